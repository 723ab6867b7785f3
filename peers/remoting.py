"""This module sends single RocketMQ requests: the few that the harness itself must ask.

It is independent of Sluice's own codec on purpose: a peer is not started through the code that it
is there to judge.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

from peers.errors import PeerFailed

QUERY_CONSUMER_OFFSET = 14
UPDATE_CONSUMER_OFFSET = 15
UPDATE_TOPIC = 17
UPDATE_BROKER_CONFIG = 25
GET_RUNTIME_INFO = 28
GET_MAX_OFFSET = 30
GET_ROUTE = 105
GET_CLUSTER_INFO = 106
UPDATE_GROUP = 200
SEND_MESSAGE_V2 = 310
ANSWER_BYTES_MAX = 1 << 20
ANSWER_TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """What a server answered to a request that it has done."""

    fields: dict[str, str]
    body: bytes


def call(port: int, code: int, body: bytes = b"", *, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
    """The body of the answer of a server on loopback; PeerFailed when it is not a success."""
    return ask(port, code, {}, body, timeout_s=timeout_s).body


def ask(
    port: int,
    code: int,
    fields: Mapping[str, object],
    body: bytes = b"",
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Answer:
    """One request with header fields; OSError if nobody answers, PeerFailed if it is refused."""
    header = json.dumps(
        {
            "code": code,
            "language": "OTHER",
            "version": 0,
            "opaque": 1,
            "flag": 0,
            "extFields": {name: str(value) for name, value in fields.items()},
        }
    ).encode()
    frame = struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(frame)
        (size,) = struct.unpack(">i", _exactly(connection, 4))
        if not 4 <= size <= ANSWER_BYTES_MAX:
            raise PeerFailed(f"request {code} to port {port}: an answer of {size} bytes")
        answer = _exactly(connection, size)
    header_bytes = struct.unpack(">i", answer[:4])[0] & 0xFFFFFF
    answered = json.loads(answer[4 : 4 + header_bytes])
    if answered.get("code") != 0:
        raise PeerFailed(f"request {code} to port {port}: {answered.get('remark')}")
    return Answer(answered.get("extFields") or {}, answer[4 + header_bytes :])


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise PeerFailed("the server closed the connection in the middle of an answer")
        received += piece
    return received
