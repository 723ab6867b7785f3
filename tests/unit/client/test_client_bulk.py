"""Queues that are far behind: bulk reads beside pulls, and what they must not change."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.aio import Producer, PullConsumer, PushConsumer
from sluice.client.aio import bulk_pulls
from sluice.client.aio.bulk_pulls import Backlog, bulk_fields, must_wait, read_bulk
from sluice.client.core.messages import Message, ReceivedMessage, read_pulled
from sluice.client.core.process_queues import ProcessQueue
from sluice.client.core.settings import PushSettings
from sluice.client.core.subscriptions import Sql, make_subscription
from sluice.errors import ProtocolError
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.kafka_door_kit import KafkaRig, batch
from tests.unit.client.admin_kit import Site
from tests.unit.client.test_core_consuming import pulled
from tests.unit.client.test_core_messages import BORN_MS, QUEUE, entry
from tests.unit.loops import run_once, until

COUNT = 600  # of each of the four queues
BULK = Request.SLUICE_BULK_FETCH
PULLS = (Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(kafka="on", kafka_port=0)
    site.start()
    yield site
    site.stop()


async def fill(site: Site, topic: str, count: int = COUNT) -> None:
    """The same number in each queue, each with the tag A or B."""
    async with Producer(site.nameserver.address) as producer:
        for queue in await producer.queues(topic):
            for at in range(0, count, 200):
                numbers = range(at, min(at + 200, count))
                messages = [Message(topic, f"{n}", tags="AB"[n % 2]) for n in numbers]
                await producer.send_batch(messages, queue=queue)


class Asked:
    """What a broker is asked for, and how often."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[int] = Counter()
        self.commands: list[RemotingCommand] = []
        handlers = site.broker.api.handlers
        for code in (BULK, *PULLS):
            monkeypatch.setitem(handlers, code, self._noting(handlers[code]))

    def _noting(
        self, handle: Callable[[Connection, RemotingCommand], None]
    ) -> Callable[[Connection, RemotingCommand], None]:
        def note(connection: Connection, command: RemotingCommand) -> None:
            self.counts[command.code] += 1
            self.commands.append(command)
            handle(connection, command)

        return note


class ByQueue:
    """A handler that remembers what it got of each queue."""

    def __init__(self) -> None:
        self.offsets: dict[int, list[int]] = defaultdict(list)
        self.bodies: dict[int, list[bytes]] = defaultdict(list)
        self.count = 0

    async def soon(self, message: ReceivedMessage) -> None:
        self.offsets[message.queue_id].append(message.queue_offset)
        self.bodies[message.queue_id].append(message.body)
        self.count += 1


def numbers(*wanted: int) -> list[bytes]:
    return [b"%d" % number for number in wanted]


@pytest.mark.parametrize("orderly", [False, True])
def test_a_queue_that_is_far_behind_is_read_in_bulk(
    site: Site, monkeypatch: pytest.MonkeyPatch, orderly: bool
) -> None:
    async def work() -> None:
        topic = f"Behind-{orderly}"
        await fill(site, topic)
        asked, seen = Asked(site, monkeypatch), ByQueue()
        options: Any = {"group": f"g-{topic}", "topics": topic, "start_at": "first"}
        async with PushConsumer(
            site.nameserver.address, handler=seen.soon, orderly=orderly, **options
        ):
            await until(lambda: seen.count >= 4 * COUNT)
        # Of each queue everything, once, in order.
        assert dict(seen.bodies) == {queue: numbers(*range(COUNT)) for queue in range(4)}
        assert asked.counts[BULK] >= 4
        # Each of them had a pull before, and one behind it that waits for more.
        assert asked.counts[Request.PULL_MESSAGE] >= 8
        # Pulls alone would have been 600 / 32 for each queue.
        assert asked.counts.total() < 4 * COUNT // 32
        again = ByQueue()
        async with PushConsumer(site.nameserver.address, handler=again.soon, **options):
            async with Producer(site.nameserver.address) as producer:
                await producer.send(Message(topic, "last"))
            await until(lambda: again.count)
        assert list(again.bodies.values()) == [[b"last"]]  # all the others are committed

    run_once(work())


def test_pulling_in_bulk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        await fill(site, "Polled")
        asked, bodies = Asked(site, monkeypatch), defaultdict[int, list[bytes]](list)
        async with PullConsumer(
            site.nameserver.address, group="polled", topics="Polled", start_at="first"
        ) as consumer:
            while sum(map(len, bodies.values())) < 4 * COUNT:
                for message in await consumer.poll(count=100):
                    bodies[message.queue_id].append(message.body)
        assert dict(bodies) == {queue: numbers(*range(COUNT)) for queue in range(4)}
        assert asked.counts[BULK] >= 4

    run_once(work())


