"""This module is the blocking face of producers: every call waits for the loop's thread."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

from sluice.client.aio import requests, transactions
from sluice.client.aio.batching import Results, Ticket
from sluice.client.core.messages import Message, ReceivedMessage, Reply, SendResult
from sluice.client.core.selectors import Selector
from sluice.client.core.transactions import TransactionState, state_of
from sluice.client.sync.direct import DirectSends
from sluice.client.sync.futures import SendFuture
from sluice.client.sync.loop_thread import loop_thread
from sluice.errors import ClientClosed, MessageInvalid
from sluice.protocol.json_members import MessageQueue

# Sends without a result, of one producer: who sends more waits until there are less.
_UNDER_WAY_MAX: Final = 20_000
Aio = TypeVar("Aio", bound=requests.Producer)


class _Sends:
    """Messages that a thread gives away, handed to the loop many at a time."""

    def __init__(self, producer: requests.Producer) -> None:
        self._producer = producer
        self._loop = loop_thread().loop
        self._waiting: deque[tuple[Message, dict[str, Any], SendFuture]] = deque()
        self._lock = threading.Lock()
        self._less = threading.Condition(self._lock)
        self._under_way = 0
        self._is_asked = False

    def add(self, message: Message, options: dict[str, Any]) -> SendFuture:
        future = _Counted(self)
        with self._lock:
            while self._under_way >= _UNDER_WAY_MAX:
                self._less.wait()
            self._under_way += 1
            self._waiting.append((message, options, future))
            is_asked, self._is_asked = self._is_asked, True
        if not is_asked:
            self._loop.call_soon_threadsafe(self._drain)
        return future

    def _drain(self) -> None:
        """On the loop: send all that waits."""
        self._is_asked = False  # who adds from now on asks again
        batches: dict[Results, list[tuple[SendFuture, int]]] = {}
        while self._waiting:
            message, options, future = self._waiting.popleft()
            try:
                sent = self._producer.send_async(message, future=future, **options)
            except Exception as error:
                future.set_exception(error)
                continue
            if isinstance(sent, Ticket):
                results, index = sent.place
                batches.setdefault(results, []).append((future, index))
        for results, places in batches.items():
            results.add_done_callback(partial(_settle, places))

    def ended(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == _UNDER_WAY_MAX - 1:
                self._less.notify_all()


class _Counted(SendFuture):
    """A future that makes room for the next one when it is done."""

    __slots__ = ("_sends",)

    def __init__(self, sends: _Sends) -> None:
        super().__init__()
        self._sends = sends

    def _finish(self) -> None:
        self._sends.ended()
        super()._finish()


def _settle(places: list[tuple[SendFuture, int]], results: Results) -> None:
    """All messages of a batch that one turn put there have their results."""
    error = results.exception() if not results.cancelled() else ClientClosed("closed")
    if error is not None:
        for future, _ in places:
            future.set_exception(error)
        return
    sent = results.result()
    for future, index in places:
        future.set_result(sent.result(index))


class _Face(Generic[Aio]):
    """What blocking producers have in common."""

    _aio: Aio

    def __init__(self, make: Callable[[], Aio]) -> None:
        self._thread = loop_thread()
        self._aio = make()
        self._sends = _Sends(self._aio)
        self._direct = DirectSends(self._aio, self._thread)

    def start(self) -> None:
        self._thread.run(self._aio.start())

    def close(self) -> None:
        """Send what waits, wait for answers for a bounded time, and leave."""
        self._thread.check()
        self._direct.close(self._aio.settings.close_ms / 1000)
        self._thread.run(self._aio.close())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client_id(self) -> str:
        return self._aio.client_id

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: Any = None,
        timeout_ms: int = 0,
    ) -> SendResult:
        """Send and wait for the result. Any result means that the message is stored."""
        options: dict[str, Any] = {}
        if queue is None and selector is None and type(message) is Message:
            self._thread.check()
            result = self._direct.send(message, timeout_ms)
            if result is not None:
                return result
        if queue is not None or selector is not None or timeout_ms:
            options = {"queue": queue, "selector": selector, "argument": argument}
            options["timeout_ms"] = timeout_ms
        return self.send_async(message, **options).result()

    def send_async(
        self,
        message: Message,
        callback: Callable[[SendFuture], None] | None = None,
        **options: Any,
    ) -> SendFuture:
        """Send without waiting; the future has the result. `callback` runs on the loop's thread
        and must not block. Waits only while very many sends are under way.
        """
        self._thread.check()
        if type(message) is not Message:
            raise MessageInvalid(f"send takes a Message, not {type(message).__name__}")
        future = self._sends.add(message, options)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int = 0,
    ) -> list[SendResult]:
        """Send messages of one topic in one request; all of them are stored, or none."""
        return self._thread.run(self._aio.send_batch(messages, queue=queue, timeout_ms=timeout_ms))

    def send_oneway(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: Any = None,
    ) -> None:
        """Send without an answer: nobody learns whether it is stored."""
        self._thread.run(
            self._aio.send_oneway(message, queue=queue, selector=selector, argument=argument)
        )

    def recall(self, topic: str, handle: str) -> str:
        """Take a delayed message back before it is delivered; its id."""
        return self._thread.run(self._aio.recall(topic, handle))

    def ask(self, message: Message, *, timeout_seconds: float = 3.0) -> Reply:
        """Send a request and wait for its reply; raises NoReply."""
        return self._thread.run(self._aio.ask(message, timeout_seconds=timeout_seconds))

    def reply(self, request: ReceivedMessage, body: bytes | str) -> SendResult:
        """Answer a request that a consumer got."""
        return self._thread.run(self._aio.reply(request, body))

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that can be written now."""
        return self._thread.run(self._aio.queues(topic))


