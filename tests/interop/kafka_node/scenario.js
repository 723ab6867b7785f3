// This program does with one Kafka broker what applications do with kafkajs or with node-rdkafka,
// and prints what came of each step as one JSON object per line; the same lines are expected of
// every broker and of every client.
//
// Its first word is "scenario" or "member", then the client, the broker's address, and a word that
// makes names its own; a member takes its group and its topic instead, and runs until it is killed.
'use strict'

const { spawn } = require('node:child_process')
const { setTimeout: pause } = require('node:timers/promises')

const PARTITIONS = 4
const RECORDS = 40
const MODE_RECORDS = 10
const LIMIT_MS = 120000
const PAUSE_MS = 20
const LONG_SESSION_MS = 240000
const SHORT_SESSION_MS = 2000
const MODES = [
  { name: 'acks 0', acks: 0, codec: 'none', idempotent: false },
  { name: 'acks 1', acks: 1, codec: 'none', idempotent: false },
  { name: 'acks all', acks: -1, codec: 'none', idempotent: false },
  { name: 'idempotent', acks: -1, codec: 'none', idempotent: true },
  { name: 'gzip', acks: -1, codec: 'gzip', idempotent: true },
  { name: 'snappy', acks: -1, codec: 'snappy', idempotent: true },
  { name: 'lz4', acks: -1, codec: 'lz4', idempotent: true },
  { name: 'zstd', acks: -1, codec: 'zstd', idempotent: true },
]
const PLAIN = MODES[3]

function tell(step, value) {
  process.stdout.write(JSON.stringify({ event: step, value }) + '\n')
}

async function until(what, condition) {
  const end = Date.now() + LIMIT_MS
  while (!(await condition())) {
    if (Date.now() > end) throw new Error(`waited in vain: ${what}`)
    await pause(PAUSE_MS)
  }
}

const has = (member, count) => member.assigned().length === count

// Whether a member has read all that its partitions hold.
function isAtEnd(member) {
  const places = member.places()
  return (
    member.assigned().length > 0 &&
    member.assigned().every(each => places.get(each) === RECORDS / PARTITIONS)
  )
}

class Scenario {
  constructor(name, address, peer, word) {
    Object.assign(this, { name, address, peer, word })
  }

  named(kind) {
    return `${this.name}.${kind}.${this.word}`
  }

  async run() {
    await this.inEveryMode()
    for (const strategy of this.peer.strategies) await this.shareAndResume(strategy)
    await this.killOne()
    if (this.peer.hasStatic) await this.comeBack()
    await this.transact()
    await this.administrate()
  }

  async make(topic) {
    await this.peer.createTopic(topic, PARTITIONS)
    const sent = []
    for (let i = 0; i < RECORDS; i++) {
      sent.push({ partition: i % PARTITIONS, value: Buffer.from(`r${i}`) })
    }
    await this.peer.produce(PLAIN, topic, sent)
  }

  async produceToAll(topic, value) {
    const sent = []
    for (let i = 0; i < PARTITIONS; i++) sent.push({ partition: i, value: Buffer.from(value) })
    await this.peer.produce(PLAIN, topic, sent)
  }

  // Produces with each kind of acks and each codec, and reads it back.
  async inEveryMode() {
    const topic = this.named('modes')
    await this.peer.createTopic(topic, 1)
    const modes = MODES.filter(each => this.peer.codecs.includes(each.codec))
    const wanted = new Map()
    for (const mode of modes) {
      const sent = []
      for (let i = 0; i < MODE_RECORDS; i++) {
        const key = `${mode.name}-${i}`
        const value = i === MODE_RECORDS - 1 ? null : Buffer.from(key.repeat(20))
        sent.push({ partition: 0, key: Buffer.from(key), value, header: key })
        wanted.set(key, value)
      }
      await this.peer.produce(mode, topic, sent)
    }
    const counts = new Map()
    let intact = true
    let total = 0
    await this.peer.read(topic, 1, false, found => {
      const key = found.key.toString()
      const value = wanted.get(key)
      intact &&= value === null ? found.value === null : value.equals(found.value)
      intact &&= found.header === key
      const name = key.split('-')[0]
      counts.set(name, (counts.get(name) ?? 0) + 1)
      total++
      return total === modes.length * MODE_RECORDS
    })
    for (const mode of modes) tell(mode.name, counts.get(mode.name) ?? 0)
    tell('keys, headers and nulls', intact)
  }

  // Two members share the partitions; one leaves, the other goes on.
  async shareAndResume(strategy) {
    const topic = this.named(strategy)
    const group = this.named(`group-${strategy}`)
    await this.make(topic)
    const options = { strategy, sessionMs: LONG_SESSION_MS }
    const one = await this.peer.join(group, topic, options)
    await until('the first member', () => has(one, PARTITIONS))
    const two = await this.peer.join(group, topic, options)
    await until('the second', () => has(one, PARTITIONS / 2) && has(two, PARTITIONS / 2))
    tell(`${strategy} overlap`, one.assigned().some(each => two.assigned().includes(each)))
    await until('all records', () => isAtEnd(one) && isAtEnd(two))
    tell(`${strategy} read`, new Set([...one.seen, ...two.seen]).size)
    await one.commit()
    await two.commit()
    await two.close()
    await until('the one that is left', () => has(one, PARTITIONS))
    const committed = await this.peer.committed(group, topic, one)
    await one.close()
    let sum = 0
    for (const { offset } of committed.values()) sum += offset
    tell(`${strategy} committed`, sum)
    const later = await this.peer.join(group, topic, options)
    await until('the next one', () => has(later, PARTITIONS))
    await this.produceToAll(topic, 'last')
    const last = () => later.seen.filter(value => value === 'last').length
    await until('the last records', () => last() === PARTITIONS)
    tell(`${strategy} read again`, later.seen.length - last())
    await later.close()
  }

