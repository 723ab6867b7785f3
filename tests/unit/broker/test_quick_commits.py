"""Commits of the usual form: the same bytes, and the same books, as the plain way gives."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.broker.half_messages import COMMIT, ROLLBACK
from sluice.broker.quick_commits import QuickCommits
from sluice.broker.topics import TopicSettings
from sluice.model import Placed
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand, decode, encode
from sluice.protocol.remoting_codes import RequestCode
from sluice.protocol.remoting_fast import QUICK_BYTES_MIN, quick_commit
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.transaction_kit import GROUP, TOPIC, Broker


def frame(
    placed: Placed,
    *,
    verdict: int = COMMIT,
    flag: int = 2,
    serialization: int = BINARY,
    **changes: str,
) -> bytes:
    """The end of a transaction as Java's producer says it, without the length in front."""
    fields = {
        "topic": TOPIC,
        "producerGroup": GROUP,
        "tranStateTableOffset": str(placed.queue_offset),
        "commitLogOffset": str(placed.position),
        "commitOrRollback": str(verdict),
        "fromTransactionCheck": "false",
        "msgId": "U1",
        "transactionId": "U1",
        **changes,
    }
    fields = {name: value for name, value in fields.items() if value}
    command = RemotingCommand(
        RequestCode.END_TRANSACTION, 7, flag, fields, b"", None, "JAVA", 513, serialization
    )
    return encode(command)[4:]


def quickly(broker: Broker, *frames: bytes) -> list[bool]:
    """Which of the frames are served; those that are not have changed nothing."""
    commits = QuickCommits(broker.core)
    served = []
    for each in frames:
        staged, ended = len(broker.core.store.staged), dict(broker.core.transactions._ended)
        served.append(commits.serve(each))
        if not served[-1]:
            assert len(broker.core.store.staged) == staged
            assert broker.core.transactions._ended == ended
    commits.end_group()
    broker.settle()
    return served


def log_of(broker: Broker) -> bytes:
    log = broker.core.store.log
    return bytes(log.view(0, log.written))


def begun(**properties: str) -> tuple[Broker, Placed]:
    """A queue that has had a message, and a half message that is to go there."""
    broker = Broker()
    assert broker.commit(broker.begin(b"before", queue="1")) == ""
    return broker, broker.begin(b"body", queue="1", **properties)


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"TAGS": "TagA", "KEYS": "a b"},
        {"own": "word", "UNIQ_KEY": "FD00", "WAIT": "true"},
        {"PGROUP": "", "UNIQ_KEY": "", "own": "x", "KEYS": "k"},
    ],
)
def test_the_same_as_the_plain_way(properties: dict[str, str]) -> None:
    if "PGROUP" in properties:
        properties = {**properties, "PGROUP": GROUP}  # it stands last then
    quick, placed = begun(**properties)
    plain, _ = begun(**properties)
    assert quickly(quick, frame(placed)) == [True]
    assert plain.commit(placed) == ""
    for broker in (quick, plain):
        assert broker.bodies() == [b"before", b"body"]
        assert broker.open_count == 0
        assert broker.core.transactions.committed_count == 2
        broker.tick(100)
    assert quick.operations() == plain.operations() != []
    assert log_of(quick) == log_of(plain)
    if "KEYS" in properties:
        assert keyed(quick, properties["KEYS"][:1]) == keyed(plain, properties["KEYS"][:1]) == 1


def keyed(broker: Broker, key: str) -> int:
    """How many messages of the topic are found by a key."""
    answers: list[Any] = []
    broker.core.store.query_key(TOPIC, key, lambda *answer: answers.append(answer))
    ((found, *_),) = answers
    return len(found)


def test_many_that_come_together_and_a_word_that_comes_twice() -> None:
    broker, first = begun()
    second = broker.begin(b"other", queue="1", TAGS="t")
    assert quickly(broker, frame(first), frame(second), frame(first)) == [True, True, False]
    assert broker.bodies() == [b"before", b"body", b"other"]
    assert broker.commit(first) == ""  # said again it changes nothing
    assert "the first word counts" in broker.roll_back(second)
    broker.crash()
    assert broker.open_count == 0
    assert broker.bodies() == [b"before", b"body", b"other"]


def test_whoever_waits_for_messages_is_told() -> None:
    broker, placed = begun(TAGS="t")
    arrived: list[tuple[str, int]] = []
    broker.core.polls.watchers[TOPIC] = arrived.append
    quickly(broker, frame(placed))
    assert arrived == [(TOPIC, 1)]


