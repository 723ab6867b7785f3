"""This module gives messages back that a handler failed with: the broker delivers them again later.

The broker that stored a message makes the copy (request 36). Where that fails the client sends
the copy itself, to the group's retry topic on any broker. Where that fails too the caller keeps
the message.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sluice.client.core.messages import RETRY_PREFIX, ReceivedMessage
from sluice.client.core.refusals import refusal
from sluice.client.core.routes import AUTO_CREATE_TOPIC, write_queues
from sluice.clock import wall_ms
from sluice.errors import SluiceError
from sluice.protocol import records
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

if TYPE_CHECKING:
    from sluice.client.aio.push import PushConsumer

log_lines = logging.getLogger("sluice.client")

_FIRST_DELAY_LEVEL: Final = 3
_DELAY_LEVEL_MAX: Final = 18
_FOR_EVER: Final = (1 << 31) - 1  # brokers know no -1: Apache's make a dead letter of it at once
# What the copy does not take along: it is the broker's, or of the message's earlier life.
_DROPPED: Final = (
    *("DELAY", "REAL_TOPIC", "REAL_QID", "TRAN_MSG", "__CRC32#", "CLUSTER", "POP_CK"),
    *("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_OUT_MS"),
)


class GivingBack:
    """How one consumer gives messages back."""

    def __init__(self, consumer: PushConsumer) -> None:
        self._consumer = consumer
        tries_max = consumer.push.tries_max
        self._tries_max = tries_max if tries_max >= 0 else _FOR_EVER

    async def give(self, message: ReceivedMessage) -> bool:
        """Give a message back; False where neither way worked."""
        consumer = self._consumer
        ext = {
            "group": consumer.group,
            "offset": message.position,
            "delayLevel": 0,
            "originMsgId": message.message_id,
            "originTopic": message.topic,
            "unitMode": "false",
            "maxReconsumeTimes": self._tries_max,
            "bname": message.broker_name,
        }
        try:
            address = await consumer.session.address_of(message.broker_name, message.queue.topic)
            what = f"giving {message} back"
            await consumer.session.done(address, Request.CONSUMER_SEND_MSG_BACK, ext, what=what)
        except SluiceError as error:
            log_lines.warning("%s: %s; it is sent to the retry topic", consumer.group, error)
            return await self.resend(message)
        return True

    async def resend(self, message: ReceivedMessage) -> bool:
        """Send a copy of a message to the group's retry topic."""
        try:
            await self._resend(message)
        except SluiceError as error:
            group = self._consumer.group
            log_lines.error("%s: %s cannot be given back now: %s", group, message, error)
            return False
        return True

    async def _resend(self, message: ReceivedMessage) -> None:
        consumer = self._consumer
        times = message.reconsume_times
        properties = {
            name: value for name, value in message.properties.items() if name not in _DROPPED
        }
        properties.setdefault("RETRY_TOPIC", message.topic)
        properties.setdefault("ORIGIN_MESSAGE_ID", message.offset_id)
        properties["WAIT"] = "true"
        properties["DELAY"] = str(min(_FIRST_DELAY_LEVEL + times, _DELAY_LEVEL_MAX))
        topic = RETRY_PREFIX + consumer.group
        route = await consumer.session.route(topic)
        queues = write_queues(route, topic)
        if not queues:
            raise SluiceError(f"{topic} cannot be written")
        queue = queues[message.queue_offset % len(queues)]
        ext = {
            "a": consumer.group,
            "b": topic,
            "c": AUTO_CREATE_TOPIC,
            "d": 4,
            "e": queue.queue_id,
            "f": message.sys_flag & (records.SYS_COMPRESSED | 0x700),
            "g": wall_ms(),
            "h": message.flag,
            "i": records.format_properties(properties).decode(),
            "j": times + 1,
            "k": "false",
            "l": self._tries_max,
            "m": "false",
            "n": queue.broker_name,
        }
        address = await consumer.session.address_of(queue.broker_name, topic)
        answer = await consumer.session.ask(
            address, Request.SEND_MESSAGE_V2, ext, message.stored_body
        )
        if answer.code != Response.SUCCESS:
            raise refusal(answer.code, answer.remark, f"sending to {topic}")
