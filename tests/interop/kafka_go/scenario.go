package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

const (
	partitions   = 4
	records      = 40
	modeRecords  = 10
	limit        = 120 * time.Second
	pause        = 20 * time.Millisecond
	longSession  = 240 * time.Second
	shortSession = 2 * time.Second
	heartbeat    = 200 * time.Millisecond
	transaction  = 600 * time.Second
)

type record struct {
	partition int32
	key       []byte
	value     []byte // nil: none
	header    string // the value of the header "h"
}

// mode is a way to produce.
type mode struct {
	name       string
	acks       int
	codec      string
	idempotent bool
}

var modes = []mode{
	{"acks 0", 0, "none", false},
	{"acks 1", 1, "none", false},
	{"acks all", -1, "none", false},
	{"idempotent", -1, "none", true},
	{"gzip", -1, "gzip", true},
	{"snappy", -1, "snappy", true},
	{"lz4", -1, "lz4", true},
	{"zstd", -1, "zstd", true},
}

type place struct {
	offset   int64
	metadata string
}

// memberOptions says how a member of a group is to be.
type memberOptions struct {
	strategy string // "eager" or "cooperative"
	instance string // of a static member
	session  time.Duration
}

// peer is what the scenario needs of a client library.
type peer interface {
	strategies() []string
	createTopic(name string, count int32, config map[string]string)
	partitionsOf(name string) int // 0: there is no such topic
	configOf(topic, name string) string
	deleteTopic(name string)
	produce(how mode, topic string, sent []record)
	// read gives what a topic holds from its beginning on until it is told that this is enough.
	read(topic string, count int32, committed bool, each func(record) bool)
	join(group, topic string, options memberOptions) member
	committed(group, topic string) map[int32]place
	stateOf(group string) string
	isListed(group string) bool
	deleteGroup(group string)
	transactor(id string) transactor
	// commitWithOffsets commits a record with offset 7 of the input, then rolls offset 9 back.
	commitWithOffsets(id, group, input, output string)
	stateOfTransaction(id string) string // "": this client cannot ask
}

// member reads in the background.
type member interface {
	assigned() []int32
	rounds() int // how often it was given partitions
	places() map[int32]int64
	seen() []string
	commit()
	close()
}

type transactor interface {
	begin()
	send(topic string, partition int32, value string) error
	end(commit bool) error
	close()
}

type scenario struct {
	client, address, word string
	peer                  peer
}

func newScenario(client, address string, used peer, word string) *scenario {
	return &scenario{client, address, word, used}
}

func (s *scenario) named(kind string) string { return s.client + "." + kind + "." + s.word }

func await(what string, condition func() bool) {
	deadline := time.Now().Add(limit)
	for !condition() {
		if time.Now().After(deadline) {
			panic("waited in vain: " + what)
		}
		time.Sleep(pause)
	}
}

func (s *scenario) run() {
	s.inEveryMode()
	for _, strategy := range s.peer.strategies() {
		s.shareAndResume(strategy)
	}
	s.killOne()
	s.comeBack()
	s.transact()
	s.administrate()
}

func (s *scenario) make(topic string) {
	s.peer.createTopic(topic, partitions, nil)
	var sent []record
	for i := range records {
		value := []byte(fmt.Sprintf("r%d", i))
		sent = append(sent, record{partition: int32(i % partitions), value: value})
	}
	s.peer.produce(mode{"", -1, "none", true}, topic, sent)
}

// makeInput makes a topic of one partition, of which a transaction takes the first seven records.
func (s *scenario) makeInput(topic string) {
	s.peer.createTopic(topic, 1, nil)
	var sent []record
	for range records / partitions {
		sent = append(sent, record{value: []byte("in")})
	}
	s.peer.produce(mode{"", -1, "none", true}, topic, sent)
}

