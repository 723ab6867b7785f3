// This program does with one Kafka broker what applications do with franz-go or with sarama, and
// prints what came of each step as one JSON object per line; the same lines are expected of every
// broker and of every client.
//
// Its first word is "scenario" or "member", then the client, the broker's address, and a word that
// makes names its own; a member takes its group and its topic instead, and runs until it is killed.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

func main() {
	program, client, address := os.Args[1], os.Args[2], os.Args[3]
	var used peer
	switch client {
	case "franz-go":
		used = newFranz(address)
	case "sarama":
		used = newSarama(address)
	default:
		panic("no such client: " + client)
	}
	switch program {
	case "scenario":
		newScenario(client, address, used, os.Args[4]).run()
	case "member":
		runMember(used, os.Args[4], os.Args[5])
	default:
		panic("no such program: " + program)
	}
}

// tell prints what came of one step, at once.
func tell(step string, value any) {
	line, err := json.Marshal(map[string]any{"event": step, "value": value})
	check(err)
	os.Stdout.Write(append(line, '\n'))
}

// check ends the program: the steps depend on each other.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

func text(values []string) string { return strings.Join(values, " ") }

func kindOf(err error) string {
	if err == nil {
		return "no"
	}
	return fmt.Sprint(err)
}
