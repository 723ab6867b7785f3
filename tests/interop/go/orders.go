package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

type orderOptions struct {
	namesrv, role, topic, group, broker string
	shards, count, workMs, pauseMs      int
	readers, sends                      words
}

func (o *orderOptions) read(flags *flag.FlagSet, arguments []string) {
	flags.StringVar(&o.namesrv, "namesrv", "", "nameservers, separated by ;")
	flags.StringVar(&o.role, "role", "read", "send or read")
	flags.StringVar(&o.topic, "topic", "", "topic")
	flags.StringVar(&o.group, "group", "", "consumer group")
	flags.StringVar(&o.broker, "broker", "", "not needed")
	flags.IntVar(&o.shards, "shards", 1, "keys")
	flags.IntVar(&o.count, "count", 1, "messages of each key")
	flags.IntVar(&o.workMs, "work-ms", 0, "how long a message takes")
	flags.IntVar(&o.pauseMs, "pause-ms", 0, "between two messages of a key")
	flags.Var(&o.readers, "reader", "MODE:GROUP:TOPIC:MAX:LEVEL, several times; see Failing.java")
	flags.Var(&o.sends, "send", "TOPIC:ID:RULE:N, several times; see Failing.java")
	check(flags.Parse(arguments))
}

func (o *orderOptions) producer(choices ...producer.Option) rocketmq.Producer {
	choices = append(choices, producer.WithNameServer(strings.Split(o.namesrv, ";")))
	client, err := rocketmq.NewProducer(choices...)
	check(err)
	check(client.Start())
	return client
}

// orders does what Orders.java does.
func orders(o orderOptions) {
	if o.role == "read" {
		readOrders(o)
		return
	}
	client := o.producer(producer.WithQueueSelector(producer.NewHashQueueSelector()))
	for number := 0; number < o.count; number++ {
		for shard := 0; shard < o.shards; shard++ {
			id := fmt.Sprintf("%d-%d", shard, number)
			message := primitive.NewMessage(o.topic, []byte(id)).WithKeys([]string{id})
			message.WithShardingKey(fmt.Sprintf("shard-%d", shard))
			result, err := client.SendSync(context.Background(), message)
			check(err)
			say("sent", event{"id": id, "queueId": result.MessageQueue.QueueId})
		}
		time.Sleep(time.Duration(o.pauseMs) * time.Millisecond)
	}
	check(client.Shutdown())
	say("done", event{})
}

func readOrders(o orderOptions) {
	stop := stopped()
	client := o.consumer(0, o.group, true)
	check(client.Subscribe(o.topic, consumer.MessageSelector{},
		func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			for _, message := range messages {
				sayOrder("begin", message)
				time.Sleep(time.Duration(o.workMs) * time.Millisecond)
				sayOrder("end", message)
			}
			return consumer.ConsumeSuccess, nil
		}))
	check(client.Start())
	say("ready", event{})
	<-stop
	check(client.Shutdown())
	say("done", event{})
}

func sayOrder(kind string, message *primitive.MessageExt) {
	say(kind, event{
		"id":          message.GetKeys(),
		"queueId":     message.Queue.QueueId,
		"queueOffset": message.QueueOffset,
		"nowMs":       time.Now().UnixMilli(),
	})
}

func (o *orderOptions) consumer(
	number int, group string, inOrder bool, choices ...consumer.Option,
) rocketmq.PushConsumer {
	choices = append(choices,
		consumer.WithNameServer(strings.Split(o.namesrv, ";")),
		consumer.WithGroupName(group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithInstance(fmt.Sprintf("%d-reader-%d", time.Now().UnixNano(), number)),
		consumer.WithConsumerOrder(inOrder),
		consumer.WithConsumeMessageBatchMaxSize(1),
	)
	client, err := rocketmq.NewPushConsumer(choices...)
	check(err)
	return client
}

// failing does what Failing.java does, with push readers.
func failing(o orderOptions) {
	stop := stopped()
	clients := []rocketmq.PushConsumer{}
	for number, reader := range o.readers {
		clients = append(clients, o.failingReader(number, strings.Split(reader, ":")))
	}
	o.sendAll()
	say("ready", event{})
	<-stop
	for _, client := range clients {
		check(client.Shutdown())
	}
	say("done", event{})
}

func (o *orderOptions) failingReader(number int, spec []string) rocketmq.PushConsumer {
	most, err := strconv.Atoi(spec[3])
	check(err)
	level, err := strconv.Atoi(spec[4])
	check(err)
	choices := []consumer.Option{}
	if most >= 0 {
		choices = append(choices, consumer.WithMaxReconsumeTimes(int32(most)))
	}
	client := o.consumer(number, spec[1], false, choices...)
	var guard sync.Mutex
	deliveries := map[string]int{}
	check(client.Subscribe(spec[2], consumer.MessageSelector{},
		func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			concurrent, _ := primitive.GetConcurrentlyCtx(ctx)
			concurrent.DelayLevelWhenNextConsume = level
			message := messages[0]
			guard.Lock()
			before := deliveries[message.GetKeys()]
			deliveries[message.GetKeys()]++
			guard.Unlock()
			if message.GetProperty("rule") == "times" {
				before = int(message.ReconsumeTimes)
			}
			count, err := strconv.Atoi(message.GetProperty("count"))
			check(err)
			say("received", event{
				"group": spec[1], "id": message.GetKeys(), "topic": message.Topic,
				"times": message.ReconsumeTimes, "storeMs": message.StoreTimestamp,
				"nowMs": time.Now().UnixMilli(), "msgId": message.MsgId,
			})
			if before < count {
				return consumer.ConsumeRetryLater, nil
			}
			return consumer.ConsumeSuccess, nil
		}))
	check(client.Start())
	return client
}

func (o *orderOptions) sendAll() {
	if len(o.sends) == 0 {
		return
	}
	client := o.producer()
	for _, one := range o.sends {
		spec := strings.Split(one, ":")
		message := primitive.NewMessage(spec[0], []byte(spec[1])).WithKeys([]string{spec[1]})
		message.WithProperties(map[string]string{"rule": spec[2], "count": spec[3]})
		_, err := client.SendSync(context.Background(), message)
		check(err)
	}
	check(client.Shutdown())
}
