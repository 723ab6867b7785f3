"""This module finds messages: by id, key, unique key, offset and time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from sluice.client.administration.offsets import OffsetDesk, When, when_ms
from sluice.client.messages import TIME_MAX, Sent, StoredMessage
from sluice.errors import ConfigError, NotFound
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_reports import DirectResult

# What the store adds to a message by itself; a message that is sent again gets it anew.
_STORE_PROPERTIES: Final = frozenset({"__CRC32#", "MSG_REGION", "TRACE_ON", "CLUSTER"})


class MessageDesk(OffsetDesk):
    """Messages of a cluster."""

    async def messages(
        self,
        topic: str,
        *,
        begin: When | None = None,
        end: When | None = None,
        tags: str = "*",
        queues: list[MessageQueue] | None = None,
    ) -> AsyncIterator[StoredMessage]:
        """The messages of a topic that were stored in a span of time, queue by queue.

        Nobody's place changes by it. It ends with what was there when it began.
        """
        wanted = None if queues is None else {(q.broker_name, q.queue_id) for q in queues}
        places = await self.queues(topic, writing=False)
        places = [p for p in places if wanted is None or (p.broker_name, p.queue_id) in wanted]
        begin_ms = None if begin is None else when_ms(begin)
        end_ms = None if end is None else when_ms(end)
        spans = [await self.span(topic, place, begin_ms, end_ms) for place in places]
        for place, (first, stop) in zip(places, spans, strict=True):
            async for message in self.walk(topic, place, first, stop, expression=tags):
                yield message

    async def message_in(self, queue: MessageQueue, offset: int) -> StoredMessage:
        """The message at an offset of a queue; raises NotFound."""
        place = await self.queue(queue.broker_name, queue.queue_id)
        return await self.message_at(queue.topic, place, offset)

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        begin: When = 0.0,
        end: When | None = None,
        count: int = 64,
    ) -> list[StoredMessage]:
        """The messages with a key that their producer gave them, the oldest first."""
        end_ms = TIME_MAX if end is None else when_ms(end)
        return await self.query(topic, key, count=count, begin_ms=when_ms(begin), end_ms=end_ms)

    async def messages_by_unique_key(self, topic: str, key: str) -> list[StoredMessage]:
        """The messages with the id that a producer made for one, the oldest first.

        More than one where it was sent again. Raises NotFound.
        """
        return await self.find_unique(topic, key)

    async def send_again(self, message: StoredMessage) -> Sent:
        """Send a stored message once more, to the queue that it was in if that still exists."""
        if message.compression is not None:
            raise ConfigError(f"{message.message_id} is compressed by {message.compression}")
        queues = await self.queues(message.topic, writing=True)
        own = [
            q
            for q in queues
            if (q.broker_name, q.queue_id) == (message.broker_name, message.queue_id)
        ]
        properties = {n: v for n, v in message.properties.items() if n not in _STORE_PROPERTIES}
        return await self.send_message(message.topic, (own or queues)[0], message.body, properties)

    async def consume_now(self, group: str, client_id: str, message: StoredMessage) -> DirectResult:
        """Let one running push consumer handle a message now; raises NotFound for another kind."""
        info = await self.running_info(group, client_id)
        if info.consume_type != "CONSUME_PASSIVELY":
            raise NotFound(f"{client_id} is no push consumer, so it cannot be told to consume")
        return await self.consume_directly(group, client_id, message)
