"""This module makes producers and consumers for a test, and closes them when it is over.

Those of the blocking face are ready when they are returned. Those for asyncio belong to the loop
that they were made on: they are closed with it, or before, when the test ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from sluice import aio
from sluice.client.aio.member import Member
from sluice.client.core.subscriptions import Topics, make_subscription, wanted_of
from sluice.client.sync.consumers import PullConsumer, PushConsumer
from sluice.client.sync.loop_thread import loop_thread
from sluice.client.sync.producers import Producer, TransactionProducer

if TYPE_CHECKING:
    from sluice.testing.site import LiveBroker

_CLOSE_SECONDS: Final = 30.0
GROUP: Final = "tests"


class _Client(Protocol):
    def start(self) -> None: ...

    def close(self) -> object: ...


class _AioClient(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


_C = TypeVar("_C", bound=_Client)


class Clients:
    """The clients of one test."""

    def __init__(self, broker: LiveBroker) -> None:
        self._broker = broker
        self._open: list[_Client] = []
        self._open_aio: list[tuple[_AioClient, asyncio.AbstractEventLoop]] = []
        self._guards: set[asyncio.Task[None]] = set()

    def _group(self, topics: Topics, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options with a group: consumers of different topics in one would miss messages."""
        if "group" in options:
            return dict(options)
        wanted = [make_subscription(*each, 0) for each in wanted_of(topics).items()]
        kind = (frozenset(wanted), options.get("broadcasting", False))
        numbers = self._broker.group_numbers
        number = numbers.setdefault(kind, len(numbers) + 1)
        return {"group": GROUP if number == 1 else f"{GROUP}-{number}", **options}

    # ------------------------------------------------------------------------------------- blocking

    def producer(self, options: Mapping[str, Any]) -> Producer:
        producer = Producer(self._broker.nameserver_address, **{"group": GROUP, **options})
        return self._started(producer)

    def transaction_producer(
        self, checker: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> TransactionProducer:
        given = {"group": GROUP, **options}
        producer = TransactionProducer(self._broker.nameserver_address, checker=checker, **given)
        return self._started(producer)

    def push_consumer(
        self, topics: Topics, handler: Any, options: Mapping[str, Any]
    ) -> PushConsumer:
        self._broker.make_topics(_names(topics))
        given = {"start_at": "first", "topics": topics, **self._group(topics, options)}
        consumer = PushConsumer(self._broker.nameserver_address, handler=handler, **given)
        self._started(consumer)
        self._broker.registered()
        loop_thread().run(consumer._aio.rebalance())
        return consumer

    def pull_consumer(self, topics: Topics, options: Mapping[str, Any]) -> PullConsumer:
        self._broker.make_topics(_names(topics))
        given = {"start_at": "first", "topics": topics, **self._group(topics, options)}
        return self._started(PullConsumer(self._broker.nameserver_address, **given))

    def _started(self, client: _C) -> _C:
        client.start()
        self._open.append(client)
        return client

    # -------------------------------------------------------------------------------------- asyncio

    async def aio_producer(self, options: Mapping[str, Any]) -> aio.Producer:
        producer = aio.Producer(self._broker.nameserver_address, **{"group": GROUP, **options})
        await self._start_aio(producer)
        return producer

    async def aio_transaction_producer(
        self, checker: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> aio.TransactionProducer:
        given = {"group": GROUP, **options}
        address = self._broker.nameserver_address
        producer = aio.TransactionProducer(address, checker=checker, **given)
        await self._start_aio(producer)
        return producer

    async def aio_consumer(
        self, topics: Topics, handler: Any, options: Mapping[str, Any]
    ) -> aio.PushConsumer | aio.PullConsumer:
        await asyncio.to_thread(self._broker.make_topics, _names(topics))
        given = {"start_at": "first", "topics": topics, **self._group(topics, options)}
        address = self._broker.nameserver_address
        consumer: aio.PushConsumer | aio.PullConsumer
        if handler is None:
            consumer = aio.PullConsumer(address, **given)
        else:
            consumer = aio.PushConsumer(address, handler=handler, **given)
        await self._start_aio(consumer)
        await asyncio.to_thread(self._broker.registered)
        assert isinstance(consumer, Member)
        await consumer.rebalance()
        return consumer

    async def _start_aio(self, client: _AioClient) -> None:
        await client.start()
        loop = asyncio.get_running_loop()
        self._open_aio.append((client, loop))
        # A loop that ends cancels its tasks and waits for them: the last moment to close.
        guard = loop.create_task(_close_with_loop(client))
        self._guards.add(guard)
        guard.add_done_callback(self._guards.discard)

    # -------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Close all that are open, the newest first; the first error is raised at the end."""
        errors: list[BaseException] = []
        for client, loop in reversed(self._open_aio):
            with _gathering(errors):
                _close_aio(client, loop)
        self._open_aio.clear()
        for blocking in reversed(self._open):
            with _gathering(errors):
                blocking.close()
        self._open.clear()
        if errors:
            raise errors[0]


@contextlib.contextmanager
def _gathering(errors: list[BaseException]) -> Any:
    try:
        yield
    except Exception as error:
        errors.append(error)


async def _close_with_loop(client: _AioClient) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        await client.close()
        raise


def _close_aio(client: _AioClient, loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_closed():
        return  # it was closed with it
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(_CLOSE_SECONDS)
    else:
        loop.run_until_complete(client.close())


def _names(topics: Topics) -> list[str]:
    return list(wanted_of(topics))
