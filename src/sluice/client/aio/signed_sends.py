"""This module writes sends for brokers that want every request signed.

A signature is over all fields and the body, so nothing of a frame can be ready before: these sends
cost more. Who has no keys never comes here.
"""

from __future__ import annotations

from typing import Any

from sluice.client.core.signing import Credentials
from sluice.model import Buffer
from sluice.protocol import remoting
from sluice.protocol.client_frames import SEND_BATCH, SendTemplate
from sluice.protocol.remoting import BINARY


class SignedTemplate(SendTemplate):
    """The header of sends of one producer to one queue, each signed."""

    __slots__ = ("_credentials", "_fields")

    def __init__(
        self,
        credentials: Credentials,
        group: str,
        topic: str,
        queue_id: int,
        broker_name: str,
        *,
        code: int,
        sys_flag: int,
        message_flag: int,
        default_queue_count: int,
    ) -> None:
        super().__init__(group, topic, queue_id, broker_name, code=code)
        self._credentials = credentials
        self._fields = {
            "a": group,
            "b": topic,
            "c": "TBW102",
            "d": str(default_queue_count),
            "e": str(queue_id),
            "f": str(sys_flag),
            "h": str(message_flag),
            "j": "0",
            "k": "false",
            "m": "true" if code == SEND_BATCH else "false",
            "n": broker_name,
        }

    def frame(self, opaque: int, flag: int, born_ms: int, properties: bytes, body: Buffer) -> bytes:
        """The whole frame."""
        fields = {**self._fields, "g": str(born_ms), "i": properties.decode()}
        self._credentials.sign(fields, body)
        head = remoting.head(BINARY, self._code, opaque, flag, fields, None, len(body))
        return b"".join((head, body))


def make_template(credentials: Credentials | None, *queue: Any, **options: Any) -> SendTemplate:
    """The template of sends to a queue, signed where there are keys to sign with."""
    if credentials is None:
        return SendTemplate(*queue, **options)
    return SignedTemplate(credentials, *queue, **options)
