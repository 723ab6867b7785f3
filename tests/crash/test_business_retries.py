"""Crashes between a retry and the offset that passes it: no retry is lost, none comes twice.

A consumer reads a topic and its retry topic, fails with messages a known number of times, sends
them back and commits its offsets now and then. The broker is cut off after any of these steps, and
the consumer begins again where the broker says that it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

import orjson
import pytest

from sluice.broker import retry_notes
from sluice.errors import Busy
from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPrefix, KeepRandom
from tests.interop.sluice_process import SluiceProcess
from tests.unit.broker.broker_kit import offset_fields, pull_fields, send_fields
from tests.unit.broker.retry_kit import Broker
from tests.unit.loops import run_once

COUNT = 6
TIMES_MAX = 3
TOPICS = ("orders", "%RETRY%g")


def failures(key: str) -> int:
    """How often the consumer fails with a message: more often than is allowed makes it dead."""
    return int(key.removeprefix("U")) % (TIMES_MAX + 2)


class Consumer:
    """One consumer from its start on; what it knows is lost with it."""

    def __init__(self, broker: Broker, random: Random) -> None:
        self._broker = broker
        self._random = random
        self._next = {topic: broker.core.offsets.committed("g", topic, 0) or 0 for topic in TOPICS}

    @property
    def is_done(self) -> bool:
        store = self._broker.core.store
        return all(self._next[topic] >= store.max_offset(topic, 0) for topic in TOPICS)

    def step(self, topic: str) -> None:
        """Consume one message, and send it back if that fails."""
        offset = self._next[topic]
        if offset >= self._broker.core.store.max_offset(topic, 0):
            return
        entry = self._broker.entries(topic)[offset]
        key = records.property_value(entry.properties, b"UNIQ_KEY")
        assert key is not None
        if entry.reconsume_times < failures(key.decode()) and not self._send_back(entry, key):
            return  # refused for now: the consumer keeps it
        self._next[topic] = offset + 1

    def _send_back(self, entry: records.Entry, key: bytes) -> bool:
        if self._random.random() < 0.7:
            self._broker.send_back(entry.position, times_max=TIMES_MAX)
            return True
        try:
            self._broker.send_to_retry(
                entry.reconsume_times + 1, key.decode(), times_max=TIMES_MAX, RETRY_TOPIC="orders"
            )
        except Busy:
            return False  # the key index is made anew
        return True

    def commit(self) -> None:
        for topic, offset in self._next.items():
            self._broker.core.offsets.commit("g", topic, 0, offset)


def tries(broker: Broker) -> dict[str, list[int]]:
    """Which tries of each message came, from first to last."""
    found: dict[str, list[int]] = defaultdict(list)
    for entry in broker.entries("%RETRY%g"):
        key = records.property_value(entry.properties, b"UNIQ_KEY") or b""
        found[key.decode()].append(entry.reconsume_times)
    return found


@pytest.mark.parametrize("seed", range(24))
def test_crashes_anywhere(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    # Now and then the notes are on the disk and the walk begins behind them.
    monkeypatch.setattr(retry_notes, "_WALK_BYTES", random.choice([0, 2_000, 1 << 24]))
    broker = Broker()
    broker.make()
    for number in range(COUNT):
        broker.send(key=f"U{number}")
    broker.core.store.flusher.flush_to(broker.core.store.log.written)
    broker.tick()
    consumer = Consumer(broker, random)
    crash_count = quiet = 0
    while quiet < 3:
        for _ in range(random.randrange(1, 5)):
            consumer.step(random.choice(TOPICS))
        if random.random() < 0.4:
            consumer.commit()
        broker.run(random.choice([50, 1_000, 10_000, 60_000]), 1_000)
        if crash_count < 12 and random.random() < 0.4:
            crash_count += 1
            keep = random.choice(
                [KeepNothing(), KeepAll(), KeepPrefix(random.randrange(4_000)), KeepRandom(random)]
            )
            broker = Broker(broker.files.crash(keep), broker.now_ms)
            consumer = Consumer(broker, random)
        quiet = quiet + 1 if consumer.is_done and not waiting(broker) else 0
    expected = {
        f"U{n}": list(range(1, min(failures(f"U{n}"), TIMES_MAX) + 1)) for n in range(COUNT)
    }
    assert {key: tries(broker)[key] for key in expected} == expected
    dead = Counter(records.property_value(e.properties, b"UNIQ_KEY") for e in broker.dead())
    assert dead == {f"U{n}".encode(): 1 for n in range(COUNT) if failures(f"U{n}") > TIMES_MAX}
    assert crash_count > 0


def waiting(broker: Broker) -> bool:
    """Whether copies wait for their time."""
    return len(broker.copies()) > len(broker.entries("%RETRY%g"))


# ------------------------------------------------------------------------------------- real kills


class RealConsumer:
    """A consumer of a real broker, over its own connection."""

    def __init__(self, link: RemotingLink) -> None:
        self._link = link

    async def ask(self, code: int, fields: dict[str, object], body: bytes = b"") -> bytes:
        ext = {name: str(value) for name, value in fields.items()}
        answer = await self._link.request(code, ext, body, timeout_seconds=120)
        assert answer.code in (0, 19), answer.remark
        return bytes(answer.body) if answer.code == 0 else b""

    async def prepare(self, count: int) -> None:
        group = orjson.dumps({"groupName": "g", "retryMaxTimes": 16})
        await self.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, group)
        for number in range(count):
            fields = send_fields("orders", 0, UNIQ_KEY=f"U{number}")
            await self.ask(Request.SEND_MESSAGE_V2, fields, b"body")

    async def read(self, topic: str, offset: int) -> list[records.Entry]:
        body = await self.ask(Request.PULL_MESSAGE, pull_fields(topic, 0, offset, "g", 4))
        found, at = [], 0
        while at < len(body):
            entry = records.decode(body, at)
            found.append(entry)
            at += entry.size
        return found

    async def read_all(self, topic: str, count: int) -> list[records.Entry]:
        """Everything in a topic, once there are so many."""
        found: list[records.Entry] = []
        while len(found) < count:
            found += await self.read(topic, len(found))
            await asyncio.sleep(0.05)
        return found + await self.read(topic, len(found))

    async def send_back(self, entry: records.Entry, level: int = 1) -> None:
        fields = {"group": "g", "offset": entry.position, "delayLevel": level}
        await self.ask(
            Request.CONSUMER_SEND_MSG_BACK,
            {**fields, "originTopic": "orders", "maxReconsumeTimes": 16},
        )

    async def commit(self, offset: int) -> None:
        fields = {**offset_fields("g", "orders", 0), "commitOffset": offset}
        await self.ask(Request.UPDATE_CONSUMER_OFFSET, fields)


async def consume_until(
    sluice: SluiceProcess, count: int, kill_after: int | None, level: int = 1
) -> None:
    """Fail with all messages from the first one on; the broker is killed after so many."""
    link = await RemotingLink.open(sluice.broker_address)
    consumer = RealConsumer(link)
    entries = await consumer.read_all("orders", count)
    for done, entry in enumerate(entries[:count]):
        if done == kill_after:
            sluice.kill()
            break
        await consumer.send_back(entry, level)
    await link.close()


@pytest.mark.slow
def test_a_broker_that_is_killed_between_retry_and_offset(tmp_path: Path) -> None:
    count = 20
    sluice = SluiceProcess(tmp_path)
    with sluice:

        async def first() -> None:
            link = await RemotingLink.open(sluice.broker_address)
            await RealConsumer(link).prepare(count)
            await link.close()
            await consume_until(sluice, count, kill_after=7)

        run_once(first())
        sluice.start()
        # The offset was never committed: everything is consumed, and sent back, again.
        run_once(consume_until(sluice, count, kill_after=15))
        sluice.start()

        async def last() -> None:
            await consume_until(sluice, count, kill_after=None)
            link = await RemotingLink.open(sluice.broker_address)
            consumer = RealConsumer(link)
            await consumer.commit(count)
            copies = await consumer.read_all("%RETRY%g", count)
            keys = [records.property_value(copy.properties, b"UNIQ_KEY") for copy in copies]
            assert Counter(keys) == {f"U{n}".encode(): 1 for n in range(count)}
            assert {copy.reconsume_times for copy in copies} == {1}
            await link.close()

        run_once(last())
