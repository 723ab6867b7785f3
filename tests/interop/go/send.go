package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

const (
	inFlightMax = 32
	retryDelay  = 50 * time.Millisecond
)

type sendOptions struct {
	namesrv, group, broker, prefix string
	topics, modes                  words
	queues, count, bodyBytes       int
	threads, failures, batch       int
	perSecond                      int
	retry, brief                   string
}

func (o *sendOptions) read(flags *flag.FlagSet, arguments []string) {
	flags.StringVar(&o.namesrv, "namesrv", "", "nameservers, separated by ;")
	flags.StringVar(&o.group, "group", "interop-producer", "producer group")
	flags.StringVar(&o.broker, "broker", "", "name of the broker of chosen queues")
	flags.StringVar(&o.prefix, "prefix", "", "start of the ids")
	flags.Var(&o.topics, "topic", "topic, several times")
	flags.Var(&o.modes, "mode", "sync, async, oneway or batch, several times")
	flags.IntVar(&o.queues, "queues", 1, "queues to send to; 0: the client chooses")
	flags.IntVar(&o.count, "count", 1, "steps")
	flags.IntVar(&o.bodyBytes, "body-bytes", 100, "size of a body")
	flags.IntVar(&o.threads, "threads", 1, "who send at the same time")
	flags.IntVar(&o.failures, "failures", 1, "failures after which it ends")
	flags.IntVar(&o.batch, "batch", 8, "messages of a batch")
	flags.IntVar(&o.perSecond, "per-second", 0, "steps per second; 0: as fast as it goes")
	flags.StringVar(&o.retry, "retry", "false", "true: try until it succeeds")
	flags.StringVar(&o.brief, "brief", "false", "true: print only ids")
	check(flags.Parse(arguments))
	if len(o.modes) == 0 {
		o.modes = words{"sync"}
	}
}

// sender sends numbered messages and prints each result the moment it is known; see Send.java.
type sender struct {
	options  sendOptions
	producer rocketmq.Producer
	next     atomic.Int64
	failures atomic.Int64
	inFlight chan struct{}
	stop     <-chan struct{}
	start    time.Time
}

func newSender(options sendOptions) *sender {
	choices := []producer.Option{
		producer.WithNameServer(strings.Split(options.namesrv, ";")),
		producer.WithGroupName(options.group),
		producer.WithRetry(0),
	}
	if options.queues > 0 {
		choices = append(choices, producer.WithQueueSelector(producer.NewManualQueueSelector()))
	}
	client, err := rocketmq.NewProducer(choices...)
	check(err)
	return &sender{
		options:  options,
		producer: client,
		inFlight: make(chan struct{}, inFlightMax),
		stop:     stopped(),
	}
}

func (s *sender) run() {
	// When an asynchronous send fails the client calls back, and then stumbles over the answer that
	// did not come.
	primitive.PanicHandler = func(reason any) {
		say("panicked", event{"reason": fmt.Sprint(reason)})
	}
	check(s.producer.Start())
	s.start = time.Now()
	var workers sync.WaitGroup
	for range make([]struct{}, s.options.threads) {
		workers.Add(1)
		go func() {
			defer workers.Done()
			s.work()
		}()
	}
	workers.Wait()
	for range make([]struct{}, inFlightMax) {
		s.inFlight <- struct{}{}
	}
	check(s.producer.Shutdown())
	say("done", event{"failures": s.failures.Load()})
}

func (s *sender) retries() bool {
	return s.options.retry == "true" && !s.stopping()
}

func (s *sender) stopping() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

func (s *sender) work() {
	for i := s.next.Add(1) - 1; i < int64(s.options.count); i = s.next.Add(1) - 1 {
		s.pace(i)
		if s.stopping() {
			return
		}
		if s.options.retry != "true" && s.failures.Load() >= int64(s.options.failures) {
			return
		}
		s.step(int(i))
	}
}

