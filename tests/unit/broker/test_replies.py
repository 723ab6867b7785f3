"""Requests and replies: a reply reaches the client that asked, and is kept; or its sender hears why
not. And the topic for traces, which clients write themselves.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from sluice.broker import reply_api
from sluice.broker.replies import Replies
from sluice.errors import MessageIllegal
from sluice.link import RemotingLink
from sluice.protocol import remoting
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import CLUSTER, Rig, running, send_fields
from tests.unit.loops import run_once, until

TOPIC = f"{CLUSTER}_REPLY_TOPIC"
REPLY = {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "TTL": "3000"}
LONG_NAMES = dict(
    zip(
        "abcdefghi",
        (
            *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId"),
            *("sysFlag", "bornTimestamp", "flag", "properties"),
        ),
        strict=True,
    )
)


class Requester:
    """A producer that waits for replies and answers them with a code."""

    def __init__(self, code: int | None = Response.SUCCESS) -> None:
        self.code = code
        self.heard: list[RemotingCommand] = []

    async def connect(self, rig: Rig, client_id: str = "asker") -> RemotingLink:
        link = await rig.connect(self._requested)
        beat = bodies.write_heartbeat(bodies.Heartbeat(client_id, ("askers",)))
        assert (await rig.ask(Request.HEART_BEAT, body=beat, link=link)).code == 0
        return link

    def _requested(self, link: RemotingLink, request: RemotingCommand) -> None:
        self.heard.append(request)
        if self.code is not None:
            link.answer(request, self.code)


async def reply(rig: Rig, **properties: str) -> RemotingCommand:
    fields = send_fields(TOPIC, 0, **{**REPLY, **properties})
    return await rig.ask(Request.SEND_REPLY_MESSAGE_V2, fields, b"forty-two")


async def stored(rig: Rig) -> list[bytes]:
    answer = await rig.pull(TOPIC, 0)
    return re.findall(rb"CORRELATION_ID\x01([^\x02]+)\x02", bytes(answer.body))


def test_a_reply_reaches_who_asked_and_is_kept() -> None:
    async def work() -> None:
        async with running() as rig:
            requester = Requester()
            await requester.connect(rig)
            fields = send_fields(TOPIC, 0, **REPLY, REPLY_TO_CLIENT="asker")
            long_fields = {LONG_NAMES[name]: value for name, value in fields.items()}
            requests = [
                (Request.SEND_REPLY_MESSAGE_V2, fields),
                (Request.SEND_REPLY_MESSAGE, long_fields),
            ]
            for offset, (code, ext) in enumerate(requests):
                told = (await rig.done(code, ext, b"forty-two")).ext
                assert (told["queueId"], told["queueOffset"]) == ("0", str(offset))
                assert (told["MSG_REGION"], told["TRACE_ON"]) == ("DefaultRegion", "true")
            assert await stored(rig) == [b"c-1", b"c-1"]
            first = requester.heard[0]
            assert (first.code, bytes(first.body)) == (
                Request.PUSH_REPLY_MESSAGE_TO_CLIENT,
                b"forty-two",
            )
            assert not first.is_oneway
            assert re.search(r"CORRELATION_ID\x01c-1\x02", first.ext["properties"])
            assert re.search(r"\x02PUSH_REPLY_TIME\x01\d{13}\x02$", first.ext["properties"])
            assert (first.ext["topic"], first.ext["producerGroup"]) == (TOPIC, "senders")
            assert re.fullmatch(r"127\.0\.0\.1:\d+", first.ext["bornHost"])
            assert re.fullmatch(r"[\d.]+:\d+", first.ext["storeHost"])
            replies = rig.broker.core.replies
            assert (replies.delivered, replies.undelivered) == (2, 0)

    run_once(work())


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({}, "reply message properties[REPLY_TO_CLIENT] is null"),
        ({"REPLY_TO_CLIENT": "nobody"}, "push reply message fail, channel of <nobody> not found."),
    ],
)
def test_a_reply_to_nobody_is_kept_and_its_sender_hears_of_it(
    properties: dict[str, str], why: str
) -> None:
    async def work() -> None:
        async with running() as rig:
            answer = await reply(rig, **properties)
            assert (answer.code, answer.remark) == (Response.SYSTEM_ERROR, why)
            assert await stored(rig) == [b"c-1"]
            assert rig.broker.core.replies.undelivered == 1

    run_once(work())


def test_a_requester_that_does_not_take_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running() as rig:
            refusing, silent = Requester(Response.SYSTEM_ERROR), Requester(None)
            await refusing.connect(rig, "refusing")
            link = await silent.connect(rig, "silent")
            answer = await reply(rig, REPLY_TO_CLIENT="refusing")
            assert (answer.code, answer.remark) == (1, "push reply message to refusing fail.")
            waits = asyncio.create_task(reply(rig, REPLY_TO_CLIENT="silent"))
            await until(lambda: len(silent.heard) == 1)
            await link.close()  # the answer will never come, and nobody waits ten seconds for it
            answer = await waits
            assert (answer.code, answer.remark) == (1, "push reply message to silent fail.")
            monkeypatch.setattr(reply_api, "PUSH_SECONDS", 0.01)
            await silent.connect(rig, "slow")
            answer = await reply(rig, REPLY_TO_CLIENT="slow")
            assert (answer.code, answer.remark) == (1, "push reply message to slow fail.")
            assert len(await stored(rig)) == 3

    run_once(work())


@pytest.mark.parametrize(
    ("changes", "properties", "code", "why"),
    [
        ({"b": "SCHEDULE_TOPIC_XXXX"}, {}, 16, "is forbidden"),
        ({"e": 9}, {}, 29, "request queueId[9] is illegal"),
        ({"f": 4}, {}, 13, "a reply cannot be delayed, timed or part of a transaction"),
        ({}, {"DELAY": "3"}, 13, "a reply cannot be delayed"),
        ({}, {"TIMER_DELAY_SEC": "3"}, 13, "a reply cannot be delayed"),
        ({}, {"TRAN_MSG": "true"}, 13, "a reply cannot be delayed"),
    ],
)
def test_what_is_no_reply_is_refused_and_goes_nowhere(
    changes: dict[str, Any], properties: dict[str, str], code: int, why: str
) -> None:
    async def work() -> None:
        async with running() as rig:
            requester = Requester()
            await requester.connect(rig)
            fields = send_fields(TOPIC, 0, **REPLY, REPLY_TO_CLIENT="asker", **properties)
            found = await rig.refused(Request.SEND_REPLY_MESSAGE_V2, {**fields, **changes}, b"x")
            assert (found[0], why in found[1]) == (code, True)
            assert (await rig.pull(TOPIC, 0)).code == Response.PULL_NOT_FOUND
            assert requester.heard == []

    run_once(work())


def test_words_that_ask_for_nothing_are_no_reason_to_refuse() -> None:
    Replies.check(0, b"DELAY\x010\x02TRAN_MSG\x01false\x02note\x01DELAY\x02")
    with pytest.raises(MessageIllegal):
        Replies.check(0, b"DELAY\x011\x02")


def test_a_reply_without_an_answer_asked_for() -> None:
    async def work() -> None:
        async with running() as rig:
            requester = Requester()
            await requester.connect(rig)
            fields = send_fields(TOPIC, 0, **REPLY, REPLY_TO_CLIENT="asker")
            text = {name: str(value) for name, value in fields.items()}
            rig.link.oneway(Request.SEND_REPLY_MESSAGE_V2, text, b"x")
            await until(lambda: len(requester.heard) == 1)
            await until(lambda: rig.broker.core.stats.put == 1)
            assert not remoting.FLAG_ONEWAY & requester.heard[0].flag

    run_once(work())


@pytest.mark.parametrize(
    ("changes", "made", "not_made"),
    [
        ({}, "RMQ_SYS_TRACE_TOPIC", "Traces"),
        ({"trace_topic_name": "Traces"}, "Traces", "RMQ_SYS_TRACE_TOPIC"),
        ({"trace_topic": False}, TOPIC, "RMQ_SYS_TRACE_TOPIC"),
    ],
)
def test_the_topic_of_traces_is_made_as_it_is_set(
    changes: dict[str, Any], made: str, not_made: str
) -> None:
    async def work() -> None:
        async with running(auto_create_topics="off", **changes) as rig:
            topics = rig.broker.core.topics
            assert topics.get(not_made) is None
            assert topics.is_system(made)
            await rig.send(made, b"trace", KEYS="some-id")

    run_once(work())
