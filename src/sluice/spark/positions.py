"""This module writes offsets as Spark's checkpoint has them, and reads them again. Pure.

    {"orders": {"0": 60, "1": 58}}                             a topic on one broker, as Kafka's
    {"orders": {"broker-a/0": 60, "broker-b/0": 31}}           a topic on several

An offset is the next one to read. Spark compares the text: keys are sorted, so that equal positions
are equal texts. A number without a broker is clear as long as the topic has one; where more have
come since a checkpoint was written, the option brokerOfPlainOffsets says whose it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sluice.errors import ConfigError
from sluice.spark.cluster import Queue

Offsets = dict[Queue, int]
UNKNOWN: Final = "?"  # the broker of a topic that is not there


def to_json(offsets: Mapping[Queue, int]) -> dict[str, dict[str, int]]:
    """The form of a checkpoint."""
    result: dict[str, dict[str, int]] = {}
    for topic in sorted({queue.topic for queue in offsets}):
        own = sorted(queue for queue in offsets if queue.topic == topic)
        result[topic] = {key: offsets[queue] for queue, key in zip(own, keys(own), strict=True)}
    return result


def keys(queues: Iterable[Queue]) -> list[str]:
    """How the queues of one topic are called: by number, or with their broker."""
    own = list(queues)
    if len({queue.broker for queue in own}) <= 1:
        return [str(queue.queue_id) for queue in own]
    return [f"{queue.broker}/{queue.queue_id}" for queue in own]


def from_json(
    value: Mapping[str, Mapping[str, Any]],
    brokers: Mapping[str, set[str]],
    plain_broker: str,
    what: str,
) -> Offsets:
    """Offsets by queue. `brokers`: those of each topic now; `what` names where the offsets stand.

    Topics that are gone keep their numbers, under the broker that they had or `UNKNOWN`: the caller
    sees that they are.
    """
    result: Offsets = {}
    for topic, own in value.items():
        if not isinstance(own, Mapping):
            raise ConfigError(
                f'{what}: {topic!r}: {own!r} is not {{"0": offset, ...}}; these are no offsets of '
                "this source"
            )
        for key, offset in own.items():
            queue = queue_of(topic, key, brokers.get(topic, set()), plain_broker, what)
            if not isinstance(offset, int) or isinstance(offset, bool):
                raise ConfigError(f"{what}: {topic}/{key}: {offset!r} is no offset")
            result[queue] = offset
    return result


def queue_of(topic: str, key: str, brokers: set[str], plain_broker: str, what: str) -> Queue:
    """The queue that a key of a topic means; raises ConfigError."""
    broker, mark, number = key.rpartition("/")
    if not number.isascii() or not number.isdigit() or (mark and not broker):
        raise ConfigError(f"{what}: {topic}: {key!r} is neither a queue's number nor broker/number")
    if not mark:
        if len(brokers) > 1 and plain_broker not in brokers:
            raise ConfigError(
                f"{what}: {topic}/{key} names no broker, and the topic is on several "
                f"({', '.join(sorted(brokers))}); write broker/{key}, or, where the topic was on "
                "one broker before, name that one with option brokerOfPlainOffsets"
            )
        one = next(iter(brokers), plain_broker or UNKNOWN)
        broker = plain_broker if len(brokers) > 1 else one
    return Queue(topic, broker, int(number))