def test_tags_in_bulk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        await fill(site, "Chosen")
        asked, seen = Asked(site, monkeypatch), ByQueue()
        async with PushConsumer(
            site.nameserver.address,
            group="chosen",
            topics={"Chosen": "A || C"},
            start_at="first",
            handler=seen.soon,
        ):
            await until(lambda: seen.count >= 2 * COUNT)
        assert dict(seen.bodies) == {queue: numbers(*range(0, COUNT, 2)) for queue in range(4)}
        bulk = [command for command in asked.commands if command.code == BULK]
        assert {command.ext["tags"] for command in bulk} == {"A || C"}

    run_once(work())


@pytest.mark.parametrize("code", [Response.REQUEST_CODE_NOT_SUPPORTED, Response.NO_PERMISSION])
def test_a_broker_that_refuses_bulk_reads_is_pulled(
    site: Site, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    api = site.broker.api

    def refuse(connection: Connection, command: RemotingCommand) -> None:
        api.answer(connection, command, code, remark="as the test wants it")

    async def work() -> None:
        topic = f"Refused-{code}"
        await fill(site, topic)
        monkeypatch.setitem(api.handlers, BULK, refuse)
        asked, seen = Asked(site, monkeypatch), ByQueue()
        async with PushConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            handler=seen.soon,
        ):
            await until(lambda: seen.count >= 4 * COUNT)
        assert dict(seen.bodies) == {queue: numbers(*range(COUNT)) for queue in range(4)}
        assert asked.counts[BULK] == 4  # each queue tries it once

    run_once(work())


def test_memory_is_bounded_with_bulk_reads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        await fill(site, "Bounded")
        asked, seen, gate = Asked(site, monkeypatch), ByQueue(), asyncio.Event()

        async def wait(message: ReceivedMessage) -> None:
            await gate.wait()
            await seen.soon(message)

        async with PushConsumer(
            site.nameserver.address,
            group="bounded",
            topics="Bounded",
            start_at="first",
            handler=wait,
            concurrency=2,
            queue_count_max=200,
        ) as consumer:
            lanes = [lane for lane in consumer.lanes.values() if lane.queue.topic == "Bounded"]
            most = [0]

            def is_full() -> bool:
                most[0] = max(most[0], *(lane.process.unfinished_count for lane in lanes))
                return all(lane.process.unfinished_count > 100 for lane in lanes)

            await until(is_full)
            gate.set()
            await until(lambda: is_full() or seen.count >= 4 * COUNT)
            await until(lambda: seen.count >= 4 * COUNT)
        assert most[0] <= 200
        assert dict(seen.bodies) == {queue: numbers(*range(COUNT)) for queue in range(4)}
        assert asked.counts[BULK] >= 4

    run_once(work())


def test_batches_of_kafkas_producers_come_one_by_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        rig = KafkaRig(site.broker)
        client = await rig.connect()
        await client.create("from-kafka")
        for at in range(0, COUNT, 100):
            values = (b"%d" % number for number in range(at, at + 100))
            sent = await client.produce("from-kafka", batch(*values))
            assert sent.error_code == 0
        asked, seen = Asked(site, monkeypatch), ByQueue()
        async with PushConsumer(
            site.nameserver.address,
            group="of-kafka",
            topics="from-kafka",
            start_at="first",
            handler=seen.soon,
        ):
            await until(lambda: seen.count >= COUNT)
        assert dict(seen.bodies) == {0: numbers(*range(COUNT))}
        assert seen.offsets[0] == list(range(COUNT))
        assert asked.counts[BULK] == 1
        await rig.close()

    run_once(work())


def test_who_keeps_a_message_does_not_keep_the_answer() -> None:
    data = b"".join(entry(b"body", offset) for offset in range(3))
    message = read_pulled(data, QUEUE)[1]
    assert (message.body, message.queue_offset, message.store_ms) == (b"body", 1, BORN_MS + 5)
    assert all(each is not data for each in gc.get_referents(message))
    kept = [each for each in gc.get_referents(message) if isinstance(each, bytes)]
    assert sum(map(len, kept)) <= len(data) // 3


# ---------------------------------------------------------------------------- what is asked for