// inEveryMode produces with each kind of acks and each codec, and reads it back.
func (s *scenario) inEveryMode() {
	topic := s.named("modes")
	s.peer.createTopic(topic, 1, nil)
	want := map[string]record{}
	for _, how := range modes {
		var sent []record
		for i := range modeRecords {
			key := []byte(fmt.Sprintf("%s-%d", how.name, i))
			one := record{key: key, value: bytes.Repeat(key, 20), header: string(key)}
			if i == modeRecords-1 {
				one.value = nil
			}
			sent = append(sent, one)
			want[string(key)] = one
		}
		s.peer.produce(how, topic, sent)
	}
	counts := map[string]int{}
	intact := true
	total := 0
	s.peer.read(topic, 1, false, func(found record) bool {
		sent := want[string(found.key)]
		intact = intact && bytes.Equal(sent.value, found.value) && sent.header == found.header
		intact = intact && (sent.value == nil) == (found.value == nil)
		counts[strings.Split(string(found.key), "-")[0]]++
		total++
		return total == len(modes)*modeRecords
	})
	for _, how := range modes {
		tell(how.name, counts[how.name])
	}
	tell("keys, headers and nulls", intact)
}

func has(one member, count int) bool { return len(one.assigned()) == count }

func overlap(one, two member) bool {
	return slices.ContainsFunc(one.assigned(), func(each int32) bool {
		return slices.Contains(two.assigned(), each)
	})
}

// isAtEnd tells whether a member has read all that its partitions hold.
func isAtEnd(one member) bool {
	places := one.places()
	for _, partition := range one.assigned() {
		if places[partition] != records/partitions {
			return false
		}
	}
	return len(one.assigned()) > 0
}

// shareAndResume has two members share the partitions; one leaves, the other goes on.
func (s *scenario) shareAndResume(strategy string) {
	topic, group := s.named(strategy), s.named("group-"+strategy)
	s.make(topic)
	options := memberOptions{strategy: strategy, session: longSession}
	one := s.peer.join(group, topic, options)
	await("the first member", func() bool { return has(one, partitions) })
	two := s.peer.join(group, topic, options)
	await("the second member", func() bool {
		return has(one, partitions/2) && has(two, partitions/2)
	})
	tell(strategy+" overlap", overlap(one, two))
	await("all records", func() bool { return isAtEnd(one) && isAtEnd(two) })
	values := map[string]bool{}
	for _, value := range append(one.seen(), two.seen()...) {
		values[value] = true
	}
	tell(strategy+" read", len(values))
	one.commit()
	two.commit()
	two.close()
	await("the one that is left", func() bool { return has(one, partitions) })
	one.close()
	sum := int64(0)
	for _, each := range s.peer.committed(group, topic) {
		sum += each.offset
	}
	tell(strategy+" committed", sum)
	later := s.peer.join(group, topic, options)
	await("the next one", func() bool { return has(later, partitions) })
	s.produceToAll(topic, "last")
	await("the last records", func() bool { return s.countLast(later) == partitions })
	tell(strategy+" read again", len(later.seen())-s.countLast(later))
	later.close()
}

func (s *scenario) countLast(one member) int {
	count := 0
	for _, value := range one.seen() {
		if value == "last" {
			count++
		}
	}
	return count
}

func (s *scenario) produceToAll(topic, value string) {
	var sent []record
	for i := range int32(partitions) {
		sent = append(sent, record{partition: i, value: []byte(value)})
	}
	s.peer.produce(mode{"", -1, "none", true}, topic, sent)
}

// killOne kills a member that is a process of its own; its partitions come back.
func (s *scenario) killOne() {
	topic, group := s.named("kill"), s.named("group-kill")
	s.make(topic)
	one := s.peer.join(group, topic, memberOptions{strategy: "eager", session: longSession})
	await("the first member", func() bool { return has(one, partitions) })
	rounds := one.rounds()
	child := exec.Command(os.Args[0], "member", s.client, s.address, group, topic)
	child.Stderr = os.Stderr
	tie, err := child.StdinPipe() // it ends with this program
	check(err)
	defer tie.Close()
	check(child.Start())
	await("the second member", func() bool { return one.rounds() > rounds && has(one, partitions/2) })
	check(child.Process.Kill())
	_ = child.Wait() // it says that it was killed
	await("the partitions of the dead", func() bool { return has(one, partitions) })
	tell("after a kill", len(one.assigned()))
	one.close()
}

