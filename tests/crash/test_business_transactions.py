"""Crashes around transactional messages: half messages stay hidden, a commit counts exactly once.

A workload runs on a simulated disk, and before each operation that changes the disk the power goes:
every such disk is opened again and compared with what producers were told. Then real processes kill
themselves at named points, and a real broker is killed under load.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sluice.broker import transactions as service
from sluice.broker.half_messages import COMMIT, ROLLBACK
from sluice.errors import LinkError
from sluice.link import RemotingLink
from sluice.model import Placed
from sluice.protocol import records
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.files import RealFiles
from sluice.storage.memory_files import KeepAll, KeepNothing, KeepPolicy, KeepPrefix, KeepRandom
from tests.crash.crash_points import watch
from tests.crash.transactor import POINTS, body_of
from tests.interop.sluice_process import SluiceProcess, make_topic
from tests.unit.broker.broker_kit import pull_fields, send_fields
from tests.unit.broker.transaction_kit import TICK_MS, TOPIC, Broker

TRANSACTOR = Path(__file__).with_name("transactor.py")
HOLD_MS = 1100


# -------------------------------------------------------------------------------------- the promise


class Told:
    """What producers have asked for, and what they were told is done."""

    def __init__(self) -> None:
        self.halves: dict[bytes, Placed] = {}
        self.tried: dict[bytes, set[int]] = {}
        self.ended: dict[bytes, int] = {}
        self.may_be_parked: set[bytes] = set()

    def copy(self) -> Told:
        copy = Told()
        copy.halves = dict(self.halves)
        copy.tried = {body: set(verdicts) for body, verdicts in self.tried.items()}
        copy.ended = dict(self.ended)
        copy.may_be_parked = set(self.may_be_parked)
        return copy


def open_bodies(broker: Broker) -> list[bytes]:
    transactions = broker.core.transactions
    found = []
    for offset in transactions.table.open_from(0):
        half = transactions.open_half(offset)
        assert half is not None
        found.append(bytes(half.entry.body))
    return found


def check(broker: Broker, told: Told) -> None:
    """What a start has found is what producers were told; then everybody says it once more."""
    committed, parked = Counter(broker.bodies()), Counter(_body(e) for e in broker.parked())
    still_open = Counter(open_bodies(broker))
    for found in (committed, parked, still_open):
        assert not found or max(found.values()) == 1, "nothing is there twice"
    assert not committed.keys() & still_open.keys(), "what is committed is done"
    assert not committed.keys() & parked.keys()
    assert not parked.keys() & still_open.keys()
    assert parked.keys() <= told.may_be_parked
    for body in committed:
        assert COMMIT in told.tried.get(body, ()), "a half message became visible"
    for body, verdict in told.ended.items():
        assert (committed[body] == 1) == (verdict == COMMIT)
        assert body not in still_open
    for body in told.halves:
        if body not in told.tried and body not in parked:
            assert still_open[body] == 1, f"{body!r} is forgotten"
    # Everybody repeats what was said before, or commits what nobody has ended.
    for body, placed in told.halves.items():
        verdicts = told.tried.get(body, {COMMIT})
        answer = broker.end(placed, max(verdicts))
        assert answer == "" or answer.startswith(("604", "1 Find")), answer
    broker.tick()
    expected = {
        body
        for body in told.halves
        if ROLLBACK not in told.tried.get(body, ()) and body not in parked
    }
    again = Counter(broker.bodies())
    assert again.keys() - expected <= committed.keys()
    assert expected <= again.keys()
    assert not again or max(again.values()) == 1
    known = {*told.halves}
    assert not [body for body in open_bodies(broker) if body in known]


def _body(entry: records.Entry) -> bytes:
    return bytes(entry.body)


# ---------------------------------------------------------------------------------- simulated disks


class Workload:
    """Producers at work, and a power cut before each operation on the disk."""

    def __init__(self, policies: Callable[[Broker, Random], Iterator[KeepPolicy]], **changes: Any):
        self.told = Told()
        self.states = 0
        self._policies = policies
        self._changes = changes
        self._random = Random(7)
        self.broker = Broker(flush="sync", segment_bytes=8192, **changes)
        watch(self.broker.disk, self.visit)

    def visit(self) -> None:
        told = self.told.copy()
        for policy in self._policies(self.broker, self._random):
            self.states += 1
            disk = self.broker.disk.crash(policy)
            later = Broker(
                files=disk,
                now_ms=self.broker.now_ms,
                flush="sync",
                segment_bytes=8192,
                **self._changes,
            )
            check(later, told)
            if self.states % 5 == 0:
                later.crash(KeepNothing())
                assert not later.bodies() or max(Counter(later.bodies()).values()) == 1

    def begin(self, body: bytes) -> Placed:
        placed = self.broker.begin(body)
        self.told.halves[body] = placed
        return placed

    def end(self, body: bytes, verdict: int) -> None:
        self.told.tried.setdefault(body, set()).add(verdict)
        assert self.broker.end(self.told.halves[body], verdict) == ""
        self.told.ended[body] = verdict


def cuts(broker: Broker, random: Random) -> Iterator[KeepPolicy]:
    yield KeepNothing()
    yield KeepAll()
    room = broker.disk.unsynced_bytes()
    if room:
        yield KeepPrefix(random.randrange(room + 1))
        yield KeepRandom(Random(random.getrandbits(64)))


def test_power_cuts_while_transactions_begin_and_end() -> None:
    work = Workload(cuts)
    for number in range(4):
        work.begin(b"%d" % number)
    work.end(b"0", COMMIT)
    work.end(b"1", ROLLBACK)
    work.broker.tick()
    work.end(b"2", COMMIT)
    work.begin(b"4")
    work.broker.tick(HOLD_MS)
    work.end(b"4", ROLLBACK)
    work.broker.tick(HOLD_MS)
    assert work.states > 60


def test_power_cuts_while_half_messages_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SPREAD_SLACK", 2)
    work = Workload(cuts)
    work.begin(b"left behind")
    for number in range(8):
        work.begin(b"%d" % number)
        work.end(b"%d" % number, COMMIT if number % 2 else ROLLBACK)
    for _ in range(3):
        work.broker.tick()
    assert len(work.broker.halves()) > 9
    work.begin(b"another")
    work.end(b"left behind", COMMIT)
    work.broker.tick(HOLD_MS)
    assert work.states > 60


def test_power_cuts_while_producers_are_asked_and_nobody_knows() -> None:
    work = Workload(cuts, transaction_check_count_max=2, transaction_timeout_ms=200)
    work.broker.join()
    work.begin(b"unknown")
    work.begin(b"known")
    work.broker.tick(200 + TICK_MS)
    work.end(b"known", COMMIT)
    work.broker.pass_ms(30_000)
    work.told.may_be_parked.add(b"unknown")
    work.broker.pass_ms(30_000)
    assert [_body(entry) for entry in work.broker.parked()] == [b"unknown"]
    work.broker.tick(HOLD_MS)
    assert work.states > 30


def test_power_cuts_while_the_log_is_deleted_below_half_messages() -> None:
    work = Workload(lambda broker, random: iter((KeepNothing(), KeepAll())))
    work.begin(b"old")
    for number in range(12):
        work.begin(b"%d" % number + b"x" * 900)
        if number % 3:
            work.end(b"%d" % number + b"x" * 900, ROLLBACK)
    work.broker.tick()
    store = work.broker.core.store
    position = store.log.written - store.log.written % 8192
    assert work.broker.core.transactions.rescue(position)
    work.broker.settle()
    work.broker.tick()
    assert work.broker.core.transactions.rescue(position)
    store.housekeeping.checkpoint()
    store.housekeeping.delete_before(position)
    work.broker.tick()
    assert store.log.start == position
    work.end(b"old", COMMIT)
    work.broker.tick(HOLD_MS)
    assert work.states > 60


# ------------------------------------------------------------------------------------ named points


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_is_killed_at(point: str, tmp_path: Path) -> None:
    told = Told()
    for run in range(2):  # the second one begins with what the first has left
        done = subprocess.run(
            [sys.executable, str(TRANSACTOR), str(tmp_path / "store"), point, str(run)],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(sys.path)},
            timeout=300,
            check=False,
        )
        assert done.returncode == -9, done.stdout
        for line in done.stdout.decode().splitlines():
            word, number, *places = line.split()
            body = body_of(run, int(number))
            if word == "half":
                offset, position = map(int, places)
                told.halves[body] = Placed(position, 0, offset, 0)
            elif word in ("commit", "rollback"):
                told.tried[body] = {COMMIT if word == "commit" else ROLLBACK}
            else:
                (told.ended[body],) = told.tried[body]
    assert len(told.halves) > 10
    broker = Broker(files=RealFiles(), directory=str(tmp_path / "store"), flush="sync")
    check(broker, told)
    broker.close()


# ------------------------------------------------------------------------------------ a real broker


ANSWER_S = 120.0


async def load(address: str, told: Told, first: int, kill: Callable[[], None]) -> None:
    """Transactions over the wire, until the broker is killed under them."""
    link = await RemotingLink.open(address)
    random = Random(first)
    count = random.randrange(30, 120)
    try:
        for number in range(first, first + 1000):
            body = b"%d" % number
            properties = {"TRAN_MSG": "true", "PGROUP": "shop", "UNIQ_KEY": f"U{number}"}
            fields = {**send_fields(TOPIC, number % 4, **properties), "f": 4}
            if number == first + count:
                kill()
            sent = await link.request(
                *(Request.SEND_MESSAGE_V2, {n: str(v) for n, v in fields.items()}, body),
                timeout_seconds=ANSWER_S,
            )
            assert sent.code == 0, sent.remark
            position = int(sent.ext["msgId"][-16:], 16)
            told.halves[body] = Placed(position, 0, int(sent.ext["queueOffset"]), 0)
            verdict = random.choice((COMMIT, ROLLBACK, 0))
            if not verdict:
                continue
            told.tried[body] = {verdict}
            ending = _ending(told, body, verdict)
            ended = await link.request(Request.END_TRANSACTION, ending, timeout_seconds=ANSWER_S)
            assert ended.code == 0, ended.remark
            told.ended[body] = verdict
    except LinkError:
        return
    finally:
        await link.close()


def _ending(told: Told, body: bytes, verdict: int) -> dict[str, str]:
    placed = told.halves[body]
    return {
        "producerGroup": "shop",
        "tranStateTableOffset": str(placed.queue_offset),
        "commitLogOffset": str(placed.position),
        "commitOrRollback": str(verdict),
        "msgId": f"U{body.decode()}",
    }


async def visible(address: str) -> Counter[bytes]:
    """All messages that a consumer gets."""
    link = await RemotingLink.open(address)
    found: Counter[bytes] = Counter()
    for queue_id in range(4):
        offset = 0
        while True:
            fields = pull_fields(TOPIC, queue_id, offset, "readers", 4)
            answer = await link.request(
                *(Request.PULL_MESSAGE, {name: str(value) for name, value in fields.items()}),
                timeout_seconds=ANSWER_S,
            )
            if answer.code != 0:
                break
            at = 0
            while at < len(answer.body):
                entry = records.decode(answer.body, at)
                found[bytes(entry.body)] += 1
                at += entry.size
            offset = int(answer.ext["nextBeginOffset"])
    await link.close()
    return found


@pytest.mark.slow
def test_a_broker_that_is_killed_under_load(tmp_path: Path) -> None:
    told = Told()
    broker = SluiceProcess(tmp_path, "--flush", "sync")
    broker.start()
    make_topic(broker.broker_address, TOPIC, 4)
    for run in range(3):
        asyncio.run(load(broker.broker_address, told, run * 1000, broker.kill))
        broker.start()
        found = asyncio.run(visible(broker.broker_address))
        assert not found or max(found.values()) == 1
        for body, verdict in told.ended.items():
            assert found[body] == (verdict == COMMIT), body
        assert all(COMMIT in told.tried.get(body, ()) for body in found)
    broker.stop()
    store = str(broker.store_directory)
    later = Broker(files=RealFiles(), directory=store, flush="sync", segment_bytes=1 << 30)
    check(later, told)
    later.close()
    assert len(told.halves) > 80
