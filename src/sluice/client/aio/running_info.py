"""This module answers what administrators ask a consumer: its state, its offsets, one message.

Brokers pass these requests on (`mqadmin consumerStatus`, `consumerStatus -s`, `queryMsgById -d`).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import orjson

from sluice.client.core.messages import read_pulled
from sluice.clock import wall_ms
from sluice.errors import ProtocolError
from sluice.link import RemotingLink
from sluice.protocol.json_members import MessageQueue, queue_keys
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

if TYPE_CHECKING:
    from sluice.client.aio.push import PushConsumer


def install_reports(consumer: PushConsumer) -> None:
    """Answer the three requests."""
    started_ms = wall_ms()

    def running(link: RemotingLink, command: RemotingCommand) -> None:
        link.answer(command, Response.SUCCESS, body=running_info(consumer, started_ms))

    def status(link: RemotingLink, command: RemotingCommand) -> None:
        topic = command.ext.get("topic")
        rows = (
            (queue, lane.process.commit_offset)
            for queue, lane in consumer.lanes.items()
            if queue.topic == topic
        )
        body = orjson.dumps({"messageQueueTable": queue_keys(rows)})
        link.answer(command, Response.SUCCESS, body=body)

    def direct(link: RemotingLink, command: RemotingCommand) -> None:
        consumer.session.spawn(_consume_directly(consumer, link, command))

    requests = consumer.session.requests
    requests[Request.GET_CONSUMER_RUNNING_INFO] = running
    requests[Request.GET_CONSUMER_STATUS_FROM_CLIENT] = status
    requests[Request.CONSUME_MESSAGE_DIRECTLY] = direct


def running_info(consumer: PushConsumer, started_ms: int) -> bytes:
    """What `consumerStatus` prints, as RocketMQ's clients write it."""
    settings = consumer.push
    properties = {
        "PROP_CLIENT_VERSION": "V5_5_0",
        "PROP_CONSUMEORDERLY": "true" if settings.orderly else "false",
        "PROP_CONSUMER_START_TIMESTAMP": str(started_ms),
        "PROP_CONSUME_TYPE": consumer.consume_type,
        "PROP_NAMESERVER_ADDR": ";".join(settings.nameservers),
        "PROP_THREADPOOL_CORE_SIZE": str(settings.concurrency),
        "consumerGroup": consumer.group,
        "instanceName": consumer.session.client_id.partition("@")[2],
        "language": "PYTHON",
        "messageModel": "BROADCASTING" if settings.broadcasting else "CLUSTERING",
    }
    rows: list[tuple[MessageQueue, Any]] = []
    for queue, lane in consumer.lanes.items():
        process = lane.process
        oldest = process.oldest
        rows.append(
            (
                queue,
                {
                    "cachedMsgCount": process.unfinished_count,
                    "cachedMsgMaxOffset": process.next_offset - 1,
                    "cachedMsgMinOffset": oldest.queue_offset if oldest is not None else 0,
                    "cachedMsgSizeInMiB": process.unfinished_bytes >> 20,
                    "commitOffset": process.commit_offset,
                    "droped": process.is_dropped,
                    "lastConsumeTimestamp": wall_ms(),
                    "lastLockTimestamp": 0,
                    "lastPullTimestamp": wall_ms(),
                    "locked": settings.orderly,
                    "transactionMsgCount": 0,
                    "transactionMsgMaxOffset": 0,
                    "transactionMsgMinOffset": 0,
                    "tryUnlockTimes": 0,
                },
            )
        )
    info = {
        "mqPopTable": {},
        "mqTable": queue_keys(rows),
        "properties": properties,
        "statusTable": {},
        "subscriptionSet": [one.members() for one in consumer.subscriptions.values()],
        "userConsumerInfo": {},
    }
    return orjson.dumps(info)


async def _consume_directly(
    consumer: PushConsumer, link: RemotingLink, command: RemotingCommand
) -> None:
    """Hand one message to the handler, outside of any queue, and say what it made of it."""
    queue = MessageQueue(command.ext.get("topic", ""), command.ext.get("brokerName", ""), 0)
    try:
        message = read_pulled(command.body, queue)[0]
    except (ProtocolError, IndexError):
        link.answer(command, Response.SYSTEM_ERROR, remark="the body is no message")
        return
    begun = time.monotonic()
    error: BaseException | None
    try:
        async with asyncio.timeout(consumer.push.consume_ms / 1000):
            error = await consumer.call_directly(message)
    except TimeoutError as failure:
        error = failure
    result = {
        "autoCommit": True,
        "consumeResult": "CR_SUCCESS" if error is None else "CR_THROW_EXCEPTION",
        "order": consumer.push.orderly,
        "remark": "" if error is None else repr(error)[:1000],
        "spentTimeMills": int((time.monotonic() - begun) * 1000),
    }
    link.answer(command, Response.SUCCESS, body=orjson.dumps(result))
