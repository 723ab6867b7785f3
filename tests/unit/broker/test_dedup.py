"""One business key, one message, in a window: at once, across starts, with open outcomes."""

from __future__ import annotations

import errno

import pytest

from sluice.broker.dedup import First, key_of
from sluice.broker.half_messages import Ending
from sluice.broker.placing import RunPlace
from sluice.broker.topic_deletion import delete_topic
from sluice.errors import Busy, SluiceError
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.background import Steps
from sluice.storage.memory_files import KeepAll, KeepNothing, MemoryFiles
from tests.unit.broker.broker_kit import running, send_fields
from tests.unit.broker.topic_kit import TopicBroker
from tests.unit.loops import run_once

WINDOW_MS = 60_000


def broker_with_window(**changes: object) -> TopicBroker:
    broker = TopicBroker(**changes)  # type: ignore[arg-type]
    broker.make(dedup_window_ms=str(WINDOW_MS))
    return broker


# --------------------------------------------------------------------------------------- the window


def test_a_second_send_with_the_key_is_answered_with_the_first_one() -> None:
    broker = broker_with_window()
    first = broker.send(body=b"1", queue_id=1, KEYS="order-1", UNIQ_KEY="A").first
    assert (first.queue_id, first.queue_offset, first.unique) == (1, 0, b"A")
    broker.run(WINDOW_MS - 1)
    # Wherever it goes, and whatever else is in it.
    assert broker.send(body=b"2", queue_id=3, KEYS="order-1", UNIQ_KEY="B").first == first
    assert broker.send(body=b"3", queue_id=1, KEYS="order-2").first != first
    assert [entry.body.tobytes() for entry in broker.stored(queue_id=1)] == [b"1", b"3"]
    assert broker.stored(queue_id=3) == []
    assert broker.core.dedup.suppressed == {"orders": 1}


def test_the_window_is_counted_from_the_first_and_no_duplicate_makes_it_longer() -> None:
    broker = broker_with_window()
    first = broker.send(KEYS="k").first
    broker.run(WINDOW_MS - 1)
    assert broker.send(KEYS="k").first == first
    broker.run(1)
    second = broker.send(KEYS="k").first
    assert second.queue_offset == 1
    broker.run(WINDOW_MS - 1)
    assert broker.send(KEYS="k").first == second
    assert broker.core.dedup.key_count == 1


def test_what_the_key_is() -> None:
    assert key_of(b"KEYS\x01a b\x02") == b"a b"  # all of it: "a" alone is another one
    assert key_of(b"KEYS\x01a b\x02DEDUP_KEY\x01d\x02") == b"d"
    assert key_of(b"DEDUP_KEY\x01\x02KEYS\x01a\x02") == b"a"
    assert key_of(b"OTHER\x01a\x02") == b""
    assert key_of(b"DEDUP_KEY\x01" + b"x" * 64 + b"\x02") == b"x" * 64
    long = [key_of(b"DEDUP_KEY\x01" + b"x" * count + b"\x02") for count in (65, 66, 30_000)]
    assert [len(key) for key in long] == [24] * 3
    assert len(set(long)) == 3


def test_messages_without_a_key_and_topics_without_a_window_take_everything() -> None:
    broker = broker_with_window()
    broker.make("plain")
    for _ in range(2):
        broker.send(UNIQ_KEY="same")
        broker.send("plain", KEYS="k")
    assert (len(broker.stored()), len(broker.stored("plain"))) == (2, 2)
    assert broker.core.dedup.key_count == 0


def test_topics_do_not_share_keys() -> None:
    broker = broker_with_window()
    broker.make("others", dedup_window_ms="1000")
    broker.send(KEYS="k")
    broker.send("others", KEYS="k")
    assert (len(broker.stored()), len(broker.stored("others"))) == (1, 1)
    broker.run(1_000)
    broker.send(KEYS="k")
    broker.send("others", KEYS="k")
    assert (len(broker.stored()), len(broker.stored("others"))) == (1, 2)