class Queue:
    """A queue of a member, as far as bulk reads look at both; its clock stands at 100 s."""

    def __init__(self, wanted: str | Sql = "*", **limits: int) -> None:
        settings = PushSettings(group="g", **limits)  # type: ignore[arg-type]
        self.backlog = Backlog()
        self.backlog.behind = 5000
        self.backlog.pulled_at = 100.0
        self.process = ProcessQueue(QUEUE, 10, settings)
        self.lane: Any = SimpleNamespace(
            queue=QUEUE, process=self.process, backlog=self.backlog, read_from=0
        )
        subscriptions = {QUEUE.topic: make_subscription(QUEUE.topic, wanted, 1)}
        self.member: Any = SimpleNamespace(
            settings=settings, group="g", subscriptions=subscriptions
        )

    def fields(self, more: int = 0, now: float = 100.0) -> dict[str, str] | None:
        return bulk_fields(self.member, self.lane, now, 10, more, more)

    def read(self, code: int, ext: dict[str, str], body: bytes = b"") -> Any:
        return read_bulk(self.lane, RemotingCommand(code, 1, 1, ext, body))


def test_the_fields_of_a_bulk_read() -> None:
    assert Queue().fields() == {
        "topic": QUEUE.topic,
        "queueId": str(QUEUE.queue_id),
        "offset": "10",
        "toOffset": "510",
        "maxBytes": str(1024 * 1024),
        "consumerGroup": "g",
    }
    assert (Queue("A || B").fields() or {})["tags"] == "A || B"
    limited = Queue(bulk_bytes=100, queue_count_max=300).fields() or {}
    assert (limited["toOffset"], limited["maxBytes"]) == ("160", "100")
    assert (Queue(queue_bytes_max=1000).fields(more=400) or {})["maxBytes"] == "600"
    assert (Queue(queue_span_max=600).fields(more=500) or {})["toOffset"] == "110"


@pytest.mark.parametrize(
    "queue",
    [
        Queue(Sql("a > 1")),
        Queue(bulk_bytes=0),
        Queue(pull_count=31),
        Queue(queue_count_max=127),
    ],
)
def test_who_is_only_pulled(queue: Queue) -> None:
    assert queue.fields() is None
    assert not must_wait(queue.member, queue.lane, more_count=127)


def test_when_a_pull_is_better() -> None:
    queue = Queue()
    assert queue.fields(now=100.0 + bulk_pulls._PULL_SECONDS) is not None
    assert queue.fields(now=100.1 + bulk_pulls._PULL_SECONDS) is None  # rights and resets
    assert queue.fields(more=937) is None  # room for 63
    queue.backlog.behind = 63
    assert queue.fields() is None
    queue.backlog.behind = 64
    assert queue.fields() is not None
    queue.backlog.is_unfit = True
    assert queue.fields() is None


def test_half_of_the_memory_is_kept_for_what_is_on_its_way() -> None:
    queue = Queue(queue_count_max=200)
    queue.process.put(pulled(*range(10, 110)), 110)
    assert not must_wait(queue.member, queue.lane)
    assert must_wait(queue.member, queue.lane, more_count=1)
    queue.process.put(pulled(110), 111)
    assert must_wait(queue.member, queue.lane)
    queue.backlog.behind = 0  # a pull asks for few: it has room
    assert not must_wait(queue.member, queue.lane)


def test_answers_to_bulk_reads() -> None:
    queue = Queue()
    offsets = {"nextOffset": "12", "minOffset": "0", "maxOffset": "100", "count": "2"}
    found = queue.read(Response.SUCCESS, offsets, b"entries" + bytes(8))
    assert found == (b"entries", 2, 12)
    assert queue.backlog.behind == 88
    assert queue.read(Response.PULL_NOT_FOUND, offsets) is None
    assert (queue.backlog.behind, queue.backlog.is_unfit) == (0, False)
    assert queue.read(Response.PULL_OFFSET_MOVED, offsets) is None
    assert not queue.backlog.is_unfit
    assert queue.read(Response.SUCCESS, {**offsets, "topicId": "x"}, bytes(8)) is None
    assert queue.backlog.is_unfit


@pytest.mark.parametrize(
    "ext",
    [
        {"nextOffset": "12", "maxOffset": "100"},
        {"nextOffset": "12", "maxOffset": "100", "count": "many"},
        {"nextOffset": "12", "maxOffset": "100", "count": "-1"},
        {"nextOffset": "12", "maxOffset": "100", "count": "3"},
        {"maxOffset": "100", "count": "1"},
    ],
)
def test_answers_that_make_no_sense(ext: dict[str, str]) -> None:
    with pytest.raises(ProtocolError):
        Queue().read(Response.SUCCESS, ext, bytes(11))
