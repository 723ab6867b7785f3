// What the scenario needs, done with kafkajs. It has gzip alone, no static members, and gives the
// partitions out in turn. A producer is told its id when its first transaction begins.
'use strict'

const {
  CompressionTypes,
  ConfigResourceTypes,
  Kafka,
  Partitioners,
  logLevel,
} = require('kafkajs')

const LIMIT_MS = 120000
const HEARTBEAT_MS = 200
const WAIT_MS = 100
const TRANSACTION_MS = 600000
const CODECS = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP }

class Member {
  constructor(consumer, topic) {
    Object.assign(this, { consumer, topic, seen: [], parts: [], at: new Map(), rounds: 0 })
  }

  async start() {
    const { consumer, topic } = this
    const { GROUP_JOIN, REBALANCING } = consumer.events
    consumer.on(REBALANCING, () => {
      this.parts = []
    })
    consumer.on(GROUP_JOIN, ({ payload }) => {
      this.parts = (payload.memberAssignment[topic] ?? []).sort()
      this.at = new Map()
      this.rounds++
    })
    await consumer.connect()
    await consumer.subscribe({ topics: [topic], fromBeginning: true })
    await consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        this.seen.push(message.value.toString())
        this.at.set(partition, Number(message.offset) + 1)
      },
    })
  }

  assigned() {
    return this.parts
  }

  places() {
    return this.at
  }

  async commit() {
    const { topic } = this
    const offsets = [...this.at].map(([partition, offset]) => ({
      topic,
      partition,
      offset: String(offset),
    }))
    await this.consumer.commitOffsets(offsets)
  }

  close() {
    return this.consumer.disconnect()
  }
}

const OFFSETS_TRIES = 200

class Transactor {
  constructor(producer, transaction) {
    Object.assign(this, { producer, transaction, isBegun: true })
  }

  async begin() {
    if (!this.isBegun) this.transaction = await this.producer.transaction()
    this.isBegun = false
  }

  send(topic, partition, value) {
    return this.transaction.send({ topic, acks: -1, messages: [{ partition, value }] })
  }

  // While the transaction before is still being ended the broker says so; this client tries again
  // by itself where it sends records, and not where it sends offsets.
  async offsets(consumerGroupId, topic, partition, offset, metadata) {
    const partitions = [{ partition, offset: String(offset), metadata }]
    for (let tries = 0; ; tries++) {
      try {
        return await this.transaction.sendOffsets({ consumerGroupId, topics: [{ topic, partitions }] })
      } catch (error) {
        if (error.type !== 'CONCURRENT_TRANSACTIONS' || tries === OFFSETS_TRIES) throw error
        await new Promise(resolve => setTimeout(resolve, 50))
      }
    }
  }

  end(isCommit) {
    return isCommit ? this.transaction.commit() : this.transaction.abort()
  }

  close() {
    return this.producer.disconnect()
  }
}

class Peer {
  constructor(kafka, admin) {
    Object.assign(this, { kafka, admin, readers: 0 })
    this.strategies = ['eager']
    this.codecs = Object.keys(CODECS)
    this.hasStatic = false
  }

  async createTopic(topic, numPartitions, config = {}) {
    const configEntries = Object.entries(config).map(([name, value]) => ({ name, value }))
    await this.admin.createTopics({ topics: [{ topic, numPartitions, configEntries }] })
  }

  async partitionsOf(topic) {
    if (!(await this.admin.listTopics()).includes(topic)) return 0
    const { topics } = await this.admin.fetchTopicMetadata({ topics: [topic] })
    return topics[0].partitions.length
  }

  async configOf(topic, name) {
    const { resources } = await this.admin.describeConfigs({
      includeSynonyms: false,
      resources: [{ type: ConfigResourceTypes.TOPIC, name: topic, configNames: [name] }],
    })
    return resources[0].configEntries[0].configValue
  }

  deleteTopic(topic) {
    return this.admin.deleteTopics({ topics: [topic] })
  }

  async produce({ acks, codec, idempotent }, topic, sent) {
    const producer = this.kafka.producer({
      idempotent,
      createPartitioner: Partitioners.DefaultPartitioner,
    })
    await producer.connect()
    const messages = sent.map(({ partition, key, value, header }) => ({
      partition,
      key,
      value,
      headers: header === undefined ? {} : { h: header },
    }))
    await producer.send({ topic, acks, compression: CODECS[codec], messages })
    await producer.disconnect()
  }

  async read(topic, count, isCommitted, each) {
    const consumer = this.kafka.consumer({
      groupId: `${topic}.reader.${this.readers++}`,
      readUncommitted: !isCommitted,
      sessionTimeout: LIMIT_MS,
      maxWaitTimeInMs: WAIT_MS,
    })
    await consumer.connect()
    await consumer.subscribe({ topics: [topic], fromBeginning: true })
    let isDone = false
    const done = new Promise((resolve, reject) => {
      setTimeout(() => reject(new Error(`waited in vain for ${topic}`)), LIMIT_MS).unref()
      consumer.run({
        autoCommit: false,
        eachMessage: async ({ partition, message: { key, value, headers } }) => {
          if (isDone) return
          isDone = each({ partition, key, value, header: headers.h?.toString() })
          if (isDone) resolve()
        },
      })
    })
    await done
    await consumer.disconnect()
  }

  async join(groupId, topic, { sessionMs }) {
    const consumer = this.kafka.consumer({
      groupId,
      sessionTimeout: sessionMs,
      heartbeatInterval: HEARTBEAT_MS,
      maxWaitTimeInMs: WAIT_MS,
      rebalanceTimeout: LIMIT_MS,
    })
    const member = new Member(consumer, topic)
    await member.start()
    return member
  }

  async committed(groupId, topic) {
    const [found] = await this.admin.fetchOffsets({ groupId, topics: [topic] })
    return new Map(
      found.partitions
        .filter(({ offset }) => Number(offset) >= 0)
        .map(({ partition, offset, metadata }) => [partition, { offset: Number(offset), metadata }])
    )
  }

  async stateOf(group) {
    return (await this.admin.describeGroups([group])).groups[0].state
  }

  async isListed(group) {
    return (await this.admin.listGroups()).groups.some(({ groupId }) => groupId === group)
  }

  async deleteGroup(group) {
    await this.admin.deleteGroups([group])
  }

  async transactor(transactionalId) {
    const producer = this.kafka.producer({
      transactionalId,
      idempotent: true,
      maxInFlightRequests: 1,
      transactionTimeout: TRANSACTION_MS,
      createPartitioner: Partitioners.DefaultPartitioner,
    })
    await producer.connect()
    return new Transactor(producer, await producer.transaction())
  }
}

async function connect(address) {
  const kafka = new Kafka({
    brokers: [address],
    clientId: 'scenario',
    connectionTimeout: LIMIT_MS,
    requestTimeout: LIMIT_MS,
    logLevel: logLevel.ERROR,
    // As plain text: only the scenario prints JSON.
    logCreator: () => entry => console.error(entry.label, entry.log.message, entry.log.error ?? ''),
  })
  const admin = kafka.admin()
  await admin.connect()
  return new Peer(kafka, admin)
}

module.exports = { connect }
