"""The edges of business messages: what a client says of itself is not what the broker knows, and
what was answered holds after kill -9.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from sluice.broker import delay_forms, priorities
from sluice.broker.admin_groups import _checked
from sluice.broker.delay_desk import DelayDesk
from sluice.broker.groups import GroupSettings
from sluice.broker.half_messages import begun
from sluice.broker.sending import Sending
from sluice.broker.topics import HALF_TOPIC, OP_TOPIC, TIMER_TOPIC, TopicSettings
from sluice.errors import Busy, MessageIllegal, SluiceError
from sluice.model import Message
from sluice.protocol import records
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.record_runs import Run
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import BROKER, Rig, running, send_fields
from tests.unit.broker.pop_kit import (
    GROUP,
    RETRY_TOPIC,
    TOPIC,
    PopBench,
    counts,
    pop_fields,
    pop_in_order,
    ticket,
)
from tests.unit.broker.retry_kit import HOST, Broker, value
from tests.unit.loops import run_once


@pytest.fixture
def broker() -> Broker:
    broker = Broker()
    broker.make()
    return broker


def text(**properties: str) -> bytes:
    return records.format_properties(properties)


def put_half(broker: Broker, key: str) -> None:
    properties = text(UNIQ_KEY=key, TRAN_MSG="true", PGROUP="pg")
    message = Message("orders", 0, b"half", properties, sys_flag=records.SYS_TX_PREPARED)
    broker.core.append(begun(message, rejected=False))
    broker.settle()


def put_timer(broker: Broker, key: str) -> Message:
    message = Message("orders", 0, b"later", text(UNIQ_KEY=key, TIMER_DELAY_SEC="3600"))
    stored = broker.core.delays.requested_form(message)
    broker.core.append(stored)
    broker.settle()
    return stored


# ------------------------------------------------------------------------------- forged topics


@pytest.mark.parametrize("topic", [HALF_TOPIC, TIMER_TOPIC])
def test_a_retry_does_not_fetch_what_nobody_was_given(broker: Broker, topic: str) -> None:
    put_half(broker, "K")
    put_timer(broker, "K")
    broker.run(200, 50)
    broker.send_to_retry(1, "K", RETRY_TOPIC=topic)
    broker.run(20_000)
    (copy,) = broker.entries("%RETRY%g")
    assert bytes(copy.body) == b"client's body"


def test_a_retry_does_not_fetch_what_another_group_was_given(broker: Broker) -> None:
    broker.make("other", "payments")
    broker.send("%RETRY%other", "K")
    broker.send("payments", "L")
    broker.join("one", "g", "orders")
    broker.run(200, 50)
    broker.send_to_retry(1, "K", RETRY_TOPIC="%RETRY%other")
    broker.send_to_retry(1, "L", RETRY_TOPIC="payments")
    broker.run(20_000)
    assert [bytes(copy.body) for copy in broker.entries("%RETRY%g")] == [b"client's body"] * 2


@pytest.mark.parametrize("topic", [OP_TOPIC, HALF_TOPIC, TIMER_TOPIC, "rmq_sys_sluice_state"])
def test_a_dead_letter_is_not_sent_into_the_brokers_own_topics(broker: Broker, topic: str) -> None:
    put_half(broker, "H")
    broker.run(100, 50)
    broker.send_to_retry(5, "X", times_max=1, RETRY_TOPIC=topic, TAGS="d")
    told: list[tuple[object, ...]] = []
    resend = broker.core.dead_letters.resend
    resend("g", 0, [0], to_topic=True, done=lambda *answer: told.append(answer))
    broker.settle()
    assert "'failed'" in str(told)
    assert "forbidden: send it to the group instead" in str(told)
    again = broker.restarted()
    again.run(100, 50)
    assert again.core.transactions.table.open_count == 1


# --------------------------------------------------------------------------------- transactions


async def send_half(rig: Rig, topic: str, **properties: str) -> tuple[int, dict[str, str]]:
    fields = send_fields(topic, 0, UNIQ_KEY="K", PGROUP="pg", **properties)
    answer = await rig.ask(
        Request.SEND_MESSAGE_V2, {**fields, "f": records.SYS_TX_PREPARED}, b"half"
    )
    return answer.code, answer.ext


def test_a_transactional_message_to_a_retry_topic_waits_for_its_commit() -> None:
    topic = "%RETRY%readers"

    async def work() -> None:
        async with running() as rig:
            await rig.make_group("readers")
            store = rig.broker.store
            code, placed = await send_half(rig, topic, TRAN_MSG="true")
            assert code == Response.SUCCESS
            assert (store.max_offset(topic, 0), store.max_offset(HALF_TOPIC, 0)) == (0, 1)
            await rig.done(
                Request.END_TRANSACTION,
                {
                    "producerGroup": "pg",
                    "tranStateTableOffset": placed["queueOffset"],
                    "commitLogOffset": int(placed["msgId"][16:], 16),
                    "commitOrRollback": records.SYS_TX_COMMIT,
                    "msgId": "K",
                },
            )
            assert store.max_offset(topic, 0) == 1
            code, _ = await send_half(rig, topic)  # the flag alone says nothing
            assert code == Response.MESSAGE_ILLEGAL
            # As consumers before 4.6.1 send back what was transactional once.
            fields = send_fields(
                topic, 0, UNIQ_KEY="L", PGROUP="pg", TRAN_MSG="true", DELAY="3", RETRY_TOPIC="t"
            )
            flags = {"f": records.SYS_TX_PREPARED, "j": 1}
            await rig.done(Request.SEND_MESSAGE_V2, {**fields, **flags}, b"back")
            assert store.max_offset(HALF_TOPIC, 0) == 1

    run_once(work())


def test_what_a_retry_topic_holds_is_no_part_of_a_transaction(broker: Broker) -> None:
    for number, flag in enumerate((0, records.SYS_TX_PREPARED, 0)):
        message = Message("%RETRY%g", 0, b"x", text(UNIQ_KEY=f"A{number}"), sys_flag=flag)
        broker.core.retries.send(message, 16, lambda *answer: None)
    broker.run(3_000)
    keys = [value(entry, "UNIQ_KEY") for entry in broker.restarted().entries("%RETRY%g")]
    assert keys == ["A0", "A1", "A2"], "an entry that is prepared has no place in its queue"


# --------------------------------------------------------------------------------------- timers


def test_a_recall_waits_until_keys_are_found_again(broker: Broker) -> None:
    stored = put_timer(broker, "T1")
    text_of = delay_forms.handle_of(stored, "broker-a", "T1")
    again = broker.restarted()
    desk = DelayDesk(again.core, again.core.delays)
    told: list[SluiceError | None] = []
    assert not again.core.store.indexing.live
    with pytest.raises(Busy, match="key index"):
        desk.recall(desk.handle("orders", text_of), "", told.append)
    again.run(300, 50)
    desk.recall(desk.handle("orders", text_of), "", told.append)
    again.settle()
    assert told == [None]


@pytest.mark.parametrize("name", ["TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "TIMER_ROLL_TIMES"])
def test_the_brokers_own_properties_are_refused_with_a_level_too(broker: Broker, name: str) -> None:
    message = Message("orders", 0, b"x", text(UNIQ_KEY="K", DELAY="1", **{name: "5"}))
    with pytest.raises(MessageIllegal, match=f"{name} is the broker's own"):
        broker.core.delays.requested_form(message)


# ----------------------------------------------------------------------------------- priorities


def urgent(bench: PopBench, factor: str | None = None) -> TopicSettings:
    settings = TopicSettings("urgent", 4, 4, attributes={"message.type": "PRIORITY"})
    bench.core.topics.put([settings, TopicSettings(f"%RETRY%{GROUP}_urgent", 1, 1)])
    extra = {} if factor is None else {"attributes": {"priority.factor": factor}}
    bench.core.groups.put([GroupSettings(GROUP, extra=extra)])
    bench.settle()
    return settings


def plans(bench: PopBench, settings: TopicSettings, **changes: object) -> set[tuple[int, ...]]:
    """The orders in which pops look at queues; -1 is the retry topic."""
    request = bench.request(topic="urgent", **changes)
    found = [list(bench.core.pops._taking.plan(request, settings)) for _ in range(500)]
    return {
        tuple(-1 if topic.startswith("%RETRY%") else queue for _, topic, queue in plan)
        for plan in found
    }


def test_pops_by_priority_look_at_retries_last() -> None:
    bench = PopBench()
    assert plans(bench, urgent(bench)) == {(3, 2, 1, 0, -1)}


def test_ordered_pops_do_not_go_by_priority() -> None:
    bench = PopBench()
    found = plans(bench, urgent(bench), order=True)
    assert {plan[0] for plan in found} == {0, 1, 2, 3}
    assert all((b - a) % 4 == 1 for plan in found for a, b in pairwise(plan))


def test_a_group_says_how_many_of_its_pops_go_by_priority() -> None:
    bench = PopBench()
    settings = urgent(bench, "0")
    assert {plan[0] for plan in plans(bench, settings)} == {-1, 0, 1, 2, 3}
    settings = urgent(bench, "50")
    found = plans(bench, settings)
    assert (3, 2, 1, 0, -1) in found
    assert (0, 1, 2, 3, -1) in found


def test_the_priority_factor_of_a_group_is_kept_and_told() -> None:
    async def work() -> None:
        async with running() as rig:

            async def attributes() -> object:
                ask = Request.GET_SUBSCRIPTIONGROUP_CONFIG
                return (await rig.json(ask, {"group": "readers"}))["attributes"]

            await rig.make_group("readers", attributes={"+priority.factor": "50"})
            assert await attributes() == {"priority.factor": "50"}
            await rig.make_group("readers", retryMaxTimes=3)
            assert await attributes() == {"priority.factor": "50"}
            await rig.make_group("readers", attributes={"-priority.factor": ""})
            assert await attributes() == {}

    run_once(work())


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"+priority.factor": "101"}, "allowed: 0 to 100"),
        ({"+priority.factor": "-1"}, "allowed: 0 to 100"),
        ({"+priority.factor": "high"}, "allowed: 0 to 100"),
        ({"priority.factor": "5"}, "wrong format key"),
        ({"-priority.factor": ""}, "only add attribute"),
        ({"+lite.sub": "1"}, "unsupported key: lite.sub"),
    ],
)
def test_no_other_attribute_of_a_group_is_taken(changes: dict[str, str], remark: str) -> None:
    with pytest.raises(SluiceError, match=remark):
        _checked({"groupName": "g", "attributes": changes}, None)
    with pytest.raises(SluiceError, match="nonexistent"):
        priorities.altered_attributes({}, {"-priority.factor": ""})


# ----------------------------------------------------------------------------------------- pops


def notices(bench: PopBench, expression: str, **changes: object) -> list[tuple[bool, bool]]:
    """What a notification says; the list grows while it waits."""
    told: list[tuple[bool, bool]] = []
    request = bench.request(count_max=0, expression=expression, expression_kind="TAG", **changes)
    bench.core.pops.notify(request, bench, lambda *answer: told.append(answer))
    bench.settle()
    return told


def test_a_notification_is_of_messages_that_are_wanted() -> None:
    bench = PopBench()
    bench.put(b"a", TAGS="A")
    assert notices(bench, "B") == [(False, False)]
    assert notices(bench, "A") == notices(bench, "*") == [(True, False)]
    waiting = notices(bench, "B", poll_ms=60_000)
    bench.put(b"a", TAGS="A")
    assert waiting == []
    bench.put(b"b", TAGS="B", queue_id=1)
    assert waiting == [(True, False)]
    assert sorted(bench.bodies()) == [b"a", b"a", b"b"], "a look takes nothing"


@pytest.mark.parametrize("crash", [False, True])
def test_what_was_put_off_was_not_tried(crash: bool) -> None:
    bench = PopBench(1)
    bench.put(b"a", b"b")
    suspended, failed = bench.pop()
    for each, suspend in ((suspended, True), (failed, False)):
        name = (GROUP, TOPIC, 0)
        bench.core.pops.change(
            name, each.offset, each.ticket, 1_000, lambda *answer: None, suspend=suspend
        )
    bench.settle()
    if crash:
        bench.crash()
    bench.pass_ms(2_000)
    times = {bytes(e.body): e.reconsume_times for e in bench.stored(RETRY_TOPIC)}
    assert times == {b"a": 0, b"b": 1}


@pytest.mark.parametrize("crash", [False, True])
def test_what_was_put_off_in_order_was_not_tried(crash: bool) -> None:
    bench = PopBench(1)
    bench.put(b"a")
    (taken,) = pop_in_order(bench)
    bench.core.pops.change(
        (GROUP, TOPIC, 0), 0, taken.ticket, 1_000, lambda *answer: None, suspend=True
    )
    bench.settle()
    if crash:
        bench.crash()
    bench.pass_ms(2_000)
    assert counts(bench) == [(-1, 0)]
    bench.pass_ms(120_000)
    assert counts(bench) == [(0, 1), (-1, 1)]


@pytest.mark.parametrize("said", [{}, {"suspend": "false"}, {"suspend": "true"}])
def test_a_consumer_says_that_it_puts_off(said: dict[str, str]) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic(TOPIC, 1)
            await rig.send(TOPIC)
            popped = await rig.done(Request.POP_MESSAGE, pop_fields())
            fields = {**ticket(popped), "invisibleTime": 60_000, **said}
            await rig.done(Request.CHANGE_MESSAGE_INVISIBLETIME, fields)
            point = rig.broker.core.pops.state.holder((GROUP, TOPIC, 0), 0)
            assert point is not None
            assert point.suspended == (said.get("suspend") == "true")

    run_once(work())


# --------------------------------------------------------------------------------------- resets


def test_a_reset_that_nobody_heard_of_outlives_a_kill(broker: Broker) -> None:
    for number in range(10):
        broker.send(key=f"k{number}")
    broker.core.offsets.commit("g", "orders", 0, 8)
    told: list[SluiceError | None] = []
    broker.core.offsets.reset("g", "orders", {0: 2, 1: 0}, told.append)
    broker.core.ask_turn()
    broker.settle()
    assert told == [None]
    again = broker.restarted()
    offsets = again.core.offsets
    assert offsets.committed("g", "orders", 0) == 2
    assert not offsets.commit("g", "orders", 0, 9), "it was read before the reset"
    assert offsets.take_reset("g", "orders", 0) == 2
    assert offsets.commit("g", "orders", 0, 3)
    again.run(1_000, 50)
    last = again.restarted().core.offsets
    assert last.take_reset("g", "orders", 0) is None, "it was told"
    assert last.take_reset("g", "orders", 1) == 0
    assert last.committed("g", "orders", 0) == 3


def test_a_reset_goes_with_its_topic_and_its_group(broker: Broker) -> None:
    broker.make("h", "payments")
    for group, topic in (("g", "orders"), ("h", "payments")):
        broker.core.offsets.reset(group, topic, {0: 0})
    broker.run(1_000, 50)
    offsets = broker.core.offsets
    offsets.give_back(offsets.take_topic("orders"))
    assert broker.core.store.table("reset") == {"orders@g@0": 0, "payments@h@0": 0}
    offsets.take_topic("orders")
    offsets.forget_group("h", lambda error: None)
    broker.run(1_000, 50)
    assert broker.core.store.table("reset") == {}


@pytest.mark.parametrize("queues", [0, 1, 1_000, 2_500])
def test_a_reset_of_many_queues_is_told_once(broker: Broker, queues: int) -> None:
    told: list[SluiceError | None] = []
    broker.core.offsets.reset("g", "orders", dict.fromkeys(range(queues), 7), told.append)
    broker.core.ask_turn()
    broker.settle()
    assert told == [None]
    again = broker.restarted().core.offsets
    assert again.of("g", "orders") == dict.fromkeys(range(queues), 7)
    assert all(again.take_reset("g", "orders", queue_id) == 7 for queue_id in range(queues))


def test_a_reset_is_answered_when_it_is_safe() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_group("readers")
            for _ in range(3):
                await rig.send("orders")
            await rig.commit("readers", "orders", 3)
            fields = {"topic": "orders", "group": "readers", "timestamp": 0, "isForce": "true"}
            await rig.done(Request.INVOKE_BROKER_TO_RESET_OFFSET, fields)
            table = rig.broker.store.table
            assert table("reset") == {"orders@readers@0": 0, "orders@readers@1": 0}
            assert table("offset")["orders@readers"]["0"] == 0

    run_once(work())


def test_what_was_handed_out_stays_so(broker: Broker) -> None:
    for number in range(50):
        broker.send(key=f"k{number}")
    offsets = broker.core.offsets
    offsets.pulled("g", "orders", 0, 50)
    offsets.pulled("g", "orders", 0, 32)  # another pull, answered later
    position = broker.entries("orders")[40].position
    assert broker.send_back(position, -1) is not None


# ---------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("flag", [0x80, 0xC0])
@pytest.mark.parametrize("number", ["", "1", "2"])
def test_a_message_is_no_batch_that_is_stored_whole(broker: Broker, flag: int, number: str) -> None:
    sending, settings = Sending(broker.core), broker.core.topics.get("orders")
    assert settings is not None
    properties = text(UNIQ_KEY="Z", **({"INNER_NUM": number} if number else {}))
    message = Message("orders", 0, b"x", properties, sys_flag=flag)
    run = Run("orders", 0, flag, broker.now_ms, HOST, 0, [(0, b"x", properties)])
    with pytest.raises(MessageIllegal, match="send it without the flag"):
        sending.stored_form(message, settings)
    with pytest.raises(MessageIllegal, match="send it without the flag"):
        sending.send_run(run, settings, [records.message_keys(properties)], lambda error: None)
    with pytest.raises(MessageIllegal, match="send it without the flag"):
        sending.is_half(message, settings)  # asked first where it goes to a retry topic


# ---------------------------------------------------------------------------------------- locks


def test_nobody_locks_or_unlocks_for_a_member_over_another_connection() -> None:
    queue = MessageQueue("orders", BROKER, 0)
    lock = bodies.write_lock_request(bodies.LockRequest("one", "readers", (queue,)))

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.join("readers", {"orders": "*"}, client_id="one")
            stranger = await rig.connect()
            await rig.join("readers", {"orders": "*"}, client_id="two", link=stranger)
            answer = await rig.ask(Request.LOCK_BATCH_MQ, body=lock, link=stranger)
            assert answer.code == Response.SUBSCRIPTION_NOT_EXIST
            assert rig.broker.core.locks.owner(("readers", "orders", 0)) is None
            await rig.done(Request.LOCK_BATCH_MQ, body=lock)
            answer = await rig.ask(Request.UNLOCK_BATCH_MQ, body=lock, link=stranger)
            assert answer.code == Response.SUBSCRIPTION_NOT_EXIST
            assert rig.broker.core.locks.owner(("readers", "orders", 0)) == "one"

    run_once(work())


def locked(broker: Broker, client_id: str) -> list[tuple[str, int]]:
    broker.join(client_id, "g", "orders")
    owned: list[tuple[str, int]] = []
    who, queues = (client_id, client_id), [("orders", 0), ("orders", 1)]
    broker.core.ordering.lock("g", who, queues, lambda queues, error: owned.extend(queues))
    broker.settle()
    return owned


def test_an_owner_keeps_its_queues_where_nothing_else_is_written(broker: Broker) -> None:
    for _ in range(6):
        assert len(locked(broker, "one")) == 2
        broker.run(20_000, 10_000)
    assert len(locked(broker, "one")) == 2
    again = broker.restarted()
    again.now_ms += 2_000
    assert locked(again, "two") == []
    assert len(locked(again, "one")) == 2


def test_renewals_are_not_written_while_others_write(broker: Broker) -> None:
    assert locked(broker, "one")
    broker.run(14_000, 7_000)
    end = broker.core.store.log.end
    assert locked(broker, "one")
    assert broker.core.store.log.end == end
