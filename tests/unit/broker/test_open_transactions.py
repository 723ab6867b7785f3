"""Half messages that stay open: questions, copies, restarts, and what administrators see."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from sluice.broker import transactions as service
from sluice.broker.topics import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC
from sluice.errors import SluiceError
from sluice.model import Placed
from sluice.protocol import records
from sluice.storage.memory_files import KeepNothing
from tests.unit.broker.transaction_kit import TICK_MS, TOPIC, Broker

TIMEOUT_MS = 6_000
INTERVAL_MS = 30_000


def properties_of(entry: records.Entry) -> dict[str, str]:
    return records.parse_properties(entry.properties)


# ---------------------------------------------------------------------------------------- questions


def questions(broker: Broker) -> list[tuple[str, int]]:
    """Who was asked since the last look, and how often that makes."""
    found = [(client_id, checks) for client_id, _, checks in broker.asked]
    broker.asked.clear()
    return found


def test_fifteen_questions_and_then_it_is_parked() -> None:
    broker = Broker()
    broker.join()
    placed = broker.begin(b"body", UNIQ_KEY="U1", queue="3")
    broker.tick(TIMEOUT_MS - TICK_MS)
    assert questions(broker) == []
    broker.tick(2 * TICK_MS)
    assert questions(broker) == [("one", 1)]
    for number in range(2, 16):
        broker.pass_ms(INTERVAL_MS - 2 * TICK_MS)
        assert questions(broker) == []
        broker.tick(2 * TICK_MS)
        assert questions(broker) == [("one", number)]
    assert broker.parked() == []
    broker.pass_ms(INTERVAL_MS)
    broker.tick()
    (parked,) = broker.parked()
    assert questions(broker) == []
    assert (parked.topic, parked.queue_id, bytes(parked.body)) == (CHECK_MAX_TOPIC, 0, b"body")
    properties = properties_of(parked)
    assert (properties["REAL_TOPIC"], properties["REAL_QID"]) == (TOPIC, "3")
    assert properties["TRANSACTION_CHECK_TIMES"] == "15"
    assert broker.commit(placed).startswith("604 the transaction was parked before")
    assert broker.entries() == []
    assert broker.core.transactions.asked_count == 15
    assert broker.core.transactions.parked_count == 1
    broker.reopen()
    assert broker.open_count == 0
    assert len(broker.parked()) == 1


def test_the_questions_are_counted_across_restarts() -> None:
    broker = Broker()
    placed = broker.begin()
    broker.tick()
    for number in range(1, 16):
        broker.join()
        broker.pass_ms(INTERVAL_MS)
        broker.tick()
        assert questions(broker) == [("one", number)]
        if number % 3:
            broker.reopen()
        else:
            broker.crash()
        assert broker.open_count == 1
    broker.pass_ms(INTERVAL_MS)
    assert len(broker.parked()) == 1
    assert broker.commit(placed).startswith("604")


def test_a_producer_is_shown_its_message_and_how_often_it_was_asked() -> None:
    broker = Broker()
    broker.join()
    placed = broker.begin(b"body", UNIQ_KEY="U1")
    broker.tick(TIMEOUT_MS + TICK_MS)
    ((client_id, half, checks),) = broker.asked
    assert (client_id, checks, half.unique_key, half.topic) == ("one", 1, "U1", TOPIC)
    assert (half.first_position, half.first_offset) == (placed.position, placed.queue_offset)
    assert broker.end(placed, from_check=True) == ""
    (entry,) = broker.entries()
    assert properties_of(entry)["TRANSACTION_CHECK_TIMES"] == "1"
    broker.pass_ms(INTERVAL_MS * 2)
    assert len(broker.asked) == 1


def test_the_producers_of_a_group_are_asked_in_turn() -> None:
    broker = Broker()
    for name in ("one", "two", "three"):
        broker.join(name)
    broker.join("stranger", "others")
    for _ in range(6):
        broker.begin()
    broker.tick(TIMEOUT_MS + TICK_MS)
    names = [name for name, _ in questions(broker)]
    assert sorted(names) == ["one", "one", "three", "three", "two", "two"]
    broker.leave("two")
    broker.leave("three")
    broker.pass_ms(INTERVAL_MS)
    assert questions(broker) == [("one", 2)] * 6


def test_without_a_producer_it_waits_and_loses_no_question() -> None:
    broker = Broker()
    broker.begin()
    for _ in range(30):
        broker.pass_ms(INTERVAL_MS)
    assert broker.parked() == []
    broker.join("late")
    broker.tick()
    assert questions(broker) == [("late", 1)]
    broker.leave("late")
    broker.pass_ms(10 * INTERVAL_MS)
    broker.join("later")
    broker.tick()
    assert questions(broker) == [("later", 2)]


def test_what_is_older_than_the_retention_is_parked_whoever_is_there() -> None:
    broker = Broker()
    broker.begin(b"alone")
    broker.tick(TIMEOUT_MS + TICK_MS)
    hours = broker.config.store.retention_hours
    broker.pass_ms(hours * 3_600_000 - TIMEOUT_MS - 1000)
    assert broker.parked() == []
    broker.pass_ms(2000)
    assert [bytes(entry.body) for entry in broker.parked()] == [b"alone"]
    assert broker.open_count == 0


@pytest.mark.parametrize(
    ("seconds", "first_ms"),
    [("20", 20_000), ("2", TIMEOUT_MS), ("-1", TIMEOUT_MS), ("soon", TIMEOUT_MS), ("9" * 30, 6000)],
)
def test_a_message_may_set_its_first_question(seconds: str, first_ms: int) -> None:
    broker = Broker()
    broker.join()
    broker.begin(CHECK_IMMUNITY_TIME_IN_SECONDS=seconds)
    broker.tick(first_ms - TICK_MS)
    assert questions(broker) == []
    broker.tick(2 * TICK_MS)
    assert questions(broker) == [("one", 1)]
    broker.pass_ms(INTERVAL_MS)
    assert questions(broker) == [("one", 2)]


def test_an_absurd_time_for_the_first_question_ends_with_the_retention() -> None:
    broker = Broker()
    broker.join()
    broker.begin(CHECK_IMMUNITY_TIME_IN_SECONDS="9" * 15)
    broker.tick(TIMEOUT_MS + TICK_MS)
    broker.pass_ms(broker.config.store.retention_hours * 3_600_000)
    broker.tick(2 * TICK_MS)
    assert questions(broker) == []
    assert len(broker.parked()) == 1


def test_questions_of_one_tick_are_bounded() -> None:
    broker = Broker()
    broker.join()
    count = 2 * service.LOOKS_A_TICK + 10
    for _ in range(count):
        broker.begin()
    broker.pass_ms(TIMEOUT_MS * 2)
    broker.asked.clear()
    broker.pass_ms(TIMEOUT_MS)
    assert len(questions(broker)) == service.LOOKS_A_TICK
    broker.tick(2 * TICK_MS)
    assert len(questions(broker)) == count - service.LOOKS_A_TICK


@pytest.mark.parametrize("restart", [False, True])
def test_a_half_message_that_cannot_be_read_is_given_up(restart: bool) -> None:
    broker = Broker()
    placed = broker.begin(b"x" * 100)
    good = broker.begin(b"good")
    broker.tick()
    if restart:
        broker.reopen()
    broker.join()
    segment = next(iter(broker.core.store.log.segments.values()))
    segment.file.pwritev([b"\0\0\0"], placed.position + 100)
    broker.pass_ms(TIMEOUT_MS + 1)
    broker.tick()
    assert [half.position for _, half, _ in broker.asked] == [good.position]
    assert broker.open_count == 1
    assert ("d", b"0,") in broker.operations()


# ----------------------------------------------------------------------------------- copies, places


def front_moved(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Placed:
    """A half message that others have left behind: its first place."""
    monkeypatch.setattr(service, "SPREAD_SLACK", 20)
    placed = broker.begin(b"first", UNIQ_KEY="F")
    for _ in range(30):
        broker.commit(broker.begin(b"other"))
    broker.tick()
    broker.tick()
    return placed


def test_one_that_is_left_behind_is_copied_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    placed = front_moved(broker, monkeypatch)
    assert broker.open_count == 1
    copy = broker.halves()[-1]
    assert copy.prepared_offset == placed.position
    assert bytes(copy.body) == b"first"
    assert broker.core.transactions.table.lowest_open == copy.queue_offset == 31
    assert b"0" in b"".join(body for _, body in broker.operations()).split(b",")
    broker.tick(1000)
    committed = broker.core.offsets.committed("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0)
    assert committed == 31


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("place", ["first", "newest"])
def test_a_copy_is_ended_by_its_first_place_and_by_its_newest(
    place: str, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker()
    first = front_moved(broker, monkeypatch)
    if restart:
        broker.crash()
    copy = broker.halves()[-1]
    newest = Placed(copy.position, copy.size, copy.queue_offset, copy.store_ms)
    used, other = (first, newest) if place == "first" else (newest, first)
    mixed = broker.end(first, offset=newest.queue_offset)
    assert mixed.startswith("1 The commit log offset wrong")
    assert broker.commit(used) == ""
    assert broker.bodies().count(b"first") == 1
    assert broker.commit(other) == ""  # said twice, done once
    broker.tick()
    broker.reopen()
    assert broker.bodies().count(b"first") == 1
    assert broker.open_count == 0
    (entry,) = (entry for entry in broker.entries() if bytes(entry.body) == b"first")
    assert entry.prepared_offset == first.position
    names = {"TRAN_PREPARED_QUEUE_OFFSET", "SLUICE_HALF_SINCE_MS"}
    assert not names & properties_of(entry).keys()


def test_a_copy_keeps_its_age_its_questions_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    broker.join()
    monkeypatch.setattr(service, "SPREAD_SLACK", 20)
    first = broker.begin(b"first")
    broker.tick(TIMEOUT_MS + TICK_MS)
    assert questions(broker) == [("one", 1)]
    for _ in range(30):
        broker.commit(broker.begin(b"other"))
    broker.tick(2 * TICK_MS)
    for _ in range(30):
        broker.commit(broker.begin(b"other"))
    broker.tick(2 * TICK_MS)  # once more
    assert len([e for e in broker.halves() if bytes(e.body) == b"first"]) == 3
    broker.tick(INTERVAL_MS - 10 * TICK_MS)
    assert questions(broker) == []
    broker.tick(10 * TICK_MS)
    ((_, half, checks),) = broker.asked
    assert checks == 2
    assert (half.first_position, half.first_offset) == (first.position, first.queue_offset)
    assert half.since_ms == first.store_ms
    assert broker.commit(first) == ""
    assert broker.bodies().count(b"first") == 1


def test_an_end_that_comes_while_it_is_copied_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker()
    monkeypatch.setattr(service, "SPREAD_SLACK", 2)
    first = broker.begin(b"first")
    for _ in range(10):
        broker.commit(broker.begin(b"other"))
    broker.core.tick()  # the copy is staged, and not written yet
    assert len(broker.halves()) == 11
    assert broker.commit(first) == ""
    assert len(broker.halves()) == 12
    assert broker.bodies().count(b"first") == 1
    broker.tick()
    assert broker.open_count == 0


def test_a_copy_that_cannot_be_stored_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    monkeypatch.setattr(service, "SPREAD_SLACK", 2)
    first = broker.begin(b"first")
    for _ in range(10):
        broker.commit(broker.begin(b"other"))
    broker.core.transactions.tick(broker.now_ms)
    broker.disk.fail("pwritev", error=errno.ENOSPC)
    broker.settle()
    assert len(broker.halves()) == 11
    assert broker.open_count == 1
    broker.tick()
    assert len(broker.halves()) == 12
    assert broker.commit(first) == ""
    assert broker.bodies().count(b"first") == 1


def test_open_ones_survive_the_deletion_of_the_log_below_them() -> None:
    broker = Broker(segment_bytes=16_384)
    placed = [broker.begin(b"half %d" % number + b"x" * 1000) for number in range(40)]
    for each in placed[::2]:
        broker.commit(each)
    broker.tick()
    position = broker.core.store.log.written
    position -= position % 16_384
    assert broker.core.transactions.rescue(position)
    broker.settle()
    broker.tick()
    assert broker.core.transactions.rescue(position)
    broker.core.store.housekeeping.checkpoint()
    broker.core.store.housekeeping.delete_before(position)
    broker.tick()
    assert broker.core.store.log.start == position > placed[-1].position
    assert broker.open_count == 20
    broker.reopen()
    assert broker.open_count == 20
    for each in placed[1::2]:
        assert broker.commit(each) == ""
    assert broker.commit(placed[0]).startswith("1 Find prepared transaction message failed")
    broker.tick()
    broker.reopen()
    assert broker.open_count == 0
    found = sorted(body.split(b"x")[0] for body in broker.bodies() if body.startswith(b"half"))
    assert len(found) == len(set(found)) >= 20


def test_retention_asks_before_it_deletes() -> None:
    broker = Broker(segment_bytes=16_384)
    placed = broker.begin(b"old one")
    for _ in range(60):
        broker.core.append(replace(broker.message(b"z" * 1000), sys_flag=0, topic=TOPIC))
    broker.settle()
    broker.core.store.housekeeping.checkpoint()
    broker.now_ms += (broker.config.store.retention_hours - 1) * 3_600_000
    broker.core.append(replace(broker.message(b"new"), sys_flag=0, topic=TOPIC))
    broker.settle()
    broker.now_ms += 2 * 3_600_000
    store = broker.core.store
    store.housekeeping.delete_expired()
    for _ in range(100):
        broker.pass_ms(1001)
    assert store.log.start > placed.position
    (parked,) = broker.parked()  # it is older than the retention itself
    assert bytes(parked.body) == b"old one"


# ----------------------------------------------------------------------------------------- restarts


def test_progress_is_noted_for_ourselves_and_for_apache() -> None:
    broker = Broker()
    for _ in range(5):
        broker.commit(broker.begin())
    left = broker.begin()
    broker.commit(broker.begin())
    broker.tick(1100)
    offsets = broker.core.offsets
    assert offsets.committed(service.GROUP, HALF_TOPIC, 0) == left.queue_offset == 5
    # The operation is about the one behind the open one too.
    assert not offsets.committed(service.GROUP, OP_TOPIC, 0)
    broker.commit(left)
    broker.tick(1100)
    assert offsets.committed(service.GROUP, HALF_TOPIC, 0) == 7
    assert offsets.committed(service.GROUP, OP_TOPIC, 0) == len(broker.operations())
    # Nobody else has a say in them.
    assert not offsets.commit(service.GROUP, HALF_TOPIC, 0, 100)
    assert offsets.committed(service.GROUP, HALF_TOPIC, 0) == 7
    offsets.reset(service.GROUP, HALF_TOPIC, {0: 100})
    broker.begin(b"later")
    broker.tick(1100)
    assert offsets.committed(service.GROUP, HALF_TOPIC, 0) == 7
    broker.reopen()
    assert broker.open_count == 1


def test_a_start_reads_only_what_is_needed() -> None:
    broker = Broker()
    for _ in range(50):
        broker.commit(broker.begin())
    broker.tick(1100)
    broker.reopen()
    table = broker.core.transactions.table
    assert (table.next_offset, table.open_count, table.lowest_open) == (50, 0, 50)
    placed = broker.begin()
    assert placed.queue_offset == 50
    assert broker.commit(placed) == ""


def test_apache_may_have_gone_on_meanwhile() -> None:
    """Its broker copies what it asks about, and its progress is in the offsets alone."""
    broker = Broker()
    first = broker.begin(b"asked by apache")
    broker.begin(b"ended by apache")
    broker.tick(1100)
    core = broker.core
    entry = broker.halves()[0]
    core.append(
        replace(
            broker.message(b"asked by apache"),
            topic=HALF_TOPIC,
            sys_flag=0,
            properties=records.without_checksum(entry.properties)
            + b"TRANSACTION_CHECK_TIMES\x0114\x02",
        )
    )
    broker.settle()
    core.offsets.note_own(service.GROUP, HALF_TOPIC, 0, 2)
    core.store.offsets.send()
    core.store.write_staged()
    broker.crash()
    assert broker.open_count == 1
    broker.join()
    broker.pass_ms(TIMEOUT_MS + 1)
    broker.tick()
    assert questions(broker) == [("one", 15)]
    assert broker.commit(first).startswith("604")  # Apache's copy stands for it
    copy = broker.halves()[2]
    assert broker.commit(Placed(copy.position, 0, copy.queue_offset, 0)) == ""
    assert broker.bodies() == [b"asked by apache"]


def test_a_commit_whose_operation_is_lost_is_found_by_its_origin() -> None:
    broker = Broker(flush="sync")
    placed = [broker.begin(b"%d" % number) for number in range(4)]
    broker.tick()
    broker.roll_back(placed[2])
    broker.commit(placed[1])  # its operation would be written by the next tick
    broker.crash(KeepNothing())
    assert broker.bodies() == [b"1"]
    assert broker.open_count == 2
    assert broker.commit(placed[1]).startswith("604")
    broker.tick()
    assert ("d", b"1,") in broker.operations()
    assert broker.commit(placed[0]) == ""
    assert broker.commit(placed[3]) == ""
    broker.crash()
    broker.crash()
    assert sorted(broker.bodies()) == [b"0", b"1", b"3"]
    assert broker.open_count == 0


# -------------------------------------------------------------------------------- listing, resuming


def test_why_a_half_message_waits() -> None:
    broker = Broker(transaction_check_count_max=1)
    broker.begin(b"x", PGROUP="nobody")
    transactions = broker.core.transactions
    broker.tick()

    def why(offset: int) -> tuple[int, int, str]:
        half = transactions.open_half(offset)
        assert half is not None
        return transactions.why(half)

    assert why(0) == (0, -1, "no producer of group nobody is connected")
    broker.join()
    broker.begin()
    broker.tick()
    checks, next_ms, text = why(1)
    assert (checks, text) == (0, "its producer may still end it: nobody was asked yet")
    assert next_ms == broker.now_ms + TIMEOUT_MS
    broker.tick(TIMEOUT_MS + TICK_MS)
    assert why(1)[0] == 1
    assert "it will be parked" in why(1)[2]
    broker.core.reconfigure(replace(broker.config, transaction_check_count_max=5))
    assert "a producer was asked" in why(1)[2]
    broker.core.topics.delete(TOPIC)
    broker.settle()
    assert "topic orders is gone" in why(1)[2]


def resume(broker: Broker, position: int) -> str:
    outcome: list[SluiceError | None] = []
    broker.core.transactions.resume(position, outcome.append)
    broker.settle()
    (error,) = outcome
    return "" if error is None else f"{error.rocketmq_code} {error}"


def test_questions_begin_anew_for_an_open_one() -> None:
    broker = Broker(transaction_check_count_max=3)
    broker.join()
    placed = broker.begin()
    broker.tick(TIMEOUT_MS + TICK_MS)
    broker.pass_ms(INTERVAL_MS)
    assert [checks for _, checks in questions(broker)] == [1, 2]
    assert resume(broker, placed.position) == ""
    broker.tick(TIMEOUT_MS + 2 * TICK_MS)
    assert [checks for _, checks in questions(broker)] == [1]
    assert broker.commit(placed) == ""
    assert broker.bodies() == [b"hello"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_parked_one_becomes_a_half_message_again_once(restart: bool) -> None:
    broker = Broker(transaction_check_count_max=1)
    broker.join()
    first = broker.begin(b"body")
    broker.tick(TIMEOUT_MS + TICK_MS)
    broker.pass_ms(INTERVAL_MS)
    (parked,) = broker.parked()
    assert resume(broker, parked.position) == ""
    broker.tick()
    assert broker.open_count == 1
    if restart:
        broker.crash()
    assert broker.open_count == 1
    assert resume(broker, parked.position).startswith("604 the message has been made a half")
    broker.join()
    broker.asked.clear()
    broker.tick(TIMEOUT_MS + 2 * TICK_MS)
    ((_, half, checks),) = broker.asked
    assert checks == 1
    again = Placed(half.first_position, 0, half.first_offset, 0)
    assert broker.commit(first).startswith("604")
    assert broker.commit(again) == ""
    assert broker.bodies() == [b"body"]
    broker.tick()
    broker.reopen()
    assert resume(broker, parked.position).startswith("604")
    assert broker.open_count == 0


def test_only_half_messages_are_resumed() -> None:
    broker = Broker()
    done = broker.begin()
    broker.commit(done)
    (entry,) = broker.entries()
    for position in (entry.position, done.position):
        assert resume(broker, position).startswith("22 the message is neither")
    assert resume(broker, 1 << 50).startswith("22 no message can be read")
    broker.tick()
    assert broker.open_count == 0
