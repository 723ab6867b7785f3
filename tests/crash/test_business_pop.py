"""Crashes while messages are popped, acknowledged and come again: none is lost, none that was
acknowledged comes again, and none comes again twice.

On a simulated disk the power goes before every operation, and of what was not synced nothing,
everything, or any part is left. A real process is killed, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from sluice.broker import pop_log
from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, MemoryFiles
from tests.interop.sluice_process import SluiceProcess
from tests.unit.broker.broker_kit import broker_config, send_fields
from tests.unit.broker.pop_kit import (
    DEAD_TOPIC,
    GROUP,
    INVISIBLE_MS,
    RETRY_TOPIC,
    TOPIC,
    PopBench,
    Taken,
)
from tests.unit.loops import run_once

RETRY_MAX = 3
_CHANGES = ("pwritev", "sync", "replace")


class Known(NamedTuple):
    """What holds at a moment, whatever happens next."""

    now_ms: int
    stored: frozenset[bytes]
    asked: frozenset[bytes]  # an acknowledgement is under way, or safe
    acknowledged: frozenset[bytes]
    over: Counter[bytes]  # how often the time of a message was over, at most


class WatchedFiles(MemoryFiles):
    """A disk that keeps pictures of itself: what would be left if the power went now."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[tuple[Known, MemoryFiles]] = []
        self.known: Known | None = None
        self.random = Random(7)

    def _call(self, operation: str, path: str) -> None:
        if self.known is not None and operation in _CHANGES:
            self.pictures += [(self.known, self.crash(keep)) for keep in self._policies()]
        super()._call(operation, path)

    def _policies(self) -> Iterator[KeepPolicy]:
        yield self.random.choice([KeepNothing(), KeepAll()])
        unsynced = self.unsynced_bytes()
        for count in self.random.sample(range(unsynced), min(unsynced, 2)):
            yield KeepPrefix(count)


def settings() -> dict[str, Any]:
    return {"store": replace(broker_config().store, flush="sync", segment_bytes=64 << 10)}


class Reader:
    """A consumer that does what comes to its mind, and what may be expected of the broker."""

    def __init__(self, random: Random, *, order: bool) -> None:
        self._random = random
        self._order = order
        self.files = WatchedFiles()
        self.bench = PopBench(files=self.files, **settings())
        group = self.bench.core.groups.require(GROUP)
        self.bench.core.groups.put([replace(group, retry_max=RETRY_MAX)])
        self.bench.settle()
        self._number = 0
        self._held: dict[bytes, tuple[Taken, int]] = {}  # with when it comes again
        self._stored: set[bytes] = set()
        self._asked: set[bytes] = set()
        self._acknowledged: set[bytes] = set()
        self._over: Counter[bytes] = Counter()

    def look(self) -> None:
        """From now on pictures are taken, of what is known now."""
        self.files.known = Known(
            self.bench.now_ms,
            frozenset(self._stored),
            frozenset(self._asked),
            frozenset(self._acknowledged),
            Counter(self._over),
        )

    def step(self) -> None:
        self.look()
        self._random.choice(
            [self._put, self._pop, self._pop, self._ack, self._change, self._wait]
        )()
        self.look()

    def _put(self) -> None:
        queue_id = self._random.randrange(2)
        bodies = [b"%d" % (self._number + index) for index in range(3)]
        self._number += len(bodies)
        self.bench.put(*bodies, queue_id=queue_id)
        self._stored.update(bodies)

    def _pop(self) -> None:
        span_ms = self._random.choice([5_000, 20_000, INVISIBLE_MS])
        until_ms = self.bench.now_ms + span_ms
        count = self._random.randrange(1, 6)
        for each in self.bench.pop(count_max=count, invisible_ms=span_ms, order=self._order):
            assert each.body not in self._acknowledged
            self._held[each.body] = (each, until_ms)

    def _ack(self) -> None:
        bodies = self._random.sample(sorted(self._held), min(2, len(self._held)))
        self._asked.update(bodies)
        self.look()
        if bodies:
            self.bench.ack(*[self._held.pop(body)[0] for body in bodies])
        self._acknowledged.update(bodies)

    def _change(self) -> None:
        for body in self._random.sample(sorted(self._held), min(1, len(self._held))):
            span_ms = self._random.choice([0, 1_000, 30_000])
            self._over[body] += not span_ms
            self.look()
            self.bench.change(self._held[body][0], span_ms)
            self._held[body] = (self._held[body][0], self.bench.now_ms + span_ms)
            if not span_ms:
                del self._held[body]

    def _wait(self) -> None:
        end_ms = self.bench.now_ms + self._random.choice([1_000, 10_000, 40_000])
        for body, (_, until_ms) in list(self._held.items()):
            if until_ms <= end_ms:
                self._over[body] += 1
                del self._held[body]
        self.look()
        self.bench.pass_ms(end_ms - self.bench.now_ms, step_ms=2_500)


