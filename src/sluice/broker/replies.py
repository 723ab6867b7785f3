"""This module is the service behind replies: who asked, and what is kept of the answer.

A request is a usual message whose properties name the client that waits for an answer. Whoever
consumed it sends a reply; the reply goes straight to that client over its own connection, and is
stored beside, delivered or not, as RocketMQ does. It knows neither a wire nor a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.errors import MessageIllegal, SluiceError
from sluice.protocol import records

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.groups import Client

_TO_CLIENT: Final = "REPLY_TO_CLIENT"
# A reply is handed over at once: what these ask for cannot be done with it.
_REFUSED_NAMES: Final = (
    *(b"DELAY", b"TIMER_DELIVER_MS", b"TIMER_DELAY_MS", b"TIMER_DELAY_SEC", b"TRAN_MSG"),
)
_OFF: Final = (None, b"0", b"false")


class Replies:
    """The replies of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self.delivered = 0
        self.undelivered = 0

    @staticmethod
    def check(sys_flag: int, properties: bytes) -> None:
        """Refuse what is no reply."""
        if sys_flag & records.SYS_TX_MASK or any(
            records.property_value(properties, name) not in _OFF for name in _REFUSED_NAMES
        ):
            raise MessageIllegal("a reply cannot be delayed, timed or part of a transaction")

    def requester(self, properties: bytes) -> Client:
        """The client that waits for this reply; raises why it cannot be told."""
        name = records.property_value(properties, _TO_CLIENT.encode())
        if not name:
            raise SluiceError(f"reply message properties[{_TO_CLIENT}] is null")
        client_id = name.decode("utf-8", "replace")
        client = self._core.clients.producer(client_id)
        if client is None:
            raise SluiceError(f"push reply message fail, channel of <{client_id}> not found.")
        return client

    def pushed_form(self, properties: bytes) -> bytes:
        """The properties of a reply as its requester gets them: with the time of now."""
        separator = b"\x02" if properties and properties[-1] != 2 else b""
        return properties + separator + b"PUSH_REPLY_TIME\x01%d\x02" % self._core.now_ms()

    def told(self, *, delivered: bool) -> None:
        """Count what became of a reply."""
        if delivered:
            self.delivered += 1
        else:
            self.undelivered += 1
