"""The requests that every client sends, each once over a real connection, in its good case."""

from __future__ import annotations

from sluice.clock import wall_ms
from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.message_batches import join_batch
from sluice.protocol.remoting import BINARY, RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import (
    BROKER,
    FLAG_SUBSCRIPTION,
    Rig,
    pull_fields,
    running,
    send_fields,
)
from tests.unit.loops import run_once, until


def long_fields(topic: str) -> dict[str, object]:
    """The fields of code 10, as the Go client sends them."""
    return {
        "producerGroup": "senders",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": wall_ms(),
        "flag": 0,
        "properties": "TAGS\x01TagA\x02",
        "reconsumeTimes": 0,
        "unitMode": "false",
        "batch": "false",
    }


def messages_in(answer: RemotingCommand) -> list[records.Entry]:
    found, at, body = [], 0, bytes(answer.body)
    while at < len(body):
        size, _ = records.peek(body, at)
        found.append(records.decode(body[at : at + size]))
        at += size
    return found


def test_all_ways_to_send() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            long = await rig.done(Request.SEND_MESSAGE, long_fields("orders"), b"long")
            assert long.ext["queueOffset"] == "0"
            assert (await rig.send("orders", b"short"))["queueOffset"] == "1"
            batch = join_batch([(0, b"one", b""), (0, b"two", b"")])
            fields = {**send_fields("orders"), "m": "true"}
            both = await rig.done(Request.SEND_BATCH_MESSAGE, fields, batch)
            assert both.ext["queueOffset"] == "2"
            assert len(both.ext["msgId"].split(",")) == 2
            texts = {name: str(value) for name, value in send_fields("orders").items()}
            rig.link.oneway(Request.SEND_MESSAGE_V2, texts, b"no answer")
            store = rig.broker.store
            await until(lambda: store.max_offset("orders", 0) == 5)
            found = messages_in(await rig.pull("orders", 0))
            stored = [bytes(message.body) for message in found]
            assert stored == [b"long", b"short", b"one", b"two", b"no answer"]

    run_once(work())


def test_a_send_is_stored_alike_whatever_its_header_looks_like() -> None:
    """A binary header of the usual form goes a way of its own."""

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            quick = await RemotingLink.open(rig.broker.address, serialization=BINARY)
            fields = send_fields("orders", UNIQ_KEY="0123456789ABCDEF", KEYS="k1 k2", TAGS="TagA")
            answers = [
                await rig.ask(Request.SEND_MESSAGE_V2, fields, b"body", link)
                for link in (rig.link, quick)
            ]
            plain, other = messages_in(await rig.pull("orders", 0))
            for name in ("topic", "queue_id", "flag", "sys_flag", "born_ms", "reconsume_times"):
                assert getattr(plain, name) == getattr(other, name)
            texts = [records.parse_properties(entry.properties) for entry in (plain, other)]
            assert [text.pop("__CRC32#") for text in texts]
            assert texts[0] == texts[1]
            assert [int(answer.ext["queueOffset"]) for answer in answers] == [0, 1]
            names = {"queueId", "transactionId", "MSG_REGION", "TRACE_ON"}
            first, second = ({name: answer.ext[name] for name in names} for answer in answers)
            assert first == second
            await quick.close()

    run_once(work())


def test_topics_that_clients_of_a_unit_make_say_so() -> None:
    unit, unit_subscription = 1, 2
    consumer = bodies.ConsumerData(
        *("readers", "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET"), unit_mode=True
    )

    async def work() -> None:
        async with running() as rig:
            quick = await RemotingLink.open(rig.broker.address, serialization=BINARY)
            for name, link in (("json", rig.link), ("binary", quick)):
                fields = send_fields(name, UNIQ_KEY="0123456789ABCDEF") | {"k": "true"}
                answer = await rig.ask(Request.SEND_MESSAGE_V2, fields, b"body", link)
                assert answer.code == Response.SUCCESS
                found = await rig.json(Request.GET_TOPIC_CONFIG, {"topic": name})
                assert found["topicSysFlag"] == unit
            await quick.close()
            heartbeat = bodies.Heartbeat("client-1", (), (consumer,))
            await rig.done(Request.HEART_BEAT, body=bodies.write_heartbeat(heartbeat))
            found = await rig.json(Request.GET_TOPIC_CONFIG, {"topic": "%RETRY%readers"})
            assert found["topicSysFlag"] == unit_subscription

    run_once(work())


def test_a_lite_pull_is_a_pull() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.send("orders", b"one")
            fields = pull_fields("orders", 0, 0, "readers", FLAG_SUBSCRIPTION)
            answer = await rig.done(Request.LITE_PULL_MESSAGE, fields)
            assert [bytes(each.body) for each in messages_in(answer)] == [b"one"]
            assert answer.ext["nextBeginOffset"] == "1"

    run_once(work())


async def offset(rig: Rig, code: int, queue_id: int = 0, **fields: object) -> int:
    answer = await rig.done(code, {"topic": "orders", "queueId": queue_id, **fields})
    return int(answer.ext.get("offset", answer.ext.get("timestamp", "?")))


