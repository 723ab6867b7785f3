"""Transactional messages without a wire: half messages and their ends."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from sluice.broker.half_messages import COMMIT, ROLLBACK, UNKNOWN, Ending
from sluice.broker.long_polling import HeldRead
from sluice.broker.topics import HALF_TOPIC, TopicSettings
from sluice.errors import MessageIllegal, NoPermission, SluiceError
from sluice.protocol import records
from tests.unit.broker.transaction_kit import GROUP, TICK_MS, TOPIC, Broker

TIMEOUT_MS = 6_000


def properties_of(entry: records.Entry) -> dict[str, str]:
    return records.parse_properties(entry.properties)


# ---------------------------------------------------------------------------------------- beginning


def test_a_half_message_is_stored_as_apache_stores_it_and_nobody_can_read_it() -> None:
    broker = Broker()
    placed = broker.begin(b"body", UNIQ_KEY="U1", TAGS="a", queue="3")
    assert broker.entries() == []
    (half,) = broker.halves()
    assert (half.position, half.queue_offset) == (placed.position, placed.queue_offset)
    assert (half.topic, half.queue_id, half.sys_flag) == (HALF_TOPIC, 0, 0)
    assert bytes(half.body) == b"body"
    properties = properties_of(half)
    assert properties["REAL_TOPIC"] == TOPIC
    assert properties["REAL_QID"] == "3"
    assert properties["__transactionId__"] == "U1"
    assert properties["PGROUP"] == GROUP
    assert properties["TAGS"] == "a"


def refusal_of(
    broker: Broker, sys_flag: int = records.SYS_TX_PREPARED, /, **properties: str
) -> str:
    message = replace(broker.message(**properties), sys_flag=sys_flag)
    with pytest.raises((MessageIllegal, NoPermission)) as caught:
        broker.sending.stored_form(message, TopicSettings(TOPIC))
    assert broker.halves() == []
    return f"{caught.value.rocketmq_code} {caught.value}"


@pytest.mark.parametrize("sys_flag", [0x4, 0x8, 0xC])
def test_a_flag_without_the_property_is_refused(sys_flag: int) -> None:
    for value in ("", "false", "yes"):
        text = refusal_of(Broker(), sys_flag, TRAN_MSG=value)
        assert text.startswith("13 sysFlag says that the message is part of a transaction")


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"PGROUP": ""}, "13 a transactional message must name its producer's group"),
        ({"PGROUP": "g" * 256}, "13 a transactional message must name its producer's group"),
        ({"DELAY": "3"}, "13 a transactional message cannot be delayed"),
        ({"TIMER_DELAY_SEC": "5"}, "13 a transactional message cannot be delayed"),
        ({"TIMER_DELIVER_MS": "1"}, "13 a transactional message cannot be delayed"),
        ({"TRAN_PREPARED_QUEUE_OFFSET": "0"}, "13 the property TRAN_PREPARED_QUEUE_OFFSET is the"),
        ({"SLUICE_HALF_SINCE_MS": "0"}, "13 the property SLUICE_HALF_SINCE_MS is the broker's"),
        ({"x": "y" * 32_700}, "13 properties of 32"),
    ],
)
def test_what_a_transactional_message_may_not_say(properties: dict[str, str], text: str) -> None:
    assert refusal_of(Broker(), **properties).startswith(text)


def test_a_broker_may_refuse_transactions() -> None:
    text = refusal_of(Broker(reject_transactions=True))
    assert text.startswith("16 sending transaction message is forbidden")


def test_a_message_that_is_tried_again_is_not_transactional_any_more() -> None:
    broker = Broker()
    message = replace(broker.message(DELAY="3"), reconsume_times=1)
    stored = broker.sending.stored_form(message, TopicSettings(TOPIC))
    assert stored.topic != HALF_TOPIC
    assert not stored.sys_flag & records.SYS_TX_MASK


def test_what_a_forwarded_message_carries_along_does_not_count() -> None:
    broker = Broker(transaction_check_count_max=2)
    placed = broker.begin(
        REAL_TOPIC="elsewhere", REAL_QID="9", TRANSACTION_CHECK_TIMES="14", __transactionId__="old"
    )
    broker.join()
    broker.tick(TIMEOUT_MS + TICK_MS)
    assert [checks for _, _, checks in broker.asked] == [1]
    assert broker.commit(placed) == ""
    (entry,) = broker.entries()
    assert entry.topic == TOPIC


# ------------------------------------------------------------------------------------------- ending


def test_a_commit_makes_the_message_as_apache_makes_it() -> None:
    broker = Broker()
    placed = broker.begin(b"body", UNIQ_KEY="U1", TAGS="a", KEYS="k", queue="2")
    broker.now_ms += 1000
    assert broker.commit(placed) == ""
    (entry,) = broker.entries()
    (half,) = broker.halves()
    assert (entry.topic, entry.queue_id, bytes(entry.body)) == (TOPIC, 2, b"body")
    assert entry.sys_flag & records.SYS_TX_MASK == records.SYS_TX_COMMIT
    assert entry.prepared_offset == placed.position
    assert (entry.born_ms, entry.born_host) == (half.born_ms, half.born_host)
    properties = properties_of(entry)
    assert not {"REAL_TOPIC", "REAL_QID", "TRANSACTION_CHECK_TIMES"} & properties.keys()
    assert properties["TRAN_MSG"] == "true"
    assert properties["UNIQ_KEY"] == "U1"
    assert broker.operations() == []  # written with those of the tick
    broker.tick()
    assert broker.operations() == [("d", b"0,")]
    assert broker.core.transactions.committed_count == 1
    found: list[list[memoryview] | None] = []
    broker.core.store.query_key(TOPIC, "k", lambda entries, error: found.append(entries))
    assert found
    assert found[0] is not None
    assert len(found[0]) == 1


def test_a_rollback_leaves_only_its_operation_at_once() -> None:
    broker = Broker()
    first, second, third = broker.begin(), broker.begin(), broker.begin()
    assert broker.roll_back(second) == ""
    assert broker.operations() == [("d", b"1,")]
    assert broker.commit(first) == ""
    assert broker.commit(third) == ""
    broker.tick()
    assert broker.operations() == [("d", b"1,"), ("d", b"0,2,")]
    assert len(broker.entries()) == 2
    assert broker.core.transactions.rolled_back_count == 1
    assert broker.open_count == 0


def test_many_ends_share_operations_of_bounded_size() -> None:
    broker = Broker()
    for placed in [broker.begin() for _ in range(1500)]:
        broker.commit(placed)
    broker.tick()
    operations = broker.operations()
    assert 1 < len(operations) < 4
    assert all(len(body) <= 4096 + 8 for _, body in operations)
    offsets = [int(text) for _, body in operations for text in body.decode().split(",") if text]
    assert offsets == list(range(1500))


@pytest.mark.parametrize("first", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("restart", [False, True])
def test_the_first_word_counts(first: int, second: int, restart: bool) -> None:
    broker = Broker()
    placed = broker.begin()
    assert broker.end(placed, first) == ""
    if restart:
        broker.tick()
        broker.reopen()
    before = broker.bodies()
    answer = broker.end(placed, second)
    if restart:
        assert answer.startswith("604 the transaction was ended before")
    elif first == second:
        assert answer == ""
    else:
        assert answer.startswith("604 the transaction was ")
        assert "the first word counts" in answer
    broker.tick()
    assert broker.bodies() == before == ([b"hello"] if first == COMMIT else [])
    assert broker.open_count == 0


def test_nothing_is_decided_by_who_does_not_know() -> None:
    broker = Broker()
    placed = broker.begin()
    assert broker.end(placed, UNKNOWN) == ""
    assert broker.open_count == 0  # nobody has looked at the queue yet
    broker.tick()
    assert broker.open_count == 1
    assert broker.end(placed, 5).startswith("29 commitOrRollback is 5")
    assert broker.commit(placed) == ""


def test_ends_of_what_nobody_began_are_refused() -> None:
    broker = Broker()
    placed = broker.begin()
    other = broker.begin()
    plain = broker.core.append(replace(broker.message(), sys_flag=0))
    broker.settle()
    end = broker.end
    assert end(placed, group="thieves").startswith("1 The producer group wrong")
    assert end(placed, offset=7).startswith("1 The transaction state table offset wrong")
    assert end(placed, offset=-1).startswith("1 The transaction state table offset wrong")
    assert end(placed, position=other.position).startswith("1 The transaction state table offset")
    for position in (placed.position + 1, 1 << 40, -5, plain.position):
        answer = end(placed, position=position)
        assert answer.startswith("1 Find prepared transaction message failed")
    assert broker.bodies() == [b"hello"]  # the plain one
    broker.tick()
    assert broker.operations() == []
    assert broker.open_count == 2


def test_a_commit_into_a_topic_that_is_gone_leaves_the_half_message_open() -> None:
    broker = Broker()
    placed = broker.begin()
    broker.core.topics.delete(TOPIC)
    broker.settle()
    assert broker.commit(placed).startswith("17 topic[orders] not exist")
    broker.tick()
    assert broker.open_count == 1
    broker.core.topics.put([TopicSettings(TOPIC, 2, 2)])
    assert broker.commit(placed) == ""
    assert broker.bodies() == [b"hello"]


def test_a_commit_into_a_topic_that_has_fewer_queues_now() -> None:
    broker = Broker()
    placed = broker.begin(queue="3")
    broker.core.topics.put([TopicSettings(TOPIC, 2, 2)])
    assert broker.commit(placed) == ""
    (entry,) = broker.entries()
    assert entry.queue_id == 1


def test_a_held_pull_is_woken_by_the_commit_and_not_before() -> None:
    broker = Broker()
    woken: list[bool] = []
    polls = broker.core.polls
    polls.hold(HeldRead((TOPIC, 1), broker.now_ms + 60_000, None, woken.append, broker))
    placed = broker.begin(queue="1")
    assert woken == []
    broker.commit(placed)
    assert woken == [False]


def test_who_sets_the_first_question_must_end_before_it() -> None:
    broker = Broker()
    placed = broker.begin(CHECK_IMMUNITY_TIME_IN_SECONDS="20")
    broker.now_ms += 20_001
    assert broker.commit(placed).startswith("604 the transaction could be ended for 20000 ms")
    assert broker.end(placed, from_check=True) == ""
    assert broker.bodies() == [b"hello"]


def test_a_commit_that_cannot_be_stored_leaves_the_half_message_open() -> None:
    broker = Broker()
    placed = broker.begin()
    broker.tick()
    broker.disk.fail("pwritev", error=errno.ENOSPC)
    assert broker.commit(placed).startswith("14 ")
    assert broker.open_count == 1
    assert broker.bodies() == []
    assert broker.commit(placed) == ""
    broker.tick()
    assert broker.bodies() == [b"hello"]
    assert broker.operations() == [("d", b"0,")]


def test_a_rollback_whose_operation_cannot_be_stored_is_tried_again() -> None:
    broker = Broker()
    placed = broker.begin()
    broker.tick()
    broker.disk.fail("pwritev", error=errno.ENOSPC)
    assert broker.roll_back(placed).startswith("14 ")
    assert broker.commit(placed).startswith("604 ")
    broker.tick()
    assert broker.operations() == [("d", b"0,")]
    broker.reopen()
    assert broker.open_count == 0


def test_a_commit_that_fails_together_with_its_operation_is_open_after_a_restart() -> None:
    broker = Broker()
    placed = broker.begin()
    broker.tick()
    outcome: list[SluiceError | None] = []
    ending = Ending(GROUP, placed.queue_offset, placed.position, COMMIT, False)
    broker.core.transactions.end(ending, outcome.append)
    broker.core.transactions.tick(broker.now_ms)  # the operation is staged behind the commit
    broker.disk.fail("pwritev", error=errno.ENOSPC)
    broker.settle()
    assert isinstance(outcome[0], SluiceError)
    broker.tick(1100)
    broker.crash()
    assert broker.open_count == 1
    assert broker.commit(placed) == ""
    assert broker.bodies() == [b"hello"]
