"""This module is a member of a consumer group: which queues are its own, and how far it has read.

It tells brokers what it wants, divides the queues with the other members, pulls what is its own
as long as there is room in memory, and commits what is done. What happens with the messages is
decided by those who build on it (`push.py`, `pull.py`).

A queue that is taken away is committed at once and never again: the next owner may be further.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from sluice.client.aio.bulk_pulls import Backlog, must_wait
from sluice.client.aio.expressions import check_expression
from sluice.client.aio.offset_file import OffsetFile
from sluice.client.aio.pulls import Asked, Pulled, ask, ask_on, read_answer
from sluice.client.aio.resets import install_resets
from sluice.client.aio.session import Session, make_client_id
from sluice.client.core.allocation import Strategy, strategy_of
from sluice.client.core.messages import RETRY_PREFIX
from sluice.client.core.process_queues import ProcessQueue
from sluice.client.core.routes import read_queues
from sluice.client.core.settings import ConsumerSettings, check_topic
from sluice.client.core.subscriptions import matching
from sluice.clock import wall_ms
from sluice.errors import (
    ConfigError,
    LinkError,
    NoRoute,
    ProtocolError,
    SluiceError,
    TopicMissing,
)
from sluice.link import RemotingLink
from sluice.net import own_address
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_clients import (
    ConsumerData,
    Heartbeat,
    LockRequest,
    Subscription,
    read_consumer_ids,
    read_locked_queues,
    write_lock_request,
)
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

log_lines = logging.getLogger("sluice.client")

_START_AT: Final = {
    "last": "CONSUME_FROM_LAST_OFFSET",
    "first": "CONSUME_FROM_FIRST_OFFSET",
    "timestamp": "CONSUME_FROM_TIMESTAMP",
}
_AGAIN_SECONDS: Final = 1.0  # after something that should not happen
_PAUSE_SECONDS: Final = 0.5
_FULL_SECONDS: Final = 30.0
_LOCK_SECONDS: Final = 30.0  # so long a lock is believed in; a broker keeps it for 60
_RELOCK_SECONDS: Final = 20.0


class Lane:
    """A queue of this member, and the task that pulls it."""

    __slots__ = ("backlog", "is_gone", "process", "read_from", "room", "task", "work")

    def __init__(self, process: ProcessQueue) -> None:
        self.process = process
        self.backlog = Backlog()
        self.read_from = 0  # which copy of the broker
        self.is_gone = False  # its broker said that there is no such topic
        self.room = asyncio.Event()  # set when it may be that there is room again
        self.task: asyncio.Task[Any] | None = None
        self.work: asyncio.Task[Any] | None = None  # of an ordered consumer

    @property
    def queue(self) -> MessageQueue:
        return self.process.queue


class Member:
    """What push and pull consumers have in common. Belongs to the event loop's thread."""

    consume_type = "CONSUME_PASSIVELY"
    pull_code: int = Request.PULL_MESSAGE
    commits_by_pull = True
    is_lite = False  # what is wanted goes with every pull
    locks_queues = False
    commits_alone = True  # False: only what the user commits is committed

    def __init__(
        self, settings: ConsumerSettings, allocation: str | Strategy = "averagely"
    ) -> None:
        self.settings = settings
        self.group = settings.group
        self.session = Session(settings, make_client_id(settings.instance_name), self._heartbeat)
        self.session.all_replicas = True
        self.session.on_routes.append(lambda _: self._wake.set())
        self._strategy = strategy_of(allocation)
        self.subscriptions: dict[str, Subscription] = {}
        self.lanes: dict[MessageQueue, Lane] = {}
        self._wake = asyncio.Event()
        self._balancing = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._file: OffsetFile | None = None
        self._file_offsets: dict[MessageQueue, int] = {}
        self._is_closing = False
        self.session.requests[Request.NOTIFY_CONSUMER_IDS_CHANGED] = self._members_changed
        install_resets(self)

    # ------------------------------------------------------------------------------- start, stop

    async def start_member(self) -> None:
        """Join the group; the first queues are there when this returns, if there are any."""
        settings = self.settings
        await self.session.start()
        try:
            if settings.broadcasting:
                owner = f"{own_address()}@{settings.instance_name or 'DEFAULT'}"
                self._file = OffsetFile(settings.offset_directory, owner, self.group)
                self._file_offsets = self._file.read()
            for topic in list(self.subscriptions):
                await self._join_topic(topic)
            await self.session.heartbeat()
            await self.rebalance()
        except BaseException:
            await self.session.close()
            raise
        self.session.spawn(self._keep_balanced())
        self.session.repeat(settings.commit_ms / 1000, self.commit_all)
        if self.locks_queues:
            self.session.repeat(_RELOCK_SECONDS, self._lock_all)

    async def _join_topic(self, topic: str) -> None:
        """Ask for the route; a topic that does not exist yet may come later."""
        self.session.wanted.add(topic)
        try:
            route = await self.session.route(topic)
        except TopicMissing:
            level = logging.DEBUG if topic.startswith(RETRY_PREFIX) else logging.WARNING
            log_lines.log(level, "%s: topic %s does not exist yet", self.group, topic)
            return
        if route.queues and not read_queues(route, topic):
            text = "%s: no queue of %s may be read (its permission): nothing comes until one may"
            log_lines.warning(text, self.group, topic)
        await check_expression(self.session, self.group, self.subscriptions[topic])

    async def stop_member(self) -> None:
        """Give all queues back, with what is done committed, and leave the group."""
        self._is_closing = True
        for lane in self.lanes.values():
            if lane.task is not None:
                lane.task.cancel()
        if self.session.is_open:
            try:
                async with asyncio.timeout(self.settings.close_ms / 1000):
                    await self.commit_all(answered=True)
                    if self.locks_queues:
                        await self._unlock([lane.queue for lane in self.lanes.values()])
                    await self.session.unregister(consumerGroup=self.group)
            except (SluiceError, TimeoutError) as error:
                reason = str(error) or "no answer within close_ms"
                log_lines.warning("%s: closed without the last commit: %s", self.group, reason)
        for lane in self.lanes.values():
            lane.process.is_dropped = True
        await self.session.close()

    async def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until somebody closes the consumer; False where that took too long."""
        closed = self.session.closed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await closed.wait()
        return closed.is_set()

    @property
    def client_id(self) -> str:
        return self.session.client_id

    def assignment(self) -> list[MessageQueue]:
        """The queues that are read now."""
        return sorted(self.lanes)

    def _heartbeat(self, address: str) -> Heartbeat:
        consumer = ConsumerData(
            self.group,
            self.consume_type,
            "BROADCASTING" if self.settings.broadcasting else "CLUSTERING",
            _START_AT[self.settings.start_at],
            tuple(self.subscriptions.values()),
        )
        return Heartbeat(self.session.client_id, (), (consumer,))

    def subscribe_to(self, subscription: Subscription) -> None:
        if not subscription.topic.startswith(RETRY_PREFIX):
            check_topic(subscription.topic)
        self.subscriptions[subscription.topic] = subscription

    # --------------------------------------------------------------------------------- rebalance

    def _members_changed(self, link: RemotingLink, command: RemotingCommand) -> None:
        if command.ext.get("consumerGroup") == self.group:
            self._wake.set()
        link.answer(command, Response.SUCCESS)

    async def _keep_balanced(self) -> None:
        seconds = soon = _AGAIN_SECONDS / 2
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.session.greet_new()
                settled = await self.rebalance()
            except SluiceError as error:
                log_lines.warning("%s: queues cannot be divided now: %s", self.group, error)
                settled = False
            except Exception:  # a member that stops to balance would be deaf
                log_lines.exception("%s: queues cannot be divided now", self.group)
                settled = False
            longest = self.settings.rebalance_ms / 1000
            soon = _AGAIN_SECONDS / 2 if settled else min(longest, 2 * soon)
            seconds = longest if settled else soon

    async def rebalance(self) -> bool:
        """Take and give up queues; False where it has to be done again soon."""
        # Two at a time would both take what neither has yet.
        async with self._balancing:
            return await self._rebalance()

    async def _rebalance(self) -> bool:
        settled = True
        for topic in list(self.subscriptions):
            try:
                route = await self.session.route(topic)
            except TopicMissing:
                # A nameserver that was started anew hears of it later: what brokers serve is read.
                await self._apply(topic, [q for q, lane in self.lanes.items() if not lane.is_gone])
                settled = False  # it may be made any time
                continue
            queues = sorted(read_queues(route, topic))
            if self.settings.broadcasting:
                mine: list[MessageQueue] | None = queues
            else:
                mine = await self._allocated(topic, queues)
            if mine is None:
                settled = False
            else:
                settled = await self._apply(topic, mine) and settled
        return settled

    async def _allocated(self, topic: str, queues: list[MessageQueue]) -> list[MessageQueue] | None:
        """The queues of this member; None where nobody says who the members are."""
        members: tuple[str, ...] = ()
        for is_last in (False, True):
            members = await self._members(queues)
            if self.session.client_id in members:
                break
            if not is_last:
                await self.session.heartbeat()  # a broker that was started anew has forgotten us
        if not members:
            return None
        return self._strategy(self.session.client_id, sorted(members), queues)

    async def _members(self, queues: list[MessageQueue]) -> tuple[str, ...]:
        names = dict.fromkeys(queue.broker_name for queue in queues)
        for name in names:
            try:
                address = await self.session.address_of(name, queues[0].topic)
                answer = await self.session.ask(
                    address, Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": self.group}
                )
            except (LinkError, NoRoute) as error:
                log_lines.info("%s: %s does not name the members: %s", self.group, name, error)
                continue
            if answer.code == Response.SUCCESS:
                return read_consumer_ids(answer.body)
        return ()

    async def _apply(self, topic: str, mine: Iterable[MessageQueue]) -> bool:
        wanted = set(mine)
        for queue in [q for q in self.lanes if q.topic == topic and q not in wanted]:
            await self._drop(self.lanes[queue])
        new = [queue for queue in sorted(wanted) if queue not in self.lanes]
        if self.locks_queues and new:
            locked = await self._lock(new)
            refused = [queue for queue in new if queue not in locked]
        else:
            refused = []
        for queue in new:
            if queue in refused:
                continue
            try:
                offset = await self._first_offset(queue)
            except SluiceError as error:
                log_lines.warning("%s: where to begin with %s: %s", self.group, queue, error)
                refused.append(queue)
                continue
            self._add(queue, offset)
        return not refused

    def _add(self, queue: MessageQueue, offset: int) -> Lane:
        lane = Lane(ProcessQueue(queue, offset, self.settings))
        if self.locks_queues:
            lane.process.locked_until = asyncio.get_running_loop().time() + _LOCK_SECONDS
        self.lanes[queue] = lane
        log_lines.info("%s: reads %s from %d on", self.group, queue, offset)
        self.lane_added(lane)
        lane.task = self.session.spawn(self._pull_lane(lane))
        return lane

    async def _drop(self, lane: Lane) -> None:
        log_lines.info("%s: gives %s up", self.group, lane.queue)
        if lane.task is not None:
            lane.task.cancel()
        lane.process.is_dropped = True
        del self.lanes[lane.queue]
        await self.lane_dropped(lane)
        if self.commits_alone:
            with contextlib.suppress(SluiceError):
                await self._commit(lane.process, answered=True)
        if self.locks_queues:
            await self._unlock([lane.queue])

    def lane_added(self, lane: Lane) -> None:
        """A queue is ours from now on."""

    async def lane_dropped(self, lane: Lane) -> None:
        """A queue is not ours any more."""

    def arrived(self, lane: Lane) -> None:
        """Messages of a queue came."""

    # ----------------------------------------------------------------------------------- pulling

    async def _pull_lane(self, lane: Lane) -> None:
        """Pull as long as the queue is ours, whatever happens."""
        asked: Asked | None = None
        try:
            while not lane.process.is_dropped:
                try:
                    asked = await self._pull_once(lane, asked)
                except Exception:
                    log_lines.exception("%s: reading %s, tried again", self.group, lane.queue)
                    await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            if asked is not None:
                asked.forget()

    async def _pull_once(self, lane: Lane, asked: Asked | None) -> Asked | None:
        """One pull, or a wait for what it needs; the next pull where it is under way already."""
        process = lane.process
        if asked is not None and asked.process is not process:
            asked.forget()  # the queue was sent elsewhere meanwhile
            asked = None
        if asked is None and not await self._may_pull(lane):
            return None
        try:
            if asked is None:
                asked = await ask(self, lane)
            found = read_answer(self, lane, asked, await asked.answer)
            lane.is_gone = False
            if process is not lane.process or (self.locks_queues and not self._is_locked(process)):
                following = None
            else:
                following = ask_on(self, lane, found)
            try:
                if following is not None:
                    await asyncio.sleep(0)  # it goes out before the messages are taken apart
                self._take_in(lane, process, found)
            except BaseException:
                if following is not None:
                    following.forget()
                raise
            return following
        except ProtocolError as error:
            log_lines.error("%s: %s cannot be read: %s", self.group, lane.queue, error)
            await asyncio.sleep(_AGAIN_SECONDS * 5)
        except SluiceError as error:
            log_lines.warning("%s: reading %s: %s", self.group, lane.queue, error)
            lane.is_gone = isinstance(error, TopicMissing)
            await asyncio.sleep(_AGAIN_SECONDS)
            if isinstance(error, LinkError):
                await self._look_again(lane.queue.topic)
            else:
                await self.session.heartbeat()
        return None

    async def _may_pull(self, lane: Lane) -> bool:
        """Whether there is room for more; where there is none, this waits for it."""
        process = lane.process
        if process.is_paused or (self.locks_queues and not self._is_locked(process)):
            await asyncio.sleep(_PAUSE_SECONDS)
            return False
        if not process.why_full() and not must_wait(self, lane):
            return True
        lane.room.clear()
        if process.why_full() or must_wait(self, lane):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FULL_SECONDS):
                    await lane.room.wait()
        return False

    async def _look_again(self, topic: str) -> None:
        with contextlib.suppress(SluiceError):
            await self.session.route(topic, fresh=True)
            await self.session.greet_new()

    def _take_in(self, lane: Lane, process: ProcessQueue, found: Pulled) -> None:
        if process is not lane.process or process.is_dropped:
            return  # it was sent elsewhere while the pull was under way
        if found.is_elsewhere:
            log_lines.warning(
                "%s: %s has no offset %d; goes on at %d",
                *(self.group, lane.queue, process.next_offset, found.next_offset),
            )
            self.go_to(lane, found.next_offset)
            return
        messages = found.messages(lane.queue, process.next_offset)
        if not messages:
            process.put([], found.next_offset)
            return
        wanted, _ = matching(messages, self.subscriptions[lane.queue.topic])
        process.put(wanted, found.next_offset)
        if wanted:
            self.arrived(lane)

    def go_to(self, lane: Lane, offset: int) -> None:
        """Go on at another offset; what handlers have of the old ones does not count any more."""
        old = lane.process
        old.is_dropped = True
        lane.process = ProcessQueue(lane.queue, offset, self.settings)
        lane.process.locked_until = old.locked_until
        lane.process.is_paused = old.is_paused
        lane.room.set()

    def pull_from(self, lane: Lane, offset: int) -> None:
        """`go_to`, and do not wait for a pull that may be held at the old place."""
        self.go_to(lane, offset)
        if lane.task is not None:
            lane.task.cancel()
        lane.task = self.session.spawn(self._pull_lane(lane))

    # ----------------------------------------------------------------------------------- offsets

    async def _first_offset(self, queue: MessageQueue) -> int:
        """Where to begin: where the group stopped, or as `start_at` says where it never was."""
        if self._file is not None:
            known = self._file_offsets.get(queue)
        else:
            known = await self.committed(queue)
        if known is not None:
            return known
        start_at = self.settings.start_at
        is_retry = queue.topic.startswith(RETRY_PREFIX)
        if start_at == "first" or is_retry:
            return await self.offset_of(queue, Request.GET_MIN_OFFSET)
        if start_at == "timestamp":
            when = self.settings.start_timestamp
            seconds = when.timestamp() if isinstance(when, datetime) else when
            return await self.offset_at(queue, seconds)
        return await self.offset_of(queue, Request.GET_MAX_OFFSET)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset on a queue; None where it has none."""
        if self._file is not None:
            return self._file_offsets.get(queue)
        address = await self.session.address_of(queue.broker_name, queue.topic)
        ext = {"consumerGroup": self.group, "topic": queue.topic, "queueId": queue.queue_id}
        answer = await self.session.ask(address, Request.QUERY_CONSUMER_OFFSET, ext)
        if answer.code == Response.SUCCESS:
            return int(answer.ext["offset"])
        if answer.code == Response.QUERY_NOT_FOUND:
            return None
        raise ConfigError(f"the offset of {self.group} on {queue}: {answer.remark}")

    async def offset_of(self, queue: MessageQueue, code: int) -> int:
        """The first or the next offset of a queue (GET_MIN_OFFSET, GET_MAX_OFFSET)."""
        return await self._offset(queue, code, {})

    async def offset_at(self, queue: MessageQueue, when: float) -> int:
        """The offset of the first message that was stored at a time (seconds) or later."""
        ext = {"timestamp": int(when * 1000)}
        return await self._offset(queue, Request.SEARCH_OFFSET_BY_TIMESTAMP, ext)

    async def _offset(self, queue: MessageQueue, code: int, more: dict[str, int]) -> int:
        address = await self.session.address_of(queue.broker_name, queue.topic)
        ext = {"topic": queue.topic, "queueId": queue.queue_id, **more}
        answer = await self.session.done(address, code, ext, what=f"the offsets of {queue.topic}")
        return int(answer.ext["offset"])

    async def commit_all(self, *, answered: bool = False) -> None:
        """Commit what is done of all queues, where it is not yet."""
        processes = [lane.process for lane in self.lanes.values()]
        if self._file is not None:
            now = {process.queue: process.commit_offset for process in processes}
            if now.items() - self._file_offsets.items():
                self._file_offsets.update(now)
                await self._write_file(self._file)
            return
        results = await asyncio.gather(
            *(self._commit(process, answered=answered) for process in processes),
            return_exceptions=True,
        )
        for failure in results:
            if isinstance(failure, SluiceError):
                log_lines.warning("%s: a commit failed: %s", self.group, failure)
            elif isinstance(failure, BaseException):
                raise failure

    async def _commit(self, process: ProcessQueue, *, answered: bool) -> None:
        offset = process.commit_offset
        if offset == process.committed_offset:
            return
        await self.commit_offset(process.queue, offset, answered=answered)
        process.committed_offset = offset

    async def commit_offset(self, queue: MessageQueue, offset: int, *, answered: bool) -> None:
        """Tell the broker, or the file, how far the group has read."""
        if self._file is not None:
            self._file_offsets[queue] = offset
            await self._write_file(self._file)
            return
        ext = {
            "consumerGroup": self.group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "commitOffset": str(offset),
        }
        address = await self.session.address_of(queue.broker_name, queue.topic)
        if answered:
            what = f"committing {offset} of {queue}"
            await self.session.done(address, Request.UPDATE_CONSUMER_OFFSET, ext, what=what)
        else:
            link = await self.session.link(address)
            link.oneway(Request.UPDATE_CONSUMER_OFFSET, ext)

    async def _write_file(self, file: OffsetFile) -> None:
        async with self._writing:  # two at a time would write into each other's
            offsets = dict(self._file_offsets)
            await asyncio.get_running_loop().run_in_executor(None, file.write, offsets)

    # ------------------------------------------------------------------------------------- locks

    def _is_locked(self, process: ProcessQueue) -> bool:
        return process.locked_until > asyncio.get_running_loop().time()

    async def _lock(self, queues: list[MessageQueue]) -> set[MessageQueue]:
        """Have queues for ourselves; those that another member still has are not among them."""
        if self.settings.broadcasting:
            return set(queues)
        locked: set[MessageQueue] = set()
        for name in dict.fromkeys(queue.broker_name for queue in queues):
            part = tuple(queue for queue in queues if queue.broker_name == name)
            request = LockRequest(self.session.client_id, self.group, part)
            try:
                address = await self.session.address_of(name, part[0].topic)
                answer = await self.session.done(
                    address,
                    Request.LOCK_BATCH_MQ,
                    body=write_lock_request(request),
                    what=f"locking {len(part)} queues of {name}",
                )
            except SluiceError as error:
                log_lines.warning("%s: %s", self.group, error)
                continue
            locked.update(read_locked_queues(answer.body))
        return locked

    async def _lock_all(self) -> None:
        lanes = list(self.lanes.values())
        locked = await self._lock([lane.queue for lane in lanes])
        until = asyncio.get_running_loop().time() + _LOCK_SECONDS
        for lane in lanes:
            if lane.queue in locked:
                lane.process.locked_until = until

    async def _unlock(self, queues: list[MessageQueue]) -> None:
        for name in dict.fromkeys(queue.broker_name for queue in queues):
            part = tuple(queue for queue in queues if queue.broker_name == name)
            request = LockRequest(self.session.client_id, self.group, part)
            with contextlib.suppress(SluiceError):
                address = await self.session.address_of(name, part[0].topic)
                link = await self.session.link(address)
                link.oneway(Request.UNLOCK_BATCH_MQ, body=write_lock_request(request))

    def version(self) -> int:
        """For subscriptions: a number that grows."""
        return wall_ms()
