"""This module runs a nameserver and a broker beside a test, each on a thread of its own.

They are what `sluice serve` runs: the same code on a real disk, over real sockets on loopback, with
small files. Clients of any language can use them. What tests do to them goes through here: look at
messages, stop, start, kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import shutil
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from sluice import aio
from sluice.broker.attributes import altered
from sluice.broker.server import Broker
from sluice.broker.topics import TopicSettings
from sluice.client.core.messages import ReceivedMessage, read_pulled
from sluice.client.core.subscriptions import Topics
from sluice.client.sync.consumers import PullConsumer, PushConsumer
from sluice.client.sync.producers import Producer, TransactionProducer
from sluice.config import BrokerConfig, NameserverConfig, settings_of
from sluice.config.settings import build
from sluice.errors import ConfigError, SluiceError
from sluice.nameserver.server import Nameserver
from sluice.protocol.json_members import MessageQueue
from sluice.testing import due, stopping
from sluice.testing.clients import Clients
from sluice.testing.clock import Clock, Reading
from sluice.testing.disk import FaultyFiles
from sluice.testing.due import Look
from sluice.testing.faults import Faults
from sluice.testing.gate import Gate
from sluice.testing.host import PATIENCE_SECONDS, Host
from sluice.testing.readers import Readers, readers_of

T = TypeVar("T")

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
# Small files: a test has few messages, and many tests have a store each. The disk of a laptop may
# be nearly full, which is no business of a test.
SMALL: Final[dict[str, Any]] = {
    "segment_bytes": 64 * _MIB,
    "queue_file_units": 20_000,
    "key_index_slots": 20_000,
    "key_index_entries": 80_000,
    "disk_clean_ratio": 1.0,
    "disk_force_ratio": 1.0,
    "disk_refuse_ratio": 1.0,
    "listen_port": 0,
    "kafka_port": 0,
    "kafka_initial_rebalance_delay_ms": 0,  # nobody waits for more members to come
    "metrics": False,
}
_OWN: Final = ("directory", "nameserver_addresses")  # what a test gets from here
_PAUSE_SECONDS: Final = 0.002
_POLL_SECONDS: Final = 0.5
_READ_BYTES_MAX: Final = 8 * _MIB


def config_of(settings: Mapping[str, Any], directory: str, nameserver: str) -> BrokerConfig:
    """A broker's configuration from settings of docs/settings.md; raises ConfigError."""
    known = settings_of(BrokerConfig)
    values: dict[str, Any] = dict(SMALL)
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"no setting is called {name}; did you mean {near}? docs/settings.md has them all"
            )
        if name in _OWN:
            raise ConfigError(f"{name}: every broker of a test has its own")
        kind = known[name].kind
        if isinstance(value, str) and type(known[name].default) is not str:
            try:
                value = kind.parse(value)
            except ValueError as error:
                allowed = known[name].allowed
                raise ConfigError(f"{name}: {value!r} {error}; allowed: {allowed}") from error
        values[name] = tuple(value) if isinstance(value, list) else value
    values |= {"directory": directory, "nameserver_addresses": (nameserver,)}
    return build(BrokerConfig, values)


class NameserverSite:
    """A nameserver on a thread; brokers of one test may share it."""

    def __init__(self) -> None:
        self._host = Host("sluice-test-nameserver")
        self.group_numbers: dict[Any, int] = {}  # of the groups that consumers get by default
        self.nameserver: Nameserver = self._host.run(self._start(0))
        self.address = self.nameserver.address

    async def _start(self, port: int) -> Nameserver:
        nameserver = Nameserver(NameserverConfig(listen_port=port))
        await nameserver.start()
        return nameserver

    def close(self) -> None:
        self._host.run(self.nameserver.stop())
        self._host.stop()


