"""This module holds the values of Kafka's classic consumer groups: what members say, what they are
told, and what has to be done for a group.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

NEVER_MS: Final = 1 << 62


class State(StrEnum):
    """The states of a group, in the words that Kafka's tools print."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class Limits(NamedTuple):
    """What groups may be, and how long they wait."""

    initial_delay_ms: int = 3_000
    session_min_ms: int = 6_000
    session_max_ms: int = 1_800_000
    size_max: int = 10_000
    bytes_max: int = 16 << 20  # of what all members of one group say of themselves
    new_member_ms: int = 300_000  # a member is kept so long while it waits for its first round


class JoinRequest(NamedTuple):
    """What a member says when it joins."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]  # in the order of preference
    fresh_id: str  # for a member that has no id yet
    needs_known_id: bool = False  # it has to come again with the id that it is given
    can_skip_assignment: bool = False


class SyncRequest(NamedTuple):
    """What a member says when it wants its assignment."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None = None  # None: not told
    protocol: str | None = None
    assignments: Mapping[str, bytes] = {}  # the leader's, by member


class Joined(NamedTuple):
    """The answer to a join."""

    code: int = 0
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[tuple[str, str | None, bytes], ...] = ()


class Synced(NamedTuple):
    """The answer to a sync."""

    code: int = 0
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Answer(NamedTuple):
    """To be done: a request that waited has its answer."""

    to: Any  # as it was given with the request
    body: Joined | Synced


class Save(NamedTuple):
    """To be done: keep a row, and say how it went; None: the group is as good as new."""

    name: str
    row: dict[str, Any] | None
    then: Callable[[int, int], None] | None  # with an error code and the time


Effect = Answer | Save


@dataclass(slots=True)
class Member:
    """One member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocols: dict[str, bytes]
    assignment: bytes = b""
    expires_ms: int = NEVER_MS
    is_new: bool = True  # it has been in no generation yet
    join: Any = None  # its join waits for an answer
    sync: Any = None  # ... its sync

    @property
    def size(self) -> int:
        return sum(len(name) + len(data) for name, data in self.protocols.items())

    def row(self, protocol: str, assignment: bytes) -> list[Any]:
        """What is kept of it."""
        return [
            *(self.member_id, self.instance_id, self.client_id, self.client_host),
            *(self.session_ms, self.rebalance_ms),
            *(_text(self.protocols.get(protocol, b"")), _text(assignment)),
        ]

    @classmethod
    def restored(cls, row: list[Any], protocol: str, now_ms: int) -> Member:
        member_id, instance_id, client_id, host, session_ms, rebalance_ms, data, assignment = row
        member = cls(member_id, instance_id, client_id, host, session_ms, rebalance_ms, {})
        member.protocols = {protocol: b64decode(data)}
        member.assignment = b64decode(assignment)
        member.expires_ms = now_ms + session_ms
        member.is_new = False
        return member


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")
