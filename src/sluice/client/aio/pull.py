"""This module reads messages when it is asked to: `PullConsumer`, with places that can be moved.

Messages are fetched ahead, within the limits of memory. A message counts as handled when the next
ones are asked for, when `commit` is called, or when the consumer is closed in order; what was not
handled comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

from sluice.client.aio.member import Lane, Member
from sluice.client.core.allocation import Strategy
from sluice.client.core.messages import ReceivedMessage
from sluice.client.core.process_queues import ProcessQueue
from sluice.client.core.routes import read_queues
from sluice.client.core.settings import PullSettings, make_settings
from sluice.client.core.subscriptions import Sql, Topics, make_subscription, wanted_of
from sluice.errors import ConfigError, ParameterInvalid
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_codes import RequestCode as Request

_POLL_SECONDS: Final = 5.0
log_lines = logging.getLogger("sluice.client")
Expression = str | Sql | Sequence[str]
Ahead = tuple[ProcessQueue, ReceivedMessage]


def check_queue(queue: MessageQueue) -> MessageQueue:
    if not isinstance(queue, MessageQueue):
        raise ParameterInvalid(f"{queue!r} is no queue; take some of `consumer.queues(topic)`")
    return queue


def check_offset(offset: object) -> None:
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise ParameterInvalid(f"offset {offset!r} is no number")
    if offset < 0:
        raise ParameterInvalid(f"offset {offset} is below 0")


class PullConsumer(Member):
    """Reads topics (`subscribe`, shared with the group) or queues (`assign`, one's own choice).

    `async with PullConsumer("host:9876", group="reports", topics="orders") as consumer:` and then
    `async for message in consumer`, or `await consumer.poll()`.
    """

    consume_type = "CONSUME_ACTIVELY"
    pull_code = Request.LITE_PULL_MESSAGE
    commits_by_pull = False
    is_lite = True

    def __init__(
        self,
        nameservers: str | Iterable[str] | None = None,
        *,
        topics: Topics = "",
        allocation: str | Strategy = "averagely",
        properties: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        settings = make_settings(PullSettings, nameservers, properties, os.environ, options)
        super().__init__(settings, allocation)
        self.pull = settings
        self.commits_alone = settings.auto_commit
        self._assigned: set[MessageQueue] | None = None
        self._handed: list[tuple[ProcessQueue, list[ReceivedMessage]]] = []
        self._ahead: deque[Ahead] = deque()  # taken to be returned one by one
        self._news = asyncio.Event()
        self._ready: deque[Lane] = deque()
        self._paused: set[MessageQueue] = set()
        self._is_started = False
        for topic, expression in wanted_of(topics).items():
            self.subscribe_to(make_subscription(topic, expression, self.version()))

    # ------------------------------------------------------------------------------- start, stop

    async def start(self) -> None:
        await self.start_member()
        self._is_started = True
        self._tell_missing()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whoever leaves with an error has not handled what it got last.
        await self.close(handled=kind is None)

    async def close(self, *, handled: bool = True) -> None:
        """Commit what is handled, and leave. `handled`: whether what was returned last is."""
        if handled and self.pull.auto_commit:
            self._settle()
        await self.stop_member()
        self._news.set()  # who waits for messages learns that none will come

    async def commit_all(self, *, answered: bool = False) -> None:
        if self.commits_alone:
            await super().commit_all(answered=answered)

    # --------------------------------------------------------------------------- what is its own

    async def subscribe(self, topic: str, expression: Expression = "*") -> None:
        """Read a topic too, and share its queues with the other members of the group."""
        if self._assigned is not None:
            raise ConfigError("a consumer either subscribes or assigns")
        self.subscribe_to(make_subscription(topic, expression, self.version()))
        if self._is_started:
            await self._join_topic(topic)
            await self.session.heartbeat()
            await self.rebalance()

    async def unsubscribe(self, topic: str) -> None:
        """Read a topic no more; what is handled of it is committed (with `auto_commit`)."""
        if self.subscriptions.pop(topic, None) is not None:
            async with self._balancing:
                for lane in [each for each in self.lanes.values() if each.queue.topic == topic]:
                    await self._drop(lane)
            await self.session.heartbeat()

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these queues, whoever else does; no other is read any more."""
        if self.subscriptions and self._assigned is None:
            raise ConfigError("a consumer either subscribes or assigns")
        self._assigned = {check_queue(queue) for queue in queues}
        for topic in {queue.topic for queue in self._assigned} - self.subscriptions.keys():
            self.subscribe_to(make_subscription(topic, "*", self.version()))
            if self._is_started:
                await self._join_topic(topic)
        if self._is_started:
            await self.session.heartbeat()
            await self.rebalance()
            self._tell_missing()

    def _tell_missing(self) -> None:
        """Say which of the assigned queues there are not, or not yet."""
        for queue in sorted((self._assigned or set()) - self.lanes.keys()):
            text = "%s: %s is assigned and cannot be read now: does it exist, and may it be read?"
            log_lines.warning(text, self.group, queue)

    async def _allocated(self, topic: str, queues: list[MessageQueue]) -> list[MessageQueue] | None:
        if self._assigned is not None:
            return [queue for queue in queues if queue in self._assigned]
        return await super()._allocated(topic, queues)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic, whoever reads them."""
        return sorted(read_queues(await self.session.route(topic), topic))

    def lane_added(self, lane: Lane) -> None:
        lane.process.is_paused = lane.queue in self._paused

    def arrived(self, lane: Lane) -> None:
        if lane not in self._ready:
            self._ready.append(lane)
        self._news.set()

    # ----------------------------------------------------------------------------------- reading

    async def poll(
        self, timeout_seconds: float = _POLL_SECONDS, count: int = 32
    ) -> list[ReceivedMessage]:
        """The next messages, at most so many; none where none came in time.

        What an earlier poll returned counts as handled now.
        """
        self.session.check_open()
        self._settle()
        found = await self._next(timeout_seconds, count)
        messages: dict[ProcessQueue, list[ReceivedMessage]] = {}
        for process, message in found:
            messages.setdefault(process, []).append(message)
        self._handed.extend(messages.items())
        return [message for _, message in found]

    async def take_ahead(self, count: int = 32) -> list[Ahead]:
        """The next messages, with their queues. Nobody has them yet: they are not handled before
        `settle` says so.
        """
        self.session.check_open()
        self._settle()
        return await self._next(_POLL_SECONDS, count)

    async def _next(self, timeout_seconds: float, count: int) -> list[Ahead]:
        found = self._take(count)
        if found or timeout_seconds <= 0:
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not found and self.session.is_open:
                    self._news.clear()
                    await self._news.wait()
                    found = self._take(count)
        return found

    def _take(self, count: int) -> list[Ahead]:
        if self._ahead and (found := self._take_left(count)):
            return found
        while self._ready:
            lane = self._ready[0]
            process = lane.process
            if process.is_dropped or process.is_paused or not process.waiting_count:
                self._ready.popleft()
                continue
            self._ready.rotate(-1)
            return [(process, message) for message in process.take(count)]
        return []

    def _take_left(self, count: int) -> list[Ahead]:
        """What an iteration has left. Of a queue that is paused it stays, of one that was sent
        elsewhere it is of no use.
        """
        found: list[Ahead] = []
        held: list[Ahead] = []
        while self._ahead and len(found) < count:
            one = self._ahead.popleft()
            if not one[0].is_dropped:
                (held if one[0].is_paused else found).append(one)
        self.give_back(held)
        return found

    def _settle(self) -> None:
        """What was returned is handled."""
        for process, messages in self._handed:
            process.done([message for message in messages if not message.is_done])
        self._handed.clear()
        self._make_room()

    def _make_room(self) -> None:
        for lane in self.lanes.values():
            lane.room.set()

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """One message after the other until it is closed; handled when the next is taken."""
        self.session.check_open()
        while self.session.is_open:
            self._settle()  # the one before, perhaps of an iteration that was left
            if not self._ahead or self._ahead[0][0].is_paused:
                self.give_back(await self.take_ahead())
                continue
            process, message = self._ahead.popleft()
            if not process.is_dropped:
                self._handed.append((process, [message]))
                yield message

    def give_back(self, ahead: Iterable[Ahead]) -> None:
        """These of `take_ahead` come first when the next ones are asked for."""
        self._ahead.extendleft(reversed(list(ahead)))

    def settle(self, handled: Iterable[Ahead]) -> None:
        """These of `take_ahead` are handled."""
        for process, message in handled:
            if not message.is_done:
                process.done([message])
        self._make_room()

    # ------------------------------------------------------------------------------------ places

    def _lane(self, queue: MessageQueue) -> Lane:
        lane = self.lanes.get(queue)
        if lane is None:
            raise ParameterInvalid(f"{queue} is not read by this consumer now (see assignment)")
        return lane

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at an offset; what was fetched ahead is dropped."""
        check_offset(offset)
        self.pull_from(self._lane(queue), offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        self.seek(queue, await self.offset_of(queue, Request.GET_MIN_OFFSET))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        self.seek(queue, await self.offset_of(queue, Request.GET_MAX_OFFSET))

    async def seek_to_time(self, queue: MessageQueue, when: datetime | float) -> None:
        """Go on at the first message that was stored at a time or later."""
        self.seek(queue, await self.offset_for_time(queue, when))

    async def offset_for_time(self, queue: MessageQueue, when: datetime | float) -> int:
        seconds = when.timestamp() if isinstance(when, datetime) else when
        return await self.offset_at(queue, seconds)

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which everything is handled."""
        return self._lane(queue).process.commit_offset

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Return nothing of these queues until `resume`."""
        for queue in queues:
            self._lane(queue).process.is_paused = True
            self._paused.add(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            self._paused.discard(queue)
            lane = self._lane(queue)
            lane.process.is_paused = False
            self.arrived(lane)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit all that was returned, or these offsets; the broker has it when this returns."""
        if offsets is not None:
            if not isinstance(offsets, Mapping):
                raise ParameterInvalid("commit takes a table of queues and offsets, or nothing")
            for queue, offset in offsets.items():
                check_queue(queue)
                check_offset(offset)
            for queue, offset in offsets.items():
                await self.commit_offset(queue, offset, answered=True)
                if queue in self.lanes:
                    self.lanes[queue].process.committed_offset = offset
            return
        self._settle()
        for lane in list(self.lanes.values()):
            await self._commit(lane.process, answered=True)
