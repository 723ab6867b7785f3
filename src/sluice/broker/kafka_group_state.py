"""This module is what is known of one classic consumer group: its members, state and generation,
and whether somebody who asks is one of them. What happens to it is in `kafka_group.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sluice.broker.kafka_group_values import NEVER_MS, Effect, Limits, Member, State
from sluice.protocol import kafka_codes as codes


@dataclass(slots=True)
class GroupState:
    """What is known of one group."""

    name: str
    limits: Limits
    effects: list[Effect]  # the owner's
    state: State = State.EMPTY
    since_ms: int = 0  # when that began
    generation: int = 0
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)  # ids given away -> when they are void
    statics: dict[str, str] = field(default_factory=dict)  # instance -> member
    unsynced: set[str] = field(default_factory=set)
    byte_count: int = 0
    join_due_ms: int = NEVER_MS
    sync_due_ms: int = NEVER_MS
    # Only while a group that was empty waits for its first members.
    is_first_round: bool = False
    others_came: bool = False
    first_left_ms: int = 0
    noted_ms: int = NEVER_MS  # the owner looks at it then

    # -------------------------------------------------------------------------------------- looking

    @property
    def due_ms(self) -> int:
        """When time brings something next."""
        dues = [self.join_due_ms, self.sync_due_ms, *self.pending.values()]
        dues += [member.expires_ms for member in self.members.values()]
        return min(dues)

    @property
    def rebalance_ms(self) -> int:
        return max((member.rebalance_ms for member in self.members.values()), default=0)

    @property
    def all_joined(self) -> bool:
        return not self.pending and all(m.join is not None for m in self.members.values())

    def common_protocols(self) -> set[str]:
        """Those that every member knows."""
        return set.intersection(*(set(member.protocols) for member in self.members.values()))

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        if self.state == State.EMPTY or not self.members:
            return bool(protocol_type) and any(True for _ in names)
        return protocol_type == self.protocol_type and not self.common_protocols().isdisjoint(names)

    def check(self, member_id: str, instance_id: str | None) -> int:
        """Whether a member is one, and nobody else has its name."""
        if instance_id is not None:
            known = self.statics.get(instance_id)
            if known is None:
                return codes.UNKNOWN_MEMBER_ID
            if known != member_id:
                return codes.FENCED_INSTANCE_ID
        return 0 if member_id in self.members else codes.UNKNOWN_MEMBER_ID

    def check_commit(
        self, member_id: str, instance_id: str | None, generation: int, *, transactional: bool
    ) -> int:
        """Whether offsets may be committed by somebody."""
        if generation < 0 and self.state == State.EMPTY:
            return 0
        if generation >= 0 or member_id or instance_id is not None:
            code = self.check(member_id, instance_id)
            if code:
                return code
            if generation != self.generation:
                return codes.ILLEGAL_GENERATION
        elif not transactional and self.state != State.EMPTY:
            return codes.UNKNOWN_MEMBER_ID
        if not transactional and self.state == State.COMPLETING:
            return codes.REBALANCE_IN_PROGRESS
        return 0

    def chosen_protocol(self) -> str:
        """The one that most members like best, of those that all know."""
        common = self.common_protocols()
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = next((name for name in member.protocols if name in common), None)
            if choice is not None:
                votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=votes.__getitem__, default="")

    def carry(self, jump_ms: int) -> None:
        """The clock jumps: what is waited for is due so much later."""
        if self.join_due_ms != NEVER_MS:
            self.join_due_ms += jump_ms
        if self.sync_due_ms != NEVER_MS:
            self.sync_due_ms += jump_ms
        self.pending = {each: due_ms + jump_ms for each, due_ms in self.pending.items()}
        for member in self.members.values():
            if member.expires_ms != NEVER_MS:
                member.expires_ms += jump_ms

    # --------------------------------------------------------------------------------------- saving

    def row(self, assignments: Mapping[str, bytes] | None = None) -> dict[str, Any]:
        """What is kept of the group, with new assignments where they are given."""
        protocol = self.protocol or ""
        members = [
            m.row(
                protocol, m.assignment if assignments is None else assignments.get(m.member_id, b"")
            )
            for m in self.members.values()
        ]
        return {
            "generation": self.generation,
            "type": self.protocol_type,
            "protocol": self.protocol,
            "leader": self.leader,
            "since": self.since_ms,
            "members": members,
        }

    @classmethod
    def restored(
        cls, name: str, row: Mapping[str, Any], limits: Limits, effects: list[Effect], now_ms: int
    ) -> Self:
        """A group as it was saved: its members have a whole session to be heard of again."""
        group = cls(name, limits, effects, since_ms=row["since"], generation=row["generation"])
        group.protocol_type = row["type"]
        for each in row["members"]:
            member = Member.restored(each, row["protocol"] or "", now_ms)
            group.members[member.member_id] = member
            group.byte_count += member.size
            if member.instance_id is not None:
                group.statics[member.instance_id] = member.member_id
        if group.members:
            group.protocol, group.leader = row["protocol"], row["leader"]
            group.state = State.STABLE
        return group
