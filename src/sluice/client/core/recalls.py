"""This module reads and writes recall handles: what a delayed message is taken back with.

A handle names the broker that has the message: only that one can take it back.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

from sluice.errors import ParameterInvalid


class Handle(NamedTuple):
    """The parts of a handle that say where a message is."""

    topic: str
    broker_name: str
    unique_key: str


def read_handle(text: object) -> Handle:
    """A handle that a send returned; raises ParameterInvalid."""
    advice = "is no recall handle; take the recall_handle of the send's result"
    if not isinstance(text, str):
        raise ParameterInvalid(f"{text!r} {advice}")
    try:
        parts = urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode().split(" ")
    except ValueError:
        parts = []
    if len(parts) < 5 or parts[0] != "v1" or not parts[1] or not parts[2]:
        raise ParameterInvalid(f"{text!r} {advice}")
    return Handle(parts[1], parts[2], parts[4])


def write_handle(topic: str, broker_name: str, due_ms: int, unique_key: str) -> str:
    """RocketMQ's form. Its time is one more than what is stored: there it is rounded down."""
    plain = f"v1 {topic} {broker_name} {due_ms + 1} {unique_key}"
    return urlsafe_b64encode(plain.encode()).decode()
