"""Sluice's Python client: one suite, against Sluice and against Apache RocketMQ's own broker."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peers import Jars, RocketMQ
from peers.programs import started
from sluice import (
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceivedMessage,
    SendStatus,
    Sql,
    TransactionProducer,
    TransactionState,
)
from sluice.errors import NoReply, SendFailed, SluiceError
from tests.interop.clients import JavaClients
from tests.interop.sluice_process import (
    SluiceBroker,
    SluiceNameserver,
    SluiceProcess,
    make_topic,
    wait_for_route,
)
from tests.interop.watching import Group, Member, wait_until

LEVELS = " ".join(["1s"] * 18)
QUEUES = 8
STEADY = 200
_REPOSITORY = Path(__file__).parents[2]
Server = SluiceProcess | RocketMQ


# Against Apache's broker it takes as long again:
# `script/test -m soak tests/interop/test_python_client.py`.
@pytest.fixture(scope="module", params=["sluice", pytest.param("apache", marks=pytest.mark.soak)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "sluice":
        flags = (
            *("--delay-levels", LEVELS, "--transaction-timeout-ms", "1000"),
            *("--transaction-check-interval-ms", "500", "--recall-messages"),
            *("--trace-topic", "--sql-filter"),
        )
        with SluiceProcess(directory, *flags) as process:
            yield process
        return
    jars: Jars = request.getfixturevalue("rocketmq_jars")
    config = {
        "messageDelayLevel": LEVELS,
        # Apache's broker takes note of ends after 3 s: before that it asks for everybody.
        "transactionTimeOut": 5000,
        "transactionCheckInterval": 1000,
        "recallMessageEnable": "true",
        "enablePropertyFilter": "true",
        "traceTopicEnable": "true",
        "mappedFileSizeCommitLog": 64 << 20,
    }
    with RocketMQ(directory, config=config, jars=jars) as peer:
        yield peer


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, known to the nameserver."""
    name = str(request.node.name).replace("[", "-").replace("]", "")
    make_topic(server.broker_address, name, 4)
    wait_for_route(server.nameserver_address, name)
    return name


class Inbox:
    """A handler that keeps what it gets."""

    def __init__(self, fails: Callable[[ReceivedMessage], bool] = lambda _: False) -> None:
        self._fails = fails
        self.messages: list[ReceivedMessage] = []
        self.tries: list[tuple[bytes, int]] = []

    def __call__(self, message: ReceivedMessage) -> None:
        self.tries.append((message.body, message.reconsume_times))
        if self._fails(message):
            raise ValueError("as the test wants it")
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.messages) >= count, lambda: f"{len(self.messages)} of {count}")


@contextlib.contextmanager
def reading(server: Server, topic: str, handler: Any, **options: Any) -> Iterator[PushConsumer]:
    given = {"group": f"g-{topic}", "topics": {topic: "*"}, "start_at": "first", **options}
    with PushConsumer(server.nameserver_address, handler=handler, **given) as consumer:
        yield consumer


def test_every_way_to_send(server: Server, topic: str) -> None:
    with (
        Producer(server.nameserver_address, group="senders") as producer,
        Producer(server.nameserver_address, group="batchers", batching=True) as batcher,
    ):
        results = [producer.send(Message(topic, f"sync{i}", keys=f"key{i}")) for i in range(8)]
        results += [
            future.result()
            for future in [producer.send_async(Message(topic, f"async{i}")) for i in range(100)]
        ]
        results += producer.send_batch([Message(topic, f"batch{i}") for i in range(10)])
        results += [
            future.result()
            for future in [batcher.send_async(Message(topic, f"auto{i}")) for i in range(100)]
        ]
        results.append(producer.send(Message(topic, b"large" * 4000, tags="big")))
        producer.send_oneway(Message(topic, "oneway"))
    assert {result.status for result in results} == {SendStatus.OK}
    assert len({result.offset_id for result in results}) == len(results) == 219
    assert len({(r.queue.queue_id, r.queue_offset) for r in results}) == 219
    inbox = Inbox()
    with reading(server, topic, inbox):
        inbox.wait_for(220)
    assert Counter(inbox.bodies).most_common(1)[0][1] == 1
    by_body = {message.body: message for message in inbox.messages}
    assert by_body[b"large" * 4000].tags == "big"
    assert by_body[b"sync3"].keys == "key3"
    ids = {result.message_id for result in results}
    assert {message.message_id for message in inbox.messages} > ids - {""}


