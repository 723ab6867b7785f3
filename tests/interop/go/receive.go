package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

const (
	pullCount  = 32
	pollDelay  = 200 * time.Millisecond
	errorDelay = 100 * time.Millisecond
)

type receiveOptions struct {
	namesrv, broker, brief string
	topics, readers        words
	queues                 int
}

func (o *receiveOptions) read(flags *flag.FlagSet, arguments []string) {
	flags.StringVar(&o.namesrv, "namesrv", "", "nameservers, separated by ;")
	flags.StringVar(&o.broker, "broker", "", "name of the broker, for readers of the mode all")
	flags.IntVar(&o.queues, "queues", 1, "queues of each topic, for readers of the mode all")
	flags.StringVar(&o.brief, "brief", "false", "true: print only ids and places")
	flags.Var(&o.topics, "topic", "topic, several times")
	flags.Var(&o.readers, "reader", "MODE:GROUP or MODE:GROUP:TAGS, several times")
	check(flags.Parse(arguments))
}

// receiver reads topics in one or several ways at once until SIGTERM; see Receive.java. Its modes
// are push, orderly, broadcast; poll, which is a pull consumer that polls and acknowledges; and all.
type receiver struct {
	options receiveOptions
	seen    atomic.Int64
	stops   []func() error
	stop    <-chan struct{}
}

func newReceiver(options receiveOptions) *receiver {
	return &receiver{options: options, stop: stopped()}
}

func (r *receiver) run() {
	for number, reader := range r.options.readers {
		spec := strings.SplitN(reader+":*", ":", 4)
		r.begin(number, spec[0], spec[1], spec[2])
	}
	if len(r.stops) > 0 {
		say("ready", event{})
		<-r.stop
		for _, stop := range r.stops {
			check(stop())
		}
	}
	say("done", event{"count": r.seen.Load()})
}

func (r *receiver) begin(number int, mode, group, tags string) {
	switch mode {
	case "push", "orderly", "broadcast":
		r.push(number, mode, group, tags)
	case "poll":
		r.poll(number, group, tags)
	case "all":
		r.all(number, group, tags)
	default:
		check(errors.New("no mode " + mode))
	}
}

func (r *receiver) choices(number int, group string) []consumer.Option {
	return []consumer.Option{
		consumer.WithNameServer(strings.Split(r.options.namesrv, ";")),
		consumer.WithGroupName(group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithInstance(fmt.Sprintf("%d-reader-%d", time.Now().UnixNano(), number)),
	}
}

func (r *receiver) push(number int, mode, group, tags string) {
	choices := append(
		r.choices(number, group),
		consumer.WithStrategy(r.watched(number, group)),
		consumer.WithConsumerOrder(mode == "orderly"),
	)
	if mode == "broadcast" {
		choices = append(choices, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	client, err := rocketmq.NewPushConsumer(choices...)
	check(err)
	for _, topic := range r.options.topics {
		check(client.Subscribe(topic, selector(tags),
			func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
				r.received(number, messages)
				return consumer.ConsumeSuccess, nil
			}))
	}
	check(client.Start())
	r.stops = append(r.stops, client.Shutdown)
}

// watched divides queues as the client does, and prints the own share whenever it changes.
func (r *receiver) watched(number int, group string) consumer.AllocateStrategy {
	var guard sync.Mutex
	shares := map[string][]string{}
	before := ""
	return func(name, id string, queues []*primitive.MessageQueue,
		members []string) []*primitive.MessageQueue {
		mine := consumer.AllocateByAveragely(name, id, queues, members)
		guard.Lock()
		defer guard.Unlock()
		topic := queues[0].Topic
		if !slices.Contains(r.options.topics, topic) {
			return mine
		}
		shares[topic] = nil
		for _, queue := range mine {
			shares[topic] = append(shares[topic], fmt.Sprintf("%s/%d", topic, queue.QueueId))
		}
		all := []string{}
		for _, share := range shares {
			all = append(all, share...)
		}
		slices.Sort(all)
		if now := strings.Join(all, " "); now != before {
			before = now
			say("owns", event{"reader": number, "group": group, "queues": now})
		}
		return mine
	}
}

func (r *receiver) poll(number int, group, tags string) {
	client, err := rocketmq.NewPullConsumer(r.choices(number, group)...)
	check(err)
	for _, topic := range r.options.topics {
		check(client.Subscribe(topic, selector(tags)))
	}
	check(client.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-r.stop:
				return
			default:
			}
			request, err := client.Poll(context.Background(), pollDelay)
			if consumer.IsNoNewMsgError(err) {
				continue
			}
			if err != nil {
				say("error", event{"reader": number, "reason": err.Error()})
				time.Sleep(errorDelay)
				continue
			}
			r.received(number, request.GetMsgList())
			client.ACK(context.Background(), request, consumer.ConsumeSuccess)
		}
	}()
	r.stops = append(r.stops, func() error {
		<-ended
		return client.Shutdown()
	})
}

// all reads every queue from its first offset to the end it has now, whatever is committed.
func (r *receiver) all(number int, group, tags string) {
	client, err := rocketmq.NewPullConsumer(r.choices(number, group)...)
	check(err)
	for _, topic := range r.options.topics {
		check(client.Subscribe(topic, selector(tags)))
	}
	check(client.Start())
	for _, topic := range r.options.topics {
		for id := 0; id < r.options.queues; id++ {
			queue := &primitive.MessageQueue{
				Topic: topic, BrokerName: r.options.broker, QueueId: id,
			}
			for offset := int64(0); ; {
				result, err := client.PullFrom(context.Background(), queue, offset, pullCount)
				check(err)
				r.received(number, result.GetMessageExts())
				offset = result.NextBeginOffset
				if offset >= result.MaxOffset {
					break
				}
			}
		}
	}
	check(client.Shutdown())
}

// selector reads tags, or after the word sql a filter of that kind.
func selector(tags string) consumer.MessageSelector {
	if expression, isSQL := strings.CutPrefix(tags, "sql "); isSQL {
		return consumer.MessageSelector{Type: consumer.SQL92, Expression: expression}
	}
	return consumer.MessageSelector{Type: consumer.TAG, Expression: tags}
}

func (r *receiver) received(number int, messages []*primitive.MessageExt) {
	r.seen.Add(int64(len(messages)))
	for _, message := range messages {
		fields := event{
			"reader":      number,
			"topic":       message.Topic,
			"queueId":     message.Queue.QueueId,
			"queueOffset": message.QueueOffset,
			"id":          message.GetProperty("id"),
		}
		if r.options.brief != "true" {
			hash := sha256.Sum256(message.Body)
			fields["offsetMsgId"] = message.OffsetMsgId
			fields["tags"] = message.GetTags()
			fields["flag"] = message.Flag
			fields["properties"] = message.GetProperties()
			fields["bodySha256"] = hex.EncodeToString(hash[:])
		} else if !isWhole(message) {
			say("broken", event{"reader": number, "id": fields["id"], "body": message.Body})
		}
		say("received", fields)
	}
}
