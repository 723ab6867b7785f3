"""What administrators ask about connected clients, and what is passed on to these."""

from __future__ import annotations

from unittest import mock

from sluice.broker import admin_clients
from sluice.link import RemotingLink
from sluice.protocol import remoting_bodies
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import running
from tests.unit.loops import run_once, until

RUNNING_INFO = {"consumerGroup": "readers", "clientId": "client-1", "jstackEnable": "false"}


def test_connected_consumers_and_what_they_want() -> None:
    async def work() -> None:
        async with running() as rig:
            asked = {"consumerGroup": "readers"}
            assert await rig.refused(Request.GET_CONSUMER_CONNECTION_LIST, asked) == (
                Response.CONSUMER_NOT_ONLINE,
                "the consumer group[readers] not online",
            )
            await rig.make_topic("orders")
            await rig.join("readers", {"orders": "TagA || TagB"})
            found = await rig.json(Request.GET_CONSUMER_CONNECTION_LIST, asked)
            assert [row["clientId"] for row in found["connectionSet"]] == ["client-1"]
            assert found["connectionSet"][0]["clientAddr"].startswith("127.0.0.1:")
            assert found["connectionSet"][0]["language"] == "PYTHON"
            wanted = found["subscriptionTable"]["orders"]
            assert (wanted["subString"], sorted(wanted["tagsSet"])) == (
                "TagA || TagB",
                ["TagA", "TagB"],
            )
            assert sorted(wanted["codeSet"]) == [2598919, 2598920]
            assert found["messageModel"] == "CLUSTERING"
            one = await rig.json(
                Request.QUERY_SUBSCRIPTION_BY_CONSUMER, {"group": "readers", "topic": "orders"}
            )
            assert one["subscriptionData"]["subString"] == "TagA || TagB"
            none = await rig.json(
                Request.QUERY_SUBSCRIPTION_BY_CONSUMER, {"group": "others", "topic": "orders"}
            )
            assert none == {"group": "others", "topic": "orders"}

    run_once(work())


def test_members_that_do_not_agree_are_named_beside_the_connections() -> None:
    async def work() -> None:
        async with running() as rig:
            asked = {"consumerGroup": "readers"}
            await rig.join("readers", {"orders": "TagA"}, client_id="one")
            alone = await rig.json(Request.GET_CONSUMER_CONNECTION_LIST, asked)
            assert "unequalSubscriptions" not in alone  # then the body is RocketMQ's
            await rig.join("readers", {"orders": "TagB"}, client_id="two")
            found = await rig.json(Request.GET_CONSUMER_CONNECTION_LIST, asked)
            assert found["unequalSubscriptions"] == ["orders: 'TagA' by one; 'TagB' by two"]
            await rig.join("readers", {"orders": "TagA"}, client_id="two")
            again = await rig.json(Request.GET_CONSUMER_CONNECTION_LIST, asked)
            assert "unequalSubscriptions" not in again

    run_once(work())


def test_connected_producers() -> None:
    async def work() -> None:
        async with running() as rig:
            asked = {"producerGroup": "senders"}
            assert await rig.refused(Request.GET_PRODUCER_CONNECTION_LIST, asked) == (
                1,
                "the producer group[senders] not exist",
            )
            await rig.join("readers", {}, producer_groups=("senders",))
            found = await rig.json(Request.GET_PRODUCER_CONNECTION_LIST, asked)
            assert [row["clientId"] for row in found["connectionSet"]] == ["client-1"]
            everybody = await rig.json(Request.GET_ALL_PRODUCER_INFO)
            assert everybody["data"]["senders"][0]["remoteIP"].startswith("/127.0.0.1:")

    run_once(work())


def test_running_info_is_asked_of_the_client_and_passed_back() -> None:
    seen: list[RemotingCommand] = []

    def consumer(link: RemotingLink, request: RemotingCommand) -> None:
        if request.code == Request.GET_CONSUMER_RUNNING_INFO:
            seen.append(request)
            link.answer(request, 0, {"k": "v"}, "fine", b"what I do")

    async def work() -> None:
        async with running() as rig:
            client = await rig.connect(consumer)
            await rig.join("readers", {"orders": "*"}, link=client)
            answer = await rig.done(Request.GET_CONSUMER_RUNNING_INFO, RUNNING_INFO)
            assert (bytes(answer.body), answer.remark, answer.ext) == (
                b"what I do",
                "fine",
                {"k": "v"},
            )
            assert seen[0].ext == RUNNING_INFO

    run_once(work())