def test_tags_and_sql(server: Server, topic: str) -> None:
    with Producer(server.nameserver_address) as producer:
        for i in range(12):
            tag = "ABC"[i % 3]
            producer.send(Message(topic, f"{tag}{i}", tags=tag, properties={"price": str(i)}))
    tagged, chosen = Inbox(), Inbox()
    with (
        reading(server, topic, tagged, group=f"t-{topic}", topics={topic: "A || C"}),
        reading(
            server, topic, chosen, group=f"s-{topic}", topics={topic: Sql("price BETWEEN 3 AND 5")}
        ),
    ):
        tagged.wait_for(8)
        chosen.wait_for(3)
    assert {body[:1] for body in tagged.bodies} == {b"A", b"C"}
    assert sorted(chosen.bodies) == [b"A3", b"B4", b"C5"]
    with pytest.raises(SluiceError, match="expression"):
        PushConsumer(
            server.nameserver_address,
            group=f"x-{topic}",
            topics={topic: Sql("price >")},
            handler=tagged,
        ).start()


def test_failed_messages_come_again_and_end_as_dead_letters(server: Server, topic: str) -> None:
    inbox = Inbox(lambda m: m.body == b"never" or (m.body == b"twice" and m.reconsume_times < 2))
    group = f"g-{topic}"
    with Producer(server.nameserver_address) as producer:
        for body in ("good", "twice", "never"):
            producer.send(Message(topic, body))
    with reading(server, topic, inbox, tries_max=2) as consumer:
        inbox.wait_for(2)
        wait_until(lambda: inbox.tries.count((b"never", 2)) > 0, lambda: str(inbox.tries))
        wait_for_route(server.nameserver_address, f"%DLQ%{group}")
    assert consumer.failed_count == 5
    assert [row for row in inbox.tries if row[0] == b"twice"] == [
        *((b"twice", 0), (b"twice", 1), (b"twice", 2)),
    ]
    assert {message.topic for message in inbox.messages} == {topic}
    with PullConsumer(
        server.nameserver_address, group="look", topics=f"%DLQ%{group}", start_at="first"
    ) as dead:
        assert [message.body for message in _polled(dead, 1)] == [b"never"]


def _polled(consumer: PullConsumer, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []

    def enough() -> bool:
        found.extend(consumer.poll(1.0))
        return len(found) >= count

    wait_until(enough, lambda: f"{len(found)} of {count}")
    return found


def test_order_by_key(server: Server, topic: str) -> None:
    inbox = Inbox()
    with Producer(server.nameserver_address) as producer:
        for i in range(60):
            producer.send(Message(topic, f"{i % 5}:{i}", sharding_key=f"order-{i % 5}"))
    with reading(server, topic, inbox, orderly=True):
        inbox.wait_for(60)
    for key in range(5):
        mine = [b for b in inbox.bodies if b.startswith(b"%d:" % key)]
        assert mine == [f"{key}:{i}".encode() for i in range(key, 60, 5)]


def test_delays_and_recall(server: Server, topic: str) -> None:
    inbox = Inbox()
    with Producer(server.nameserver_address) as producer, reading(server, topic, inbox):
        begun = time.time() * 1000
        producer.send(Message(topic, "level", delay_level=2))
        producer.send(Message(topic, "seconds", delay_seconds=2))
        producer.send(Message(topic, "at", deliver_at=time.time() + 2))
        gone = producer.send(Message(topic, "recalled", delay_seconds=6))
        assert producer.recall(topic, gone.recall_handle) == gone.message_id
        after = producer.send(Message(topic, "after", delay_seconds=8))
        assert after.status is SendStatus.OK
        inbox.wait_for(4)
    assert sorted(inbox.bodies) == [b"after", b"at", b"level", b"seconds"]
    for message in inbox.messages:
        assert message.store_ms - begun > 900, message


def test_transactions(server: Server, topic: str) -> None:
    asked: list[bytes] = []

    def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message.body)
        assert message.topic == topic
        is_bad = message.body in (b"refused", b"dropped", b"no")
        return TransactionState.ROLLBACK if is_bad else TransactionState.COMMIT

    inbox = Inbox()
    with (
        TransactionProducer(
            server.nameserver_address, group=f"shop-{topic}", checker=check, heartbeat_ms=1000
        ) as producer,
        reading(server, topic, inbox),
    ):
        _, state = producer.send_transaction(Message(topic, "paid"), lambda _: True)
        assert state is TransactionState.COMMIT
        producer.send_transaction(Message(topic, "refused"), lambda _: False)
        producer.send_transaction(Message(topic, "asked"), lambda _: None)
        producer.send_transaction(Message(topic, "dropped"), lambda _: None)
        with producer.transaction(Message(topic, "block")):
            pass
        with pytest.raises(ValueError, match="mine"), producer.transaction(Message(topic, "no")):
            raise ValueError("mine")
        inbox.wait_for(3)
        wait_until(lambda: b"dropped" in asked, lambda: str(asked))
    assert sorted(inbox.bodies) == [b"asked", b"block", b"paid"]
    assert set(asked) >= {b"asked", b"dropped"}


