"""This module decides which messages a subscription wants, by their tags. Pure: no clock, no file.

A tag filter compares hashes only, as RocketMQ's broker does; clients compare the text again, so two
tags with one hash cost a message on the wire and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sluice.errors import SubscriptionIllegal
from sluice.protocol.records import java_hash

TAG: Final = "TAG"
SQL92: Final = "SQL92"
EVERYTHING: Final = "*"
TAGS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a consumer group wants of one topic."""

    topic: str
    expression: str = EVERYTHING
    kind: str = TAG
    tags: tuple[str, ...] = ()
    codes: frozenset[int] = field(default_factory=frozenset)
    version: int = 0

    @property
    def accept(self) -> Callable[[int], bool] | None:
        """A test of a queue unit's tags code; None where everything is wanted."""
        if not self.codes:
            return None
        codes = self.codes
        return lambda tags_code: _low_32(tags_code) in codes

    def same_as(self, other: Subscription) -> bool:
        """Whether two members of a group want the same; versions do not matter."""
        return (self.kind, self.expression, self.codes) == (
            other.kind,
            other.expression,
            other.codes,
        )


def parse_tags(topic: str, expression: str | None, version: int = 0) -> Subscription:
    """A subscription from "*", "" or "TagA || TagB"; raises SubscriptionIllegal."""
    text = (expression or EVERYTHING).strip()
    if text in ("", EVERYTHING):
        return Subscription(topic, EVERYTHING, version=version)
    tags = [tag.strip() for tag in text.split("||")]
    tags = [tag for tag in tags if tag]
    if not tags:
        raise SubscriptionIllegal(f"the subscription {text[:200]!r} names no tag")
    if len(tags) > TAGS_MAX:
        raise SubscriptionIllegal(f"the subscription names {len(tags)} tags, {TAGS_MAX} at most")
    codes = frozenset(java_hash(tag.encode()) for tag in tags)
    return Subscription(topic, text, TAG, tuple(tags), codes, version)


def _low_32(tags_code: int) -> int:
    """What Java's cast to int makes of it."""
    low = tags_code & 0xFFFFFFFF
    return low - 0x100000000 if low & 0x80000000 else low
