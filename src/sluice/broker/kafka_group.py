"""This module is one classic consumer group of Kafka's clients: who is in it, and what comes of
each of their requests.

A group is a machine without clock, socket and disk. An event comes with the time; what is to be
done (an answer to a request that waits, a row to be saved) is put on a list that the owner works
off. The states are Kafka's:

    Empty -> PreparingRebalance    somebody joins; a new group waits a little for others
          -> CompletingRebalance   all have joined, or the time is over: a new generation begins
          -> Stable                the leader has said who reads what, and that is saved
    any   -> PreparingRebalance    somebody joins, leaves, is silent for too long
          -> Empty                 nobody is left

What members say of themselves and what the leader assigns are bytes that only they understand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sluice.broker.kafka_group_state import GroupState
from sluice.broker.kafka_group_values import (
    NEVER_MS,
    Answer,
    Joined,
    JoinRequest,
    Member,
    Save,
    State,
    Synced,
    SyncRequest,
)
from sluice.protocol import kafka_codes as codes


class Group(GroupState):
    """One group."""

    __slots__ = ()

    # -------------------------------------------------------------------------------------- joining

    def join(self, request: JoinRequest, to: Any, now_ms: int) -> None:
        """Somebody joins, for the first time or again."""
        code = self._refusal(request)
        if code == codes.GROUP_MAX_SIZE_REACHED:
            self._remove(request.member_id)
            self._tell(to, Joined(code))
        elif code:
            self._tell(to, Joined(code, request.member_id))
        elif request.member_id:
            self._join_again(request, to, now_ms)
        elif request.instance_id is not None:
            known = self.statics.get(request.instance_id)
            if known is None:
                self._add(request.fresh_id, request, to, now_ms)
            else:
                self._replace(known, request, to, now_ms)
        elif request.needs_known_id:
            self.pending[request.fresh_id] = now_ms + request.session_ms
            self._tell(to, Joined(codes.MEMBER_ID_REQUIRED, request.fresh_id))
        else:
            self._add(request.fresh_id, request, to, now_ms)

    def _refusal(self, request: JoinRequest) -> int:
        if self.state == State.DEAD:
            return codes.COORDINATOR_NOT_AVAILABLE
        if not self._has_room(request):
            return codes.GROUP_MAX_SIZE_REACHED
        if not self.supports(request.protocol_type, (name for name, _ in request.protocols)):
            return codes.INCONSISTENT_GROUP_PROTOCOL
        return 0

    def _has_room(self, request: JoinRequest) -> bool:
        limits = self.limits
        member = self.members.get(request.member_id)
        size = sum(len(name) + len(data) for name, data in request.protocols)
        if self.byte_count - (member.size if member else 0) + size > limits.bytes_max:
            return False
        if not request.member_id and len(self.pending) >= limits.size_max:
            return False
        if self.state == State.PREPARING:
            waiting = sum(1 for each in self.members.values() if each.join is not None)
            is_waiting = member is not None and member.join is not None
            return is_waiting or waiting < limits.size_max
        if self.state == State.EMPTY:
            return True
        return member is not None or len(self.members) < limits.size_max

    def _join_again(self, request: JoinRequest, to: Any, now_ms: int) -> None:
        member_id = request.member_id
        if member_id in self.pending and request.instance_id is None:
            self._add(member_id, request, to, now_ms)
            return
        code = self.check(member_id, request.instance_id)
        if code or self.state == State.EMPTY:
            self._tell(to, Joined(code or codes.UNKNOWN_MEMBER_ID, member_id))
            return
        member = self.members[member_id]
        is_same = list(member.protocols.items()) == list(request.protocols)
        leads = self.leader == member_id
        if is_same and (
            self.state == State.COMPLETING or (self.state == State.STABLE and not leads)
        ):
            # It did not get the answer that it was given, or wants to be sure.
            members = self._described() if leads else ()
            self._tell(to, self._joined(member_id, members))
            return
        self._update(member, request, to)
        self._rebalance_or_complete(now_ms)

    def _add(self, member_id: str, request: JoinRequest, to: Any, now_ms: int) -> None:
        self.pending.pop(member_id, None)
        if not self.members:
            self.protocol_type = request.protocol_type
        member = self.members[member_id] = Member(
            member_id,
            request.instance_id,
            request.client_id,
            request.client_host,
            request.session_ms,
            request.rebalance_ms,
            dict(request.protocols),
            expires_ms=now_ms + self.limits.new_member_ms,
            join=to,
        )
        self.byte_count += member.size
        if request.instance_id is not None:
            self.statics[request.instance_id] = member_id
        if self.leader is None:
            self.leader = member_id
        if self.state == State.PREPARING and self.is_first_round:
            self.others_came = True
        self._rebalance_or_complete(now_ms)

    def _update(self, member: Member, request: JoinRequest, to: Any) -> None:
        self.byte_count -= member.size
        member.protocols = dict(request.protocols)
        self.byte_count += member.size
        member.session_ms, member.rebalance_ms = request.session_ms, request.rebalance_ms
        if member.join is not None:  # it asked before, over a connection that it gave up
            self._tell(member.join, Joined(codes.UNKNOWN_MEMBER_ID, member.member_id))
        member.join = to

    def _replace(self, old_id: str, request: JoinRequest, to: Any, now_ms: int) -> None:
        """A static member is back, under a new id; whoever has the old one is shut out."""
        assert request.instance_id is not None
        old, new_id = self.members[old_id], request.fresh_id
        if old.join is not None:
            self._tell(old.join, Joined(codes.FENCED_INSTANCE_ID, old_id))
        if old.sync is not None:
            self._tell(old.sync, Synced(codes.FENCED_INSTANCE_ID))
        old_leader = self.leader or ""
        # It takes the old one's place in the order of members, too.
        self.members = {
            (new_id if name == old_id else name): each for name, each in self.members.items()
        }
        if old_id in self.unsynced:
            self.unsynced.discard(old_id)
            self.unsynced.add(new_id)
        old.member_id, old.join, old.sync = new_id, None, None
        old.client_id, old.client_host = request.client_id, request.client_host
        self.statics[request.instance_id] = new_id
        if self.leader == old_id:
            self.leader = new_id
        self._update(old, request, to)
        old.expires_ms = now_ms + old.session_ms
        if self.state == State.STABLE:
            if self.chosen_protocol() == self.protocol:
                self._keep_place(old, request, old_leader)
            else:
                self._rebalance_or_complete(now_ms)
        elif self.state == State.COMPLETING:
            self._prepare(now_ms)
        else:
            self._complete_if_joined(now_ms)

    def _keep_place(self, member: Member, request: JoinRequest, old_leader: str) -> None:
        """Nothing changes for the others: it goes on with what it had."""
        leads = self.leader == member.member_id
        if request.can_skip_assignment:
            body = self._joined(member.member_id, self._described() if leads else ())
            body = body._replace(skip_assignment=leads)
        else:
            # One that knows of no skipping must not take itself for the leader.
            body = self._joined(member.member_id, ())._replace(leader=old_leader)
        waiting = member.join

        def saved(code: int, now_ms: int) -> None:
            if member.join is waiting and member.join is not None:
                member.join = None
                member.expires_ms = now_ms + member.session_ms
                self._tell(waiting, Joined(code, "") if code else body)

        self.effects.append(Save(self.name, self.row(), saved))

    # ----------------------------------------------------------------------------------- rebalances

    def _rebalance_or_complete(self, now_ms: int) -> None:
        if self.state in (State.EMPTY, State.COMPLETING, State.STABLE):
            self._prepare(now_ms)
        else:
            self._complete_if_joined(now_ms)

    def _complete_if_joined(self, now_ms: int) -> None:
        # A new group waits its time, also where all that are known have joined.
        if self.state == State.PREPARING and not self.is_first_round and self.all_joined:
            self._complete(now_ms)

    def _prepare(self, now_ms: int) -> None:
        """A new round begins: everybody has to join again."""
        if self.state == State.COMPLETING:
            for member in self.members.values():
                member.assignment = b""
            self._propagate(codes.REBALANCE_IN_PROGRESS, now_ms)
        self.unsynced.clear()
        self.sync_due_ms = NEVER_MS
        self.is_first_round = self.state == State.EMPTY
        self._enter(State.PREPARING, now_ms)
        if self.is_first_round:
            delay_ms = self.limits.initial_delay_ms
            self.others_came = False
            self.first_left_ms = max(0, self.rebalance_ms - delay_ms)
            self.join_due_ms = now_ms + delay_ms
            if not delay_ms:
                self._complete(now_ms)
        elif self.all_joined:
            self._complete(now_ms)
        else:
            self.join_due_ms = now_ms + self.rebalance_ms

    def _join_time_over(self, now_ms: int) -> None:
        if self.is_first_round and self.others_came and self.first_left_ms:
            self.others_came = False
            delay_ms = min(self.limits.initial_delay_ms, self.first_left_ms)
            self.first_left_ms = max(0, self.first_left_ms - delay_ms)
            self.join_due_ms = now_ms + delay_ms
        else:
            self._complete(now_ms)

    def _complete(self, now_ms: int) -> None:
        """The round of joining is over: those who joined are the next generation."""
        self.join_due_ms = NEVER_MS
        for member in list(self.members.values()):
            if member.join is None and member.instance_id is None:
                self._remove(member.member_id)
        if self.members and not self._elect():
            # Only static members that are away: they have until their sessions end.
            self.is_first_round = False
            self.join_due_ms = now_ms + self.rebalance_ms
            return
        self.is_first_round = False
        self.generation += 1
        self.unsynced.clear()
        if not self.members:
            self._become_empty(now_ms)
            return
        self.protocol = self.chosen_protocol()
        self._enter(State.COMPLETING, now_ms)
        described = self._described()
        for member in self.members.values():
            waiting, member.join = member.join, None
            member.is_new = False
            member.expires_ms = now_ms + member.session_ms
            self.unsynced.add(member.member_id)
            if waiting is not None:
                members = described if member.member_id == self.leader else ()
                self._tell(waiting, self._joined(member.member_id, members))
        self.sync_due_ms = now_ms + self.rebalance_ms

    def _become_empty(self, now_ms: int) -> None:
        self.protocol = None
        self.sync_due_ms = NEVER_MS
        self._enter(State.EMPTY, now_ms)
        self.effects.append(Save(self.name, self.row(), None))

    def _elect(self) -> bool:
        """Whether there is a leader that has joined."""
        if self.leader is not None and self.members[self.leader].join is not None:
            return True
        joined = next((m.member_id for m in self.members.values() if m.join is not None), None)
        if joined is not None:
            self.leader = joined
        return joined is not None

    # -------------------------------------------------------------------------------------- syncing

    def sync(self, request: SyncRequest, to: Any, now_ms: int) -> None:
        """A member wants its assignment; the leader brings those of all."""
        code = self._check_sync(request)
        if code:
            self._tell(to, Synced(code))
        elif self.state == State.PREPARING:
            self._tell(to, Synced(codes.REBALANCE_IN_PROGRESS))
        elif self.state == State.STABLE:
            member = self._synced(request.member_id)
            member.expires_ms = now_ms + member.session_ms
            self._tell(to, Synced(0, self.protocol_type, self.protocol, member.assignment))
        else:
            member = self._synced(request.member_id)
            if member.sync is not None:
                self._tell(member.sync, Synced(codes.UNKNOWN_MEMBER_ID))
            member.sync = to
            if member.member_id == self.leader:
                self._assign(dict(request.assignments))

    def _check_sync(self, request: SyncRequest) -> int:
        if self.state in (State.EMPTY, State.DEAD):
            return codes.UNKNOWN_MEMBER_ID
        code = self.check(request.member_id, request.instance_id)
        if code:
            return code
        if request.generation != self.generation:
            return codes.ILLEGAL_GENERATION
        if request.protocol_type not in (None, self.protocol_type):
            return codes.INCONSISTENT_GROUP_PROTOCOL
        if request.protocol not in (None, self.protocol):
            return codes.INCONSISTENT_GROUP_PROTOCOL
        return 0

    def _synced(self, member_id: str) -> Member:
        self.unsynced.discard(member_id)
        self._end_of_syncs()
        return self.members[member_id]

    def _end_of_syncs(self) -> None:
        if not self.unsynced:
            self.sync_due_ms = NEVER_MS

    def _assign(self, assignments: dict[str, bytes]) -> None:
        generation = self.generation

        def saved(code: int, now_ms: int) -> None:
            if self.state != State.COMPLETING or self.generation != generation:
                return  # another round has begun meanwhile
            for member in self.members.values():
                member.assignment = b"" if code else assignments.get(member.member_id, b"")
            if code:
                self._propagate(code, now_ms)
                self._rebalance_or_complete(now_ms)
                return
            self._enter(State.STABLE, now_ms)
            self._propagate(0, now_ms)

        self.effects.append(Save(self.name, self.row(assignments), saved))

    def _propagate(self, code: int, now_ms: int) -> None:
        for member in self.members.values():
            waiting, member.sync = member.sync, None
            if waiting is None:
                continue
            member.expires_ms = now_ms + member.session_ms
            if code:
                self._tell(waiting, Synced(code))
            else:
                body = Synced(0, self.protocol_type, self.protocol, member.assignment)
                self._tell(waiting, body)

    # -------------------------------------------------------------------------- heartbeats, leaving

    def heartbeat(
        self, member_id: str, instance_id: str | None, generation: int, now_ms: int
    ) -> int:
        """A member lives; the error code of the answer."""
        if self.state == State.DEAD:
            return codes.COORDINATOR_NOT_AVAILABLE
        code = self.check(member_id, instance_id)
        if code:
            return code
        if generation != self.generation:
            return codes.ILLEGAL_GENERATION
        self.touch(member_id, now_ms)
        return codes.REBALANCE_IN_PROGRESS if self.state == State.PREPARING else 0

    def touch(self, member_id: str, now_ms: int) -> None:
        """A member was heard of."""
        member = self.members.get(member_id)
        if member is not None:
            member.expires_ms = now_ms + member.session_ms

    def leave(self, leavers: Iterable[tuple[str, str | None]], now_ms: int) -> list[int]:
        """Members go, or are sent away, by id or by instance; an error code for each."""
        result = [self._leave(member_id, instance_id) for member_id, instance_id in leavers]
        if 0 in result:
            if self.state in (State.STABLE, State.COMPLETING):
                self._prepare(now_ms)
            else:
                self._complete_if_joined(now_ms)
        return result

    def _leave(self, member_id: str, instance_id: str | None) -> int:
        if not member_id and instance_id is not None:
            member_id = self.statics.get(instance_id, "")
        elif member_id in self.pending:
            del self.pending[member_id]
            return 0
        code = self.check(member_id, instance_id)
        if not code:
            self._remove(member_id)
        return code

    def _remove(self, member_id: str) -> None:
        self.pending.pop(member_id, None)
        self.unsynced.discard(member_id)
        self._end_of_syncs()
        member = self.members.pop(member_id, None)
        if member is None:
            return
        self.byte_count -= member.size
        if member.instance_id is not None:
            self.statics.pop(member.instance_id, None)
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        if member.join is not None:
            self._tell(member.join, Joined(codes.UNKNOWN_MEMBER_ID))
        if member.sync is not None:
            self._tell(member.sync, Synced(codes.UNKNOWN_MEMBER_ID))

    # ----------------------------------------------------------------------------------------- time

    def expire(self, now_ms: int) -> None:
        """What is due by now."""
        for member_id in [each for each, due_ms in self.pending.items() if due_ms <= now_ms]:
            del self.pending[member_id]
            self._complete_if_joined(now_ms)
        for member in list(self.members.values()):
            if member.expires_ms > now_ms:
                continue
            if not member.is_new and (member.join is not None or member.sync is not None):
                member.expires_ms = NEVER_MS  # it waits for us, not we for it
                continue
            self._remove(member.member_id)
            if self.state in (State.STABLE, State.COMPLETING):
                self._prepare(now_ms)
            else:
                self._complete_if_joined(now_ms)
        if self.sync_due_ms <= now_ms:
            self._sync_time_over(now_ms)
        if self.join_due_ms <= now_ms:
            self._join_time_over(now_ms)

    def _sync_time_over(self, now_ms: int) -> None:
        """Those who were told of the generation and never asked for their part are gone."""
        self.sync_due_ms = NEVER_MS
        for member_id in list(self.unsynced):
            self._remove(member_id)
        if self.state in (State.COMPLETING, State.STABLE):
            self._prepare(now_ms)

    def die(self) -> None:
        """The group was deleted: it has no members."""
        self.state = State.DEAD
        self.pending.clear()

    # ----------------------------------------------------------------------------------- small ones

    def _enter(self, state: State, now_ms: int) -> None:
        self.state, self.since_ms = state, now_ms

    def _joined(self, member_id: str, members: tuple[tuple[str, str | None, bytes], ...]) -> Joined:
        return Joined(
            0,
            member_id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader or "",
            members=members,
        )

    def _described(self) -> tuple[tuple[str, str | None, bytes], ...]:
        name = self.protocol or ""
        return tuple(
            (m.member_id, m.instance_id, m.protocols.get(name, b"")) for m in self.members.values()
        )

    def _tell(self, to: Any, body: Joined | Synced) -> None:
        self.effects.append(Answer(to, body))