def test_request_and_reply(server: Server, topic: str) -> None:
    with Producer(server.nameserver_address, group=f"asks-{topic}") as producer:

        def answer(message: ReceivedMessage) -> None:
            if message.body != b"silence":
                producer.reply(message, b"re: " + message.body)

        with reading(server, topic, answer):
            reply = producer.ask(Message(topic, "price?"), timeout_seconds=60)
            assert reply.body == b"re: price?"
            with pytest.raises(NoReply):
                producer.ask(Message(topic, "silence"), timeout_seconds=1)


def test_pulling_by_hand(server: Server, topic: str) -> None:
    with Producer(server.nameserver_address) as producer:
        sent = producer.send_batch([Message(topic, f"m{i}") for i in range(40)])
    queue = sent[0].queue
    options: dict[str, Any] = {"group": f"p-{topic}", "start_at": "first"}
    with PullConsumer(server.nameserver_address, auto_commit=False, **options) as consumer:
        assert len(consumer.queues(topic)) == 4
        consumer.assign([queue])
        assert [m.body for m in _polled(consumer, 40)] == [f"m{i}".encode() for i in range(40)]
        consumer.seek(queue, 30)
        assert _polled(consumer, 10)[0].queue_offset == 30
        consumer.commit({queue: 35})
        assert consumer.committed(queue) == 35
        assert consumer.offset_for_time(queue, 0.0) == 0
        consumer.pause([queue])
        consumer.seek(queue, 0)
        assert consumer.poll(0.5) == []
        consumer.resume([queue])
        assert _polled(consumer, 1)[0].queue_offset == 0
    with PullConsumer(server.nameserver_address, topics=topic, **options) as consumer:
        assert [m.body for m in _polled(consumer, 5)] == [f"m{i}".encode() for i in range(35, 40)]


def test_broadcasting(server: Server, topic: str, tmp_path: Path) -> None:
    with Producer(server.nameserver_address) as producer:
        for i in range(8):
            producer.send(Message(topic, f"m{i}"))
    inboxes = [Inbox(), Inbox()]
    with contextlib.ExitStack() as stack:
        for number, inbox in enumerate(inboxes):
            more = {"offset_directory": str(tmp_path), "instance_name": f"n{number}"}
            stack.enter_context(reading(server, topic, inbox, broadcasting=True, **more))
        for inbox in inboxes:
            inbox.wait_for(8)
    assert all(sorted(inbox.bodies) == [f"m{i}".encode() for i in range(8)] for inbox in inboxes)


def test_the_message_trace(server: Server, topic: str) -> None:
    inbox = Inbox()
    with Producer(server.nameserver_address, group=f"tr-{topic}", trace=True) as producer:
        sent = producer.send(Message(topic, "traced", keys="k1"))
        with reading(server, topic, inbox, trace=True):
            inbox.wait_for(1)
    with PullConsumer(
        server.nameserver_address, group="look", topics="RMQ_SYS_TRACE_TOPIC", start_at="first"
    ) as consumer:
        lines: list[list[str]] = []

        def all_there() -> bool:
            for message in consumer.poll(1.0):
                text = message.body.decode()
                lines.extend(line.split("\x01") for line in text.split("\x02") if line)
            mine = {line[0] for line in lines if sent.message_id in line}
            return mine == {"Pub", "SubBefore", "SubAfter"}

        wait_until(all_there, lambda: str(lines))


