"""Pop consumption without a wire: what is in flight, what comes again, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.broker.pop_taking import Popped
from sluice.broker.pops import INVISIBLE_MS_MAX, Ticket
from sluice.broker.topic_deletion import delete_topic
from sluice.broker.topics import TopicSettings
from sluice.errors import (
    GroupMissing,
    NotInFlight,
    ParameterInvalid,
    RequestLate,
    SluiceError,
    TopicMissing,
)
from sluice.protocol import records
from tests.unit.broker.pop_kit import (
    DEAD_TOPIC,
    GROUP,
    INVISIBLE_MS,
    RETRY_TOPIC,
    TOPIC,
    PopBench,
    pop_in_order,
    taken_of,
)


def test_what_is_popped_is_invisible_until_it_is_acknowledged() -> None:
    bench = PopBench()
    bench.put(b"1", b"2")
    bench.put(b"3", queue_id=1)
    first = bench.pop()
    assert sorted(each.body for each in first) == [b"1", b"2", b"3"]
    assert bench.pop() == []
    assert bench.core.pops.state.in_flight == 3
    bench.ack(*first)
    assert bench.core.pops.state.in_flight == 0
    bench.pass_ms(INVISIBLE_MS * 2)
    assert bench.pop() == []
    assert bench.stored(RETRY_TOPIC) == []


def test_what_is_not_acknowledged_comes_again_from_the_retry_topic() -> None:
    bench = PopBench()
    bench.put(b"good", b"bad", KEYS="k", TAGS="red")
    good, bad = bench.pop()
    bench.ack(good)
    bench.pass_ms(INVISIBLE_MS - 1)
    assert bench.pop() == []
    bench.pass_ms(1)
    (again,) = bench.pop()
    assert (again.body, again.mark) == (b"bad", "1")
    entry = again.entry
    assert (entry.topic, entry.reconsume_times) == (TOPIC, 1)
    assert entry.prepared_offset == bad.entry.position
    properties = records.parse_properties(entry.properties)
    ticket = properties["POP_CK"].split(" ")
    assert ticket[4:] == ["1", "broker-a", "0", "0"]
    assert properties["1ST_POP_TIME"] == str(bad.ticket.pop_ms)
    assert (properties["RETRY_TOPIC"], properties["TAGS"]) == (TOPIC, "red")
    bench.ack(again)
    bench.pass_ms(INVISIBLE_MS * 2)
    assert bench.pop() == []


def test_the_last_try_is_followed_by_a_dead_letter() -> None:
    bench = PopBench()
    bench.core.groups.put([replace(bench.core.groups.require(GROUP), retry_max=2)])
    bench.put(b"bad", KEYS="k")
    tries = []
    for _ in range(5):
        tries.append([each.entry.reconsume_times for each in bench.pop()])
        bench.pass_ms(INVISIBLE_MS)
    assert tries == [[0], [1], [2], [], []]
    (dead,) = bench.stored(DEAD_TOPIC)
    properties = records.parse_properties(dead.properties)
    assert (bytes(dead.body), dead.reconsume_times, properties["KEYS"]) == (b"bad", 2, "k")
    assert properties["DLQ_ORIGIN_TOPIC"] == properties["RETRY_TOPIC"] == TOPIC
    assert (properties["ORIGIN_QUEUE_ID"], properties["ORIGIN_QUEUE_OFFSET"]) == ("0", "0")
    assert bench.core.pops.state.in_flight == 0


def test_the_time_of_a_message_can_be_changed_and_its_ticket_with_it() -> None:
    bench = PopBench()
    bench.put(b"1")
    (message,) = bench.pop()
    old = message.ticket
    bench.pass_ms(1_000)
    bench.change(message, 10_000)
    with pytest.raises(NotInFlight, match="by another pop"):
        bench.core.pops.acknowledge((GROUP, TOPIC, 0), 0, old, lambda error: None)
    bench.pass_ms(9_999)
    assert bench.pop() == []
    bench.pass_ms(1)
    (again,) = bench.pop()
    bench.change(again, 0)
    bench.pass_ms(1)
    (third,) = bench.pop()
    assert third.entry.reconsume_times == 2
    bench.change(third, INVISIBLE_MS * 3)
    bench.pass_ms(INVISIBLE_MS * 2)
    bench.ack(third)
    assert bench.core.pops.state.in_flight == 0


def test_groups_do_not_see_each_other() -> None:
    bench = PopBench()
    bench.put(b"1")
    (mine,) = bench.pop()
    (theirs,) = bench.pop(group="others")
    assert mine.body == theirs.body
    bench.ack(mine)
    bench.pass_ms(INVISIBLE_MS)
    assert bench.pop() == []
    assert bench.bodies(group="others") == [b"1"]


def test_retries_of_two_groups_in_one_topic_are_told_apart() -> None:
    # %RETRY%a_b_c is of group a and topic b_c, and of group a_b and topic c.
    bench = PopBench()
    bench.core.topics.put([TopicSettings("b_c", 1, 1), TopicSettings("c", 1, 1)])
    bench.put(b"of a", topic="b_c")
    bench.put(b"of a_b", topic="c")
    assert bench.bodies(group="a", topic="b_c") == [b"of a"]
    assert bench.bodies(group="a_b", topic="c") == [b"of a_b"]
    bench.pass_ms(INVISIBLE_MS)
    assert len(bench.stored("%RETRY%a_b_c")) == 2
    assert bench.bodies(group="a", topic="b_c") == [b"of a"]
    assert bench.bodies(group="a_b", topic="c") == [b"of a_b"]


# ------------------------------------------------------------------------------------------ waiting


def test_a_pop_waits_for_a_message_of_any_queue_and_wakes_with_all_that_came() -> None:
    bench = PopBench()
    seen = bench.ask(poll_ms=15_000)
    assert seen == []
    bench.put(b"1", b"2", queue_id=1)
    ((popped, _, error),) = seen
    assert error is None
    assert [each.body for each in taken_of(popped)] == [b"1", b"2"]
    assert bench.core.polls.held_count == 0


def test_messages_that_come_again_wake_who_waits() -> None:
    bench = PopBench()
    bench.put(b"1")
    bench.pop(invisible_ms=5_000)
    seen = bench.ask(poll_ms=15_000)
    bench.pass_ms(5_000)
    bench.pass_ms(50)
    ((popped, _, _),) = seen
    (again,) = taken_of(popped)
    assert again.mark == "1"


def test_one_arrival_wakes_one_of_a_group_and_the_rest_the_next() -> None:
    bench = PopBench()
    first, second = (bench.ask(poll_ms=15_000, count_max=1) for _ in range(2))
    other = bench.ask(poll_ms=15_000, group="others")
    bench.put(b"1")
    assert [len(first), len(second), len(other)] == [1, 0, 1]
    third = bench.ask(poll_ms=15_000, count_max=1)
    assert bench.core.pops.waiting_count(GROUP, TOPIC, -1) == 2
    bench.put(b"2", b"3")
    assert [len(second), len(third)] == [1, 1]


def test_a_wait_ends_in_time_and_requests_that_are_too_old_are_not_served() -> None:
    bench = PopBench()
    seen = bench.ask(poll_ms=5_000, born_ms=bench.now_ms - 2_000)
    bench.pass_ms(2_999)
    assert seen == []
    bench.pass_ms(1)
    assert seen == [(None, "", None)]
    bench.put(b"1")
    with pytest.raises(RequestLate, match="timeout too much: by 501 ms"):
        bench.ask(poll_ms=1_000, born_ms=bench.now_ms - 1_501)
    assert bench.core.pops.state.in_flight == 0
    assert bench.bodies(poll_ms=1_000, born_ms=bench.now_ms - 1_500) == [b"1"]
    # A client whose clock is ahead does not wait longer.
    seen = bench.ask(poll_ms=1_000, born_ms=bench.now_ms + 100_000)
    bench.pass_ms(1_000)
    assert len(seen) == 1


def test_more_than_may_wait_are_told_so() -> None:
    bench = PopBench(held_polls_max=1)
    bench.ask(poll_ms=15_000)
    ((_, full, _),) = bench.ask(poll_ms=15_000)
    assert "(held_polls_max)" in full


def test_a_notice_says_that_there_is_something_and_takes_nothing() -> None:
    bench = PopBench()
    seen: list[tuple[bool, bool]] = []

    def notify(poll_ms: int) -> None:
        request = bench.request(poll_ms=poll_ms)
        bench.core.pops.notify(request, bench, lambda *answer: seen.append(answer))

    notify(0)
    notify(15_000)
    assert seen == [(False, False)]
    bench.put(b"1")
    notify(15_000)
    assert seen == [(False, False), (True, False), (True, False)]
    assert bench.bodies() == [b"1"]


def test_a_peek_takes_nothing() -> None:
    bench = PopBench()
    bench.put(b"1", b"2", b"3")
    seen: list[Popped | None] = []
    bench.core.pops.peek(bench.request(count_max=2), lambda popped, error: seen.append(popped))
    assert [each.body for each in taken_of(seen[0])] == [b"1", b"2"]
    assert seen[0] is not None
    assert seen[0].rest == 1
    assert bench.bodies() == [b"1", b"2", b"3"]


# ----------------------------------------------------------------------------------- which messages


def test_tags_and_sql_decide_what_is_popped() -> None:
    bench = PopBench(queues=1)
    for number in range(6):
        bench.put(b"%d" % number, TAGS="red" if number % 2 else "blue", a=str(number))
    assert bench.bodies(expression="red || green", count_max=2) == [b"1", b"3"]
    assert bench.bodies(expression="red") == [b"5"]
    sql = {"group": "sql", "expression_kind": "SQL92"}
    assert bench.bodies(expression="a > 2 AND TAGS = 'blue'", **sql) == [b"4"]
    # What is not wanted is passed over for good, and counts as read.
    assert bench.core.offsets.committed(GROUP, TOPIC, 0) == 6
    bench.put(*[b"x"] * 3000, TAGS="blue")
    bench.put(b"found", TAGS="red")
    assert bench.bodies(expression="red") == [b"found"]


def test_the_highest_priority_is_popped_first() -> None:
    bench = PopBench()
    attributes = {"message.type": "PRIORITY"}
    bench.core.topics.put([TopicSettings(TOPIC, 3, 3, attributes=attributes)])
    for queue_id in (0, 1, 2):
        bench.put(b"%d" % queue_id, queue_id=queue_id)
    assert bench.bodies() == [b"2", b"1", b"0"]


def test_a_group_begins_where_it_says() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2")
    assert bench.bodies(from_end=True) == [b"1", b"2"]  # a young queue is read whole
    bench.core.offsets.commit("late", TOPIC, 0, 1)
    assert bench.bodies(group="late") == [b"2"]


def test_too_many_in_flight_stop_a_queue_and_an_acknowledgement_lets_it_go_on() -> None:
    bench = PopBench(queues=1, pop_inflight_per_queue_max=2)
    bench.put(b"1", b"2", b"3", b"4")
    first = bench.pop(count_max=2)
    assert bench.pop() == []
    seen = bench.ask(poll_ms=15_000, count_max=1)
    assert seen == []
    bench.ack(first[0])
    ((popped, _, _),) = seen
    assert [each.body for each in taken_of(popped)] == [b"3"]


def test_too_many_in_flight_in_all_is_a_refusal() -> None:
    bench = PopBench(queues=1, pop_inflight_max=2)
    bench.put(b"1", b"2", b"3")
    first = bench.pop(count_max=2)
    ((_, full, _),) = bench.ask(poll_ms=15_000)
    assert "(pop_inflight_max)" in full
    bench.ack(*first)
    assert bench.bodies() == [b"3"]


# ---------------------------------------------------------------------------------------- bad input


def test_acknowledgements_of_what_is_not_in_flight_are_refused_and_change_nothing() -> None:
    bench = PopBench()
    bench.put(b"1", b"2")
    first, _ = bench.pop()

    def refused(
        name: tuple[str, str, int], offset: int, ticket: Ticket = first.ticket
    ) -> SluiceError:
        with pytest.raises(SluiceError) as caught:
            bench.core.pops.acknowledge(name, offset, ticket, lambda error: None)
        return caught.value

    name = (GROUP, TOPIC, 0)
    start, pop_ms, revive_queue = first.ticket
    assert isinstance(refused((GROUP, "nothing", 0), 0), TopicMissing)
    assert refused((GROUP, TOPIC, 2), 0).rocketmq_code == 13
    assert refused((GROUP, TOPIC, -1), 0).rocketmq_code == 13
    for offset in (-1, 2, 1 << 40):
        assert refused(name, offset).rocketmq_code == 208
    assert "never popped" in str(refused(("others", TOPIC, 0), 0))
    assert refused((GROUP, TOPIC, 1), 0).rocketmq_code == 208
    assert "by another pop" in str(refused(name, 0, Ticket(start, pop_ms + 1, revive_queue)))
    assert "by another pop" in str(refused(name, 0, Ticket(start + 1, pop_ms, revive_queue)))
    assert bench.core.pops.state.in_flight == 2
    bench.ack(first)
    assert refused(name, 0).rocketmq_code == 208
    bench.pass_ms(INVISIBLE_MS)
    assert bench.bodies() == [b"2"]
    assert refused(name, 1).rocketmq_code == 208  # too late: somebody else has it


@pytest.mark.parametrize(
    "changes",
    [
        {"count_max": 33},
        {"count_max": 0},
        {"count_max": -1},
        {"invisible_ms": 0},
        {"invisible_ms": -1},
        {"invisible_ms": INVISIBLE_MS_MAX + 1},
        {"queue_id": 2},
    ],
)
def test_pops_that_make_no_sense_are_refused(changes: dict[str, int]) -> None:
    bench = PopBench()
    bench.put(b"1")
    with pytest.raises(ParameterInvalid):
        bench.ask(**changes)
    assert bench.bodies() == [b"1"]


@pytest.mark.parametrize("invisible_ms", [-1, INVISIBLE_MS_MAX + 1])
def test_changes_that_make_no_sense_are_refused(invisible_ms: int) -> None:
    bench = PopBench()
    bench.put(b"1")
    (message,) = bench.pop()
    with pytest.raises(ParameterInvalid, match="invisible time"):
        bench.change(message, invisible_ms)
    bench.ack(message)


# ------------------------------------------------------------------------- what others do meanwhile


def test_a_reset_moves_the_pops_and_what_was_in_flight_is_taken_over() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    old = bench.pop()
    bench.core.offsets.reset(GROUP, TOPIC, {0: 1})
    again = bench.pop()
    assert [each.body for each in again] == [b"2", b"3"]
    with pytest.raises(NotInFlight):
        bench.ack(old[1])
    bench.ack(*again, old[0])
    bench.crash()
    assert bench.pop() == []
    bench.pass_ms(INVISIBLE_MS)
    assert bench.pop() == []


def test_members_that_pull_and_members_that_pop_do_not_share_messages() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3", b"4")
    (first,) = bench.pop(count_max=1)
    # Who pulls goes on behind what was popped, and moves the pops when it commits.
    assert bench.core.offsets.committed(GROUP, TOPIC, 0) == 1
    bench.core.offsets.commit(GROUP, TOPIC, 0, 3)
    assert bench.bodies() == [b"4"]
    bench.ack(first)


def test_offsets_that_a_crash_has_lost_are_committed_again() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    bench.ack(*bench.pop())
    bench.crash()
    assert bench.core.offsets.committed(GROUP, TOPIC, 0) == 3


def test_a_reset_holds_after_a_crash() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2", b"3")
    bench.ack(*bench.pop())
    bench.core.offsets.reset(GROUP, TOPIC, {0: 1})
    bench.pass_ms(10_000)
    bench.crash()
    assert bench.bodies() == [b"2", b"3"]


def test_a_reset_opens_a_queue_that_is_popped_in_order() -> None:
    bench = PopBench(queues=1)
    bench.put(b"1", b"2")
    pop_in_order(bench)
    bench.core.offsets.reset(GROUP, TOPIC, {0: 1})
    assert [each.body for each in pop_in_order(bench)] == [b"2"]


def test_what_a_deleted_group_popped_does_not_come_again() -> None:
    bench = PopBench()
    bench.put(b"1")
    bench.pop()
    bench.core.groups.delete(GROUP)
    bench.core.pops.forget_group(GROUP)
    bench.settle()
    bench.core.groups.require(GROUP)
    bench.settle()
    for _ in range(2):
        bench.pass_ms(INVISIBLE_MS)
        assert bench.stored(RETRY_TOPIC) == []
        bench.crash()


def test_a_pop_that_waits_hears_that_its_group_or_topic_is_gone() -> None:
    bench = PopBench()
    bench.ask(poll_ms=15_000)
    seen = [bench.ask(poll_ms=15_000), bench.ask(poll_ms=15_000, group="others")]
    bench.core.groups.delete("others")
    bench.put(b"1")
    ((_, _, error),) = seen[1]
    assert isinstance(error, GroupMissing)
    assert bench.core.groups.get("others") is None
    delete_topic(bench.core, TOPIC, lambda error: None)
    bench.settle()
    bench.pass_ms(15_000)
    ((_, _, error),) = seen[0]
    assert isinstance(error, TopicMissing)
    assert bench.core.pops.state.in_flight == 0


def test_a_group_that_may_not_consume_is_refused_and_its_messages_wait() -> None:
    bench = PopBench()
    bench.put(b"1")
    bench.pop()
    settings = bench.core.groups.require(GROUP)
    bench.core.groups.put([replace(settings, consume_enabled=False)])
    with pytest.raises(SluiceError, match="no permission"):
        bench.ask()
    bench.pass_ms(INVISIBLE_MS)
    bench.core.groups.put([settings])
    assert bench.bodies() == [b"1"]


def test_messages_in_memory_are_popped_too() -> None:
    bench = PopBench()
    bench.core.topics.put([TopicSettings("quick", 1, 1, attributes={"storage": "memory"})])
    bench.put(b"1", b"2", topic="quick")
    first, _ = bench.pop(topic="quick")
    name = (GROUP, "quick", 0)
    outcomes: list[SluiceError | None] = []
    bench.core.pops.acknowledge(name, first.offset, first.ticket, outcomes.append)
    bench.pass_ms(INVISIBLE_MS)
    assert outcomes == [None]
    assert bench.bodies(topic="quick") == [b"2"]
    bench.crash()  # in memory they were gone; what came again is on the disk
    bench.pass_ms(INVISIBLE_MS)
    assert bench.bodies(topic="quick") == [b"2"]