def test_a_changed_window_holds_at_once_and_a_removed_one_forgets() -> None:
    broker = broker_with_window()
    broker.send(KEYS="k")
    broker.run(10_000)
    broker.make(dedup_window_ms="5000")
    broker.send(KEYS="k")
    assert len(broker.stored()) == 2
    broker.make()
    broker.run(1)
    assert broker.core.dedup.key_count == 0
    broker.send(KEYS="k")
    assert len(broker.stored()) == 3


def test_a_topic_of_the_same_name_begins_without_keys() -> None:
    broker = broker_with_window()
    broker.send(KEYS="k")
    outcome: list[SluiceError | None] = []
    delete_topic(broker.core, "orders", outcome.append)
    broker.settle()
    assert outcome == [None]
    broker.make(dedup_window_ms=str(WINDOW_MS))
    assert broker.send(KEYS="k").first.queue_offset == 0
    assert len(broker.stored()) == 1
    assert len(broker.crashed().stored()) == 1


# ------------------------------------------------------------------------------------------ batches


def test_each_message_of_a_batch_is_compared() -> None:
    broker = broker_with_window()
    known = broker.send(body=b"a", queue_id=2, KEYS="a", UNIQ_KEY="A").first
    parts = [
        (b"b", {"KEYS": "b", "UNIQ_KEY": "B"}),
        (b"a again", {"KEYS": "a", "UNIQ_KEY": "C"}),
        (b"free", {"UNIQ_KEY": "D"}),
        (b"b again", {"KEYS": "b", "UNIQ_KEY": "E"}),
        (b"a once more", {"KEYS": "a", "UNIQ_KEY": "F"}),
    ]
    run = broker.send_batch("orders", parts, 1).run
    b, free = broker.stored(queue_id=1)
    assert (bytes(b.body), bytes(free.body)) == (b"b", b"free")
    assert run.positions == [b.position, known.position, free.position, b.position, known.position]
    assert (run.queue_id, run.queue_offset, run.unique) == (1, 0, b"B")
    assert broker.core.dedup.suppressed == {"orders": 3}
    # All of it is there: the answer is the first one's.
    assert broker.send_batch("orders", parts[1:2], 1).run == RunPlace(
        [known.position], 2, known.queue_offset, b"A"
    )
    assert broker.send(KEYS="b").first.position == b.position
    assert len(broker.stored(queue_id=1)) == 2


# ------------------------------------------------------------------------------------ open outcomes


def test_the_second_waits_for_the_outcome_of_the_first() -> None:
    background = Steps()
    broker = TopicBroker(background=background)
    settle = background.run_all
    broker.make(dedup_window_ms=str(WINDOW_MS))
    settle()
    first = broker.send(KEYS="k", UNIQ_KEY="A")
    second = broker.send(KEYS="k", UNIQ_KEY="B")
    batch = broker.send_batch("orders", [(b"x", {"KEYS": "x"}), (b"k", {"KEYS": "k"})])
    assert (first.told, second.told, batch.told) == (0, 0, 0)
    assert second.place is None
    assert broker.core.dedup.suppressed == {}
    settle()  # the disk has the first one
    broker.settle()
    settle()  # and what was new in the batch
    broker.settle()
    assert second.first == first.first
    assert batch.run.positions[1] == first.first.position
    assert len(broker.stored()) == 2
    assert broker.core.dedup.suppressed == {"orders": 2}


def test_where_the_first_fails_the_second_is_stored() -> None:
    broker = broker_with_window()
    broker.files.fail("pwritev", error=errno.ENOSPC)
    first = broker.post(body=b"1", KEYS="k", UNIQ_KEY="A")
    second = broker.post(body=b"2", KEYS="k", UNIQ_KEY="B")
    third = broker.post(body=b"3", KEYS="k", UNIQ_KEY="C")
    broker.settle()
    assert first.error is not None
    assert second.first.unique == b"B"
    assert third.first == second.first
    assert [bytes(entry.body) for entry in broker.stored()] == [b"2"]