def test_a_broker_that_goes_away_and_comes_back(server: Server, topic: str) -> None:
    """What was acknowledged is there; a producer and a consumer go on by themselves."""
    inbox = Inbox()
    with (
        Producer(server.nameserver_address, send_ms=60_000, tries_max=100) as producer,
        reading(server, topic, inbox),
    ):
        for i in range(10):
            producer.send(Message(topic, f"before{i}"))
        inbox.wait_for(10)
        if isinstance(server, RocketMQ):
            server.stop_broker()
        else:
            server.stop()
        waiting = producer.send_async(Message(topic, "meanwhile"))
        server.start()
        assert waiting.result(120).status is SendStatus.OK
        for i in range(10):
            producer.send(Message(topic, f"after{i}"))
        wanted = {
            b"meanwhile",
            *(f"{w}{i}".encode() for w in ("before", "after") for i in range(10)),
        }
        wait_until(lambda: set(inbox.bodies) == wanted, lambda: str(wanted - set(inbox.bodies)))


def test_one_broker_of_two_is_killed(tmp_path: Path) -> None:
    """No send fails, and everything that was acknowledged is handled."""
    with contextlib.ExitStack() as stack:
        nameserver = stack.enter_context(SluiceNameserver(tmp_path / "nameserver")).address
        first, second = (
            stack.enter_context(
                SluiceBroker(tmp_path / name, [nameserver], "--broker-name", f"broker-{name}")
            )
            for name in "ab"
        )
        for broker in (first, second):
            make_topic(broker.address, "Two", 4)
        inbox = Inbox()
        consumer = stack.enter_context(
            PushConsumer(
                nameserver,
                group="two",
                topics="Two",
                start_at="first",
                handler=inbox,
                rebalance_ms=1000,
                route_ms=1000,  # the routes of the broker that comes back, soon
            )
        )
        wait_until(
            lambda: len([q for q in consumer.assignment() if q.topic == "Two"]) == 8,
            lambda: str(consumer.assignment()),
        )
        brokers: Counter[str] = Counter()
        with Producer(nameserver, group="two", send_ms=30_000) as producer:
            for number in range(600):
                if number == 200:
                    second.kill()
                brokers[producer.send(Message("Two", f"m{number}")).queue.broker_name] += 1
        assert brokers["broker-b"] == 100
        second.start()
        wanted = {f"m{number}".encode() for number in range(600)}
        wait_until(lambda: set(inbox.bodies) == wanted, lambda: str(wanted - set(inbox.bodies)))


# ------------------------------------------------------------------------------------------- groups


class Scene:
    """A topic with many queues, a sender that goes on all the time, members that come and go."""

    def __init__(self, server: Server, name: str, mode: str, home: Path) -> None:
        self.topic = name
        self.mode = mode
        self.group = Group(f"g-{name}")
        self.queues = [f"{name}/{queue_id}" for queue_id in range(QUEUES)]
        self.acknowledged: list[str] = []
        self._server = server
        self._home = home
        self._running = contextlib.ExitStack()
        self._stop = threading.Event()
        self._sender = threading.Thread(target=self._send)
        make_topic(server.broker_address, name, QUEUES)
        wait_for_route(server.nameserver_address, name)

    def _send(self) -> None:
        options: Any = {"group": f"send-{self.topic}", "send_ms": 60_000}
        with Producer(self._server.nameserver_address, **options) as producer:
            queues = producer.queues(self.topic)
            number = 0
            while not self._stop.wait(0.005):
                name = f"m{number}"
                message = Message(self.topic, name, properties={"id": name})
                number += 1
                # Without an answer nobody knows whether it will come: it does not count.
                with contextlib.suppress(SendFailed):
                    producer.send(message, queue=queues[number % QUEUES])
                    self.acknowledged.append(name)

    def __enter__(self) -> Scene:
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_sending()
        self._running.close()

    def stop_sending(self) -> None:
        self._stop.set()
        self._sender.join()

    def join(self) -> Member:
        words = (self._server.nameserver_address, self.topic, self.group.name, self.mode)
        command = [sys.executable, "-m", "tests.interop.python_member", *words]
        path = f"{_REPOSITORY / 'src'}{os.pathsep}{_REPOSITORY}"
        program = self._running.enter_context(
            started("member", command, home=self._home, environment={"PYTHONPATH": path})
        )
        return self._joined(Member(program, self.group.name))

    def join_java(self, clients: JavaClients) -> Member:
        program = self._running.enter_context(
            clients.receiving(
                self._server.nameserver_address,
                [self.topic],
                f"{self.mode}:{self.group.name}",
                brief=True,
            )
        )
        return self._joined(Member(program, self.group.name))

    def _joined(self, member: Member) -> Member:
        self.group.members.append(member)
        return member

    def wait_for_shares(self) -> None:
        self.group.wait_for_shares(self.queues)

    def wait_for_more(self, count: int) -> None:
        wanted = len(self.acknowledged) + count
        wait_until(
            lambda: len(self.acknowledged) >= wanted,
            lambda: f"{len(self.acknowledged)} of {wanted} are acknowledged",
        )