def check(files: MemoryFiles, known: Known, *, order: bool) -> None:
    """Everything that is left comes once, for a consumer that acknowledges all."""
    bench = PopBench(files=files, now_ms=known.now_ms, **settings())
    seen: Counter[bytes] = Counter()
    for turn in range(4):
        for _ in range(40):
            messages = bench.pop(order=order)
            if not messages:
                break
            for each in messages:
                seen[each.body] += 1
                assert each.entry.reconsume_times <= known.over[each.body] + 1
            bench.ack(*messages)
        if turn == 1:
            bench.crash(KeepAll())
        bench.pass_ms(INVISIBLE_MS + 1)
    dead = Counter(bytes(entry.body) for entry in bench.stored(DEAD_TOPIC))
    came = seen + dead
    assert not known.acknowledged & came.keys(), "acknowledged, and came again"
    assert not known.stored - known.asked - came.keys(), "lost"
    assert all(count == 1 for count in came.values()), "came twice"
    assert bench.core.pops.state.in_flight == 0
    copies = Counter(bytes(entry.body) for entry in bench.stored(RETRY_TOPIC))
    for body, count in copies.items():
        assert count <= known.over[body] + 1, "a restart made a copy more"


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_power_cuts_anywhere(seed: int, order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr(pop_log, "NOTE_INTERVAL_MS", random.choice([0, 5_000]))
    monkeypatch.setattr(pop_log, "NOTE_BYTES", random.choice([500, 16 << 20]))
    monkeypatch.setattr(pop_log, "BEHIND_MAX", random.choice([2, 10_000]))
    reader = Reader(random, order=order)
    for _ in range(40):
        reader.step()
    pictures = reader.files.pictures
    assert len(pictures) > 100
    for known, picture in random.sample(pictures, 60):
        check(picture, known, order=order)


# -------------------------------------------------------------------------------------- real kills


# -------------------------------------------------------------------------------------- real kills


class RealConsumer:
    """A consumer of a real broker, over a connection of its own."""

    def __init__(self, link: RemotingLink) -> None:
        self._link = link

    async def ask(self, code: int, fields: dict[str, object], body: bytes = b"") -> RemotingCommand:
        ext = {name: str(value) for name, value in fields.items()}
        return await self._link.request(code, ext, body, timeout_seconds=120)

    async def send(self, body: bytes, queue_id: int) -> None:
        answer = await self.ask(Request.SEND_MESSAGE_V2, send_fields(TOPIC, queue_id), body)
        assert answer.code == 0, answer.remark

    async def pop(self, invisible_ms: int, poll_ms: int) -> list[tuple[bytes, dict[str, object]]]:
        """Bodies, each with what acknowledges it."""
        fields: dict[str, object] = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": -1}
        fields |= {"maxMsgNums": 4, "invisibleTime": invisible_ms, "pollTime": poll_ms}
        answer = await self.ask(Request.POP_MESSAGE, {**fields, "bornTime": 0, "initMode": 0})
        assert answer.code in (0, 210), answer.remark
        if answer.code:
            return []
        ext, entries, at = answer.ext, [], 0
        while at < len(answer.body):
            entries.append(records.decode(answer.body, at))
            at += entries[-1].size
        numbers = iter(entries)
        found = []
        starts = [row.split(" ") for row in ext["startOffsetInfo"].split(";")]
        counts = [len(row.split(",")) for row in ext["msgOffsetInfo"].split(";")]
        for (mark, queue_id, start), count in zip(starts, counts, strict=True):
            for entry in (next(numbers) for _ in range(count)):
                place = (mark, "broker-a", queue_id, str(entry.queue_offset))
                extra = (start, ext["popTime"], ext["invisibleTime"], ext["reviveQid"], *place)
                ack: dict[str, object] = {"consumerGroup": GROUP, "queueId": queue_id}
                ack |= {"topic": RETRY_TOPIC if mark == "1" else TOPIC}
                ack |= {"offset": entry.queue_offset, "extraInfo": " ".join(extra)}
                found.append((bytes(entry.body), ack))
        return found


@pytest.mark.slow
def test_a_broker_that_is_killed_while_messages_are_popped(tmp_path: Path) -> None:
    random = Random(3)
    sent = [b"%d" % number for number in range(60)]
    acknowledged: set[bytes] = set()
    sluice = SluiceProcess(tmp_path)

    async def consume(kill_after: int | None) -> None:
        link = await RemotingLink.open(sluice.broker_address)
        consumer = RealConsumer(link)
        if not acknowledged:
            for number, body in enumerate(sent):
                await consumer.send(body, number % 3)
        count = empty = 0
        while empty < 2:
            # A last look is patient: what the dead one had comes when its time is over.
            found = await consumer.pop(2_000, 3_000 if kill_after is None else 500)
            empty = 0 if found else empty + 1
            for body, ack in found:
                assert body not in acknowledged, "acknowledged, and came again"
                count += 1
                if count == kill_after:
                    sluice.kill()
                    await link.close()
                    return
                if kill_after is not None and random.random() < 0.3:
                    continue  # forgotten: it comes again
                answer = await consumer.ask(Request.ACK_MESSAGE, ack)
                if answer.code == 0:
                    acknowledged.add(body)
                else:
                    assert answer.code == 208, answer.remark  # too late: it comes again
        await link.close()

    with sluice:
        for kill_after in (9, 20, 13):
            run_once(consume(kill_after))
            sluice.start()
        run_once(consume(None))
    assert acknowledged == set(sent)