def test_bounds_and_times_of_a_queue() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            assert await offset(rig, Request.GET_MAX_OFFSET) == 0
            assert await offset(rig, Request.GET_EARLIEST_MSG_STORETIME) == -1
            before_ms = wall_ms()
            for _ in range(3):
                await rig.send("orders")
            assert await offset(rig, Request.GET_MIN_OFFSET) == 0
            assert await offset(rig, Request.GET_MAX_OFFSET) == 3
            assert await offset(rig, Request.GET_MAX_OFFSET, queue_id=1) == 0
            earliest_ms = await offset(rig, Request.GET_EARLIEST_MSG_STORETIME)
            assert before_ms <= earliest_ms <= wall_ms()
            search = Request.SEARCH_OFFSET_BY_TIMESTAMP
            assert await offset(rig, search, timestamp=0) == 0
            assert await offset(rig, search, timestamp=earliest_ms) == 0
            later_ms = wall_ms() + 60_000
            assert await offset(rig, search, timestamp=later_ms) == 3
            assert await offset(rig, search, timestamp=later_ms, boundaryType="UPPER") == 2

    run_once(work())


def test_queues_are_locked_for_one_client() -> None:
    queues = tuple(MessageQueue("orders", BROKER, number) for number in range(2))

    async def locked(rig: Rig, client_id: str) -> list[int]:
        body = bodies.write_lock_request(bodies.LockRequest(client_id, "readers", queues))
        answer = await rig.done(Request.LOCK_BATCH_MQ, body=body)
        return sorted(queue.queue_id for queue in bodies.read_locked_queues(answer.body))

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            for client_id in ("one", "two"):
                await rig.join("readers", {"orders": "*"}, client_id=client_id)
            assert await locked(rig, "one") == [0, 1]
            assert await locked(rig, "two") == []
            request = bodies.LockRequest("one", "readers", queues[:1])
            await rig.done(Request.UNLOCK_BATCH_MQ, body=bodies.write_lock_request(request))
            assert await locked(rig, "two") == [0]
            assert await locked(rig, "one") == [1]

    run_once(work())


def test_a_stranger_gets_no_lock() -> None:
    queue = MessageQueue("orders", BROKER, 0)

    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.join("readers", {"orders": "*"}, client_id="one")
            for client_id, group in (("stranger", "readers"), ("one", "others")):
                request = bodies.LockRequest(client_id, group, (queue,))
                code, remark = await rig.refused(
                    Request.LOCK_BATCH_MQ, body=bodies.write_lock_request(request)
                )
                assert code == Response.SUBSCRIPTION_NOT_EXIST
                assert f"{client_id} is no member of group {group}" in remark
            request = bodies.LockRequest("one", "readers", (queue,))
            lock = bodies.write_lock_request(request)
            answer = await rig.done(Request.LOCK_BATCH_MQ, body=lock)
            assert bodies.read_locked_queues(answer.body) == (queue,)

    run_once(work())


def test_who_leaves_is_out_of_the_list_and_the_others_hear_of_it() -> None:
    told: list[str] = []

    def other(link: RemotingLink, request: RemotingCommand) -> None:
        if request.code == Request.NOTIFY_CONSUMER_IDS_CHANGED:
            told.append(request.ext["consumerGroup"])

    async def work() -> None:
        async with running() as rig:
            stays = await rig.connect(other)
            await rig.join("readers", {"orders": "*"}, client_id="stays", link=stays)
            await rig.join("readers", {"orders": "*"}, client_id="leaves")
            asked = {"consumerGroup": "readers"}
            answer = await rig.done(Request.GET_CONSUMER_LIST_BY_GROUP, asked)
            assert sorted(bodies.read_consumer_ids(answer.body)) == ["leaves", "stays"]
            await until(lambda: len(told) == 2)  # of itself, and of the second one
            fields = {"clientID": "leaves", "consumerGroup": "readers"}
            await rig.done(Request.UNREGISTER_CLIENT, fields)
            await until(lambda: told == ["readers"] * 3)
            answer = await rig.done(Request.GET_CONSUMER_LIST_BY_GROUP, asked)
            assert bodies.read_consumer_ids(answer.body) == ("stays",)

    run_once(work())


def test_the_backlog_is_skipped() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders", 1)
            await rig.make_group("readers")
            for _ in range(4):
                await rig.send("orders")
            await rig.commit("readers", "orders", 1)
            # What mqadmin's skipAccumulatedMessage asks for.
            fields = {"topic": "orders", "group": "readers", "timestamp": -1, "isForce": "true"}
            await rig.done(Request.INVOKE_BROKER_TO_RESET_OFFSET, fields)
            told = await rig.pull("orders", 1)
            assert (told.code, told.ext["nextBeginOffset"]) == (Response.PULL_OFFSET_MOVED, "4")
            assert await rig.committed("readers", "orders") == 4

    run_once(work())
