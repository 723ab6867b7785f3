// This program uses Apache's Go client as the Java programs beside it use Apache's Java client:
// the same options, the same events, one JSON object per line. Its first word names the program.
package main

import (
	"encoding/json"
	"flag"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
)

// words is an option that may be given several times.
type words []string

func (w *words) String() string { return strings.Join(*w, " ") }

func (w *words) Set(value string) error {
	*w = append(*w, value)
	return nil
}

type event map[string]any

var output sync.Mutex

// say prints one event as one whole line, at once.
func say(kind string, fields event) {
	fields["event"] = kind
	line, err := json.Marshal(fields)
	if err != nil {
		panic(err)
	}
	output.Lock()
	defer output.Unlock()
	os.Stdout.Write(append(line, '\n'))
}

// check ends the program: what cannot be set up is not worth going on with.
func check(err error) {
	if err != nil {
		say("error", event{"reason": err.Error()})
		os.Exit(1)
	}
}

// stopped closes when somebody asks the program to end.
func stopped() <-chan struct{} {
	asked := make(chan struct{})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	go func() {
		<-signals
		close(asked)
	}()
	return asked
}

func main() {
	switch os.Args[1] {
	case "Send":
		options := sendOptions{}
		options.read(flag.NewFlagSet("Send", flag.ExitOnError), os.Args[2:])
		newSender(options).run()
	case "Receive":
		options := receiveOptions{}
		options.read(flag.NewFlagSet("Receive", flag.ExitOnError), os.Args[2:])
		newReceiver(options).run()
	case "Delays":
		options := delayOptions{}
		options.read(flag.NewFlagSet("Delays", flag.ExitOnError), os.Args[2:])
		delays(options)
	case "Transact":
		options := transactOptions{}
		options.read(flag.NewFlagSet("Transact", flag.ExitOnError), os.Args[2:])
		newTransactor(options).run()
	case "Orders", "Failing":
		options := orderOptions{}
		options.read(flag.NewFlagSet(os.Args[1], flag.ExitOnError), os.Args[2:])
		if os.Args[1] == "Orders" {
			orders(options)
		} else {
			failing(options)
		}
	default:
		say("error", event{"reason": "no program " + os.Args[1]})
		os.Exit(2)
	}
}
