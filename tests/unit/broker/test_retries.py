"""Messages that consumers could not handle: when they come again, how often, and only once each."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.broker import retry_notes, retry_policy
from sluice.broker.groups import GroupSettings
from sluice.broker.offset_ranges import OffsetRanges
from sluice.broker.retries import SendBack
from sluice.broker.topic_deletion import delete_topic
from sluice.errors import (
    Busy,
    DiskFull,
    GroupMissing,
    NoPermission,
    ParameterInvalid,
    SluiceError,
    SubscriptionMissing,
    TopicMissing,
)
from sluice.model import Placed, message_id
from tests.unit.broker.retry_kit import HOST, LEVELS, Broker, value

INTERVALS_SECONDS = [
    *(10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200),
]


@pytest.fixture
def broker() -> Broker:
    broker = Broker()
    broker.make()
    return broker


# ----------------------------------------------------------------------------------------- the copy


def test_a_copy_waits_for_the_third_level_and_says_where_it_came_from(broker: Broker) -> None:
    broker.send(key="U0")
    first = broker.send(key="U1", TAGS="TagA", colour="red")
    assert broker.send_back(first.position) is not None
    (copy,) = broker.entries(LEVELS, 2)
    assert value(copy, "REAL_TOPIC") == "%RETRY%g"
    assert value(copy, "RETRY_TOPIC") == "orders"
    assert value(copy, "ORIGIN_MESSAGE_ID") == message_id(HOST, first.position)
    assert (value(copy, "ORIGIN_QUEUE_ID"), value(copy, "ORIGIN_QUEUE_OFFSET")) == ("0", "1")
    assert (value(copy, "UNIQ_KEY"), value(copy, "colour")) == ("U1", "red")
    assert (value(copy, "DELAY"), value(copy, "WAIT")) == ("3", "false")
    assert copy.reconsume_times == 1
    assert copy.prepared_offset == first.position
    assert bytes(copy.body) == b"body"


def test_sixteen_retries_at_the_true_intervals_then_a_dead_letter(broker: Broker) -> None:
    placed = broker.send()
    position = placed.position
    for times, seconds in enumerate(INTERVALS_SECONDS, 1):
        failed_ms = broker.now_ms
        broker.send_back(position, origin_topic="orders")
        broker.run(seconds * 1000 - 1, seconds * 50)
        assert len(broker.entries("%RETRY%g")) == times - 1, "never early"
        broker.run(2_000, 50)
        entries = broker.entries("%RETRY%g")
        assert len(entries) == times
        assert entries[-1].reconsume_times == times
        assert (
            failed_ms + seconds * 1000 <= entries[-1].store_ms < failed_ms + seconds * 1000 + 2000
        )
        position = entries[-1].position
    broker.send_back(position, origin_topic="orders")
    broker.run(7_200_000, 60_000)
    assert len(broker.entries("%RETRY%g")) == 16
    (dead,) = broker.dead()
    assert dead.reconsume_times == 17
    assert value(dead, "RETRY_TOPIC") == value(dead, "DLQ_ORIGIN_TOPIC") == "orders"
    assert value(dead, "ORIGIN_MESSAGE_ID") == message_id(HOST, placed.position)
    assert value(dead, "DLQ_ORIGIN_MESSAGE_ID") == "U1"
    assert (value(dead, "ORIGIN_QUEUE_ID"), value(dead, "ORIGIN_QUEUE_OFFSET")) == ("0", "0")
    assert value(dead, "DELAY") is None


@pytest.mark.parametrize(("level", "queue"), [(1, 0), (5, 4), (18, 17), (99, 17), (2**31 - 1, 17)])
def test_a_consumer_names_the_level(broker: Broker, level: int, queue: int) -> None:
    broker.send_back(broker.send().position, level)
    assert len(broker.entries(LEVELS, queue)) == 1


@pytest.mark.parametrize("level", [-1, -(2**31)])
def test_a_level_below_zero_is_the_end(broker: Broker, level: int) -> None:
    broker.send_back(broker.send().position, level)
    assert (len(broker.dead()), broker.copies()) == (1, [])


def test_a_maximum_of_zero_is_the_end_at_once(broker: Broker) -> None:
    broker.send_back(broker.send().position, times_max=0)
    assert (len(broker.dead()), broker.copies()) == (1, [])


def test_what_a_producer_says_of_retries_is_not_believed(broker: Broker) -> None:
    forged = broker.send(
        RETRY_TOPIC="payroll",
        ORIGIN_MESSAGE_ID="0" * 32,
        ORIGIN_QUEUE_OFFSET="77",
        RECONSUME_TIME="16",
        MAX_RECONSUME_TIMES="0",
        DLQ_ORIGIN_TOPIC="payroll",
        REAL_TOPIC="payroll",
        TIMER_OUT_MS="1",
    )
    broker.send_back(forged.position)
    (copy,) = broker.copies()
    assert value(copy, "RETRY_TOPIC") == "orders"
    assert value(copy, "ORIGIN_MESSAGE_ID") == message_id(HOST, forged.position)
    assert value(copy, "ORIGIN_QUEUE_OFFSET") == "0"
    for name in ("RECONSUME_TIME", "MAX_RECONSUME_TIMES", "DLQ_ORIGIN_TOPIC", "TIMER_OUT_MS"):
        assert value(copy, name) is None


# ---------------------------------------------------------------------------------- group settings


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [(16, 16, 16), (16, 20, 20), (16, 3, 3), (3, 16, 3), (30, 16, 16), (5, None, 5), (0, 16, 0)],
)
def test_the_maximum_is_the_consumers_within_the_groups(
    own: int, asked: int | None, expected: int
) -> None:
    assert retry_policy.times_max(GroupSettings("g", retry_max=own), asked) == expected


def policy(**members: object) -> dict[str, object]:
    return {"groupRetryPolicy": members}


def test_a_group_has_times_of_its_own() -> None:
    broker = Broker()
    times_ms = [1, 2, 700, 2_500]
    broker.make(extra=policy(type="CUSTOMIZED", customizedRetryPolicy={"next": times_ms}))
    position = broker.send().position
    for times, wait_ms in enumerate([700, 2_500, 2_500], 1):
        broker.send_back(position)
        broker.run(wait_ms - 1, wait_ms - 1)
        assert len(broker.entries("%RETRY%g")) == times - 1, "never early"
        broker.run(2_100, 50)
        entries = broker.entries("%RETRY%g")
        assert len(entries) == times
        position = entries[-1].position


@pytest.mark.parametrize(
    ("members", "expected_ms"),
    [
        ({"initial": 100, "max": 1_000, "multiplier": 3}, [100, 300, 900, 1_000, 1_000]),
        ({"initial": 7}, [7, 14, 28, 56, 112]),
    ],
)
def test_waits_that_grow(members: dict[str, int], expected_ms: list[int]) -> None:
    settings = GroupSettings("g", extra=policy(type="EXPONENTIAL", exponentialRetryPolicy=members))
    assert [retry_policy.delay_ms(settings, times) for times in range(5)] == expected_ms


@pytest.mark.parametrize(
    "said", [None, {"type": "CUSTOMIZED"}, {"type": "EXPONENTIAL"}, {"type": "NEW"}, "text"]
)
def test_without_times_of_its_own_a_group_has_the_levels(said: object) -> None:
    settings = GroupSettings("g", extra={"groupRetryPolicy": said} if said else {})
    assert retry_policy.delay_ms(settings, 0) is None


@pytest.mark.parametrize(
    "said",
    [
        "text",
        {"type": "SOMETIMES"},
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": []}},
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [-1]}},
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [True]}},
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1] * 1025}},
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [41 * 86_400_000]}},
        {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 0}},
        {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"multiplier": "2"}},
        {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"max": 10**30}},
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(said: object) -> None:
    with pytest.raises(ParameterInvalid, match="groupRetryPolicy"):
        retry_policy.check_policy(GroupSettings("g", extra={"groupRetryPolicy": said}))


def test_a_group_that_wants_no_retries_gets_none() -> None:
    broker = Broker()
    broker.make(retry_queues=0)
    broker.send_back(broker.send().position)
    assert (broker.copies(), broker.dead()) == ([], [])


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("position", [-1, -(2**63), 3, 2**40, 2**63 - 1])
def test_a_place_where_no_entry_is(broker: Broker, position: int) -> None:
    broker.send()
    with pytest.raises(SluiceError, match=f"look message by offset failed, {position}"):
        broker.send_back(position)
    assert broker.copies() == []


def test_a_place_in_the_middle_of_an_entry(broker: Broker) -> None:
    placed = broker.send()
    with pytest.raises(SluiceError):
        broker.send_back(placed.position + 8)
    assert broker.copies() == []


def test_an_unknown_group_is_made_as_by_its_first_pull(broker: Broker) -> None:
    placed = broker.send()
    assert broker.send_back(placed.position, group="newcomers") is not None
    assert broker.core.groups.get("newcomers") is not None
    assert len(broker.copies("newcomers")) == 1
    with pytest.raises(GroupMissing, match="illegal characters"):
        broker.send_back(placed.position, group="no name")


def test_a_negative_maximum(broker: Broker) -> None:
    placed = broker.send()
    with pytest.raises(ParameterInvalid, match="maxReconsumeTimes -5"):
        broker.send_back(placed.position, times_max=-5)
    with pytest.raises(ParameterInvalid, match="maxReconsumeTimes -5"):
        broker.send_to_retry(1, times_max=-5)
    with pytest.raises(ParameterInvalid, match="reconsumeTimes -1"):
        broker.send_to_retry(-1)


def test_an_entry_of_another_topic_or_group(broker: Broker) -> None:
    broker.make("other", "payroll")
    placed = broker.send("payroll")
    with pytest.raises(ParameterInvalid, match="not of orders"):
        broker.send_back(placed.position, origin_topic="orders")
    theirs = broker.send("%RETRY%other")
    with pytest.raises(ParameterInvalid, match="does not read"):
        broker.send_back(theirs.position)
    broker.join("client", "g", "orders")
    with pytest.raises(SubscriptionMissing):
        broker.send_back(placed.position)
    broker.send_back(placed.position, group="other")
    waiting = broker.entries(LEVELS, 2)[0]
    with pytest.raises(ParameterInvalid, match="does not read"):
        broker.send_back(waiting.position)
    assert (broker.copies(), len(broker.copies("other"))) == ([], 1)


def test_an_entry_that_was_never_given_to_the_group(broker: Broker) -> None:
    broker.send()
    later = broker.send(key="U2")
    broker.core.offsets.pulled("g", "orders", 0, 1)
    with pytest.raises(ParameterInvalid, match="was not given to group g"):
        broker.send_back(later.position)
    broker.core.offsets.pulled("g", "orders", 0, 2)
    broker.send_back(later.position)
    assert len(broker.copies()) == 1


def test_an_entry_of_a_topic_that_was_deleted(broker: Broker) -> None:
    placed = broker.send()
    broker.core.topics.delete("orders")
    broker.core.ask_turn()
    broker.settle()
    with pytest.raises(TopicMissing):
        broker.send_back(placed.position)


def test_a_broker_that_may_only_be_read(broker: Broker) -> None:
    placed = broker.send()
    broker.core.config = mock.Mock(wraps=broker.core.config, permission="r", broker_name="a")
    with pytest.raises(NoPermission):
        broker.send_back(placed.position)


# ------------------------------------------------------------------------------------- only once


def test_the_same_entry_twice_is_stored_once(broker: Broker) -> None:
    placed = broker.send()
    broker.send_back(placed.position)
    assert broker.send_back(placed.position) is not None
    assert len(broker.copies()) == 1
    assert broker.core.retries.suppressed_count == 1


def test_another_group_has_its_own(broker: Broker) -> None:
    broker.make("other")
    placed = broker.send()
    broker.send_back(placed.position)
    broker.send_back(placed.position, group="other")
    assert (len(broker.copies()), len(broker.copies("other"))) == (1, 1)


def _note(told: list[str], name: str, placed: Placed | None, error: SluiceError | None) -> None:
    assert placed is not None
    assert error is None
    told.append(name)


def test_a_second_word_before_the_first_is_safe_waits_for_it(broker: Broker) -> None:
    placed = broker.send()
    told: list[str] = []
    with mock.patch.object(broker.core, "end_turn"):
        for name in ("first", "second"):
            done = partial(_note, told, name)
            broker.core.retries.send_back(SendBack("g", placed.position, 0), done)
        broker.settle()
    assert told == []
    broker.core.end_turn()
    assert told == ["first", "second"]
    assert len(broker.copies()) == 1


def test_what_could_not_be_written_can_be_sent_back_again(broker: Broker) -> None:
    placed = broker.send()
    with (
        mock.patch.object(broker.core.store.log, "write", side_effect=DiskFull("no room")),
        pytest.raises(DiskFull),
    ):
        broker.send_back(placed.position)
    broker.core.store.log.unstage()
    broker.send_back(placed.position)
    assert len(broker.copies()) == 1


def test_the_notes_outlive_a_kill(broker: Broker) -> None:
    placed = broker.send()
    broker.send_back(placed.position)
    for _ in range(3):
        broker = broker.restarted()
        broker.send_back(placed.position)
        assert len(broker.copies()) == 1
    dead = broker.send(key="U2")
    broker.send_back(dead.position, -1)
    broker = broker.restarted()
    broker.send_back(dead.position, -1)
    assert len(broker.dead()) == 1


def test_the_notes_outlive_a_kill_also_when_the_walk_begins_behind_them(broker: Broker) -> None:
    placed = broker.send()
    broker.send_back(placed.position)
    with mock.patch.object(retry_notes, "_WALK_BYTES", 0):
        broker.run(2_000)
    with mock.patch.object(retry_notes, "made_since", return_value=[]):
        broker = broker.restarted()
    broker.send_back(placed.position)
    assert len(broker.copies()) == 1


def test_a_note_goes_when_the_group_has_passed_it(broker: Broker) -> None:
    placed = broker.send()
    broker.send_back(placed.position)
    assert broker.core.retry_notes.range_count == 1
    broker.commit(1)
    assert broker.core.retry_notes.range_count == 0
    assert broker.restarted().core.retry_notes.range_count == 0


def test_an_offset_that_is_not_durable_passes_nothing(broker: Broker) -> None:
    placed = broker.send()
    broker.send_back(placed.position)
    with mock.patch.object(broker.core.store.offsets, "send"):
        broker.core.offsets.commit("g", "orders", 0, 1)
        with mock.patch.object(retry_notes, "_WALK_BYTES", 0):
            broker.run(180_000, 10_000)
        broker = broker.restarted()  # the offset is lost, so the message is consumed again
    broker.send_back(placed.position)
    assert len(broker.copies()) == 1


def test_a_rewind_forgets_the_notes_behind_it(broker: Broker) -> None:
    positions = [broker.send(key=f"U{n}").position for n in range(3)]
    for position in positions:
        broker.send_back(position)
    broker.core.offsets.reset("g", "orders", {0: 1})
    broker.tick()
    broker = broker.restarted()
    for position in positions:
        broker.send_back(position)
    assert len(broker.copies()) == 5, "the first one is not read again"


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_topic_that_is_made_anew_has_no_notes(broker: Broker, kill: bool, saved: bool) -> None:
    broker.send_back(broker.send().position)
    if saved:
        with mock.patch.object(retry_notes, "_WALK_BYTES", 0):
            broker.run(2_000)
    delete_topic(broker.core, "orders", lambda error: None)
    broker.settle()
    if kill:
        broker = broker.restarted()
    broker.make()
    broker.send_back(broker.send().position)
    assert len(broker.copies()) == 2


def test_a_late_commit_of_a_former_owner_multiplies_nothing(broker: Broker) -> None:
    position = broker.send().position
    broker.send_back(position)
    broker.core.offsets.commit("g", "orders", 0, 1)
    broker.run(30_000)
    broker.core.offsets.commit("g", "orders", 0, 0)
    broker.run(1_000)
    broker.send_back(position)
    assert len(broker.copies()) == 1


def test_notes_have_a_bound_and_more_is_refused(broker: Broker) -> None:
    placed = [broker.send(key=f"U{n}") for n in range(6)]
    with mock.patch.object(retry_notes, "QUEUE_RANGES_MAX", 2):
        broker.send_back(placed[0].position)
        broker.send_back(placed[2].position)
        with pytest.raises(Busy, match="commits no offset behind them"):
            broker.send_back(placed[4].position)
        broker.send_back(placed[1].position)  # fills a gap
        assert len(broker.copies()) == 3
        broker.commit(3)
        broker.send_back(placed[4].position)
        assert len(broker.copies()) == 4


# ------------------------------------------------------------------------ sent to the retry topic


def test_a_client_that_did_not_hear_the_answer_sends_the_message_itself(broker: Broker) -> None:
    placed = broker.send()
    broker.send_back(placed.position)
    broker.send_to_retry(1, RETRY_TOPIC="orders")
    assert len(broker.copies()) == 1
    broker = broker.restarted()
    with pytest.raises(Busy, match="key index"):
        broker.send_to_retry(1, RETRY_TOPIC="orders")
    broker.run(5_000)  # a client waits as long before it tries again
    broker.send_to_retry(1, RETRY_TOPIC="orders")
    broker.send_back(placed.position)
    assert len(broker.copies()) == 1


def test_a_message_that_was_sent_itself_is_not_sent_back_again(broker: Broker) -> None:
    placed = broker.send()
    broker.send_to_retry(1, RETRY_TOPIC="orders")
    (copy,) = broker.copies()
    assert (bytes(copy.body), copy.prepared_offset) == (b"body", placed.position)
    broker = broker.restarted()
    broker.send_back(placed.position)
    assert len(broker.copies()) == 1


def test_every_try_is_its_own(broker: Broker) -> None:
    broker.send()
    for times in range(1, 4):
        broker.send_to_retry(times, RETRY_TOPIC="orders")
        broker.send_to_retry(times, RETRY_TOPIC="orders")
        broker.run(150_000)
        assert [e.reconsume_times for e in broker.entries("%RETRY%g")] == list(range(1, times + 1))


def test_two_messages_with_one_key_are_both_tried_again(broker: Broker) -> None:
    positions = [broker.send().position for _ in range(2)]
    broker.send_back(positions[0])
    broker.send_to_retry(1, RETRY_TOPIC="orders")
    broker.send_back(positions[1])
    assert len(broker.copies()) == 2


def test_a_message_of_another_broker_is_stored_as_it_comes(broker: Broker) -> None:
    broker.send_to_retry(2, "unknown", RETRY_TOPIC="orders", RECONSUME_TIME="2", colour="red")
    (copy,) = broker.copies()
    assert (bytes(copy.body), copy.reconsume_times) == (b"client's body", 2)
    assert (value(copy, "DELAY"), value(copy, "colour")) == ("4", "red")
    assert value(copy, "RECONSUME_TIME") is None


def test_after_the_maximum_it_is_a_dead_letter(broker: Broker) -> None:
    broker.send()
    broker.send_to_retry(3, times_max=3, RETRY_TOPIC="orders")
    assert (len(broker.copies()), broker.dead()) == (1, [])
    broker.send(key="U2")
    broker.send_to_retry(4, "U2", times_max=3, RETRY_TOPIC="orders")
    broker.send_to_retry(4, "unknown", times_max=3, RETRY_TOPIC="orders")
    known, unknown = broker.dead()
    assert (known.reconsume_times, value(known, "ORIGIN_QUEUE_OFFSET")) == (4, "1")
    assert value(unknown, "DLQ_ORIGIN_TOPIC") == "orders"
    assert value(unknown, "DELAY") is None


def test_a_group_that_reads_in_order_gives_up_for_good(broker: Broker) -> None:
    broker.send()
    broker.core.locks.lock("g", "client", [("orders", 0)], broker.now_ms)
    broker.send_to_retry(1, RETRY_TOPIC="orders")
    assert (broker.copies(), len(broker.dead())) == ([], 1)
    broker.send_to_retry(1, RETRY_TOPIC="orders")
    assert len(broker.dead()) == 1
    broker.send(key="U2")
    broker.run(60_001, 60_001)
    broker.send_to_retry(1, "U2", RETRY_TOPIC="orders")
    assert len(broker.copies()) == 1


def test_the_message_of_a_producer_is_just_stored(broker: Broker) -> None:
    broker.send_to_retry(0, "new")
    (entry,) = broker.entries("%RETRY%g")
    assert bytes(entry.body) == b"client's body"


# ------------------------------------------------------------------------------------------- ranges


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "discard", "below", "from"]), st.integers(0, 12)),
        max_size=60,
    )
)
def test_ranges_are_a_set(steps: list[tuple[str, int]]) -> None:
    ranges, expected = OffsetRanges(), set[int]()
    for step, offset in steps:
        if step == "add":
            grows = ranges.grows(offset)
            before = len(ranges)
            ranges.add(offset)
            assert (len(ranges) > before) == grows
            expected.add(offset)
        elif step == "discard":
            ranges.discard(offset)
            expected.discard(offset)
        elif step == "below":
            gone = {one for one in expected if one < offset}
            assert ranges.drop_below(offset) == bool(gone)
            expected -= gone
        else:
            gone = {one for one in expected if one >= offset}
            assert ranges.drop_from(offset) == bool(gone)
            expected -= gone
        assert {one for one in range(14) if one in ranges} == expected
        assert ranges.count() == len(expected)
        pairs = ranges.pairs()
        assert all(start < end for start, end in pairs)
        assert all(left[1] < right[0] for left, right in pairwise(pairs))
        ranges = OffsetRanges(pairs)
