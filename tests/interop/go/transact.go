package main

import (
	"context"
	"flag"
	"strconv"
	"strings"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

type transactOptions struct {
	namesrv, group, topic, prefix string
	count                         int
	local, checks                 words
}

func (o *transactOptions) read(flags *flag.FlagSet, arguments []string) {
	flags.StringVar(&o.namesrv, "namesrv", "", "nameservers, separated by ;")
	flags.StringVar(&o.group, "group", "interop-producer", "producer group")
	flags.StringVar(&o.topic, "topic", "", "topic")
	flags.StringVar(&o.prefix, "prefix", "", "start of the ids")
	flags.IntVar(&o.count, "count", 0, "messages")
	flags.Var(&o.local, "local", "commit, rollback or unknown, several times")
	flags.Var(&o.checks, "check", "what is said to the first question, the second one, ...")
	check(flags.Parse(arguments))
}

// transactor sends transactional messages and answers the broker's questions; see Transact.java.
type transactor struct {
	options  transactOptions
	producer rocketmq.TransactionProducer
	stop     <-chan struct{}
}

func newTransactor(options transactOptions) *transactor {
	t := &transactor{options: options, stop: stopped()}
	client, err := rocketmq.NewTransactionProducer(
		t,
		producer.WithNameServer(strings.Split(options.namesrv, ";")),
		producer.WithGroupName(options.group),
		producer.WithRetry(0),
	)
	check(err)
	t.producer = client
	return t
}

func (t *transactor) run() {
	check(t.producer.Start())
	for i := 0; i < t.options.count; i++ {
		id := t.options.prefix + "-" + strconv.Itoa(i)
		message := sample(t.options.topic, id, i, 100)
		message.WithProperty("number", strconv.Itoa(i))
		result, err := t.producer.SendMessageInTransaction(context.Background(), message)
		check(err)
		say("sent", event{
			"id":            id,
			"queueOffset":   result.QueueOffset,
			"queueId":       result.MessageQueue.QueueId,
			"msgId":         result.MsgID,
			"transactionId": result.TransactionID,
		})
	}
	say("ready", event{})
	<-t.stop
	check(t.producer.Shutdown())
	say("done", event{})
}

// ExecuteLocalTransaction says what becomes of a message right after its send.
func (t *transactor) ExecuteLocalTransaction(
	message *primitive.Message,
) primitive.LocalTransactionState {
	number := messageNumber(message.GetProperty("number"))
	return transactionState(t.options.local[number%len(t.options.local)])
}

// CheckLocalTransaction answers a question of the broker.
func (t *transactor) CheckLocalTransaction(
	message *primitive.MessageExt,
) primitive.LocalTransactionState {
	times := messageNumber(message.GetProperty("TRANSACTION_CHECK_TIMES"))
	word := t.options.checks[min(times, len(t.options.checks))-1]
	if rest, found := strings.CutPrefix(word, "odd-rollback:"); found {
		word = rest
		if messageNumber(message.GetProperty("number"))%2 == 1 {
			word = "rollback"
		}
	}
	say("asked", event{
		"id":     message.GetProperty("id"),
		"times":  times,
		"answer": word,
		"topic":  message.Topic,
	})
	return transactionState(word)
}

func messageNumber(text string) int {
	number, err := strconv.Atoi(text)
	check(err)
	return number
}

func transactionState(word string) primitive.LocalTransactionState {
	switch word {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	default:
		return primitive.UnknowState
	}
}
