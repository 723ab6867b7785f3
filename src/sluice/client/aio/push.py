"""This module hands messages to a function: `PushConsumer`, concurrent or in order.

The handler is a plain function (it gets threads) or a coroutine function. A message is done when
it returns; it comes again later when it raises, returns False, or takes longer than `consume_ms`.
A concurrent consumer gives such a message back to the broker, which delivers it later and in the
end puts it to the dead letters; an ordered one tries it again at once after a pause, and the
queue waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

from sluice.client.aio.ending import end_tasks
from sluice.client.aio.giving_back import GivingBack
from sluice.client.aio.handler_threads import HandlerThreads, Portion
from sluice.client.aio.member import Lane, Member
from sluice.client.aio.observed_sends import guarded
from sluice.client.aio.observers import Observer, close_observers, observers_of
from sluice.client.aio.running_info import install_reports
from sluice.client.aio.verdicts import failure_of, hung_error, verdict_of
from sluice.client.aio.workers import Worker, forget_cancelling, is_cancelled
from sluice.client.core.allocation import Strategy
from sluice.client.core.messages import ReceivedMessage
from sluice.client.core.portions import PortionSize
from sluice.client.core.process_queues import ProcessQueue
from sluice.client.core.settings import PushSettings, make_settings
from sluice.client.core.subscriptions import (
    Sql,
    Topics,
    make_subscription,
    retry_subscription,
    wanted_of,
)
from sluice.errors import ClientClosed, ConfigError, HandlerHung, SluiceError

log_lines = logging.getLogger("sluice.client")

Handler = Callable[[Any], Any]
_WATCH_SECONDS_MAX: Final = 1.0
_AGAIN_SECONDS: Final = 5.0  # after a message could not be given back


class PushConsumer(Member):
    """Calls a handler with every message of a group's topics.

    `async with PushConsumer("host:9876", group="billing", topics={"orders": "*"}, handler=handle)`.
    Every setting of `PushSettings` can be given by name.
    """

    def __init__(
        self,
        nameservers: str | Iterable[str] | None = None,
        *,
        handler: Handler,
        topics: Topics = "",
        allocation: str | Strategy = "averagely",
        observers: Sequence[Observer] = (),
        properties: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        settings = make_settings(PushSettings, nameservers, properties, os.environ, options)
        if not callable(handler):
            raise ConfigError("handler: a function of a message, or a coroutine function")
        super().__init__(settings, allocation)
        self.push = settings
        self.locks_queues = settings.orderly and not settings.broadcasting
        self._handler = handler
        self._is_coroutine = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004
        )
        self._observers = list(observers)
        self._ready: deque[Lane] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._workers: list[Worker] = []
        self._watching: asyncio.Task[None] | None = None
        self._size = PortionSize()
        self._threads: HandlerThreads | None = None
        self._turns: asyncio.Semaphore | None = None
        self._is_paused = False
        self._progress = asyncio.Event()  # set when handlers came to an end with something
        self._giving_back = GivingBack(self)
        self.consumed_count = 0
        self.failed_count = 0
        for topic, expression in wanted_of(topics).items():
            self.subscribe(topic, expression)
        install_reports(self)

    def subscribe(self, topic: str, expression: str | Sql | Sequence[str] = "*") -> None:
        """Read a topic too; before the start. Tags are "A || B" or a list, or it is an `Sql`."""
        self.subscribe_to(make_subscription(topic, expression, self.version()))

    async def start(self) -> None:
        """Join the group and begin."""
        if not self.subscriptions:
            raise ConfigError("subscribe to a topic before the start")
        if not self.push.broadcasting:
            self.subscribe_to(retry_subscription(self.group, self.version()))
        loop = asyncio.get_running_loop()
        if not self._is_coroutine:
            self._threads = HandlerThreads(f"sluice-{self.group}", loop)
        self._turns = asyncio.Semaphore(self.push.concurrency)
        self._observers += observers_of(self.settings, None)
        if self._observers:
            self._size = PortionSize(1)
        await self.start_member()
        if not self.push.orderly:
            for _ in range(self.push.concurrency):
                worker = Worker()
                self._workers.append(worker)
                worker.task = self.session.spawn(self._work(worker))
        watch = min(_WATCH_SECONDS_MAX, self.push.consume_ms / 4000)
        self._watching = self.session.repeat(watch, self._watch)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let handlers come to an end, for a bounded time; commit what is done; leave."""
        self._is_closing = True
        for lane in self.lanes.values():
            if lane.task is not None:
                lane.task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.push.close_ms / 1000):
                while self._busy_count():
                    self._progress.clear()
                    await self._progress.wait()
        if self._busy_count():
            log_lines.warning(
                "%s: %d messages are still with handlers; they come again",
                *(self.group, self._busy_count()),
            )
        # Who is in the middle of a portion says what of it is done.
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        tasks += [lane.work for lane in self.lanes.values() if lane.work is not None]
        await end_tasks(tasks)
        await self.stop_member()
        await close_observers(self._observers, self.push.close_ms / 1000)
        if self._threads is not None:
            self._threads.close()

    def _busy_count(self) -> int:
        return sum(lane.process.under_way for lane in self.lanes.values())

    def pause(self) -> None:
        """Hand over and pull nothing until `resume`."""
        self._is_paused = True
        for lane in self.lanes.values():
            lane.process.is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        for lane in self.lanes.values():
            lane.process.is_paused = False
            self.arrived(lane)

    # ------------------------------------------------------------------------------------- lanes

    def lane_added(self, lane: Lane) -> None:
        lane.process.is_paused = self._is_paused
        if self.push.orderly:
            lane.work = self.session.spawn(self._work_in_order(lane))

    async def lane_dropped(self, lane: Lane) -> None:
        lane.room.set()
        if lane.work is not None:
            # The handler ends with what it has, so that the next owner does not have it as well.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.push.close_ms / 1000):
                    await asyncio.shield(lane.work)
            lane.work.cancel()

    def arrived(self, lane: Lane) -> None:
        if self.push.orderly:
            lane.room.set()
            return
        if lane not in self._ready:
            self._ready.append(lane)
        waiting = lane.process.waiting_count
        if waiting and self._idle:
            self._wake_workers(-(-waiting // self._size.share(waiting, len(self._idle))))

    # --------------------------------------------------------------------------- concurrent work

    def _wake_workers(self, count: int) -> None:
        while self._idle and count > 0:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    async def _next(self) -> tuple[Lane, ProcessQueue, list[ReceivedMessage]]:
        """The next portion of some queue, each queue in turn."""
        while True:
            while self._ready and not self._is_paused and not self._is_closing:
                lane = self._ready[0]
                process = lane.process
                if process.is_dropped or not process.waiting_count:
                    self._ready.popleft()
                    continue
                self._ready.rotate(-1)
                # Others that are free get their share of what waits.
                share = self._size.share(process.waiting_count, len(self._idle))
                taken = process.take(max(self.push.batch_size, share))
                if process.waiting_count:
                    self._wake_workers(1)
                return lane, process, taken
            waiter = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    async def _work(self, worker: Worker) -> None:
        while self._goes_on():
            worker.is_hung = False
            try:
                lane, process, messages = await self._next()
                worker.lane = lane
                if self._is_coroutine and self.push.batch_size == 1 and not self._observers:
                    await self._run_plainly(worker, lane, process, messages)
                elif self._is_coroutine:
                    await self._run_coroutines(worker, lane, process, messages)
                else:
                    await self._run_on_thread(worker, lane, process, messages)
            except asyncio.CancelledError:
                if self._is_ending():
                    raise
            finally:
                worker.lane = None
                worker.messages = []
                worker.portion = None

    def _is_ending(self) -> bool:
        """Whether workers are to end: with the consumer, or with a loop that ends all its tasks."""
        watching = self._watching
        is_over = watching is not None and watching.cancelling() > 0
        return self._is_closing or is_over or not self.session.is_open

    def _goes_on(self) -> bool:
        """Whether there is more to do for the running task.

        That it was cancelled says nothing: it may be that its handler hung, or that a library
        cancelled the task that called it and did not take that back.
        """
        if self._is_ending():
            return False
        forget_cancelling()
        return True

    def _is_own_end(self, failure: BaseException, worker: Worker) -> bool:
        """Whether the call is to end, and it is not something that the handler did."""
        if not isinstance(failure, asyncio.CancelledError) or not is_cancelled():
            return False
        return worker.is_hung or self._is_ending()

    def _groups(self, messages: list[ReceivedMessage]) -> list[list[ReceivedMessage]]:
        size = self.push.batch_size
        return [messages[at : at + size] for at in range(0, len(messages), size)]

    async def _run_plainly(
        self, worker: Worker, lane: Lane, process: ProcessQueue, messages: list[ReceivedMessage]
    ) -> None:
        """As `_run_coroutines`, for handlers of single messages that nobody watches."""
        handler, clock = self._handler, time.monotonic
        begun = clock()
        failed: set[ReceivedMessage] = set()
        error: BaseException | None
        place = 0  # of the message that the handler has
        worker.messages = messages
        try:
            for message in messages:
                if process.is_dropped:
                    break
                worker.since = 0.0  # a clock for each would cost a tenth of the whole
                try:
                    if await handler(message) is not False:
                        place += 1
                        continue
                    error = verdict_of(False)
                except BaseException as failure:
                    if self._is_own_end(failure, worker):
                        raise
                    error = failure
                place += 1
                if error is not None:
                    failed.add(message)
                    self._failed(lane, process, [message], error)
        except asyncio.CancelledError:
            if worker.is_hung:
                failed.add(messages[place])
                self._failed(lane, process, [messages[place]], self._hung_error())
                place += 1
            raise
        finally:
            done = messages
            if place < len(messages):
                done = messages[:place]
                process.give_back(messages[place:])
                if not self._is_closing:
                    self.arrived(lane)
            if failed:
                done = [message for message in done if message not in failed]
            self._succeeded(lane, process, done)
            self._size.took(clock() - begun, len(messages))

    async def _run_coroutines(
        self, worker: Worker, lane: Lane, process: ProcessQueue, messages: list[ReceivedMessage]
    ) -> None:
        begun = time.monotonic()
        groups = self._groups(messages)
        finished: list[ReceivedMessage] = []
        place = 0
        try:
            for group in groups:
                if process.is_dropped:
                    break
                worker.messages, worker.since = group, time.monotonic()
                if worker.is_hung:
                    worker.go_on()
                error = await self._call_coroutine(group, worker)
                place += 1
                if error is None:
                    finished += group
                else:
                    self._failed(lane, process, group, error)
        except asyncio.CancelledError:
            if worker.is_hung:
                self._failed(lane, process, groups[place], self._hung_error())
                place += 1
            raise
        finally:
            rest = [message for group in groups[place:] for message in group]
            if rest:
                process.give_back(rest)
                if not self._is_closing:
                    self.arrived(lane)
            self._succeeded(lane, process, finished)
            self._size.took(time.monotonic() - begun, len(messages))

    async def _call_coroutine(
        self, group: list[ReceivedMessage], worker: Worker
    ) -> BaseException | None:
        given: Any = group if self.push.batch_size > 1 else group[0]
        contexts = self._before(group) if self._observers else None
        begun = time.monotonic() if contexts is not None else 0.0
        error: BaseException | None = None
        try:
            result: Awaitable[Any] = self._handler(given)
            if await result is False:
                error = verdict_of(False)
        except BaseException as failure:
            if self._is_own_end(failure, worker):
                if contexts is not None:
                    self._after(group, contexts, self._given_up_error(), begun)
                raise
            error = failure
        if contexts is not None:
            self._after(group, contexts, error, begun)
        return error

    async def _run_on_thread(
        self, worker: Worker, lane: Lane, process: ProcessQueue, messages: list[ReceivedMessage]
    ) -> None:
        groups = self._groups(messages)
        portion = worker.portion = Portion(self._call_plainly, groups)
        contexts = [self._before(group) for group in groups] if self._observers else None
        assert self._threads is not None
        begun = time.monotonic()
        is_hung = False
        try:
            await self._threads.run(portion)
        except asyncio.CancelledError:
            portion.is_given_up = True
            is_hung = worker.is_hung
            raise
        finally:
            errors = list(portion.errors[: len(groups)])
            if is_hung and len(errors) < len(groups):
                errors.append(self._hung_error())
            finished: list[ReceivedMessage] = []
            for group, error in zip(groups, errors, strict=False):
                if error is None:
                    finished += group
                else:
                    self._failed(lane, process, group, error)
            rest = [message for group in groups[len(errors) :] for message in group]
            if rest:
                process.give_back(rest)
                if not self._is_closing:
                    self.arrived(lane)
            self._succeeded(lane, process, finished)
            if contexts is not None:
                errors += [self._given_up_error()] * (len(groups) - len(errors))
                for group, context, error in zip(groups, contexts, errors, strict=True):
                    self._after(group, context, error, begun)
            # A portion that was given up does not say how long it took.
            self._size.took(portion.took or time.monotonic() - begun, len(messages))

    def _call_plainly(self, group: list[ReceivedMessage]) -> BaseException | None:
        """On a thread: the handler, and what it makes of the messages."""
        try:
            return verdict_of(self._handler(group if self.push.batch_size > 1 else group[0]))
        except BaseException as error:
            return error

    async def call_directly(self, message: ReceivedMessage) -> BaseException | None:
        """The handler with one message that belongs to no queue of ours; what came of it."""
        if self._is_coroutine:
            return await self._call_coroutine([message], Worker())
        portion = Portion(self._call_plainly, [[message]])
        assert self._threads is not None
        await self._threads.run(portion)
        return portion.errors[0]

    # ------------------------------------------------------------------------------ ordered work

    async def _work_in_order(self, lane: Lane) -> None:
        """One message after the other; a failed one is tried again before its successors."""
        assert self._turns is not None
        while self._goes_on():
            process = lane.process
            if process.is_dropped and self.lanes.get(lane.queue) is not lane:
                return
            if not self._may_take(process):
                lane.room.clear()
                if not process.waiting_count or self._is_closing or process.is_dropped:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_WATCH_SECONDS_MAX):
                            await lane.room.wait()
                else:
                    await asyncio.sleep(0.1)
                continue
            async with self._turns:
                if not self._may_take(process):
                    continue  # it changed while others had their turn
                group = process.take(self.push.batch_size)
                error = await self._call_in_order(group)
            if error is None:
                # Also where the queue is given up: who does that waits for it, and commits it.
                self._succeeded(lane, process, group)
            elif process.is_dropped:
                self._progress.set()
            else:
                await self._again_in_order(lane, process, group, error)

    def _may_take(self, process: ProcessQueue) -> bool:
        """Whether the next messages of an ordered queue may go to the handler now."""
        is_stopped = self._is_paused or self._is_closing or process.is_dropped
        if is_stopped or not process.waiting_count:
            return False
        return not self.locks_queues or self._is_locked(process)

    async def _call_in_order(self, group: list[ReceivedMessage]) -> BaseException | None:
        worker = Worker(asyncio.current_task())
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.push.consume_ms / 1000, worker.give_up)
        try:
            if self._is_coroutine:
                return await self._call_coroutine(group, worker)
            assert self._threads is not None
            portion = Portion(self._call_plainly, [group])
            contexts = self._before(group) if self._observers else None
            begun = time.monotonic()
            try:
                await self._threads.run(portion)
            finally:
                if contexts is not None:
                    errors = portion.errors or [self._given_up_error()]
                    self._after(group, contexts, errors[0], begun)
            return portion.errors[0]
        except asyncio.CancelledError:
            if not worker.is_hung or self._is_ending():
                raise
            return self._hung_error()
        finally:
            timer.cancel()

    async def _again_in_order(
        self,
        lane: Lane,
        process: ProcessQueue,
        group: list[ReceivedMessage],
        error: BaseException,
    ) -> None:
        self.failed_count += len(group)
        log_lines.warning("%s: %s is tried again: %r", self.group, group[0], error)
        tries_max = self.push.tries_max
        is_over = 0 <= tries_max <= min(message.reconsume_times for message in group)
        if is_over and all([await self._giving_back.resend(message) for message in group]):
            self._succeeded(lane, process, group)
            return
        for message in group:
            message.attempts += 1
        process.give_back(group)
        self._progress.set()
        await asyncio.sleep(self.push.suspend_ms / 1000)

    # ----------------------------------------------------------------------------------- results

    def _succeeded(
        self, lane: Lane, process: ProcessQueue, messages: list[ReceivedMessage]
    ) -> None:
        if messages:
            process.done(messages)
            self.consumed_count += len(messages)
        lane.room.set()
        self._progress.set()

    def _failed(
        self,
        lane: Lane,
        process: ProcessQueue,
        messages: list[ReceivedMessage],
        error: BaseException,
    ) -> None:
        """Messages whose handler failed: they go back, unless the queue is not ours any more."""
        self.failed_count += len(messages)
        if not isinstance(error, HandlerHung):
            error = failure_of(error, messages[0])
        log_lines.warning("%s: %s comes again: %s", self.group, messages[0], error)
        if process.is_dropped:
            return
        self.session.spawn(self._give_back(lane, process, messages))

    async def _give_back(
        self, lane: Lane, process: ProcessQueue, messages: list[ReceivedMessage]
    ) -> None:
        for message in messages:
            if self.push.broadcasting:
                log_lines.error("%s: %s is dropped: nobody else gets it", self.group, message)
            else:
                while not process.is_dropped:
                    if await self._giving_back.give(message):
                        break
                    await asyncio.sleep(_AGAIN_SECONDS)
            process.done([message])
        lane.room.set()
        self._progress.set()

    def _hung_error(self) -> HandlerHung:
        return hung_error(self.push.consume_ms)

    def _given_up_error(self) -> SluiceError:
        """Why a handler that has not come back is not waited for any more."""
        if self._is_closing:
            return ClientClosed("the consumer was closed before the handler came back")
        return self._hung_error()

    async def _watch(self) -> None:
        """Find handlers that hang."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.is_hung and not worker.since:
                worker.go_on()  # its handler has another message
            worker.since = worker.since or now
            since = worker.portion.started if worker.portion is not None else worker.since
            busy = worker.messages or worker.portion is not None
            if busy and not worker.is_hung and (now - since) * 1000 > self.push.consume_ms:
                worker.give_up()

    def _before(self, group: list[ReceivedMessage]) -> list[object]:
        return [guarded(observer.consuming, self.group, group) for observer in self._observers]

    def _after(
        self,
        group: list[ReceivedMessage],
        contexts: list[object],
        error: BaseException | None,
        begun: float,
    ) -> None:
        took_ms = (time.monotonic() - begun) * 1000
        if error is not None and not isinstance(error, SluiceError):
            error = failure_of(error, group[0])
        for observer, context in zip(self._observers, contexts, strict=True):
            guarded(observer.consumed, self.group, group, context, error, took_ms)