  // A member that is a process of its own is killed; its partitions come back.
  async killOne() {
    const topic = this.named('kill')
    const group = this.named('group-kill')
    await this.make(topic)
    const one = await this.peer.join(group, topic, {
      strategy: 'eager',
      sessionMs: LONG_SESSION_MS,
    })
    await until('the first member', () => has(one, PARTITIONS))
    const words = [__filename, 'member', this.name, this.address, group, topic]
    // Its input ends with this program, and it ends with its input.
    const child = spawn(process.execPath, words, { stdio: ['pipe', 'ignore', 'inherit'] })
    child.stdin.on('error', () => {})
    const ended = new Promise(resolve => child.on('exit', resolve))
    await until('the second member', () => has(one, PARTITIONS / 2))
    child.kill('SIGKILL')
    await ended
    await until('the partitions of the dead', () => has(one, PARTITIONS))
    tell('after a kill', one.assigned().length)
    await one.close()
  }

  // A static member goes away and comes back: nobody else notices.
  async comeBack() {
    const topic = this.named('static')
    const group = this.named('group-static')
    await this.make(topic)
    const join = instance =>
      this.peer.join(group, topic, { strategy: 'eager', instance, sessionMs: LONG_SESSION_MS })
    const one = await join('one')
    const two = await join('two')
    await until('two', () => has(one, PARTITIONS / 2) && has(two, PARTITIONS / 2))
    const rounds = one.rounds
    const before = two.assigned().join()
    await two.close()
    const back = await join('two')
    await until('the member that is back', () => has(back, PARTITIONS / 2))
    tell('static same partitions', back.assigned().join() === before)
    tell('static same generation', one.rounds === rounds)
    await one.close()
    await back.close()
  }

  // What transactions wrote, as a reader sees it who reads until it has seen the word everywhere.
  async values(topic, word, isCommitted) {
    const found = []
    let words = 0
    await this.peer.read(topic, PARTITIONS, isCommitted, each => {
      const value = each.value.toString()
      if (value.startsWith('t')) found.push(value)
      if (value === word) words++
      return words === PARTITIONS
    })
    return found.sort().join(' ')
  }

  // Commits, rolls back, commits offsets with records, and is shut out by its successor.
  async transact() {
    const topic = this.named('tx')
    const group = this.named('group-tx')
    const id = this.named('tx-id')
    await this.make(topic)
    const first = await this.peer.transactor(id)
    await first.begin()
    await first.send(topic, 0, 't1')
    await first.send(topic, 1, 't2')
    await first.end(true)
    await first.begin()
    await first.send(topic, 0, 't3-gone')
    await first.end(false)
    await first.begin()
    await first.send(topic, 2, 't4')
    const reader = await first.offsets(group, topic, 0, 7, 'with t4')
    await first.end(true)
    await first.begin()
    await first.offsets(group, topic, 0, 9, 'never', reader)
    await first.end(false)
    const found = (await this.peer.committed(group, topic, reader)).get(0)
    if (reader) await reader.close()
    tell('offset of the transaction', found.offset)
    if (found.metadata !== undefined) tell('text of the transaction', found.metadata)
    await this.produceToAll(topic, 'before')
    tell('read committed', await this.values(topic, 'before', true))
    tell('read uncommitted', await this.values(topic, 'before', false))
    await first.begin()
    await first.send(topic, 3, 't5-open')
    tell('while one is open', await this.values(topic, 'before', true))
    const later = await this.peer.transactor(id)
    let reason = 'no'
    try {
      await first.send(topic, 3, 't6-late')
      await first.end(true)
    } catch (error) {
      reason = this.peer.reasonOf?.(error) ?? error.message
    }
    tell('shut out', reason)
    await first.close()
    await later.begin()
    await later.send(topic, 3, 't7')
    await later.end(true)
    await later.close()
    await this.produceToAll(topic, 'after')
    tell('in the end', await this.values(topic, 'after', true))
  }

  // Makes, describes and deletes a topic, and a group that was left.
  async administrate() {
    const { peer } = this
    const topic = this.named('admin')
    await peer.createTopic(topic, 3, { 'retention.ms': '100000000' })
    await until('the topic', async () => (await peer.partitionsOf(topic)) > 0)
    tell('partitions of a topic', await peer.partitionsOf(topic))
    if (peer.configOf) {
      tell('configuration of a topic', await peer.configOf(topic, 'retention.ms'))
    }
    await peer.deleteTopic(topic)
    await until('the end of the topic', async () => (await peer.partitionsOf(topic)) === 0)
    tell('partitions of a deleted topic', await peer.partitionsOf(topic))
    if (!peer.stateOf) return
    const group = this.named('group-eager')
    tell('state of a group that was left', await peer.stateOf(group))
    tell('offsets of it', (await peer.committed(group, this.named('eager'))).size)
    tell('is it listed', await peer.isListed(group))
    await peer.deleteGroup(group)
    tell('is it still listed', await peer.isListed(group))
  }
}

async function main() {
  const [program, client, address, ...rest] = process.argv.slice(2)
  const peer = await require(`./${client}.peer.js`).connect(address)
  if (program === 'member') {
    process.stdin.on('end', () => process.exit(0)).resume()
    await peer.join(rest[0], rest[1], { strategy: 'eager', sessionMs: SHORT_SESSION_MS })
  } else {
    await new Scenario(client, address, peer, rest[0]).run()
    process.exit(0)
  }
}

main().catch(error => {
  console.error(error)
  process.exit(1)
})
