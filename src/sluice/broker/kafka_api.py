"""This module is the table of Kafka's requests: which versions are spoken, and who answers them.

A handler takes a request and an `Answer`, which it calls exactly once: at once, or later, on the
event loop's thread. Answers leave a connection in the order of its requests, whoever is ready
first; that is the session's business (`kafka_door.py`). What a handler raises closes the
connection, as Kafka does with what it cannot read: a refusal is an answer with an error code.

This module knows neither sockets nor the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from sluice.errors import Busy, DiskFull, MessageIllegal, SluiceError, StoreReadOnly
from sluice.model import Buffer
from sluice.protocol import kafka, kafka_codes
from sluice.protocol.kafka_bounds import BadRequest
from sluice.protocol.kafka_codes import API_VERSIONS, INVALID_REQUEST, PRODUCE

API_VERSIONS_MAX: Final = 4
_NAME_CHARACTERS: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-."
)
log_lines = logging.getLogger("sluice.kafka")


class Peer(Protocol):
    """Who asks: one connection. It is the owner of what waits, and goes when it closes."""

    @property
    def name(self) -> str:
        """The peer's address, host:port."""

    @property
    def node(self) -> Node:
        """This broker as the peer reaches it."""

    @property
    def born_host(self) -> bytes:
        """The peer's address as entries carry it."""

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not taken yet of its answers, nor the system for it."""

    again: Again | None  # serves requests like those before, where there were such

    def drop(self, reason: str) -> None:
        """Close the connection: the only way to say no to who asked for no answer."""

    def place(self, key: int, version: int, correlation_id: int) -> AnswerPlace:
        """The place of an answer among those of the connection, for a request that came now."""


class Again(Protocol):
    """Who serves requests like those before; see `kafka_again.py`."""

    def serve(self, frame: bytes | memoryview, peer: Peer) -> bool:
        """Serve a request; False, and nothing has happened, where it is not like those."""


class Node(NamedTuple):
    """One broker as clients know it."""

    node_id: int
    host: str
    port: int


@dataclass(slots=True)
class Request:
    """One request. `body` is kio's entity of its version; None for handlers that read the frame
    themselves, from `body_at` on.
    """

    key: int
    version: int
    client_id: str
    peer: Peer
    frame: bytes | memoryview
    body_at: int
    body: Any = None


class Answer(Protocol):
    """Called once by a handler: a dictionary as `protocol.kafka.encode` takes it, the parts of an
    encoded body, or None where a request gets no answer (acks=0).
    """

    def __call__(self, values: Mapping[str, Any] | list[Buffer] | None) -> None: ...


class AnswerPlace(Answer, Protocol):
    """An answer's place among those of its connection."""

    def framed(self, parts: list[Buffer]) -> None:
        """Called in place of the other, with a whole answer: length and head are in front."""


Handler = Callable[[Request, Answer], None]


class TransactionDesk(Protocol):
    """What the rest of the door asks of the coordinator of transactions."""

    def check_append(
        self,
        transactional_id: str | None,
        producer_id: int,
        epoch: int,
        topic: str,
        partition: int,
        *,
        implicit: bool,
    ) -> int:
        """Whether a transactional batch may be stored: an error code, 0 where it may."""

    def init(
        self,
        transactional_id: str,
        timeout_ms: int,
        producer_id: int,
        epoch: int,
        then: Callable[[int, int, int], None],
    ) -> None:
        """Begin or take over a transactional id; tells error code, producer id and epoch."""


class Row(NamedTuple):
    """One API: the versions that are spoken, and who answers."""

    lowest: int
    highest: int
    handler: Handler
    is_raw: bool  # it reads the frame itself
    advertised_lowest: int


class KafkaApi:
    """All that is asked through Kafka's door of one broker."""

    def __init__(self) -> None:
        self.table: dict[int, Row] = {}
        self.features: list[tuple[str, int, int]] = []  # name, lowest, highest: finalized at it
        self._on_closed: list[Callable[[Peer], None]] = []
        self.register(API_VERSIONS, 0, API_VERSIONS_MAX, self._api_versions)

    def register(
        self, key: int, lowest: int, highest: int, handler: Handler, *, is_raw: bool = False
    ) -> None:
        """Answer requests of a key in these versions, both included."""
        # Older clients look for version 0 of Produce to find out which codecs may be used.
        advertised_lowest = 0 if key == PRODUCE else lowest
        self.table[key] = Row(lowest, highest, handler, is_raw, advertised_lowest)

    def when_closed(self, told: Callable[[Peer], None]) -> None:
        """Tell of every connection that is gone."""
        self._on_closed.append(told)

    def closed(self, peer: Peer) -> None:
        for told in self._on_closed:
            told(peer)

    def read(self, peer: Peer, frame: bytes | memoryview) -> tuple[int, Request | None]:
        """The correlation id and the request of a frame; None for an ApiVersions that is too new.

        Raises `BadRequest` for everything else that is not spoken here.
        """
        head = kafka.read_head(frame)
        row = self.table.get(head.key)
        if row is None or not row.lowest <= head.version <= row.highest:
            if head.key == API_VERSIONS and head.version > API_VERSIONS_MAX:
                return head.correlation_id, None
            raise BadRequest(f"request {head.key} version {head.version} is not spoken here")
        at = kafka.body_start(frame, head)
        body = None if row.is_raw else kafka.decode(head.key, head.version, frame, at)
        request = Request(head.key, head.version, head.client_id, peer, frame, at, body)
        return head.correlation_id, request

    def serve(self, request: Request, answer: Answer) -> None:
        """Hand a request to who answers it."""
        self.table[request.key].handler(request, answer)

    def _api_versions(self, request: Request, answer: Answer) -> None:
        named = [
            getattr(request.body, each, None)
            for each in ("client_software_name", "client_software_version")
        ]
        if not all(map(_is_software_name, named)):
            answer({"error_code": INVALID_REQUEST})
            return
        answer(
            {
                "api_keys": [
                    {
                        "api_key": key,
                        "min_version": row.advertised_lowest,
                        "max_version": row.highest,
                    }
                    for key, row in sorted(self.table.items())
                ],
                "supported_features": [
                    {"name": name, "min_version": lowest, "max_version": highest}
                    # Clients that speak up to version 3 do not understand a lowest of 0.
                    for name, lowest, highest in self.features
                    if lowest > 0 or request.version > 3
                ],
                "finalized_features_epoch": 0 if self.features else -1,
                "finalized_features": [
                    {"name": name, "max_version_level": highest, "min_version_level": highest}
                    for name, _, highest in self.features
                ],
            }
        )


def _is_software_name(name: str | None) -> bool:
    """Whether a client's name or version is of the form that Kafka asks for."""
    if name is None:
        return True
    return (
        bool(name)
        and _NAME_CHARACTERS.issuperset(name)
        and name[0] not in "-."
        and name[-1] not in "-."
    )


def code_of(error: SluiceError) -> int:
    """What a Kafka client is told of an error of ours: whether to try again, above all."""
    if isinstance(error, Busy):
        return kafka_codes.REQUEST_TIMED_OUT
    if isinstance(error, DiskFull | StoreReadOnly):
        return kafka_codes.KAFKA_STORAGE_ERROR
    if isinstance(error, MessageIllegal):
        return kafka_codes.RECORD_LIST_TOO_LARGE
    return kafka_codes.UNKNOWN_SERVER_ERROR
