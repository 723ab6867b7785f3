package main

import (
	"context"
	"flag"
	"strconv"
	"strings"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

type delayOptions struct {
	namesrv, topic, group string
	sends                 words
}

func (o *delayOptions) read(flags *flag.FlagSet, arguments []string) {
	flags.StringVar(&o.namesrv, "namesrv", "", "nameservers, separated by ;")
	flags.StringVar(&o.topic, "topic", "", "topic")
	flags.StringVar(&o.group, "group", "", "consumer group")
	flags.Var(&o.sends, "send", "ID:level:LEVEL, several times; see Delays.java")
	check(flags.Parse(arguments))
}

// delays does what Delays.java does, with delay levels: this client knows nothing else.
func delays(o delayOptions) {
	servers := strings.Split(o.namesrv, ";")
	reader, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer(servers),
		consumer.WithGroupName(o.group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	)
	check(err)
	received := func(_ context.Context, messages ...*primitive.MessageExt) (
		consumer.ConsumeResult, error,
	) {
		for _, message := range messages {
			say("received", event{"id": string(message.Body), "atMs": time.Now().UnixMilli()})
		}
		return consumer.ConsumeSuccess, nil
	}
	check(reader.Subscribe(o.topic, consumer.MessageSelector{}, received))
	check(reader.Start())
	writer, err := rocketmq.NewProducer(
		producer.WithNameServer(servers), producer.WithGroupName("delays"), producer.WithRetry(0),
	)
	check(err)
	check(writer.Start())
	for _, one := range o.sends {
		parts := strings.Split(one, ":")
		level, err := strconv.Atoi(parts[2])
		check(err)
		message := primitive.NewMessage(o.topic, []byte(parts[0])).WithDelayTimeLevel(level)
		at := time.Now().UnixMilli()
		result, err := writer.SendSync(context.Background(), message)
		check(err)
		say("sent", event{"id": parts[0], "atMs": at, "msgId": result.MsgID})
	}
	check(writer.Shutdown())
	say("ready", event{})
	<-stopped()
	check(reader.Shutdown())
	say("done", event{})
}
