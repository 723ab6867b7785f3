package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

// sar is the peer that uses sarama.
type sar struct {
	address string
	admin   sarama.ClusterAdmin
}

func newSarama(address string) *sar {
	admin, err := sarama.NewClusterAdmin([]string{address}, saramaConfig())
	check(err)
	return &sar{address, admin}
}

func saramaConfig() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.MaxVersion
	config.Consumer.MaxWaitTime = 100 * time.Millisecond
	config.Metadata.Retry.Max = 100
	config.Admin.Timeout = limit
	config.Producer.Timeout = limit
	config.Net.ReadTimeout = limit
	config.Producer.Return.Successes = true
	config.Producer.Partitioner = sarama.NewManualPartitioner
	return config
}

func (s *sar) strategies() []string { return []string{"eager"} }

func (s *sar) createTopic(name string, count int32, config map[string]string) {
	values := map[string]*string{}
	for key, value := range config {
		values[key] = &value
	}
	detail := &sarama.TopicDetail{NumPartitions: count, ReplicationFactor: 1, ConfigEntries: values}
	check(s.admin.CreateTopic(name, detail, false))
}

func (s *sar) partitionsOf(name string) int {
	topics, err := s.admin.ListTopics()
	check(err)
	return int(topics[name].NumPartitions)
}

func (s *sar) configOf(topic, name string) string {
	found, err := s.admin.DescribeConfig(sarama.ConfigResource{
		Type: sarama.TopicResource, Name: topic, ConfigNames: []string{name},
	})
	check(err)
	for _, each := range found {
		if each.Name == name {
			return each.Value
		}
	}
	return ""
}

func (s *sar) deleteTopic(name string) { check(s.admin.DeleteTopic(name)) }

func (s *sar) produce(how mode, topic string, sent []record) {
	codecs := map[string]sarama.CompressionCodec{
		"none":   sarama.CompressionNone,
		"gzip":   sarama.CompressionGZIP,
		"snappy": sarama.CompressionSnappy,
		"lz4":    sarama.CompressionLZ4,
		"zstd":   sarama.CompressionZSTD,
	}
	config := saramaConfig()
	config.Producer.RequiredAcks = sarama.RequiredAcks(how.acks)
	config.Producer.Compression = codecs[how.codec]
	if how.idempotent {
		config.Producer.Idempotent = true
		config.Net.MaxOpenRequests = 1
	}
	producer, err := sarama.NewSyncProducer([]string{s.address}, config)
	check(err)
	var all []*sarama.ProducerMessage
	for _, each := range sent {
		one := &sarama.ProducerMessage{Topic: topic, Partition: each.partition}
		if each.key != nil {
			one.Key = sarama.ByteEncoder(each.key)
		}
		if each.value != nil {
			one.Value = sarama.ByteEncoder(each.value)
		}
		if each.header != "" {
			header := sarama.RecordHeader{Key: []byte("h"), Value: []byte(each.header)}
			one.Headers = []sarama.RecordHeader{header}
		}
		all = append(all, one)
	}
	check(producer.SendMessages(all))
	check(producer.Close())
}