@pytest.mark.parametrize(
    "changed",
    [
        {"verdict": ROLLBACK},
        {"verdict": 0},
        {"flag": 0},
        {"serialization": JSON},
        {"producerGroup": "others"},
        {"producerGroup": ""},
        {"msgId": ""},
        {"tranStateTableOffset": "5"},
        {"tranStateTableOffset": "-1"},
        {"commitLogOffset": "3"},
        {"commitLogOffset": "1" * 19},
        {"commitLogOffset": "x"},
        {f"more{number}": "1" for number in range(20)},
    ],
)
def test_a_word_that_is_unusual_is_left_to_the_plain_way(changed: dict[str, object]) -> None:
    broker, placed = begun()
    assert quickly(broker, frame(placed, **changed)) == [False]  # type: ignore[arg-type]
    assert quickly(broker, frame(placed)[:-1], frame(placed)[:30], b"") == [False] * 3
    assert quickly(broker, frame(placed)) == [True]


@pytest.mark.parametrize(
    "properties", [{"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}, {"SLUICE_own": "1"}]
)
def test_messages_that_are_unusual(properties: dict[str, str]) -> None:
    broker, placed = begun(**properties)
    assert quickly(broker, frame(placed)) == [False]
    assert broker.commit(placed) == ""


def asked(broker: Broker) -> None:
    broker.join()
    broker.tick(7_000)
    assert broker.asked


def widened(broker: Broker) -> None:
    settings = broker.core.topics.get(TOPIC)
    assert settings is not None
    broker.core.topics.put([replace(settings, attributes={"dedup.window.ms": "1000"})])
    broker.settle()


def narrowed(broker: Broker) -> None:
    broker.core.topics.put([TopicSettings(TOPIC, 1, 1)])
    broker.settle()


def gone(broker: Broker) -> None:
    broker.core.topics.delete(TOPIC)
    broker.settle()


@pytest.mark.parametrize("change", [asked, widened, narrowed, gone])
def test_circumstances_that_are_unusual(change: Callable[[Broker], None]) -> None:
    broker, placed = begun()
    change(broker)
    assert quickly(broker, frame(placed)) == [False]


def test_a_queue_that_has_had_nothing_yet() -> None:
    broker = Broker()
    placed = broker.begin(b"first", queue="2")
    assert quickly(broker, frame(placed)) == [False]
    assert broker.commit(placed) == ""


def test_a_copy_of_a_half_message() -> None:
    broker, placed = begun()
    outcome: list[object] = []
    broker.core.transactions.resume(placed.position, outcome.append)
    assert quickly(broker, frame(placed)) == [False]  # it is being moved
    broker.settle()
    assert outcome == [None]
    assert quickly(broker, frame(placed)) == [False]
    assert broker.commit(placed) == ""
    assert broker.bodies() == [b"before", b"body"]


def test_a_commit_that_cannot_be_written_leaves_the_half_message_open() -> None:
    files = MemoryFiles()
    broker = Broker(files=files)
    assert broker.commit(broker.begin(b"before", queue="1")) == ""
    placed = broker.begin(b"body", queue="1")
    files.fail("pwritev", error=errno.ENOSPC, within="/commitlog/")
    assert quickly(broker, frame(placed)) == [True]
    assert broker.open_count == 1
    assert broker.core.transactions.committed_count == 1
    assert broker.bodies() == [b"before"]
    assert quickly(broker, frame(placed)) == [True]
    assert broker.bodies() == [b"before", b"body"]
    broker.crash()
    assert broker.bodies() == [b"before", b"body"]
    assert broker.open_count == 0


@given(st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=3))
def test_bytes_that_were_changed_mean_the_same_to_both(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(frame(Placed(12345, 200, 67, 0)))
    for at, put in changes:
        data[at : at + len(put)] = put
    raw = bytes(data)
    named = quick_commit(raw) if len(raw) >= QUICK_BYTES_MIN else None
    if named is not None:
        command = decode(raw)
        ext = command.ext
        assert (command.code, command.is_oneway) == (RequestCode.END_TRANSACTION, True)
        assert named[0].decode() == ext["producerGroup"]
        assert named[1:] == (int(ext["tranStateTableOffset"]), int(ext["commitLogOffset"]))
        assert (ext["commitOrRollback"], "msgId" in ext) == (str(COMMIT), True)
