"""This module stands between the connections of a broker and the broker: requests pass, or do not.

What is ordered holds for requests of one kind, or for all: so many of them are lost, come late, or
find their connection cut, before the broker has seen them or right after. A broker has a door for
RocketMQ's clients and one for Kafka's; the gate stands in front of both. Everything here belongs to
the thread of the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from sluice.broker.kafka_door import KafkaDoor
from sluice.clock import wall_ms
from sluice.net import Connection, Handler
from sluice.protocol import kafka_codes, remoting
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request

Action = Literal["drop", "drop answer", "delay", "cut", "cut after"]

_WORDS: Final = "as the test wants it"
_PASSED: Final = "gate"

# What tests call requests by: their numbers in RocketMQ's protocol, and in Kafka's.
KINDS: Final[dict[str, tuple[frozenset[int], frozenset[int]]]] = {
    "send": (
        frozenset({Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE}),
        frozenset({kafka_codes.PRODUCE}),
    ),
    "pull": (
        frozenset(
            {
                *(Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE, Request.POP_MESSAGE),
                Request.SLUICE_BULK_FETCH,
            }
        ),
        frozenset({kafka_codes.FETCH}),
    ),
    "commit": (
        frozenset({Request.UPDATE_CONSUMER_OFFSET}),
        frozenset({kafka_codes.OFFSET_COMMIT}),
    ),
    "heartbeat": (frozenset({Request.HEART_BEAT}), frozenset({kafka_codes.HEARTBEAT})),
    "members": (
        frozenset({Request.GET_CONSUMER_LIST_BY_GROUP}),
        frozenset({kafka_codes.JOIN_GROUP}),
    ),
    "end transaction": (frozenset({Request.END_TRANSACTION}), frozenset({kafka_codes.END_TXN})),
    "ack": (frozenset({Request.ACK_MESSAGE, Request.BATCH_ACK_MESSAGE}), frozenset()),
    "give back": (frozenset({Request.CONSUMER_SEND_MSG_BACK}), frozenset()),
    "lock": (frozenset({Request.LOCK_BATCH_MQ}), frozenset()),
}


@dataclass(slots=True, eq=False)
class Order:
    """Something that happens to the next requests of a kind; `hits` counts them."""

    action: Action
    kind: str | int  # empty: all; a number is one of RocketMQ's requests
    left: int
    seconds: float = 0.0
    hits: int = 0
    lift: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self) -> None:
        if isinstance(self.kind, str) and self.kind and self.kind not in KINDS:
            names = ", ".join(KINDS)
            raise ValueError(f"no kind of request is called {self.kind!r}; there are {names}")

    def concerns(self, code: int, *, is_kafka: bool) -> bool:
        if isinstance(self.kind, int):
            return code == self.kind and not is_kafka
        return not self.kind or code in KINDS[self.kind][is_kafka]

    def __enter__(self) -> Order:
        return self

    def __exit__(self, *_: object) -> None:
        self.lift()


class Gate:
    """What was ordered for one broker, and what was seen passing."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.is_closed = False  # nobody gets in: the network is gone
        self.is_dead = False  # the process is gone: nothing is asked any more
        self.now_ms = wall_ms  # the broker's time, where it is not that of its clients
        self.is_watching = False  # whether all requests are looked at, for the next and for times
        self.checks_answered = 0  # answers to the broker's questions about transactions

    def before(self, inner: Handler) -> Handler:
        """Something that stands in front of a handler."""
        return _KafkaFront(self, inner) if isinstance(inner, KafkaDoor) else _Front(self, inner)

    def order_of(self, code: int, *, is_kafka: bool) -> Order | None:
        """What is to happen to a request."""
        for order in self.orders:
            if order.concerns(code, is_kafka=is_kafka):
                order.left -= 1
                order.hits += 1
                if order.left <= 0:
                    self.orders.remove(order)
                return order
        return None


class _Front:
    """In front of the door for RocketMQ's clients."""

    is_kafka = False

    def __init__(self, gate: Gate, inner: Handler) -> None:
        self._gate = gate
        self._inner = inner
        self._late: dict[Connection, list[Frame]] = {}

    def opened(self, connection: Connection) -> None:
        if self._gate.is_closed or self._gate.is_dead:
            connection.abort(_WORDS)
            return
        connection.attributes[_PASSED] = True
        self._inner.opened(connection)

    def closed(self, connection: Connection) -> None:
        self._late.pop(connection, None)
        if connection.attributes.get(_PASSED):
            self._inner.closed(connection)

    def received(self, connection: Connection, frames: list[Frame]) -> None:
        gate = self._gate
        if gate.is_dead or not connection.attributes.get(_PASSED):
            return
        if connection in self._late:
            self._late[connection] += frames  # behind what is late already
            return
        if not (gate.orders or gate.is_watching):
            self._inner.received(connection, frames)
            return
        passing: list[Frame] = []
        for index, frame in enumerate(frames):
            code, frame = self.looked_at(frame)
            order = None if code is None else gate.order_of(code, is_kafka=self.is_kafka)
            if order is None:
                passing.append(frame)
                continue
            if order.action == "drop":
                continue
            if order.action == "drop answer" and not self.is_kafka:
                passing.append(_unanswered(frame))
                continue
            if order.action in ("cut after", "drop answer"):
                # Kafka's answers come in order: one that is missing would hold up all others.
                passing.append(frame)
            self._pass(connection, passing)
            if order.action == "delay":
                self._delay(connection, frames[index:], order.seconds)
            else:
                connection.abort(_WORDS)
            return
        self._pass(connection, passing)

    def _pass(self, connection: Connection, frames: list[Frame]) -> None:
        if frames:
            self._inner.received(connection, frames)

    def _delay(self, connection: Connection, frames: list[Frame], seconds: float) -> None:
        """These and all that come after them over the connection wait."""
        self._late[connection] = list(frames)

        def go_on() -> None:
            late = self._late.pop(connection, None)
            if late and connection.is_open:
                self._inner.received(connection, late[:1])  # it was late once, that is enough
                if late[1:]:
                    self.received(connection, late[1:])

        asyncio.get_running_loop().call_later(seconds, go_on)

    def looked_at(self, frame: Frame) -> tuple[int | None, Frame]:
        """The number of a request, None of an answer; and what the broker gets."""
        command = remoting.decode(frame)
        if command.is_answer:
            return None, frame
        if command.code == Request.END_TRANSACTION:
            self._gate.checks_answered += command.ext.get("fromTransactionCheck") == "true"
        return command.code, self._in_broker_time(frame, command)

    def _in_broker_time(self, frame: Frame, command: RemotingCommand) -> Frame:
        """A request with the time of its client, in the broker's."""
        born = command.ext.get("bornTime", "")
        if not born.isdecimal():
            return frame
        born_ms = int(born) + self._gate.now_ms() - wall_ms()
        ext = {**command.ext, "bornTime": str(born_ms)}
        return remoting.encode(replace(command, ext=ext))[4:]


class _KafkaFront(_Front):
    """In front of the door for Kafka's clients."""

    is_kafka = True

    def looked_at(self, frame: Frame) -> tuple[int | None, Frame]:
        return int.from_bytes(frame[:2], "big"), frame


def _unanswered(frame: Frame) -> Frame:
    """A request that is done and not answered."""
    command = remoting.decode(frame)
    silent = replace(command, flag=command.flag | remoting.FLAG_ONEWAY)
    return remoting.encode(silent)[4:]
