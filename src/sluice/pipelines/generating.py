"""This module sends the traffic of a ready pipeline at a rate: `sluice pipeline generate NAME`.

Events are made from a seed and have their times in them; this only waits until each is due. Where
the broker is slower than wanted, nothing is left out: it takes longer, as the closing line says.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sluice.client.core.messages import Message
from sluice.client.sync.producers import Producer
from sluice.errors import ConfigError
from sluice.pipelines.files import READY
from sluice.pipelines.traffic import Event, Traffic

RATE_MAX: Final = 1_000_000.0
_PENDING_MAX: Final = 2000
_SLICE_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Sent:
    """What a generator did."""

    count: int
    seconds: float


def traffic_of(name: str) -> Traffic:
    """The generator of a ready pipeline."""
    if name not in READY:
        raise ConfigError(f"{name}: no such traffic; there is {', '.join(READY)}")
    made: Traffic = READY[name].traffic
    return made


def events(
    name: str, *, seed: int, start_ms: int, rate: float, count: int | None
) -> Iterator[Event]:
    """The messages of a ready pipeline, so many or without end."""
    if not 0 < rate <= RATE_MAX:  # and NaN
        raise ConfigError(f"--rate {rate:g}: allowed are more than 0 up to {RATE_MAX:g} a second")
    return itertools.islice(traffic_of(name)(seed, start_ms, rate), count)


def send(
    producer: Producer, stream: Iterator[Event], stop: threading.Event, *, paced: bool = True
) -> Sent:
    """Send events when they are due, or as fast as the broker takes them, until `stop` is set."""
    begin = time.monotonic()
    count = 0
    pending = []
    for event in stream:
        wait_seconds = begin + event.after_seconds - time.monotonic()
        # Short waits are saved up: a thousand wake-ups a second would cost more than the sends.
        if paced and wait_seconds > _SLICE_SECONDS and stop.wait(wait_seconds):
            break
        if stop.is_set():
            break
        message = Message(event.topic, event.body, tags=event.tag, keys=event.key)
        pending.append(producer.send_async(message))
        count += 1
        if len(pending) >= _PENDING_MAX:
            for future in pending:
                future.result()
            pending.clear()
    for future in pending:
        future.result()
    return Sent(count, time.monotonic() - begin)
