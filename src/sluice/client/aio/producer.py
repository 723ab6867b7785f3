"""This module sends messages: `Sender`, with everything that concerns a single one.

A send is an `Operation`: it takes a queue, goes out over the queue's connection, and gets its
answer there. Where the route or the connection is missing, a task brings it and the operation goes
on. So the usual send makes no task at all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

from sluice.client.aio.batching import Batcher
from sluice.client.aio.observers import Observer, close_observers, observers_of, tell
from sluice.client.aio.operations import Operation
from sluice.client.aio.session import Session, make_client_id
from sluice.client.aio.signed_sends import make_template
from sluice.client.core.faults import QUICK_MS, FaultTable
from sluice.client.core.ids import BatchKeys, KeyRange, UniqueKeys, key_of
from sluice.client.core.messages import (
    COMPRESSED_ZLIB,
    SEND_STATUSES,
    Message,
    SendResult,
    SendStatus,
    SentBatch,
)
from sluice.client.core.recalls import read_handle
from sluice.client.core.refusals import refusal
from sluice.client.core.routes import AUTO_CREATE_TOPIC, Publishing, write_queues
from sluice.client.core.selectors import Selector, hash_selector
from sluice.client.core.sends import (
    Tries,
    batch_key,
    batch_of,
    check_batch_size,
    check_queue,
    check_size,
    choose_queue,
    fixed_queue,
)
from sluice.client.core.settings import ProducerSettings, check_topic, make_settings
from sluice.clock import wall_ms
from sluice.errors import (
    LinkError,
    LinkLost,
    MessageInvalid,
    NoNameserver,
    NoRoute,
    RequestTimedOut,
    SluiceError,
    TopicMissing,
)
from sluice.model import Buffer
from sluice.protocol.client_frames import (
    KEY_BYTES,
    KEYED_BYTES,
    SEND,
    SEND_BATCH,
    SendTemplate,
    SentFields,
    keyed_batch,
)
from sluice.protocol.framing import Frame
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_clients import Heartbeat
from sluice.protocol.remoting_codes import RequestCode as Request

log_lines = logging.getLogger("sluice.client")

_TEMPLATES_MAX: Final = 4096
_QUICK_SECONDS: Final = QUICK_MS / 1000
_PACK_ASIDE_BYTES: Final = 64 * 1024  # packing more than this would hold up the event loop


class Sender:
    """Sends messages; `requests.py` makes the producer out of it that users have."""

    def __init__(
        self,
        nameservers: str | Iterable[str] | None = None,
        *,
        properties: Mapping[str, str] | None = None,
        observers: Sequence[Observer] = (),
        **options: Any,
    ) -> None:
        settings = make_settings(ProducerSettings, nameservers, properties, os.environ, options)
        self.settings = settings
        self.session = Session(settings, make_client_id(settings.instance_name), self._heartbeat)
        self.session.pending_max = settings.waiting_max
        self.session.on_routes.append(self._route_changed)
        self._keys = UniqueKeys(os.urandom(10))
        self._batch_keys = BatchKeys(os.urandom(10))
        self._faults = FaultTable()
        self._topics: dict[str, Publishing] = {}
        self._templates: dict[tuple[MessageQueue, int, int], SendTemplate] = {}
        self._observers = list(observers)
        self._send_seconds = settings.send_ms / 1000
        self._body_bytes_max = settings.message_bytes_max
        self._pack_bytes_min = settings.compress_bytes_min or settings.message_bytes_max + 1
        self._avoids = settings.avoid_slow_brokers
        self._open_operations = 0
        self._idle: asyncio.Future[None] | None = None
        self._batcher: Batcher | None = None
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        """Find the nameservers. Routes and connections come with the first messages."""
        self._loop = asyncio.get_running_loop()
        await self.session.start()
        self._observers += observers_of(self.settings, self)
        if self.settings.batching:
            self._batcher = Batcher(self.settings, self._send_batch, self._loop)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what waits, wait for answers for a bounded time, and leave."""
        if not self.session.is_open:
            await self.session.close()
            return
        if self._batcher is not None:
            self._batcher.flush()
        if self._open_operations:
            self._idle = self._loop.create_future()
            try:
                async with asyncio.timeout(self.settings.close_ms / 1000):
                    await self._idle
            except TimeoutError:
                log_lines.warning(
                    "%d sends have no answer while the producer is closed", self._open_operations
                )
        # After the last result was shown to them.
        await close_observers(self._observers, self.settings.close_ms / 1000)
        await self.session.unregister(producerGroup=self.settings.group)
        await self.session.close()

    @property
    def client_id(self) -> str:
        return self.session.client_id

    @property
    def takes_direct(self) -> bool:
        """Whether a thread may send by itself: nobody watches, nothing is gathered or encrypted."""
        return not (self._observers or self._batcher or self.settings.tls)

    def _heartbeat(self, address: str) -> Heartbeat:
        return Heartbeat(self.session.client_id, (self.settings.group,))

    # ---------------------------------------------------------------------------------- sending

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: Any = None,
        timeout_ms: int = 0,
    ) -> SendResult:
        """Send and wait for the result. Any result means that the message is stored."""
        return await self.send_async(
            message, queue=queue, selector=selector, argument=argument, timeout_ms=timeout_ms
        )

    def send_async(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: Any = None,
        timeout_ms: int = 0,
        future: Any = None,
    ) -> Awaitable[SendResult]:
        """Send; await what is returned for the result. Nothing of the loop is needed before it.

        `future` is for the blocking face: what is told the result instead of a future of asyncio's.
        """
        if not self.session.is_open:
            self.session.check_open()
        if type(message) is not Message:
            raise MessageInvalid(f"send takes a Message, not {type(message).__name__}")
        if (
            self._batcher is not None
            and queue is None
            and selector is None
            and not message.sharding_key
            and message.is_plain
            and not timeout_ms  # a batch has one for all
        ):
            return self._batcher.add(message)
        operation = self._operation(message, SEND, timeout_ms, future)
        if queue is not None or selector is not None or message.sharding_key:
            self._select(operation, queue, selector, argument)
        else:
            self._attempt(operation)
        result: Awaitable[SendResult] = operation.future
        return result

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int = 0,
    ) -> list[SendResult]:
        """Send messages of one topic and one sharding key together: all are stored, or none."""
        self.session.check_open()
        messages = batch_of(messages)
        topic = messages[0].topic
        check_queue(queue, topic)
        if queue is None and (key := batch_key(messages)) is not None:
            queue = hash_selector((await self.publishing(topic)).queues, key, None)
        bodies, tails = [each.body for each in messages], [each.wire_tail() for each in messages]
        for message, tail in zip(messages, tails, strict=True):
            check_size(message, KEY_BYTES + len(tail), self._body_bytes_max)
        size_bytes = KEYED_BYTES * len(messages) + sum(map(len, bodies)) + sum(map(len, tails))
        check_batch_size(size_bytes, self._body_bytes_max)
        future: asyncio.Future[SentBatch] = self._loop.create_future()
        flags = {index: each.flag for index, each in enumerate(messages) if each.flag}
        self._send_batch(topic, 0, bodies, tails, flags, future, queue, timeout_ms)
        return (await future).results()

    async def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: Any = None,
        mark: bytes = b"",
    ) -> None:
        """Send without an answer: nobody learns whether it is stored. `mark`: the id it gets."""
        self.session.check_open()
        if type(message) is not Message:
            raise MessageInvalid(f"send takes a Message, not {type(message).__name__}")
        publishing = await self.publishing(message.topic)
        chosen = fixed_queue(message, publishing.queues, queue, selector, argument)
        chosen = chosen or choose_queue(publishing, self._faults, "", self._loop.time() * 1000)
        link = await self.session.link(await self._address(publishing, chosen))
        await link.room()
        link.check_open()
        now_ms = wall_ms()
        properties = (mark or self._keys.mark(now_ms)) + message.wire_tail()
        check_size(message, len(properties), self._body_bytes_max)
        template = self._template(chosen, SEND, 0, message.flag)
        link.transmit_oneway(template, now_ms, properties, message.body)

    async def send_as(
        self, message: Message, code: int, queue: MessageQueue | None = None, sys_flag: int = 0
    ) -> SendResult:
        """Send with another request than the usual one, or with flags."""
        self.session.check_open()
        operation = self._operation(message, code, 0)
        operation.fixed = queue
        operation.sys_flag = sys_flag
        self._attempt(operation)
        result: SendResult = await operation.future
        return result

    async def recall(self, topic: str, handle: str) -> str:
        """Take a delayed message back before it is delivered; its id."""
        check_topic(topic)
        # Only the broker that has the message can take it back.
        address = await self.session.address_of(read_handle(handle).broker_name, topic)
        ext = {"producerGroup": self.settings.group, "topic": topic, "recallHandle": handle}
        what = f"recalling a message of {topic}"
        answer = await self.session.done(address, Request.RECALL_MESSAGE, ext, what=what)
        return answer.ext.get("msgId", "")

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that can be written now."""
        return (await self.publishing(topic)).queues

    # --------------------------------------------------------------------------- one operation

    def _operation(
        self, message: Message, code: int, timeout_ms: int, future: Any = None
    ) -> Operation:
        now_ms = wall_ms()
        loop = self._loop
        seconds = timeout_ms / 1000 if timeout_ms else self._send_seconds
        mark = self._keys.mark(now_ms)
        given = message
        for observer in self._observers:
            message = observer.sending(message, key_of(mark))
        properties = mark + message.wire_tail()
        body = message.body
        try:
            check_size(message, len(properties), self._body_bytes_max)
        except SluiceError as error:
            for observer in self._observers:
                observer.sent(given, key_of(mark), None, error, 0.0)
            raise
        operation = Operation(
            self,
            loop.create_future() if future is None else future,
            code,
            loop.time() + seconds,
            now_ms,
            message.topic,
            body,
            properties,
        )
        operation.message = given
        if len(body) >= self._pack_bytes_min:
            operation.sys_flag = -1  # packed before it goes out
        self._open_operations += 1
        return operation

    def _send_batch(
        self,
        topic: str,
        sys_flag: int,
        bodies: Sequence[Buffer],
        tails: Sequence[bytes],
        flags: Mapping[int, int],
        future: asyncio.Future[SentBatch],
        queue: MessageQueue | None = None,
        timeout_ms: int = 0,
    ) -> None:
        now_ms = wall_ms()
        keys: KeyRange = self._batch_keys.take(now_ms, len(bodies))
        body = keyed_batch(keys.stamp, keys.first, bodies, tails, flags)
        seconds = timeout_ms / 1000 if timeout_ms else self._send_seconds
        deadline = self._loop.time() + seconds
        properties = self._keys.mark(now_ms) + b"WAIT\x01true\x02"
        operation = Operation(self, future, SEND_BATCH, deadline, now_ms, topic, body, properties)
        operation.keys = keys
        operation.sys_flag = sys_flag
        operation.fixed = queue
        self._open_operations += 1
        self._attempt(operation)

    def _select(
        self,
        operation: Operation,
        queue: MessageQueue | None,
        selector: Selector | None,
        argument: Any,
    ) -> None:
        """Find the queue that it has to go to; the topic's queues may have to be asked for."""
        publishing = self._topics.get(operation.topic)
        message = operation.message
        assert message is not None

        def go_on(found: Publishing) -> None:
            operation.fixed = fixed_queue(message, found.queues, queue, selector, argument)
            self._attempt(operation)

        if publishing is not None:
            try:
                go_on(publishing)
            except SluiceError as error:
                self._over(operation, error)
            return

        async def ask() -> None:
            try:
                go_on(await self.publishing(operation.topic))
            except SluiceError as error:
                self._over(operation, error)

        self.session.spawn(ask()).add_done_callback(operation.prepared)

    def _attempt(self, operation: Operation) -> None:
        """Send now if everything is there for it, else as soon as it is."""
        publishing = self._topics.get(operation.topic)
        if publishing is None or operation.sys_flag < 0:
            self.session.spawn(self._prepare(operation)).add_done_callback(operation.prepared)
            return
        queue = operation.fixed
        loop_time = self._loop.time()
        if queue is None:
            avoided = operation.tries.avoided if operation.tries is not None else ""
            queue = choose_queue(publishing, self._faults, avoided, loop_time * 1000)
        operation.queue = queue
        address = publishing.addresses.get(queue.broker_name)
        link = self.session.links.get(address) if address is not None else None
        if link is None or not link.has_room(len(operation.body)):
            bringing = self._prepare_link(operation, publishing, queue)
            self.session.spawn(bringing).add_done_callback(operation.prepared)
            return
        operation.started = loop_time
        template = self._templates.get((queue, operation.code, operation.sys_flag))
        message = operation.message
        if template is None or (message is not None and message.flag):
            flag = message.flag if message is not None else 0
            template = self._template(queue, operation.code, operation.sys_flag, flag)
        link.transmit(operation, template, operation.born_ms, operation.properties, operation.body)

    async def _prepare(self, operation: Operation) -> None:
        """Bring the route, pack the body."""
        try:
            if operation.sys_flag < 0:
                await self._pack(operation)
            async with asyncio.timeout_at(operation.deadline):
                await self.publishing(operation.topic)
        except NoNameserver as error:
            self._failed(operation, error)
        except NoRoute as error:
            if operation.topic in self.session.wanted:
                # It was there before: its brokers are gone for a while.
                self._failed(operation, LinkLost(str(error)))
            else:
                self._over(operation, error)
        except SluiceError as error:
            self._over(operation, error)
        except TimeoutError:
            text = f"no route of {operation.topic} came in time; do the nameservers answer?"
            self._over(operation, RequestTimedOut(text))
        else:
            self._attempt(operation)

    async def _pack(self, operation: Operation) -> None:
        body, level = operation.body, self.settings.compress_level
        if len(body) > _PACK_ASIDE_BYTES:
            packed = await self._loop.run_in_executor(None, zlib.compress, body, level)
        else:
            packed = zlib.compress(body, level)
        operation.sys_flag = 0
        if len(packed) < len(body):
            operation.body, operation.sys_flag = packed, COMPRESSED_ZLIB

    async def _prepare_link(
        self, operation: Operation, publishing: Publishing, queue: MessageQueue
    ) -> None:
        """Bring the connection, or wait for room on it."""
        try:
            async with asyncio.timeout_at(operation.deadline):
                address = await self._address(publishing, queue)
                link = await self.session.link(address)
                await link.room()
        except SluiceError as error:
            self._failed(operation, error)
        except TimeoutError:
            text = f"no room for a send to {queue.broker_name} within its time; send slower"
            self._over(operation, RequestTimedOut(text))
        else:
            if operation.fixed is None:
                operation.fixed = queue
                self._attempt(operation)
                operation.fixed = None
            else:
                self._attempt(operation)

    async def _address(self, publishing: Publishing, queue: MessageQueue) -> str:
        address = publishing.addresses.get(queue.broker_name)
        return address or await self.session.address_of(queue.broker_name, queue.topic)

    def _template(
        self, queue: MessageQueue, code: int, sys_flag: int, message_flag: int = 0
    ) -> SendTemplate:
        if len(self._templates) >= _TEMPLATES_MAX:
            self._templates.clear()
        template = make_template(
            self.settings.credentials,
            self.settings.group,
            queue.topic,
            queue.queue_id,
            queue.broker_name,
            code=code,
            sys_flag=sys_flag,
            message_flag=message_flag,
            default_queue_count=self.settings.default_queue_count,
        )
        if not message_flag:
            self._templates[queue, code, sys_flag] = template
        return template

    # ---------------------------------------------------------------------------------- results

    def _succeeded(self, operation: Operation, frame: Frame, now: float) -> None:
        """The usual answer, taken apart when somebody asks for what is in it."""
        queue = operation.queue
        assert queue is not None
        if operation.keys is not None or now - operation.started > _QUICK_SECONDS:
            self._answered(operation, 0, SentFields(frame), None)
            return
        if not self._faults.is_empty:
            self._note_speed(operation, now)
        result = SendResult(SendStatus.OK, operation.properties, queue, frame)
        self._finish(operation, result, None)

    def _answered(
        self, operation: Operation, code: int, fields: SentFields, remark: str | None
    ) -> None:
        queue = operation.queue
        assert queue is not None
        self._note_speed(operation, self._loop.time())
        status = SEND_STATUSES.get(code)
        if status is None:
            self._failed(operation, refusal(code, remark, f"sending to {operation.topic}"))
            return
        result: Any
        if operation.keys is None:
            result = SendResult(status, operation.properties, queue, fields)
        else:
            result = SentBatch(status, operation.keys, queue, fields)
        self._finish(operation, result, None)

    def _note_speed(self, operation: Operation, now: float) -> None:
        assert operation.queue is not None
        took_ms = (now - operation.started) * 1000
        if self._avoids and (took_ms > QUICK_MS or not self._faults.is_empty):
            self._faults.answered(operation.queue.broker_name, took_ms, now * 1000)

    def _failed(self, operation: Operation, error: SluiceError) -> None:
        """Another try, or the end of it."""
        now = self._loop.time()
        broker = operation.queue.broker_name if operation.queue is not None else ""
        if self.settings.avoid_slow_brokers and broker and isinstance(error, LinkError):
            self._faults.failed(broker, now * 1000)
        if operation.tries is None:
            operation.tries = Tries(1 if operation.fixed is not None else self.settings.tries_max)
        publishing = self._topics.get(operation.topic)
        broker_count = publishing.broker_count if publishing is not None else 1
        left_ms = (operation.deadline - now) * 1000
        pause_ms = operation.tries.pause_ms(error, broker, broker_count, left_ms)
        if pause_ms is None or not self.session.is_open:
            self._over(operation, operation.tries.verdict(error, operation.topic))
            return
        log_lines.info("a send to %s goes again: %s", operation.topic, error)
        if isinstance(error, LinkError | TopicMissing):
            self._topics.pop(operation.topic, None)  # the route may have changed
        if pause_ms:
            self._loop.call_later(pause_ms / 1000, self._attempt, operation)
        else:
            self._attempt(operation)

    def _over(self, operation: Operation, error: SluiceError) -> None:
        self._finish(operation, None, error)

    def _finish(self, operation: Operation, result: Any, error: SluiceError | None) -> None:
        self._open_operations -= 1
        future = operation.future
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        if self._observers and operation.message is not None:
            tell(self._observers, operation, result, error)
        if self._idle is not None and not self._open_operations and not self._idle.done():
            self._idle.set_result(None)

    # ----------------------------------------------------------------------------------- routes

    async def publishing(self, topic: str) -> Publishing:
        """Where a topic is written; a topic that nobody knows yet is made by sending to it."""
        known = self._topics.get(topic)
        if known is not None:
            return known
        check_topic(topic)
        try:
            route = await self.session.route(topic, fresh=True)
            queues = write_queues(route, topic)
        except TopicMissing as missing:
            try:
                route = await self.session.route(AUTO_CREATE_TOPIC, fresh=True)
            except TopicMissing:
                raise NoRoute(
                    f"no nameserver knows topic {topic}, and no broker makes topics; make it "
                    "with `sluice admin updateTopic`"
                ) from missing
            queues = write_queues(route, topic, self.settings.default_queue_count)
        if not queues:
            raise NoRoute(
                f"topic {topic} has no queue that can be written now: no broker of it is alive, "
                "or none has the write permission"
            )
        known = self._topics.get(topic)
        if known is not None:
            return known  # somebody else asked at the same time
        publishing = Publishing(topic, route, queues)
        self._topics[topic] = publishing
        self.session.wanted.add(topic)
        self.session.spawn(self.session.greet_new())
        return publishing

    def _route_changed(self, topic: str) -> None:
        if topic == AUTO_CREATE_TOPIC:
            return
        route = self.session.known_route(topic)
        if topic in self._topics and route is not None:
            queues = write_queues(route, topic)
            if queues:
                self._topics[topic] = Publishing(topic, route, queues)
            else:
                del self._topics[topic]
