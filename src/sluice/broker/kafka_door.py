"""This module is the door for Kafka's clients: frames become requests, answers leave in order.

Requests of a connection are served as they come, so that a producer's batches are stored one after
the other without waiting for the answers in between; the answers go out in the order of the
requests, whichever is ready first. How many requests a connection may have open is bounded, and so
is what it may send beyond that: who floods is closed.

What is no request, or one that is not spoken here, closes the connection, as Kafka does it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from traceback import format_exception
from typing import Any, Final

from sluice.broker import kafka_group_api
from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import API_VERSIONS_MAX, Again, KafkaApi, Node, TransactionDesk
from sluice.broker.kafka_cluster_api import KafkaCluster
from sluice.broker.kafka_configs import KafkaConfigs
from sluice.broker.kafka_fetch import KafkaFetch
from sluice.broker.kafka_list_offsets import KafkaListOffsets
from sluice.broker.kafka_log_api import KafkaLogs
from sluice.broker.kafka_metadata import KafkaMetadata
from sluice.broker.kafka_produce import KafkaProduce
from sluice.broker.kafka_topics import KafkaAdminTopics
from sluice.broker.kafka_waiting import KafkaWaiting
from sluice.errors import ProtocolError, SluiceError
from sluice.model import Buffer
from sluice.net import Connection
from sluice.protocol import kafka
from sluice.protocol.framing import Frame
from sluice.protocol.kafka_codes import API_VERSIONS

OPEN_REQUESTS_MAX: Final = 1000
_SESSION: Final = "kafka"
log_lines = logging.getLogger("sluice.kafka")


def build(core: BrokerCore) -> KafkaApi:
    """The table of all requests that are answered."""
    api = KafkaApi()
    transactions: TransactionDesk = core.kafka_transactions
    waiting = KafkaWaiting(core.polls, core.call_soon)
    core.services.append(waiting)
    KafkaProduce(core, transactions).register(api)
    KafkaFetch(core, waiting).register(api)
    KafkaListOffsets(core).register(api)
    KafkaMetadata(core, transactions).register(api)
    KafkaAdminTopics(core).register(api)
    KafkaConfigs(core).register(api)
    KafkaLogs(core).register(api)
    KafkaCluster(core).register(api)
    kafka_group_api.install(api, core, core.kafka_topics)  # groups
    return api


class _Slot:
    """The place of one answer among those of its connection."""

    __slots__ = ("_correlation_id", "_key", "_session", "_version", "is_ready", "parts")

    def __init__(self, session: Session, key: int, version: int, correlation_id: int) -> None:
        self._session = session
        self._key = key
        self._version = version
        self._correlation_id = correlation_id
        self.is_ready = False
        self.parts: list[Buffer] = []

    def __call__(self, values: Mapping[str, Any] | list[Buffer] | None) -> None:
        assert not self.is_ready, "a request is answered once"
        self.is_ready = True
        if values is not None:
            body: list[Buffer]
            if isinstance(values, list):
                body = values
            else:
                body = [kafka.encode(self._key, self._version, values)]
            self.parts = kafka.frame_answer(self._key, self._version, self._correlation_id, body)
        self._session.ready()

    def framed(self, parts: list[Buffer]) -> None:
        assert not self.is_ready, "a request is answered once"
        self.is_ready = True
        self.parts = parts
        self._session.ready()


class Session:
    """One connection of a Kafka client."""

    __slots__ = (
        *("_api", "_born_host", "_connection", "_is_going_on", "_kept", "_kept_bytes", "_node"),
        *("_open", "again"),
    )

    def __init__(self, api: KafkaApi, connection: Connection, node: Node) -> None:
        self._api = api
        self._connection = connection
        self._node = node
        self._born_host = b""
        self._open: deque[_Slot] = deque()
        self._kept: deque[Frame] = deque()  # received, and not served yet: too many are open
        self._kept_bytes = 0
        self._is_going_on = False
        self.again: Again | None = None

    # --------------------------------------------------------------------------- as handlers see it

    @property
    def name(self) -> str:
        return str(self._connection)

    @property
    def node(self) -> Node:
        return self._node

    @property
    def born_host(self) -> bytes:
        if not self._born_host:
            self._born_host = self._connection.packed_peer()
        return self._born_host

    @property
    def unsent_bytes(self) -> int:
        return self._connection.unsent_bytes

    def drop(self, reason: str) -> None:
        self._connection.close(reason)

    def place(self, key: int, version: int, correlation_id: int) -> _Slot:
        slot = _Slot(self, key, version, correlation_id)
        self._open.append(slot)
        return slot

    # ---------------------------------------------------------------------------- requests, answers

    def received(self, frames: list[Frame], kept_bytes_max: int) -> None:
        if self._kept or len(self._open) >= OPEN_REQUESTS_MAX:
            self._kept.extend(frames)
            self._kept_bytes += sum(map(len, frames))
            if self._kept_bytes > kept_bytes_max:
                raise ProtocolError(f"{len(self._open)} requests are open, and more came")
            return
        for at, frame in enumerate(frames):
            if len(self._open) >= OPEN_REQUESTS_MAX:
                self._kept.extend(frames[at:])
                self._kept_bytes += sum(map(len, frames[at:]))
                return
            self._serve(frame)

    def _serve(self, frame: Frame) -> None:
        again = self.again
        try:
            if again is not None and again.serve(frame, self):
                return
            correlation_id, request = self._api.read(self, frame)
            if request is None:
                slot = self.place(API_VERSIONS, 0, correlation_id)
                slot([kafka.refuse_api_versions(API_VERSIONS_MAX)])
                return
            slot = self.place(request.key, request.version, correlation_id)
            self._api.serve(request, slot)
        except SluiceError:
            raise
        except Exception as error:
            key, version = kafka.key_and_version(frame)
            self._connection.log_share.line(
                log_lines,
                logging.ERROR,
                "%s: request %d version %d failed: %s",
                *(self, key, version, "".join(format_exception(error))),
            )
            raise ProtocolError(f"request {key} failed") from error

    def ready(self) -> None:
        """An answer is there: it leaves when those before it have left."""
        slots, send = self._open, self._connection.send
        while slots and slots[0].is_ready:
            parts = slots.popleft().parts
            if parts:
                send(*parts)
        if self._kept and not self._is_going_on and len(slots) < OPEN_REQUESTS_MAX:
            self._is_going_on = True
            self._go_on()
            self._is_going_on = False

    def _go_on(self) -> None:
        """Serve what was kept; answers that are ready at once come back to `ready`."""
        while self._kept and len(self._open) < OPEN_REQUESTS_MAX:
            frame = self._kept.popleft()
            self._kept_bytes -= len(frame)
            try:
                self._serve(frame)
            except SluiceError as error:
                self._kept.clear()
                self.drop(str(error))

    def __str__(self) -> str:
        return self.name


class KafkaDoor:
    """Stands in the listener: nobody is served before the store is open, or when it closes."""

    def __init__(self, node_for: Callable[[Connection], Node], kept_bytes_max: int) -> None:
        """`node_for`: this broker as the peer of a connection reaches it."""
        self._api: KafkaApi | None = None
        self._core: BrokerCore | None = None
        self._node_for = node_for
        self._kept_bytes_max = kept_bytes_max
        self._is_shut = False

    def open(self, core: BrokerCore, api: KafkaApi) -> None:
        self._core, self._api = core, api

    def shut(self) -> None:
        """From now on every request closes its connection: clients come again."""
        self._is_shut = True

    def opened(self, connection: Connection) -> None:
        if self._api is None or self._is_shut:
            connection.abort("the broker starts or stops")
            return
        session = Session(self._api, connection, self._node_for(connection))
        connection.attributes[_SESSION] = session

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        session = connection.attributes.get(_SESSION)
        if not isinstance(session, Session):
            return
        if self._is_shut:
            raise ProtocolError("the broker stops")
        assert self._core is not None, "sessions begin when the door is open"
        self._core.serve(connection)
        try:
            session.received(frames, self._kept_bytes_max)
        finally:
            self._core.served()

    def closed(self, connection: Connection) -> None:
        session = connection.attributes.pop(_SESSION, None)
        if self._api is not None and isinstance(session, Session):
            self._api.closed(session)