class Producer(_Face[requests.Producer]):
    """Sends messages. Use it as `with Producer("host:9876", group="orders") as producer`."""

    def __init__(self, nameservers: str | Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(lambda: requests.Producer(nameservers, **options))


class Transaction:
    """One open half message; see `TransactionProducer.begin`."""

    def __init__(self, inner: transactions.Transaction) -> None:
        self._inner = inner

    @property
    def message_id(self) -> str:
        return self._inner.message_id

    @property
    def transaction_id(self) -> str:
        return self._inner.transaction_id

    @property
    def message(self) -> Message:
        return self._inner.message

    @property
    def result(self) -> SendResult:
        """What the broker said to the half message."""
        return self._inner.result

    @property
    def state(self) -> TransactionState | None:
        """How it was ended; None while it is open."""
        return self._inner.state

    def settle(self, state: TransactionState) -> None:
        """End it after the local work is over; a broker that does not hear it asks the checker."""
        loop_thread().run(self._inner.settle(state))

    def commit(self) -> None:
        loop_thread().run(self._inner.commit())

    def rollback(self) -> None:
        loop_thread().run(self._inner.rollback())

    def give_up(self) -> None:
        """Roll back after an error, where nothing was decided; never raises over that error."""
        loop_thread().run(self._inner.give_up())


class TransactionProducer(_Face[transactions.TransactionProducer]):
    """Sends transactional messages; `checker(message)` says later what became of one."""

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        checker: transactions.Checker,
        **options: Any,
    ) -> None:
        super().__init__(
            lambda: transactions.TransactionProducer(nameservers, checker=checker, **options)
        )

    def send_transaction(
        self, message: Message, executor: transactions.Executor
    ) -> tuple[SendResult, TransactionState]:
        """Send the half message, run `executor(message)`, end it by what that returns.

        The executor runs on the thread of the caller, to whom database connections may be tied. One
        that raises rolls back, and its error is raised.
        """
        if inspect.iscoroutinefunction(executor):
            return self._thread.run(self._aio.send_transaction(message, executor))
        open_one = self.begin(message)
        try:
            state = state_of(executor(message))
        except BaseException:
            open_one.give_up()
            raise
        open_one.settle(state)
        return open_one.result, state

    def begin(self, message: Message) -> Transaction:
        """Send the half message; `commit` or `rollback` ends it."""
        return Transaction(self._thread.run(self._aio.begin(message)))

    @contextlib.contextmanager
    def transaction(self, message: Message) -> Iterator[Transaction]:
        """Commit the message when the block ends in order, roll it back when it raises.

        What the block has decided itself stays so.
        """
        open_one = self.begin(message)
        try:
            yield open_one
        except BaseException:
            open_one.give_up()
            raise
        if open_one.state is None:
            open_one.commit()
