"""Topics in memory as clients see them: the same requests, bounds, and what a start leaves."""

from __future__ import annotations

import asyncio

import pytest

from sluice.broker.retries import SendBack
from sluice.broker.topics import TopicSettings
from sluice.errors import MessageIllegal, SluiceError
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import (
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    Rig,
    offset_fields,
    queue_table,
    running,
    topic_fields,
)
from tests.unit.broker.pop_kit import INVISIBLE_MS, PopBench
from tests.unit.broker.topic_kit import TopicBroker
from tests.unit.loops import run_once, until

TOPIC = "fleeting"
IN_MEMORY = "+storage=memory"


def broker_in_memory(**attributes: str) -> TopicBroker:
    broker = TopicBroker()
    broker.make(TOPIC, 4, storage="memory", **attributes)
    return broker


# ---------------------------------------------------------------------------------------- as others


def test_messages_go_in_and_out_over_the_wire() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic(TOPIC, 2, attributes=IN_MEMORY)
            waits = asyncio.create_task(
                rig.pull(TOPIC, 0, flags=FLAG_SUBSCRIPTION | FLAG_SUSPEND, link=await rig.connect())
            )
            await until(lambda: rig.broker.core.polls.held_count == 1)
            sent = await rig.send(TOPIC, b"first", TAGS="a")
            assert (sent["queueId"], sent["queueOffset"]) == ("0", "0")
            held = await waits
            assert (held.code, b"first" in bytes(held.body)) == (0, True)
            await rig.send(TOPIC, b"second", TAGS="b")
            tagged = await rig.pull(TOPIC, 0, subscription="b")
            assert b"second" in bytes(tagged.body)
            assert b"first" not in bytes(tagged.body)
            high = await rig.done(Request.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": 0})
            low = await rig.done(Request.GET_MIN_OFFSET, {"topic": TOPIC, "queueId": 0})
            assert (low.ext["offset"], high.ext["offset"]) == ("0", "2")
            shown = await rig.done(
                Request.VIEW_MESSAGE_BY_ID, {"offset": int(sent["msgId"][16:], 16)}
            )
            assert b"first" in bytes(shown.body)
            stats = await rig.json(Request.GET_TOPIC_STATS_INFO, {"topic": TOPIC})
            assert queue_table(stats)[0]["maxOffset"] == 2
            units = await rig.json(
                Request.QUERY_CONSUME_QUEUE,
                {"topic": TOPIC, "queueId": 0, "index": 0, "count": 9},
            )
            assert len(units["queueData"]) == 2
            assert rig.broker.core.stats.puts()[TOPIC][0] == 2
            # A young topic is read from its first message, whatever the consumer says.
            assert await rig.committed("new-readers", TOPIC) == 0

    run_once(work())


def test_batches_keys_and_times_to_live_work_there() -> None:
    broker = broker_in_memory(dedup_window_ms="60000", message_ttl_ms="5000")
    parts = [(b"a", {"KEYS": "a"}), (b"b", {"KEYS": "b"}), (b"a again", {"KEYS": "a"})]
    run = broker.send_batch(TOPIC, parts).run
    assert run.positions[0] == run.positions[2]
    assert broker.send(TOPIC, KEYS="b").first.position == run.positions[1]
    assert broker.bodies(TOPIC) == [b"a", b"b"]
    broker.run(5_000)
    broker.send(TOPIC, body=b"c")
    assert broker.bodies(TOPIC) == [b"c"]


def test_what_has_to_wait_is_refused_and_nothing_is_stored() -> None:
    broker = broker_in_memory()
    for properties, what in (
        ({"DELAY": "3"}, "delayed"),
        ({"TIMER_DELAY_SEC": "5"}, "timed"),
        ({"TIMER_DELIVER_MS": "99"}, "timed"),
        ({"TRAN_MSG": "true", "PGROUP": "g"}, "transactional"),
    ):
        with pytest.raises(MessageIllegal, match=f"storage=memory.*no {what} messages"):
            broker.send(TOPIC, properties=properties)
    with pytest.raises(MessageIllegal):
        broker.send_batch(TOPIC, [(b"x", {"DELAY": "3"})])
    assert broker.bodies(TOPIC) == []
    broker.send(TOPIC, properties={"DELAY": "0"})


@pytest.mark.parametrize(
    ("attributes", "remark"),
    [
        ("+storage=disk", "allowed: log, memory"),
        ("+memory.bytes.max=70000", "memory.bytes.max is for topics with storage=memory"),
        ("+memory.when.full=drop,+storage=log", "memory.when.full is for topics"),
        ("+storage=memory,+memory.bytes.max=65535", "allowed: 65536 to"),
        ("+storage=memory,+memory.when.full=wait", "allowed: drop, refuse"),
        ("+storage=memory,+queue.type=BatchCQ", "no queue.type=BatchCQ"),
        ("+storage=memory,+message.type=DELAY", "takes no messages of message.type=DELAY"),
    ],
)
def test_attributes_that_cannot_be(attributes: str, remark: str) -> None:
    async def work() -> None:
        async with running() as rig:
            _, text = await rig.refused_topic("t", attributes=attributes)
            assert remark in text
            assert rig.broker.core.topics.get("t") is None

    run_once(work())


def test_where_messages_are_is_decided_when_the_topic_is_made() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("plain")
            await rig.make_topic(TOPIC, attributes=IN_MEMORY)
            for name, change in (
                ("plain", IN_MEMORY),
                (TOPIC, "+storage=log"),
                (TOPIC, "-storage"),
            ):
                fields = topic_fields(name, attributes=change)
                _, remark = await rig.refused(Request.UPDATE_AND_CREATE_TOPIC, fields)
                assert "unchangeable" in remark
            await rig.make_topic(TOPIC, attributes="+memory.bytes.max=100000")

    run_once(work())


def test_a_full_topic_drops_or_refuses() -> None:
    async def work() -> None:
        async with running() as rig:
            bound = f"{IN_MEMORY},+memory.bytes.max=65536"
            await rig.make_topic("drops", 1, attributes=bound)
            await rig.make_topic("refuses", 1, attributes=f"{bound},+memory.when.full=refuse")
            for _ in range(10):
                await rig.send("drops", bytes(20_000))
            moved = await rig.pull("drops", 0)
            assert (moved.code, moved.ext["nextBeginOffset"]) == (Response.PULL_OFFSET_MOVED, "7")
            assert moved.remark == "OFFSET_TOO_SMALL"
            for _ in range(3):
                await rig.send("refuses", bytes(20_000))
            code, remark = await rig.refused_send("refuses", filler="x" * 10_000)
            assert (code, "memory.bytes.max" in remark) == (2, True)
            assert (await rig.pull("refuses", 0)).ext["maxOffset"] == "3"

    run_once(work())


# ------------------------------------------------------------------------------------------- starts


async def _lag(rig: Rig) -> int:
    stats = await rig.json(Request.GET_CONSUME_STATS, {"consumerGroup": "readers"})
    row = queue_table(stats)[0]
    return int(row["brokerOffset"]) - int(row["consumerOffset"])


def test_a_start_forgets_the_messages_and_nobody_misses_a_new_one() -> None:
    async def work() -> None:
        files = MemoryFiles()
        async with running(files=files) as rig:
            await rig.make_topic(TOPIC, 1, attributes=IN_MEMORY)
            await rig.make_group("readers")
            for _ in range(5):
                await rig.send(TOPIC, b"old")
            assert (await rig.commit("readers", TOPIC, 3)).code == 0
        async with running(files=files) as rig:
            assert await _lag(rig) == 0
            sent = await rig.send(TOPIC, b"new")
            # The group that starts anew, the consumer that ran on, and a group that is new.
            begins = [await rig.committed(group, TOPIC) for group in ("readers", "others")]
            assert begins == [int(sent["queueOffset"])] * 2
            for offset in (0, 3, 5, begins[0]):
                pulled = await rig.pull(TOPIC, offset)
                assert (pulled.code, b"new" in bytes(pulled.body)) == (0, True)
            assert await _lag(rig) == 1
            # It commits once more what it had read before.
            assert (await rig.commit("readers", TOPIC, 4)).code == 0
            assert await rig.committed("readers", TOPIC) == begins[0]

    run_once(work())


def test_offsets_of_a_group_hold_even_where_the_blocks_were_lost() -> None:
    """Whatever is known of offsets counts: a queue never begins below what a group has read."""
    broker = broker_in_memory()
    broker.core.groups.require("readers")
    broker.core.offsets.commit("readers", TOPIC, 0, 1_000_000)
    broker.core.store.offsets.send()
    broker.core.ask_turn()
    broker.settle()
    broker = broker.crashed()
    assert broker.send(TOPIC, body=b"new").first.queue_offset >= 1_000_000
    assert broker.bodies(TOPIC) == [b"new"]


def test_an_unread_queue_answers_with_where_it_begins() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic(TOPIC, 1, attributes=IN_MEMORY)
            code, _ = await rig.refused(
                Request.QUERY_CONSUMER_OFFSET, offset_fields("readers", TOPIC, 0)
            )
            assert code == Response.QUERY_NOT_FOUND

    run_once(work())


def test_what_a_consumer_sends_back_is_tried_again_from_the_log() -> None:
    broker = broker_in_memory()
    broker.core.groups.require("readers")
    position = broker.send(TOPIC, body=b"failed").first.position
    told: list[SluiceError | None] = []
    broker.core.retries.send_back(
        SendBack("readers", position, 1, TOPIC, 16), lambda placed, error: told.append(error)
    )
    broker.settle()
    assert told == [None]
    broker = broker.crashed()
    for _ in range(20):
        broker.run(1_000)
    assert broker.bodies("%RETRY%readers") == [b"failed"]


def test_pops_take_from_memory_and_go_on_after_a_start() -> None:
    bench = PopBench()
    bench.core.topics.put([TopicSettings("orders", 1, 1, attributes={"storage": "memory"})])
    bench.settle()
    bench.put(b"1", b"2", b"3")
    taken = bench.pop()
    assert [each.body for each in taken] == [b"1", b"2", b"3"]
    bench.ack(taken[0])
    bench.pass_ms(INVISIBLE_MS + 10_000, 1_000)
    assert sorted(each.body for each in bench.pop()) == [b"2", b"3"]
    bench.crash()
    bench.put(b"new")
    bench.pass_ms(INVISIBLE_MS + 10_000, 1_000)
    # Those that had come again were in the log already, as copies in the retry topic.
    assert sorted(each.body for each in bench.pop()) == [b"2", b"3", b"new"]