def test_who_is_not_there_or_does_not_answer_is_named() -> None:
    def silent(link: RemotingLink, request: RemotingCommand) -> None:
        pass

    async def work() -> None:
        async with running() as rig:
            code = Request.GET_CONSUMER_RUNNING_INFO
            assert await rig.refused(code, RUNNING_INFO) == (
                1,
                "The Consumer <readers> <client-1> not online",
            )
            client = await rig.connect(silent)
            await rig.join("readers", {"orders": "*"}, link=client)
            with mock.patch.object(admin_clients, "CALL_SECONDS", 0.01):
                found = await rig.refused(code, RUNNING_INFO)
            assert found[0] == Response.CONSUME_MSG_TIMEOUT
            assert "consumer <readers> <client-1> Timeout" in found[1]

    run_once(work())


def test_a_client_that_leaves_instead_of_answering_is_named() -> None:
    async def work() -> None:
        async with running() as rig:

            def leaves(link: RemotingLink, request: RemotingCommand) -> None:
                if request.code == Request.GET_CONSUMER_RUNNING_INFO:
                    assert link._connection is not None
                    link._connection.abort("enough")

            client = await rig.connect(leaves)
            await rig.join("readers", {"orders": "*"}, link=client)
            found = await rig.refused(Request.GET_CONSUMER_RUNNING_INFO, RUNNING_INFO)
            assert found == (
                1,
                "invoke consumer <readers> <client-1> Exception: its connection closed",
            )
            await until(lambda: not rig.broker.core.clients.consumers)

    run_once(work())


def test_a_message_is_given_to_one_consumer_directly() -> None:
    seen: list[RemotingCommand] = []

    def consumer(link: RemotingLink, request: RemotingCommand) -> None:
        if request.code == Request.CONSUME_MESSAGE_DIRECTLY:
            seen.append(request)
            link.answer(request, 0, body=b'{"consumeResult":"CR_SUCCESS"}')

    async def work() -> None:
        async with running() as rig:
            client = await rig.connect(consumer)
            await rig.make_topic("orders")
            sent = await rig.send("orders", b"the body")
            await rig.join("readers", {"orders": "*"}, link=client)
            fields = {
                "consumerGroup": "readers",
                "clientId": "client-1",
                "msgId": sent["msgId"],
                "topic": "orders",
            }
            code = Request.CONSUME_MESSAGE_DIRECTLY
            found = await rig.json(code, fields)
            assert found == {"consumeResult": "CR_SUCCESS"}
            assert b"the body" in bytes(seen[0].body)
            assert seen[0].ext["brokerName"] == "broker-a"
            assert seen[0].ext["topicSysFlag"] == "0"
            nowhere = sent["msgId"][:16] + f"{1 << 40:016X}"
            assert await rig.refused(code, fields | {"msgId": nowhere}) == (
                1,
                f"can not find message by the offset, {1 << 40}",
            )
            bad = await rig.refused(code, fields | {"msgId": "xyz"})
            assert bad == (1, "the custom field <msgId> is no message id")

    run_once(work())


def test_offsets_that_consumers_hold() -> None:
    table = {MessageQueue("orders", "broker-a", 0): 7}

    def good(link: RemotingLink, request: RemotingCommand) -> None:
        if request.code == Request.GET_CONSUMER_STATUS_FROM_CLIENT:
            body = remoting_bodies.write_queue_offsets(table, "messageQueueTable")
            link.answer(request, 0, body=body)

    def bad(link: RemotingLink, request: RemotingCommand) -> None:
        if request.code == Request.GET_CONSUMER_STATUS_FROM_CLIENT:
            link.answer(request, 0, body=b"nonsense")

    async def work() -> None:
        async with running() as rig:
            code = Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
            fields = {"topic": "orders", "group": "readers"}
            assert await rig.refused(code, fields) == (
                1,
                "No Any Consumer online in the consumer group: [readers]",
            )
            await rig.join("readers", {"orders": "*"}, link=await rig.connect(good))
            await rig.join(
                "readers", {"orders": "*"}, client_id="client-2", link=await rig.connect(bad)
            )
            answer = await rig.done(code, fields)
            expected = b'{"client-1":{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:7}}'
            assert expected in bytes(answer.body)
            answer = await rig.done(code, fields | {"clientAddr": "client-3"})
            assert bytes(answer.body) == b'{"consumerTable":{},"messageQueueTable":{}}'

    run_once(work())