class LiveBroker:
    """A broker that runs beside a test, with its nameserver. Closed by the fixture."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        clock: Clock | None = None,
        beside: LiveBroker | None = None,
    ) -> None:
        """`beside`: a broker whose nameserver this one registers with, instead of its own."""
        self.directory = directory
        self.clock = clock or Clock()
        self._settings = dict(settings or {})
        self._nameserver: NameserverSite = (
            NameserverSite() if beside is None else beside._nameserver
        )
        self._owns_nameserver = beside is None
        self.nameserver_address: str = self._nameserver.address
        try:
            config_of(self._settings, str(directory), self.nameserver_address)
            self._host = Host("sluice-test-broker")
        except BaseException:
            self._close_nameserver()
            raise
        self._hands = self.clock.reading()
        self._files = FaultyFiles()
        self._gate: Gate
        self._broker: Broker
        self._ports: dict[str, int] = {}
        self._places: list[socket.socket] = []
        self._chores: asyncio.Task[None] | None = None
        self.is_up = False
        self.clients = Clients(self)
        self.faults = Faults(self)
        try:
            self.start()
        except BaseException:
            self._host.stop()
            self._close_nameserver()
            raise
        self.clock.attach(self)

    # ------------------------------------------------------------------------------ addresses, life

    @property
    def broker_address(self) -> str:
        """host:port of the broker itself; clients find it through the nameserver."""
        return f"127.0.0.1:{self._ports['listen_port']}"

    @property
    def kafka_address(self) -> str:
        """host:port for Kafka's clients (bootstrap.servers)."""
        return f"127.0.0.1:{self._ports['kafka_port']}"

    @property
    def group_numbers(self) -> dict[Any, int]:
        """Which default group has what topics; brokers beside each other share the groups."""
        return self._nameserver.group_numbers

    @property
    def name(self) -> str:
        """The broker's name, as routes and queues have it."""
        return self._broker.config.broker_name

    @property
    def config(self) -> BrokerConfig:
        """All its settings."""
        return self._broker.config

    def start(self) -> None:
        """Start again after `stop` or `kill`: the same port, directory and time."""
        if self.is_up:
            raise RuntimeError("the broker runs already")
        settings = {**self._settings, **self._ports}
        config = config_of(settings, str(self.directory), self.nameserver_address)
        self._hands = self.clock.reading()
        self._files = FaultyFiles()
        self._host.run(self._start(config))
        self._leave_ports()
        self.is_up = True

    async def _start(self, config: BrokerConfig) -> None:
        gate = Gate()
        if self._ports:  # what was ordered of the network outlasts a process
            gate.orders, gate.is_closed = self._gate.orders, self._gate.is_closed
        self._gate = gate
        self._watch()
        self._broker = broker = Broker(
            config, files=self._files, now_ms=self._now_ms, gate=self._gate.before
        )
        await broker.start()
        await broker.registrar.registered()
        self._ports = {"listen_port": broker.port}
        if broker.kafka_address:
            self._ports["kafka_port"] = int(broker.kafka_address.rpartition(":")[2])
        self._chores = asyncio.get_running_loop().create_task(self._do_chores())

    def stop(self) -> None:
        """Stop in order, as SIGTERM does; what was acknowledged is on the disk."""
        self._need_up()
        self.is_up = False
        try:
            self._host.run(self._stop())
        finally:
            self._keep_ports()

    async def _stop(self) -> None:
        await self._end_chores()
        await self._broker.stop()

    def kill(self) -> None:
        """End at once, as kill -9 does: nothing is written, flushed or answered any more."""
        self._need_up()
        self.is_up = False
        self._gate.is_dead = True  # also for what comes first when a frozen broker goes on
        self._host.thaw()
        try:
            self._host.run(self._kill())
        finally:
            self._keep_ports()

    async def _kill(self) -> None:
        stopping.cut_off(self._broker)
        # Only now, so that nobody hears of a disk that fails.
        self._files.is_dead = True
        self._files.let_fsync()
        await self._end_chores()
        await stopping.bury(self._broker)

    def restart(self) -> None:
        """Stop in order where it runs, and start again; a store that failed is left as it is."""
        if self.is_up:
            with contextlib.suppress(SluiceError):
                self.stop()
        self.start()

    def close(self) -> None:
        """The test is over: close its clients, stop, and delete the store."""
        try:
            self.faults.lift()
            self.clients.close()
        finally:
            self.clock.detach(self)
            try:
                if self.is_up:
                    with contextlib.suppress(SluiceError):  # a disk that failed stays so
                        self.stop()
            finally:
                self._leave_ports()
                self._host.stop()
                self._close_nameserver()
                shutil.rmtree(self.directory, ignore_errors=True)

    def _keep_ports(self) -> None:
        """While it does not run nobody else gets its ports; who connects there is refused."""
        for port in self._ports.values():
            place = socket.socket()
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._places.append(place)
            with contextlib.suppress(OSError):
                place.bind(("127.0.0.1", port))

    def _leave_ports(self) -> None:
        while self._places:
            self._places.pop().close()

    def _close_nameserver(self) -> None:
        if self._owns_nameserver:
            self._nameserver.close()

    def _need_up(self) -> None:
        if not self.is_up:
            raise RuntimeError("the broker does not run; start it first")

    # -------------------------------------------------------------------------------------- clients

    def producer(self, **options: Any) -> Producer:
        """A producer that is ready; `options` as `sluice.Producer` has them."""
        return self.clients.producer(options)

    def transaction_producer(
        self, checker: Callable[[ReceivedMessage], Any], **options: Any
    ) -> TransactionProducer:
        """A producer of transactional messages that is ready."""
        return self.clients.transaction_producer(checker, options)

    def consumer(
        self, topics: Topics, handler: Callable[[Any], Any], **options: Any
    ) -> PushConsumer:
        """A consumer that hands messages to a function; it has its queues when this returns.

        Unlike `sluice.PushConsumer` it begins at the first message, and makes its topics where they
        are missing. Without a `group`, consumers of the same topics share one.
        """
        return self.clients.push_consumer(topics, handler, options)

    def pull_consumer(self, topics: Topics = "", **options: Any) -> PullConsumer:
        """A consumer that is asked for messages; it begins at the first one."""
        return self.clients.pull_consumer(topics, options)

    async def aio_producer(self, **options: Any) -> aio.Producer:
        """A producer for asyncio that is ready, on the loop of the caller."""
        return await self.clients.aio_producer(options)

    async def aio_transaction_producer(
        self, checker: Callable[[ReceivedMessage], Any], **options: Any
    ) -> aio.TransactionProducer:
        """A producer of transactional messages for asyncio."""
        return await self.clients.aio_transaction_producer(checker, options)

    async def aio_consumer(
        self, topics: Topics, handler: Callable[[Any], Any], **options: Any
    ) -> aio.PushConsumer:
        """A consumer for asyncio; the handler is a function or a coroutine function."""
        found = await self.clients.aio_consumer(topics, handler, options)
        assert isinstance(found, aio.PushConsumer)
        return found

    async def aio_pull_consumer(self, topics: Topics = "", **options: Any) -> aio.PullConsumer:
        """A consumer for asyncio that is asked for messages."""
        found = await self.clients.aio_consumer(topics, None, options)
        assert isinstance(found, aio.PullConsumer)
        return found

    # --------------------------------------------------------------------------------------- topics

    def create_topic(
        self, topic: str, queues: int = 8, *, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Make a topic; routes have it when this returns.

        `attributes` are those of `sluice admin updateTopic`: {"message.ttl.ms": "60000"}.
        """
        added = {f"+{name}": str(value) for name, value in (attributes or {}).items()}
        settings = TopicSettings(topic, queues, queues, attributes=altered(None, added))
        self._do(self._put_topics([settings]))

    def make_topics(self, topics: Iterable[str]) -> None:
        """Make those of these topics that are missing, with as many queues as a send would."""

        async def make() -> None:
            core = self._broker.core
            count = core.config.default_queue_count
            missing = [name for name in topics if core.topics.get(name) is None]
            if missing:
                await self._put_topics([TopicSettings(name, count, count) for name in missing])

        self._do(make())

    async def _put_topics(self, topics: list[TopicSettings]) -> None:
        core = self._broker.core
        done: asyncio.Future[SluiceError | None] = asyncio.get_running_loop().create_future()
        core.topics.put(topics, done.set_result)
        core.ask_turn()
        error = await done
        if error is not None:
            raise error
        await self._broker.registrar.registered()

    def registered(self) -> None:
        """Return when the nameserver knows all topics of the broker."""
        self._do(self._broker.registrar.registered())

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """All messages that lie in a topic and can be read, in the order in which they came.

        Also those of the broker's own topics: dead letters are in `%DLQ%` with the group's name.
        """
        return self._do(self._messages(topic))

    async def _messages(self, topic: str) -> list[ReceivedMessage]:
        store = self._broker.core.store
        settings = self._broker.core.topics.get(topic)
        count = 0 if settings is None else max(settings.read_queues, settings.write_queues)
        found: list[ReceivedMessage] = []
        for queue_id in range(count):
            queue = MessageQueue(topic, self.name, queue_id)
            offset = store.min_offset(topic, queue_id)
            while offset < store.max_offset(topic, queue_id):
                at = offset
                read = await due.ask(
                    self._broker.core,
                    lambda at=at, queue_id=queue_id: store.read(  # type: ignore[misc]
                        topic, queue_id, at, count_max=1024, bytes_max=_READ_BYTES_MAX
                    ),
                )
                found += read_pulled(b"".join(map(bytes, read.messages)), queue)
                if read.next_offset <= offset:
                    break
                offset = read.next_offset
        return sorted(found, key=lambda message: (message.store_ms, message.position))

    # -------------------------------------------------------------------------------------- waiting

    def wait_until(
        self, condition: Callable[[], T], *, seconds: float = PATIENCE_SECONDS, what: str = ""
    ) -> T:
        """Wait until a condition holds, in the machine's time, and return what it returned.

        Raises AssertionError where it does not come true.
        """
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{what or 'the condition'} did not come true in {seconds:g} s"
                )
            time.sleep(_PAUSE_SECONDS)
        return found

    async def aio_wait_until(
        self, condition: Callable[[], T], *, seconds: float = PATIENCE_SECONDS, what: str = ""
    ) -> T:
        """`wait_until` for a coroutine."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{what or 'the condition'} did not come true in {seconds:g} s"
                )
            await asyncio.sleep(_PAUSE_SECONDS)
        return found

    def settle(self) -> None:
        """Return when consumers of this process are done with all that was sent so far."""
        self.clock.settle()

    async def aio_settle(self) -> None:
        """`settle` for a coroutine."""
        await self.clock.aio_settle()

    # ----------------------------------------------------------- for the clock and the faults only

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        if not self.is_up:
            work.close()
            self._need_up()
        return self._host.run(work)

    def _now_ms(self) -> int:
        return self._hands.now_ms()

    def set_time(self, hands: Reading, jump_ms: int) -> None:
        """Move the hands of this broker's clock, and take everybody along who is connected."""

        def move() -> None:
            self._hands = hands
            if not self._gate.is_watching:
                self._gate.checks_answered = self._broker.core.transactions.asked_count
            self._watch()
            if jump_ms:
                due.carry(self._broker.core, jump_ms)

        self._host.call(move)

    def _watch(self) -> None:
        """Once time is no longer the machine's, more of what clients ask has to be looked at."""
        hands = self._hands
        if hands.stopped_ms is None and not hands.ahead_ms:
            return
        self._gate.is_watching = True
        self._gate.now_ms = self._now_ms

    async def _do_chores(self) -> None:
        """While the clock stands, who waits for the other side waits in the machine's time."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if self._hands.stopped_ms is not None:
                due.carry_waits(self._broker.core, -round(_POLL_SECONDS * 1000))

    async def _end_chores(self) -> None:
        if self._chores is not None:
            self._chores.cancel()
            await asyncio.gather(self._chores, return_exceptions=True)

    def look(self) -> Look:
        """What the broker is at."""
        return self._host.run(due.look(self._broker.core))

    def readers(self) -> Readers:
        """Who reads what."""
        return self._host.call(readers_of, self._broker.core)

    @property
    def checks_open(self) -> int:
        """Questions about transactions without an answer so far."""
        return max(0, self._broker.core.transactions.asked_count - self._gate.checks_answered)

    def forget_checks(self) -> None:
        """Nobody answers those: they are not waited for any longer."""
        self._gate.checks_answered = self._broker.core.transactions.asked_count

    @property
    def gate(self) -> Gate:
        return self._gate

    @property
    def files(self) -> FaultyFiles:
        return self._files

    @property
    def host(self) -> Host:
        return self._host

    def cut_all(self) -> None:
        """Close all connections of clients at once."""

        def cut() -> None:
            for listener in self._broker.listeners:
                for connection in list(listener.connections):
                    connection.abort("as the test wants it")

        self._host.call(cut)


class BrokerFactory:
    """Makes brokers for one test: `factory(flush="async")`, `factory(beside=first)`."""

    def __init__(
        self, make_directory: Callable[[], Path], clock: Clock, settings: Mapping[str, Any]
    ) -> None:
        self._make_directory = make_directory
        self._clock = clock
        self._settings = settings
        self._made: list[LiveBroker] = []

    def __call__(self, *, beside: LiveBroker | None = None, **settings: Any) -> LiveBroker:
        """A broker that runs, with these settings above those of the marker."""
        given = {**self._settings, **settings}
        if beside is not None and "broker_name" not in given:
            given["broker_name"] = f"broker-{chr(ord('a') + len(self._made))}"
        broker = LiveBroker(self._make_directory(), given, clock=self._clock, beside=beside)
        self._made.append(broker)
        return broker

    def close(self) -> None:
        """Close all of them, the newest first: the first may have the nameserver of others."""
        errors: list[BaseException] = []
        while self._made:
            try:
                self._made.pop().close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