// runMember is a member that does not know how to leave; it ends with who started it.
func runMember(used peer, group, topic string) {
	used.join(group, topic, memberOptions{strategy: "eager", session: shortSession})
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// comeBack has a static member go away and come back: nobody else notices.
func (s *scenario) comeBack() {
	topic, group := s.named("static"), s.named("group-static")
	s.make(topic)
	join := func(instance string) member {
		options := memberOptions{strategy: "eager", instance: instance, session: longSession}
		return s.peer.join(group, topic, options)
	}
	one, two := join("one"), join("two")
	await("two static members", func() bool {
		return has(one, partitions/2) && has(two, partitions/2)
	})
	rounds, before := one.rounds(), two.assigned()
	two.close()
	back := join("two")
	await("the member that is back", func() bool { return has(back, partitions/2) })
	tell("static same partitions", slices.Equal(before, back.assigned()))
	tell("static same generation", one.rounds() == rounds)
	one.close()
	back.close()
}

// values are what transactions wrote, as a reader sees them who reads until it has seen the word
// in all partitions.
func (s *scenario) values(topic, word string, committed bool) string {
	var found []string
	words := 0
	s.peer.read(topic, partitions, committed, func(each record) bool {
		if each.value[0] == 't' {
			found = append(found, string(each.value))
		} else if string(each.value) == word {
			words++
		}
		return words == partitions
	})
	slices.Sort(found)
	return text(found)
}

// transact commits, rolls back, commits offsets with records, and is shut out by its successor.
func (s *scenario) transact() {
	topic, input, id := s.named("tx"), s.named("input"), s.named("tx-id")
	s.make(topic)
	s.makeInput(input)
	first := s.peer.transactor(id)
	first.begin()
	check(first.send(topic, 0, "t1"))
	check(first.send(topic, 1, "t2"))
	check(first.end(true))
	first.begin()
	check(first.send(topic, 0, "t3-gone"))
	check(first.end(false))
	first.begin()
	check(first.end(false))
	group := s.named("group-tx")
	s.peer.commitWithOffsets(s.named("tx-with-group"), group, input, topic)
	found := s.peer.committed(group, input)[0]
	tell("offset of the transaction", found.offset)
	tell("text of the transaction", found.metadata)
	s.produceToAll(topic, "before")
	tell("read committed", s.values(topic, "before", true))
	tell("read uncommitted", s.values(topic, "before", false))
	first.begin()
	check(first.send(topic, 3, "t5-open"))
	tell("while one is open", s.values(topic, "before", true))
	later := s.peer.transactor(id)
	err := first.send(topic, 3, "t6-late")
	if err == nil {
		err = first.end(true)
	}
	tell("shut out", kindOf(err))
	first.close()
	later.begin()
	check(later.send(topic, 3, "t7"))
	check(later.end(true))
	later.close()
	s.produceToAll(topic, "after")
	tell("in the end", s.values(topic, "after", true))
	if state := s.peer.stateOfTransaction(id); state != "" {
		tell("state of the transactional id", state)
	}
}

// administrate makes, describes and deletes a topic, and a group that was left.
func (s *scenario) administrate() {
	topic := s.named("admin")
	s.peer.createTopic(topic, 3, map[string]string{"retention.ms": "100000000"})
	await("the topic", func() bool { return s.peer.partitionsOf(topic) > 0 })
	tell("partitions of a topic", s.peer.partitionsOf(topic))
	tell("configuration of a topic", s.peer.configOf(topic, "retention.ms"))
	s.peer.deleteTopic(topic)
	await("the end of the topic", func() bool { return s.peer.partitionsOf(topic) == 0 })
	tell("partitions of a deleted topic", s.peer.partitionsOf(topic))
	group := s.named("group-eager")
	tell("state of a group that was left", s.peer.stateOf(group))
	tell("offsets of it", len(s.peer.committed(group, s.named("eager"))))
	tell("is it listed", s.peer.isListed(group))
	s.peer.deleteGroup(group)
	tell("is it still listed", s.peer.isListed(group))
}
