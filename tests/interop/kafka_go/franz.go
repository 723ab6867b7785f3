package main

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// franz is the peer that uses franz-go.
type franz struct {
	address string
	admin   *kadm.Client
}

func newFranz(address string) *franz {
	client, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.MetadataMinAge(pause))
	check(err)
	return &franz{address, kadm.NewClient(client)}
}

func (f *franz) client(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append(f.common(), options...)...)
	check(err)
	return client
}

func (f *franz) common() []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(f.address), kgo.MetadataMinAge(pause)}
}

func limited() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	context.AfterFunc(ctx, cancel)
	return ctx
}

func (f *franz) strategies() []string { return []string{"eager", "cooperative"} }

func (f *franz) createTopic(name string, count int32, config map[string]string) {
	values := map[string]*string{}
	for key, value := range config {
		values[key] = &value
	}
	made, err := f.admin.CreateTopic(limited(), count, 1, values, name)
	check(err)
	check(made.Err)
}

func (f *franz) partitionsOf(name string) int {
	topics, err := f.admin.ListTopics(limited(), name)
	check(err)
	return len(topics[name].Partitions)
}

func (f *franz) configOf(topic, name string) string {
	found, err := f.admin.DescribeTopicConfigs(limited(), topic)
	check(err)
	resource, err := found.On(topic, nil)
	check(err)
	for _, each := range resource.Configs {
		if each.Key == name {
			return each.MaybeValue()
		}
	}
	return ""
}

func (f *franz) deleteTopic(name string) {
	gone, err := f.admin.DeleteTopic(limited(), name)
	check(err)
	check(gone.Err)
}

func (f *franz) produce(how mode, topic string, sent []record) {
	acks := map[int]kgo.Acks{0: kgo.NoAck(), 1: kgo.LeaderAck(), -1: kgo.AllISRAcks()}
	codecs := map[string]kgo.CompressionCodec{
		"none":   kgo.NoCompression(),
		"gzip":   kgo.GzipCompression(),
		"snappy": kgo.SnappyCompression(),
		"lz4":    kgo.Lz4Compression(),
		"zstd":   kgo.ZstdCompression(),
	}
	options := []kgo.Opt{
		kgo.RequiredAcks(acks[how.acks]),
		kgo.ProducerBatchCompression(codecs[how.codec]),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	}
	if !how.idempotent {
		options = append(options, kgo.DisableIdempotentWrite())
	}
	client := f.client(options...)
	defer client.Close()
	var all []*kgo.Record
	for _, each := range sent {
		one := &kgo.Record{Topic: topic, Partition: each.partition, Key: each.key, Value: each.value}
		if each.header != "" {
			one.Headers = []kgo.RecordHeader{{Key: "h", Value: []byte(each.header)}}
		}
		all = append(all, one)
	}
	check(client.ProduceSync(limited(), all...).FirstErr())
}

func (f *franz) read(topic string, count int32, committed bool, each func(record) bool) {
	starts := map[int32]kgo.Offset{}
	for i := range count {
		starts[i] = kgo.NewOffset().AtStart()
	}
	options := []kgo.Opt{
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}),
		kgo.FetchMaxWait(100 * time.Millisecond),
	}
	if committed {
		options = append(options, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	client := f.client(options...)
	defer client.Close()
	ctx := limited()
	for done := false; !done; {
		fetches := client.PollFetches(ctx)
		check(fetches.Err())
		fetches.EachRecord(func(found *kgo.Record) {
			one := record{partition: found.Partition, key: found.Key, value: found.Value}
			if len(found.Headers) == 1 {
				one.header = string(found.Headers[0].Value)
			}
			done = each(one) || done
		})
	}
}

// franzMember polls in the background and holds rebalances while it notes what it got.
type franzMember struct {
	client *kgo.Client
	stop   context.CancelFunc
	ended  sync.WaitGroup
	mutex  sync.Mutex
	parts  map[int32]bool
	at     map[int32]int64
	values []string
	given  int
}

func (f *franz) join(group, topic string, options memberOptions) member {
	ctx, stop := context.WithCancel(context.Background())
	one := &franzMember{stop: stop, parts: map[int32]bool{}, at: map[int32]int64{}}
	var balancer kgo.GroupBalancer = kgo.RangeBalancer()
	if options.strategy == "cooperative" {
		balancer = kgo.CooperativeStickyBalancer()
	}
	taken := func(_ context.Context, _ *kgo.Client, lost map[string][]int32) {
		one.mutex.Lock()
		defer one.mutex.Unlock()
		for _, each := range lost[topic] {
			delete(one.parts, each)
		}
	}
	settings := []kgo.Opt{
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.Balancers(balancer),
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
		kgo.SessionTimeout(options.session),
		kgo.HeartbeatInterval(heartbeat),
		kgo.FetchMaxWait(100 * time.Millisecond),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.OnPartitionsRevoked(taken),
		kgo.OnPartitionsLost(taken),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, got map[string][]int32) {
			one.mutex.Lock()
			defer one.mutex.Unlock()
			one.given++
			for _, each := range got[topic] {
				one.parts[each] = true
				delete(one.at, each)
			}
		}),
	}
	if options.instance != "" {
		settings = append(settings, kgo.InstanceID(options.instance))
	}
	one.client = f.client(settings...)
	one.ended.Add(1)
	go one.poll(ctx)
	return one
}