def test_those_who_wait_are_bounded() -> None:
    background = Steps()
    broker = TopicBroker(background=background, inflight_requests_max=100)
    broker.make(dedup_window_ms=str(WINDOW_MS))
    background.run_all()
    broker.send(KEYS="k")
    for _ in range(100):
        broker.send(KEYS="k")
    with pytest.raises(Busy, match="inflight_requests_max"):
        broker.send(KEYS="k")
    background.run_all()
    broker.settle()
    assert broker.send(KEYS="k").first.queue_offset == 0


def test_at_the_bound_new_keys_are_refused_and_none_is_forgotten() -> None:
    broker = broker_with_window(dedup_keys_max=2)
    first = broker.send(KEYS="1").first
    broker.run(10)
    broker.send(KEYS="2")
    with pytest.raises(Busy, match="dedup_keys_max"):
        broker.send(KEYS="3")
    with pytest.raises(Busy, match="dedup_keys_max"):
        broker.send_batch("orders", [(b"1", {"KEYS": "1"}), (b"3", {"KEYS": "3"})])
    assert broker.send(KEYS="1").first == first
    broker.send()  # has no key
    broker.run(WINDOW_MS - 10)
    assert broker.send(KEYS="3").first.queue_offset == 3
    assert len(broker.stored()) == 4


# ------------------------------------------------------------------------------------------- starts


def test_keys_are_known_again_after_a_crash() -> None:
    broker = broker_with_window()
    old = broker.send(KEYS="old").first
    broker.run(30_000)
    firsts = {
        key: broker.send(
            body=key.encode(), queue_id=number % 4, KEYS=key, UNIQ_KEY=f"U-{key}"
        ).first
        for number, key in enumerate(("a", "b", "c d", "e" * 100, "f"))
    }
    batch = broker.send_batch("orders", [(b"g", {"KEYS": "g", "UNIQ_KEY": "U-g"})], 2).run
    broker.run(20_000)
    broker = broker.crashed()
    assert broker.core.dedup.key_count == 7
    for key, first in firsts.items():
        assert broker.send(KEYS=key).first == first
    again = broker.send(KEYS="g").first
    assert (again.position, again.queue_id, again.unique) == (batch.positions[0], 2, b"U-g")
    assert broker.send(KEYS="old").first == old
    broker.run(10_000)
    broker = broker.crashed(KeepAll())
    assert broker.send(KEYS="a").first == firsts["a"]
    assert broker.send(KEYS="old").first.position > old.position  # its window is over


def test_a_key_lives_exactly_as_long_as_its_message_through_a_crash() -> None:
    """Power fails before the disk has the first: it was not confirmed, and its key is free."""
    background = Steps()
    files = MemoryFiles()
    broker = TopicBroker(files, background=background)
    broker.make(dedup_window_ms=str(WINDOW_MS))
    background.run_all()
    safe = broker.send(KEYS="safe")
    background.run_all()
    lost = broker.send(KEYS="lost")
    assert (safe.told, lost.told) == (1, 0)
    broker = TopicBroker(broker.files.crash(KeepNothing()), now_ms=broker.now_ms)
    assert broker.send(KEYS="safe").first == safe.first
    assert broker.send(body=b"new", KEYS="lost").told == 1
    assert [bytes(entry.body) for entry in broker.stored()] == [b"body", b"new"]


def test_a_start_loads_more_keys_than_the_bound_rather_than_break_a_promise() -> None:
    broker = broker_with_window()
    first = broker.send(KEYS="1").first
    broker.send(KEYS="2")
    files = broker.files.crash(KeepAll())
    broker = TopicBroker(files, now_ms=broker.now_ms, dedup_keys_max=1)
    assert broker.send(KEYS="1").first == first
    with pytest.raises(Busy):
        broker.send(KEYS="3")


def test_a_damaged_message_takes_only_its_own_key_with_it() -> None:
    broker = broker_with_window()
    firsts = [broker.send(body=b"%d" % n * 50, KEYS=str(n)).first for n in range(6)]
    closed: list[object] = []
    broker.core.store.shut(closed.append)
    assert closed == [None]
    path, at = broker.core.store.log.path_of(firsts[3].position)
    broker.files.flip(path, (at + 100) * 8)
    broker = broker.crashed(KeepAll())
    assert broker.core.dedup.key_count == 5
    for number in (0, 1, 2, 4, 5):
        assert broker.send(KEYS=str(number)).first == firsts[number]


