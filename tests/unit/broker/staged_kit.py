"""This module stages and publishes on the services of a broker, as a job's tasks and driver do."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.broker.staged_entries import Handle, Owner
from sluice.errors import SluiceError
from sluice.protocol.message_batches import join_batch
from tests.unit.broker.transaction_kit import HOST, TOPIC, Broker
from tests.unit.protocol.image_kit import Part, images_of


def batch_body(bodies: Sequence[bytes], tag: str = "t") -> bytes:
    """With properties, as usual messages have them; without a tag there are none."""
    properties = f"TAGS\x01{tag}\x02".encode() if tag else b""
    return join_batch((0, body, properties) for body in bodies)


def stage(
    broker: Broker,
    bodies: Sequence[bytes],
    queue: int = 0,
    batch: int = 0,
    sink: str = "sink",
    *,
    images: bool = False,
) -> Handle:
    """A task stages messages; raises what it is refused with."""
    parts = [(0, body, b"TAGS\x01t\x02") for body in bodies]
    return stage_parts(broker, parts, Owner(sink, batch), queue, images=images)


def stage_parts(
    broker: Broker,
    parts: Sequence[Part],
    owner: Owner,
    queue: int = 0,
    *,
    images: bool,
    host: bytes = HOST,
) -> Handle:
    """The same, of messages with properties of their own."""
    outcome: list[SluiceError | None] = []
    body = images_of(parts, TOPIC.encode()) if images else join_batch(parts)
    count = len(parts) if images else 0
    handle = broker.core.staged.stage(owner, TOPIC, queue, body, host, outcome.append, count)
    broker.settle()
    (error,) = outcome
    if error is not None:
        raise error
    return handle


def publish(
    broker: Broker,
    handles: list[Handle],
    batch: int = 0,
    sink: str = "sink",
    *,
    once: bool = False,
) -> bool:
    """A driver publishes; whether it was this call that did it."""
    outcome: list[tuple[bool, SluiceError | None]] = []

    def done(is_new: bool, error: SluiceError | None) -> None:
        outcome.append((is_new, error))

    broker.core.staged.publish(Owner(sink, batch), handles, done, once=once)
    broker.settle()
    ((is_new, error),) = outcome
    if error is not None:
        raise error
    return is_new
