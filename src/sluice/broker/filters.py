"""This module decides which messages a subscription wants, by their tags or by an SQL filter. Pure:
no clock, no file.

A tag filter compares hashes only, as RocketMQ's broker does; clients compare the text again, so two
tags with one hash cost a message on the wire and nothing else. An SQL filter looks at a message's
properties (`sql_filter.py`), and nobody compares again.

Subscriptions come with a pull, which is refused if it cannot be understood, or with a heartbeat,
which also speaks for others: there a wrong one is kept with its fault, and its pulls are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sluice.broker.sql_filter import read_filter
from sluice.errors import SluiceError, SubscriptionIllegal
from sluice.model import Buffer, PropertyFilter
from sluice.protocol.records import java_hash, property_value

TAG: Final = "TAG"
SQL92: Final = "SQL92"
EVERYTHING: Final = "*"
TAGS_MAX: Final = 1024
KEYS_MAX: Final = 1024
BLANKS: Final = "".join(map(chr, range(0x21)))  # what Java takes away around a tag


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a consumer group wants of one topic."""

    topic: str
    expression: str = EVERYTHING
    kind: str = TAG
    tags: tuple[str, ...] = ()
    codes: frozenset[int] = field(default_factory=frozenset)
    version: int = 0
    fault: str = ""  # why it cannot be understood: nothing can be read by it
    warning: str = ""  # what its user should know of it

    @property
    def accept(self) -> Callable[[int], bool] | PropertyFilter | None:
        """A test of a queue unit's tags code, or of an entry's properties; None where everything
        is wanted. `Store.read` and held polls take it as it is.
        """
        if self.kind == SQL92:
            return read_filter(self.expression).test
        if self.expression == EVERYTHING:
            return None
        codes = self.codes
        return lambda tags_code: _low_32(tags_code) in codes

    def matches_record(self, tags_code: int, properties: Buffer) -> bool:
        """Whether one message is wanted, by the code of its queue unit and its properties."""
        if self.fault:
            return False
        if self.kind == SQL92:
            return read_filter(self.expression).test.matches(properties)
        return self.expression == EVERYTHING or _low_32(tags_code) in self.codes

    @property
    def label(self) -> str:
        """What is wanted, for people."""
        return self.expression if self.kind == TAG else f"{self.kind} {self.expression}"

    def same_as(self, other: Subscription) -> bool:
        """Whether two members of a group want the same; versions do not matter."""
        return (self.kind, self.expression, self.codes) == (
            other.kind,
            other.expression,
            other.codes,
        )


def parse(topic: str, expression: str | None, kind: str | None, version: int = 0) -> Subscription:
    """A subscription of any kind; raises SubscriptionIllegal with what is wrong."""
    if kind in (None, "", TAG):
        return parse_tags(topic, expression, version)
    if kind != SQL92:
        raise SubscriptionIllegal(
            f"filters of type {kind[:40]!r} are not known, only TAG and SQL92"
        )
    text = expression or ""
    ignored_at = read_filter(text).ignored_at
    warning = ""
    if ignored_at >= 0:
        warning = (
            f"the SQL filter is whole before character {ignored_at + 1}; what follows is ignored, "
            f"as RocketMQ does: {text[ignored_at : ignored_at + 40]!r}"
        )
    return Subscription(topic, text, SQL92, version=version, warning=warning)


def parse_or_keep(
    topic: str, expression: str | None, kind: str | None, version: int = 0
) -> Subscription:
    """A subscription of any kind; one that cannot be understood keeps its fault with it."""
    try:
        return parse(topic, expression, kind, version)
    except SubscriptionIllegal as error:
        return Subscription(topic, expression or "", kind or TAG, version=version, fault=str(error))


def check_usable(subscription: Subscription, *, sql_filter: bool) -> None:
    """Refuse what nothing can be read by; `sql_filter` is the broker's setting."""
    if subscription.kind != TAG and not sql_filter:
        raise SluiceError(
            f"The broker does not support consumer to filter message by {subscription.kind} "
            "(sql_filter is off)"
        )
    if subscription.fault:
        raise SubscriptionIllegal(subscription.fault)


def parse_tags(topic: str, expression: str | None, version: int = 0) -> Subscription:
    """A subscription from "*", "" or "TagA || TagB"; raises SubscriptionIllegal.

    As RocketMQ's: tags are written without the blanks around them, and one of blanks only is none.
    Where no tag is left nothing is wanted.
    """
    text = expression or EVERYTHING
    if text == EVERYTHING:
        return Subscription(topic, EVERYTHING, version=version)
    if not text.replace("||", ""):
        raise SubscriptionIllegal(f"the subscription {text[:200]!r} names no tag")
    tags = [tag.strip(BLANKS) for tag in text.split("||")]
    tags = [tag for tag in tags if tag]
    if len(tags) > TAGS_MAX:
        raise SubscriptionIllegal(f"the subscription names {len(tags)} tags, {TAGS_MAX} at most")
    codes = frozenset(java_hash(tag.encode("utf-8", "replace")) for tag in tags)
    return Subscription(topic, text, TAG, tuple(tags), codes, version)


def accept_all(
    topic: str, tags: str | None, keys: str | None, sql: str | None
) -> Callable[[int], bool] | PropertyFilter | None:
    """What `Subscription.accept` is, for a reader that names tags, keys (separated by blanks) and
    an SQL filter, any of them: a message must pass all. Raises SubscriptionIllegal.

    Tags alone are compared by their hashes; beside others, and keys always, by their text.
    """
    by_tag = parse_tags(topic, tags)
    parts = [] if not keys else [_by_keys(keys)]
    if sql:
        parts.append(read_filter(sql).test)
    if not parts:
        return by_tag.accept
    if by_tag.expression != EVERYTHING:
        wanted = frozenset(tag.encode() for tag in by_tag.tags)
        parts.append(PropertyFilter(lambda data: property_value(data, b"TAGS") in wanted, 1))
    if len(parts) == 1:
        return parts[0]
    tests = [part.test for part in parts]
    screens = [part.screen for part in parts if part.screen is not None]
    return PropertyFilter(
        lambda data: all(test(data) for test in tests),
        sum(part.steps for part in parts),
        screens[0] if screens else None,
    )


def _by_keys(text: str) -> PropertyFilter:
    """Messages that have one of these keys."""
    wanted = frozenset(text.encode("utf-8", "replace").split())
    if not wanted or len(wanted) > KEYS_MAX:
        raise SubscriptionIllegal(f"{len(wanted)} keys: from 1 to {KEYS_MAX}")

    def test(data: bytes) -> bool:
        keys = property_value(data, b"KEYS")
        return keys is not None and not wanted.isdisjoint(keys.split(b" "))

    words = b"|".join(map(re.escape, sorted(wanted)))
    screen = re.compile(rb"(?:" + words + rb")[ \x02]")
    return PropertyFilter(test, 1 + len(wanted) // 64, screen)


def _low_32(tags_code: int) -> int:
    """What Java's cast to int makes of it."""
    low = tags_code & 0xFFFFFFFF
    return low - 0x100000000 if low & 0x80000000 else low
