"""This module is what the traffic of the ready pipelines has in common. It is pure.

A generator makes events without end, from a seed: the same seed, start and rate make the same
events. When an event happens and when it is sent differ where a pipeline is to be shown late data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import orjson


class Event(NamedTuple):
    """A message to be sent: where, what, and how long after the start."""

    topic: str
    body: bytes
    key: str
    tag: str
    after_seconds: float


# (seed, time of the first event in ms since 1970, events a second) -> events, in order of sending
Traffic = Callable[[int, int, float], Iterator[Event]]


def json_event(
    topic: str, fields: dict[str, Any], *, key: str, tag: str = "", after_seconds: float
) -> Event:
    return Event(topic, orjson.dumps(fields), key, tag, after_seconds)