// pace lets step i begin i / per-second after the first one; what is late is not made up for.
func (s *sender) pace(i int64) {
	if s.options.perSecond > 0 {
		begins := s.start.Add(time.Duration(i) * time.Second / time.Duration(s.options.perSecond))
		select {
		case <-time.After(time.Until(begins)):
		case <-s.stop:
		}
	}
}

func (s *sender) step(i int) {
	o := &s.options
	topic := o.topics[i%len(o.topics)]
	id := o.prefix + "-" + strconv.Itoa(i)
	mode := o.modes[i%len(o.modes)]
	messages := []*primitive.Message{}
	if mode == "batch" {
		for k := 0; k < o.batch; k++ {
			name := id + "." + strconv.Itoa(k)
			messages = append(messages, sample(topic, name, i*o.batch+k, o.bodyBytes))
		}
	} else {
		messages = append(messages, sample(topic, id, i, o.bodyBytes))
	}
	if o.queues > 0 {
		queue := &primitive.MessageQueue{
			Topic: topic, BrokerName: o.broker, QueueId: (i / len(o.topics)) % o.queues,
		}
		for _, message := range messages {
			message.Queue = queue
		}
	}
	switch mode {
	case "sync", "batch":
		s.waiting(messages)
	case "async":
		s.inFlight <- struct{}{}
		s.async(messages[0])
	case "oneway":
		s.oneway(messages[0])
	default:
		say("error", event{"reason": "no mode " + mode})
	}
}

func (s *sender) waiting(messages []*primitive.Message) {
	for {
		result, err := s.producer.SendSync(context.Background(), messages...)
		if err == nil {
			s.sent(messages, result)
			return
		}
		s.failed(messages, err)
		if !s.retries() {
			return
		}
		time.Sleep(retryDelay)
	}
}

// async tries until the message is acknowledged. The client may call back twice for one failure.
func (s *sender) async(message *primitive.Message) {
	messages := []*primitive.Message{message}
	var once sync.Once
	again := func(err error) {
		once.Do(func() {
			s.failed(messages, err)
			if s.retries() {
				time.AfterFunc(retryDelay, func() { s.async(message) })
			} else {
				<-s.inFlight
			}
		})
	}
	called := func(_ context.Context, result *primitive.SendResult, err error) {
		if err != nil {
			again(err)
			return
		}
		once.Do(func() {
			s.sent(messages, result)
			<-s.inFlight
		})
	}
	if err := s.producer.SendAsync(context.Background(), called, message); err != nil {
		again(err)
	}
}

func (s *sender) oneway(message *primitive.Message) {
	if err := s.producer.SendOneWay(context.Background(), message); err != nil {
		s.failed([]*primitive.Message{message}, err)
		return
	}
	say("oneway", event{"id": message.GetProperty("id")})
}

func (s *sender) sent(messages []*primitive.Message, result *primitive.SendResult) {
	status := "SEND_OK"
	if result.Status != primitive.SendOK {
		status = "status " + strconv.Itoa(int(result.Status))
	}
	offsetIds := strings.Split(result.OffsetMsgID, ",")
	for k, message := range messages {
		fields := event{"status": status, "id": message.GetProperty("id")}
		if s.options.brief != "true" {
			hash := sha256.Sum256(message.Body)
			fields["topic"] = message.Topic
			fields["queueId"] = result.MessageQueue.QueueId
			fields["queueOffset"] = result.QueueOffset + int64(k)
			fields["offsetMsgId"] = offsetIds[k]
			fields["flag"] = message.Flag
			fields["bodySha256"] = hex.EncodeToString(hash[:])
		}
		say("sent", fields)
	}
}

func (s *sender) failed(messages []*primitive.Message, err error) {
	s.failures.Add(1)
	for _, message := range messages {
		say("failed", event{"id": message.GetProperty("id"), "reason": err.Error()})
	}
}