def test_keys_outlast_messages_that_retention_takes() -> None:
    broker = broker_with_window()
    firsts = {str(n): broker.send(body=bytes(60_000), KEYS=str(n)).first for n in range(40)}
    store = broker.core.store
    end = sorted(store.log.segments)[-1]
    assert end > 0
    (rescue,) = [ask for ask in store.housekeeping.rescuers if ask.__name__ == "_rescue"]
    assert not rescue(end)
    assert not rescue(end)  # it is not written yet
    broker.settle()
    assert rescue(end)
    done: list[None] = []
    store.housekeeping.delete_before(end, lambda: done.append(None))
    assert (done, store.log.start) == ([None], end)
    for _ in range(2):
        broker = broker.crashed()
        assert broker.core.store.log.start == end
        for key, first in firsts.items():
            assert broker.send(KEYS=key).first == first
    assert broker.core.dedup.suppressed == {"orders": 40}
    # What is written down goes when the windows are over.
    assert broker.core.store.table("dedup")
    broker.run(WINDOW_MS)
    assert broker.core.dedup.key_count == 0
    assert not broker.core.store.table("dedup")
    assert broker.send(KEYS="0").first.position > end


def test_keys_that_cannot_be_written_down_keep_their_messages() -> None:
    broker = broker_with_window()
    for number in range(40):
        broker.send(body=bytes(60_000), KEYS=str(number))
    store = broker.core.store
    end = sorted(store.log.segments)[-1]
    (rescue,) = [ask for ask in store.housekeeping.rescuers if ask.__name__ == "_rescue"]
    broker.files.fail("pwritev", error=errno.ENOSPC)
    assert not rescue(end)
    broker.settle()
    assert not rescue(end)  # once more
    broker.settle()
    assert rescue(end)


# -------------------------------------------------------------------------- what waits for its time


@pytest.mark.parametrize("delay", [{"DELAY": "2"}, {"TIMER_DELAY_SEC": "5"}])
@pytest.mark.parametrize("crash_after_ms", [1_000, 10_000])
def test_a_delayed_message_counts_from_when_it_was_sent(
    delay: dict[str, str], crash_after_ms: int
) -> None:
    broker = broker_with_window()
    first = broker.send(body=b"1", queue_id=1, properties=delay, KEYS="k", UNIQ_KEY="A").first
    assert broker.send(body=b"2", KEYS="k", UNIQ_KEY="B").first[:6] == first[:6]
    _pass(broker, crash_after_ms)
    broker = broker.crashed()
    assert broker.send(body=b"3", KEYS="k", UNIQ_KEY="C").first[:6] == first[:6]
    _pass(broker, 40_000)
    assert [bytes(entry.body) for entry in broker.stored(queue_id=1)] == [b"1"]
    assert broker.stored() == []
    _pass(broker, WINDOW_MS - 40_000)
    broker.send(body=b"4", KEYS="k")
    assert [bytes(entry.body) for entry in broker.stored()] == [b"4"]


