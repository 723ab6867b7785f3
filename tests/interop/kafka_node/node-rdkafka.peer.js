// What the scenario needs, done with node-rdkafka, which is librdkafka for Node.js. Its
// administrator knows topics alone, and nobody is told the text of a committed offset.
'use strict'

const rdkafka = require('node-rdkafka')

const LIMIT_MS = 120000
const POLL_MS = 50
const HEARTBEAT_MS = 200
const STRATEGIES = { eager: 'range', cooperative: 'cooperative-sticky' }
const CODECS = ['none', 'gzip', 'snappy', 'lz4', 'zstd']

// The end of a call that tells it to a function.
function done(call) {
  return new Promise((resolve, reject) => {
    call((error, result) => (error ? reject(error) : resolve(result)))
  })
}

async function connected(client) {
  await done(tell => client.connect({ timeout: LIMIT_MS }, tell))
  return client
}

class Member {
  constructor(consumer) {
    Object.assign(this, { consumer, seen: [], at: new Map(), rounds: 0, isClosing: false })
  }

  // Reads in the background.
  start(topic) {
    this.consumer.on('rebalance', (error, parts) => {
      if (error.code === rdkafka.CODES.ERRORS.ERR__ASSIGN_PARTITIONS) this.rounds++
      for (const { partition } of parts) this.at.delete(partition)
    })
    this.consumer.setDefaultConsumeTimeout(POLL_MS)
    this.consumer.subscribe([topic])
    this.ended = this.loop()
  }

  async loop() {
    while (!this.isClosing) {
      for (const { partition, offset, value } of await done(t => this.consumer.consume(100, t))) {
        this.seen.push(value.toString())
        this.at.set(partition, offset + 1)
      }
    }
  }

  assigned() {
    return this.consumer.assignments().map(({ partition }) => partition).sort()
  }

  places() {
    return this.at
  }

  async commit() {
    this.consumer.commitSync(null)
  }

  async close() {
    this.isClosing = true
    await this.ended
    await done(tell => this.consumer.disconnect(tell))
  }
}

class Transactor {
  constructor(producer, peer) {
    Object.assign(this, { producer, peer })
  }

  begin() {
    return done(tell => this.producer.beginTransaction(tell))
  }

  async send(topic, partition, value) {
    this.producer.produce(topic, partition, Buffer.from(value))
    await done(tell => this.producer.flush(LIMIT_MS, tell))
  }

  async offsets(group, topic, partition, offset, metadata, reader) {
    const one = reader ?? new Member(await this.peer.consumer(group))
    const places = [{ topic, partition, offset, metadata }]
    await done(t => this.producer.sendOffsetsToTransaction(places, one.consumer, LIMIT_MS, t))
    return one
  }

  end(isCommit) {
    return done(tell =>
      isCommit
        ? this.producer.commitTransaction(LIMIT_MS, tell)
        : this.producer.abortTransaction(LIMIT_MS, tell)
    )
  }

  close() {
    return done(tell => this.producer.disconnect(1, tell))
  }
}

class Peer {
  constructor(address, admin) {
    Object.assign(this, { address, admin, hasStatic: true })
    this.strategies = Object.keys(STRATEGIES)
    this.codecs = CODECS.filter(each => each === 'none' || rdkafka.features.includes(each))
  }

  createTopic(topic, count, config = {}) {
    const wanted = { topic, num_partitions: count, replication_factor: 1, config }
    return done(tell => this.admin.createTopic(wanted, LIMIT_MS, tell))
  }

  deleteTopic(topic) {
    return done(tell => this.admin.deleteTopic(topic, LIMIT_MS, tell))
  }

  async partitionsOf(topic) {
    const client = await this.producer({})
    const { topics } = await done(t => client.getMetadata({ timeout: LIMIT_MS }, t))
    await done(tell => client.disconnect(tell))
    return topics.find(({ name }) => name === topic)?.partitions.length ?? 0
  }

  producer(settings) {
    const common = { 'metadata.broker.list': this.address, dr_cb: true, ...settings }
    const client = new rdkafka.Producer(common)
    client.setPollInterval(POLL_MS)
    return connected(client)
  }

  async produce({ acks, codec, idempotent }, topic, sent) {
    const client = await this.producer({
      acks,
      'enable.idempotence': idempotent,
      'compression.codec': codec,
      'linger.ms': 5,
    })
    let reported = 0
    const delivered = new Promise((resolve, reject) => {
      client.on('delivery-report', error => {
        reported++
        if (error) reject(error)
        if (reported === sent.length) resolve()
      })
    })
    for (const { partition, key, value, header } of sent) {
      const headers = header === undefined ? [] : [{ h: header }]
      client.produce(topic, partition, value, key, null, null, headers)
    }
    await done(tell => client.flush(LIMIT_MS, tell))
    await delivered
    await done(tell => client.disconnect(tell))
  }

  consumer(group, settings = {}) {
    const common = {
      'metadata.broker.list': this.address,
      'group.id': group,
      'enable.auto.commit': false,
      ...settings,
    }
    return connected(new rdkafka.KafkaConsumer(common, { 'auto.offset.reset': 'earliest' }))
  }

  async read(topic, count, isCommitted, each) {
    const consumer = await this.consumer(`${topic}.reader`, {
      'isolation.level': isCommitted ? 'read_committed' : 'read_uncommitted',
    })
    const parts = []
    for (let i = 0; i < count; i++) parts.push({ topic, partition: i, offset: 0 })
    consumer.assign(parts)
    consumer.setDefaultConsumeTimeout(POLL_MS)
    const end = Date.now() + LIMIT_MS
    for (let isDone = false; !isDone; ) {
      if (Date.now() > end) throw new Error(`waited in vain for ${topic}`)
      for (const found of await done(tell => consumer.consume(100, tell))) {
        const header = found.headers?.[0]?.h?.toString()
        isDone = each({ ...found, header }) || isDone
      }
    }
    await done(tell => consumer.disconnect(tell))
  }

  async join(group, topic, { strategy, instance, sessionMs }) {
    const member = new Member(
      await this.consumer(group, {
        rebalance_cb: true,
        'partition.assignment.strategy': STRATEGIES[strategy],
        'session.timeout.ms': sessionMs,
        'heartbeat.interval.ms': HEARTBEAT_MS,
        ...(instance === undefined ? {} : { 'group.instance.id': instance }),
      })
    )
    member.start(topic)
    return member
  }

  async committed(group, topic, member) {
    const parts = []
    for (let i = 0; i < (await this.partitionsOf(topic)); i++) parts.push({ topic, partition: i })
    const found = await done(tell => member.consumer.committed(parts, LIMIT_MS, tell))
    return new Map(
      found
        .filter(({ offset }) => offset >= 0)
        .map(({ partition, offset }) => [partition, { offset }])
    )
  }

  // The text of an error has names and numbers of one run.
  reasonOf({ code, isFatal }) {
    return `${code}, ${isFatal ? 'fatal' : 'not fatal'}`
  }

  async transactor(id) {
    const producer = await this.producer({
      'transactional.id': id,
      'transaction.timeout.ms': LIMIT_MS,
    })
    await done(tell => producer.initTransactions(LIMIT_MS, tell))
    return new Transactor(producer, this)
  }
}

async function connect(address) {
  return new Peer(address, rdkafka.AdminClient.create({ 'metadata.broker.list': address }))
}

module.exports = { connect }