func (m *franzMember) poll(ctx context.Context) {
	defer m.ended.Done()
	for ctx.Err() == nil {
		m.client.PollFetches(ctx).EachRecord(func(found *kgo.Record) {
			m.mutex.Lock()
			defer m.mutex.Unlock()
			m.values = append(m.values, string(found.Value))
			m.at[found.Partition] = found.Offset + 1
		})
		m.client.AllowRebalance()
	}
}

func (m *franzMember) assigned() []int32 {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return sortedKeys(m.parts)
}

func (m *franzMember) rounds() int {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return m.given
}

func (m *franzMember) places() map[int32]int64 {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	found := map[int32]int64{}
	for partition, offset := range m.at {
		found[partition] = offset
	}
	return found
}

func (m *franzMember) seen() []string {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return slices.Clone(m.values)
}

func (m *franzMember) commit() { check(m.client.CommitUncommittedOffsets(limited())) }

func (m *franzMember) close() {
	m.stop()
	m.ended.Wait()
	m.client.CloseAllowingRebalance()
}

func (f *franz) committed(group, topic string) map[int32]place {
	found, err := f.admin.FetchOffsets(limited(), group)
	check(err)
	places := map[int32]place{}
	for partition, each := range found[topic] {
		check(each.Err)
		places[partition] = place{each.At, each.Metadata}
	}
	return places
}

func (f *franz) stateOf(group string) string {
	found, err := f.admin.DescribeGroups(limited(), group)
	check(err)
	return found[group].State
}

func (f *franz) isListed(group string) bool {
	found, err := f.admin.ListGroups(limited())
	check(err)
	return slices.Contains(found.Groups(), group)
}

func (f *franz) deleteGroup(group string) {
	gone, err := f.admin.DeleteGroup(limited(), group)
	check(err)
	check(gone.Err)
}

type franzTransactor struct{ client *kgo.Client }

func (f *franz) transactor(id string) transactor {
	client := f.client(
		kgo.TransactionalID(id),
		kgo.TransactionTimeout(transaction),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	)
	_, _, err := client.ProducerID(limited())
	check(err)
	return &franzTransactor{client}
}

func (t *franzTransactor) begin() { check(t.client.BeginTransaction()) }

func (t *franzTransactor) send(topic string, partition int32, value string) error {
	one := &kgo.Record{Topic: topic, Partition: partition, Value: []byte(value)}
	return kindOnly(t.client.ProduceSync(limited(), one).FirstErr())
}

func (t *franzTransactor) end(commit bool) error {
	return kindOnly(t.client.EndTransaction(limited(), kgo.TransactionEndTry(commit)))
}

func (t *franzTransactor) close() { t.client.Close() }

// kindOnly is the broker's error without what the client says about its own state.
func kindOnly(err error) error {
	for each := err; each != nil; {
		if found, is := each.(*kerr.Error); is {
			return found
		}
		inside, is := each.(interface{ Unwrap() error })
		if !is {
			break
		}
		each = inside.Unwrap()
	}
	return err
}

func (f *franz) commitWithOffsets(id, group, input, output string) {
	session, err := kgo.NewGroupTransactSession(append(f.common(),
		kgo.TransactionalID(id),
		kgo.TransactionTimeout(transaction),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(input),
		kgo.SessionTimeout(longSession),
		kgo.RequireStableFetchOffsets(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	)...)
	check(err)
	noted := kgo.PreTxnCommitFnContext(limited(), func(asked *kmsg.TxnOffsetCommitRequest) error {
		metadata := "with t4"
		asked.Topics[0].Partitions[0].Metadata = &metadata
		return nil
	})
	check(session.Begin())
	takeRecords(session, 7)
	check(session.ProduceSync(limited(), &kgo.Record{
		Topic: output, Partition: 2, Value: []byte("t4"),
	}).FirstErr())
	committed, err := session.End(noted, kgo.TryCommit)
	check(err)
	if !committed {
		panic("the transaction with offsets was not committed")
	}
	check(session.Begin())
	takeRecords(session, 2)
	_, err = session.End(limited(), kgo.TryAbort)
	check(err)
	session.Close()
}

func takeRecords(session *kgo.GroupTransactSession, count int) {
	for count > 0 {
		fetches := session.PollRecords(limited(), count)
		check(fetches.Err())
		count -= fetches.NumRecords()
	}
}

func (f *franz) stateOfTransaction(id string) string {
	found, err := f.admin.DescribeTransactions(limited(), id)
	check(err)
	return found[id].State
}

func sortedKeys(parts map[int32]bool) []int32 {
	var found []int32
	for each := range parts {
		found = append(found, each)
	}
	slices.Sort(found)
	return found
}