func (s *sar) read(topic string, count int32, committed bool, each func(record) bool) {
	config := saramaConfig()
	if committed {
		config.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	consumer, err := sarama.NewConsumer([]string{s.address}, config)
	check(err)
	found := make(chan *sarama.ConsumerMessage)
	enough := make(chan struct{})
	var ended sync.WaitGroup
	var parts []sarama.PartitionConsumer
	for i := range count {
		part, err := consumer.ConsumePartition(topic, i, sarama.OffsetOldest)
		check(err)
		parts = append(parts, part)
		ended.Add(1)
		go func() {
			defer ended.Done()
			for one := range part.Messages() {
				select {
				case found <- one:
				case <-enough:
				}
			}
		}()
	}
	ctx := limited()
	for done := false; !done; {
		select {
		case one := <-found:
			header := ""
			if len(one.Headers) == 1 {
				header = string(one.Headers[0].Value)
			}
			done = each(record{one.Partition, one.Key, one.Value, header})
		case <-ctx.Done():
			panic("waited in vain for what " + topic + " holds")
		}
	}
	close(enough)
	for _, part := range parts {
		check(part.Close())
	}
	ended.Wait()
	check(consumer.Close())
}

// saramaMember is also the handler of its group's sessions.
type saramaMember struct {
	group   sarama.ConsumerGroup
	stop    context.CancelFunc
	ended   sync.WaitGroup
	mutex   sync.Mutex
	session sarama.ConsumerGroupSession
	topic   string
	parts   []int32
	at      map[int32]int64
	values  []string
	given   int
}

func (s *sar) join(group, topic string, options memberOptions) member {
	config := saramaConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Enable = false
	config.Consumer.Group.Session.Timeout = options.session
	config.Consumer.Group.Heartbeat.Interval = heartbeat
	config.Consumer.Group.InstanceId = options.instance
	config.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{
		sarama.NewBalanceStrategyRange(),
	}
	joined, err := sarama.NewConsumerGroup([]string{s.address}, group, config)
	check(err)
	ctx, stop := context.WithCancel(context.Background())
	one := &saramaMember{group: joined, stop: stop, topic: topic}
	one.ended.Add(1)
	go func() {
		defer one.ended.Done()
		for ctx.Err() == nil {
			err := joined.Consume(ctx, []string{topic}, one)
			if err != nil && !errors.Is(err, context.Canceled) {
				panic(err)
			}
		}
	}()
	return one
}

// Setup is called when partitions were assigned.
func (m *saramaMember) Setup(session sarama.ConsumerGroupSession) error {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.session = session
	m.parts = slices.Sorted(slices.Values(session.Claims()[m.topic]))
	m.at = map[int32]int64{}
	m.given++
	return nil
}

// Cleanup is called when they are taken away.
func (m *saramaMember) Cleanup(sarama.ConsumerGroupSession) error {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.parts = nil
	return nil
}

// ConsumeClaim reads one partition.
func (m *saramaMember) ConsumeClaim(
	session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim,
) error {
	for found := range claim.Messages() {
		m.mutex.Lock()
		m.values = append(m.values, string(found.Value))
		m.at[found.Partition] = found.Offset + 1
		session.MarkMessage(found, "")
		m.mutex.Unlock()
	}
	return nil
}

func (m *saramaMember) assigned() []int32 {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return slices.Clone(m.parts)
}

func (m *saramaMember) rounds() int {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return m.given
}

func (m *saramaMember) places() map[int32]int64 {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	found := map[int32]int64{}
	for partition, offset := range m.at {
		found[partition] = offset
	}
	return found
}

func (m *saramaMember) seen() []string {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return slices.Clone(m.values)
}

func (m *saramaMember) commit() { m.session.Commit() }

func (m *saramaMember) close() {
	m.stop()
	m.ended.Wait()
	check(m.group.Close())
}

func (s *sar) committed(group, topic string) map[int32]place {
	asked := map[string][]int32{}
	for i := range int32(s.partitionsOf(topic)) {
		asked[topic] = append(asked[topic], i)
	}
	found, err := s.admin.ListConsumerGroupOffsets(group, asked)
	check(err)
	places := map[int32]place{}
	for partition, each := range found.Blocks[topic] {
		if each.Err != sarama.ErrNoError {
			panic(each.Err)
		}
		if each.Offset >= 0 {
			places[partition] = place{each.Offset, each.Metadata}
		}
	}
	return places
}

func (s *sar) stateOf(group string) string {
	found, err := s.admin.DescribeConsumerGroups([]string{group})
	check(err)
	return found[0].State
}

func (s *sar) isListed(group string) bool {
	found, err := s.admin.ListConsumerGroups()
	check(err)
	_, is := found[group]
	return is
}

func (s *sar) deleteGroup(group string) { check(s.admin.DeleteConsumerGroup(group)) }

type saramaTransactor struct{ producer sarama.SyncProducer }

func (s *sar) transactor(id string) transactor {
	config := saramaConfig()
	config.Producer.Idempotent = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Transaction.ID = id
	config.Producer.Transaction.Timeout = transaction
	config.Net.MaxOpenRequests = 1
	producer, err := sarama.NewSyncProducer([]string{s.address}, config)
	check(err)
	return &saramaTransactor{producer}
}

func (t *saramaTransactor) begin() { check(t.producer.BeginTxn()) }

func (t *saramaTransactor) send(topic string, partition int32, value string) error {
	_, _, err := t.producer.SendMessage(&sarama.ProducerMessage{
		Topic: topic, Partition: partition, Value: sarama.StringEncoder(value),
	})
	return err
}

func (t *saramaTransactor) end(commit bool) error {
	if commit {
		return t.producer.CommitTxn()
	}
	return t.producer.AbortTxn()
}

func (t *saramaTransactor) close() {
	_ = t.producer.Close() // one that was shut out has errors to tell
}

func (s *sar) commitWithOffsets(id, group, input, output string) {
	one := s.transactor(id).(*saramaTransactor)
	add := func(offset int64, metadata string) {
		places := []*sarama.PartitionOffsetMetadata{
			{Partition: 0, Offset: offset, LeaderEpoch: -1, Metadata: &metadata},
		}
		offsets := map[string][]*sarama.PartitionOffsetMetadata{input: places}
		check(one.producer.AddOffsetsToTxn(offsets, group))
	}
	one.begin()
	check(one.send(output, 2, "t4"))
	add(7, "with t4")
	check(one.end(true))
	one.begin()
	add(9, "never")
	check(one.end(false))
	one.close()
}

func (s *sar) stateOfTransaction(string) string { return "" }