def _pass(broker: TopicBroker, span_ms: int) -> None:
    for _ in range(span_ms // 1_000):
        broker.run(1_000)


# ------------------------------------------------------------------------------------- transactions

HALF = {"TRAN_MSG": "true", "PGROUP": "senders"}
COMMIT, ROLLBACK = 8, 12


def _end(broker: TopicBroker, half: First, verdict: int) -> None:
    outcome: list[SluiceError | None] = []
    ending = Ending("senders", half.queue_offset, half.position, verdict, from_check=False)
    broker.core.transactions.end(ending, outcome.append)
    broker.settle()
    assert outcome == [None]


@pytest.mark.parametrize("crashes", [False, True])
def test_a_committed_half_message_has_its_key(crashes: bool) -> None:
    broker = broker_with_window()
    first = broker.send(body=b"1", queue_id=2, properties=HALF, KEYS="k", UNIQ_KEY="A").first
    _end(broker, first, COMMIT)
    if crashes:
        broker = broker.crashed()
    assert broker.send(body=b"2", KEYS="k", UNIQ_KEY="B").first[:5] == first[:5]
    assert broker.send(body=b"3", properties=HALF, KEYS="k", UNIQ_KEY="C").first[:5] == first[:5]
    stored = [bytes(entry.body) for queue in range(4) for entry in broker.stored(queue_id=queue)]
    assert stored == [b"1"]


@pytest.mark.parametrize("crashes", [False, True])
def test_nobody_is_told_that_an_open_transaction_is_stored_or_is_not(crashes: bool) -> None:
    broker = broker_with_window()
    first = broker.send(body=b"1", properties=HALF, KEYS="k", UNIQ_KEY="A").first
    if crashes:
        broker = broker.crashed()
    for properties in ({}, HALF):
        with pytest.raises(Busy, match="a transaction with the same key is open"):
            broker.send(properties=properties, KEYS="k", UNIQ_KEY="B")
    with pytest.raises(Busy, match="is open"):
        broker.send_batch("orders", [(b"x", {"KEYS": "x"}), (b"k", {"KEYS": "k"})])
    # The same message once more, because its answer was lost.
    assert broker.send(properties=HALF, KEYS="k", UNIQ_KEY="A").first[:5] == first[:5]
    _end(broker, first, COMMIT)
    assert broker.send(KEYS="k", UNIQ_KEY="B").first[:5] == first[:5]
    assert [bytes(entry.body) for entry in broker.stored()] == [b"1"]


@pytest.mark.parametrize("crashes", [False, True])
def test_a_rolled_back_half_message_frees_its_key(crashes: bool) -> None:
    broker = broker_with_window()
    half = broker.send(body=b"1", properties=HALF, KEYS="k", UNIQ_KEY="A").first
    _end(broker, half, ROLLBACK)
    if crashes:
        broker = broker.crashed()
    second = broker.send(body=b"2", properties=HALF, KEYS="k", UNIQ_KEY="B").first
    assert second.position > half.position
    _end(broker, second, COMMIT)
    assert [bytes(entry.body) for entry in broker.stored()] == [b"2"]


# ----------------------------------------------------------------------------------------- the wire


def test_the_wire_gives_the_first_ones_answer() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 4, attributes=f"+dedup.window.ms={WINDOW_MS}")
            first = await rig.send("orders", b"1", 2, KEYS="k", UNIQ_KEY="A")
            again = await rig.send("orders", b"2", 3, KEYS="k", UNIQ_KEY="B")
            names = ("msgId", "queueId", "queueOffset", "transactionId")
            assert [again[name] for name in names] == [first[name] for name in names]
            assert (again["queueId"], again["transactionId"]) == ("2", "A")
            # Nobody is told of a one-way send; it is not stored either.
            rig.link.oneway(
                Request.SEND_MESSAGE_V2, _texts(send_fields("orders", 3, KEYS="k")), b"3"
            )
            await rig.send("orders", b"after", 3)
            pulled = await rig.pull("orders", 0, 3)
            assert pulled.ext["maxOffset"] == "1"
            assert rig.broker.core.dedup.suppressed["orders"] == 2

    run_once(work())


def _texts(fields: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items()}


@pytest.mark.parametrize(
    ("value", "remark"),
    [
        ("0", "dedup.window.ms is out of range: 0; allowed: 1 to 86400000"),
        ("86400001", "allowed: 1 to 86400000"),
        ("-1", "allowed: 1 to 86400000"),
        ("1m", "dedup.window.ms is no whole number"),
    ],
)
def test_a_window_that_is_none_is_refused(value: str, remark: str) -> None:
    async def work() -> None:
        async with running() as rig:
            code, text = await rig.refused_topic("t", attributes=f"+dedup.window.ms={value}")
            assert (code, remark in text) == (1, True)

    run_once(work())