def change_members(scene: Scene, *, killed: bool) -> int:
    """From one member to four, then to two, one of them killed if asked for; all under load.

    Returns how many messages were acknowledged when the last two had shared the queues out.
    """
    members = [scene.join()]
    scene.wait_for_shares()
    members += [scene.join() for _ in range(3)]
    scene.wait_for_shares()
    scene.wait_for_more(STEADY)
    members[1].leave()
    if killed:
        members[2].kill()
    else:
        members[2].leave()
    scene.wait_for_shares()
    before = len(scene.acknowledged)
    scene.wait_for_more(STEADY)
    scene.stop_sending()
    scene.group.wait_for_all(scene.acknowledged)
    assert all(member.received[scene.group.name] for member in members)
    return before


def test_one_member_four_members_two(server: Server, tmp_path: Path) -> None:
    """Under load, one killed: every message is handled, and what came last exactly once."""
    with Scene(server, "Members", "push", tmp_path) as scene:
        before = change_members(scene, killed=True)
        seen = scene.group.seen()
        assert [name for name in scene.acknowledged[before:] if seen[name] != 1] == []
        check_periods(scene.group, in_order=False)


# After a kill a queue's lock has to expire first, which takes a minute.
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_an_ordered_group_keeps_the_order(server: Server, tmp_path: Path, killed: bool) -> None:
    """The same, in order: whoever has a queue handles its messages one after the other."""
    with Scene(server, f"InOrder{killed}", "orderly", tmp_path) as scene:
        before = change_members(scene, killed=killed)
        seen = scene.group.seen()
        assert [name for name in scene.acknowledged[before:] if seen[name] != 1] == []
        check_periods(scene.group, in_order=True)
        if not killed:
            # Who leaves says how far it is: then nothing, or what was under way, comes again.
            again = [name for name, count in seen.items() if count > 1]
            assert len(again) <= 2 * QUEUES, again


def check_periods(group: Group, *, in_order: bool) -> None:
    """As long as a member has a queue, it gets every message of it once.

    So a message comes again only after its queue was given to somebody: that is all that
    at-least-once allows.
    """
    for member in group.members:
        assert member.periods
        for (queue, _), offsets in member.periods.items():
            twice = [offset for offset, count in Counter(offsets).items() if count > 1]
            assert not twice, (queue, twice)
            if in_order:
                assert offsets == sorted(offsets), queue


def test_java_and_python_share_a_group(
    server: Server, java_clients: JavaClients, tmp_path: Path
) -> None:
    with Scene(server, "Mixed", "push", tmp_path) as scene:
        python = scene.join()
        java = scene.join_java(java_clients)
        scene.wait_for_shares()
        scene.wait_for_more(STEADY)
        other = scene.join()
        scene.wait_for_shares()
        scene.wait_for_more(STEADY)
        python.leave()
        scene.wait_for_shares()
        scene.stop_sending()
        scene.group.wait_for_all(scene.acknowledged)
        for member in (python, java, other):
            assert member.received[scene.group.name]
