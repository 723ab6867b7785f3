"""This module turns what a user wants of a topic into a subscription as brokers know it.

Tags are `A || B`, or `*` for all; brokers compare hashes of tags only, so the tag itself is
compared here again. An SQL expression is the broker's affair alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sluice.client.core.messages import RETRY_PREFIX, ReceivedMessage
from sluice.errors import ConfigError
from sluice.protocol import records
from sluice.protocol.remoting_clients import SQL92, TAG, Subscription

ALL: Final = "*"


@dataclass(frozen=True, slots=True)
class Sql:
    """An SQL92 expression over properties, such as `price > 10 AND region = 'eu'`."""

    expression: str


Wanted = str | Sql | Sequence[str]  # of one topic
Topics = Mapping[str, Wanted] | Sequence[str] | str


def wanted_of(topics: Topics) -> dict[str, Wanted]:
    """What a user wants of each topic: one name, several, or a table of names and expressions."""
    if isinstance(topics, str):
        return {topics: ALL} if topics else {}
    if isinstance(topics, Mapping):
        return dict(topics)
    if isinstance(topics, list | tuple | set | frozenset):
        return dict.fromkeys(topics, ALL)
    raise ConfigError(
        f"topics: a name, a list of names, or a table of names and tags, not {topics!r}"
    )


def make_subscription(topic: str, wanted: Wanted, version: int) -> Subscription:
    """A subscription out of tags (`"A || B"`, or a list of them) or an `Sql`."""
    if not isinstance(wanted, Sql | str | list | tuple | set | frozenset):
        raise ConfigError(f"{topic}: tags as a text or a list, or an Sql, not {wanted!r}")
    if isinstance(wanted, Sql):
        if not wanted.expression.strip():
            raise ConfigError(f"{topic}: an SQL expression that is empty")
        return Subscription(topic, wanted.expression, version, expression_type=SQL92)
    parts = wanted.split("||") if isinstance(wanted, str) else list(wanted)
    tags = [part.strip() for part in parts if part.strip()]
    if not tags or tags == [ALL]:
        return Subscription(topic, ALL, version)
    codes = tuple(records.java_hash(tag.encode()) for tag in tags)
    return Subscription(topic, " || ".join(tags), version, tuple(tags), codes, TAG)


def retry_subscription(group: str, version: int) -> Subscription:
    """What every member of a group that can give messages back reads as well."""
    return Subscription(RETRY_PREFIX + group, ALL, version)


def matching(
    messages: list[ReceivedMessage], subscription: Subscription
) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
    """(those that are wanted, those whose tag only has the same hash)."""
    if not subscription.tags:
        return messages, []
    wanted: list[ReceivedMessage] = []
    others: list[ReceivedMessage] = []
    tags = {tag.encode() for tag in subscription.tags}
    for message in messages:
        tag = records.property_value(message.wire_properties, b"TAGS")
        (wanted if tag in tags else others).append(message)
    return wanted, others
