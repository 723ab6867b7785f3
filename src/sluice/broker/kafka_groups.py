"""This module keeps the classic consumer groups of Kafka's clients: finds them, gives them time,
saves them, and hands out their answers.

A group is saved when its leader has said who reads what, before anybody is told: after a restart
its members go on with their assignments, and generations never go back. What a group is doing in
between (who has joined, who waits) is in memory only; whoever waits then asks again.

Groups of RocketMQ's clients have a name space of their own (`groups.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import orjson

from sluice.broker.kafka_group import Group
from sluice.broker.kafka_group_values import (
    NEVER_MS,
    Answer,
    Effect,
    Joined,
    JoinRequest,
    Limits,
    State,
    Synced,
    SyncRequest,
)
from sluice.errors import SluiceError
from sluice.protocol import kafka_codes as codes
from sluice.protocol.kafka_subscriptions import subscribed_topics
from sluice.storage.state import KAFKA_GROUP_TABLE

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

CONSUMER_PROTOCOL: Final = "consumer"
NAME_MAX: Final = 1024  # characters of a group's name
_ROW_BYTES_MAX: Final = 1 << 20  # a larger group is not saved with its members

Replies = Callable[[Any], None]

log_lines = logging.getLogger("sluice.kafka")


class GroupTable:
    """The groups, as a machine without clock, disk and sockets: work off `effects` after each
    call.
    """

    def __init__(self, limits: Limits, groups_max: int) -> None:
        self.limits = limits
        self.groups_max = groups_max
        self.groups: dict[str, Group] = {}
        self.effects: list[Effect] = []
        self._dues: list[tuple[int, str]] = []  # when to look at a group: never too late

    def get(self, name: str) -> Group | None:
        return self.groups.get(name)

    def make(self, name: str, now_ms: int) -> Group | None:
        """The group, a new one where there is none; None where there are too many."""
        group = self.groups.get(name)
        if group is None and len(self.groups) < self.groups_max:
            group = self.groups[name] = Group(name, self.limits, self.effects, since_ms=now_ms)
        return group

    def restore(self, name: str, row: dict[str, Any], now_ms: int) -> None:
        group = Group.restored(name, row, self.limits, self.effects, now_ms)
        self.groups[name] = group
        self._note(group)

    def join(self, name: str, request: JoinRequest, to: Any, now_ms: int) -> None:
        limits = self.limits
        group = self.groups.get(name)
        if not 0 < len(name) <= NAME_MAX:
            code = codes.INVALID_GROUP_ID
        elif not limits.session_min_ms <= request.session_ms <= limits.session_max_ms:
            code = codes.INVALID_SESSION_TIMEOUT
        elif group is None and request.member_id:
            code = codes.UNKNOWN_MEMBER_ID
        else:
            group = group or self.make(name, now_ms)
            code = 0 if group is not None else codes.COORDINATOR_NOT_AVAILABLE
        if code or group is None:
            self.effects.append(Answer(to, Joined(code, request.member_id)))
            return
        group.join(request, to, now_ms)
        self._note(group)

    def sync(self, name: str, request: SyncRequest, to: Any, now_ms: int) -> None:
        group = self.groups.get(name)
        if group is None:
            code = codes.UNKNOWN_MEMBER_ID if name else codes.INVALID_GROUP_ID
            self.effects.append(Answer(to, Synced(code)))
            return
        group.sync(request, to, now_ms)
        self._note(group)

    def heartbeat(
        self, name: str, member_id: str, instance_id: str | None, generation: int, now_ms: int
    ) -> int:
        group = self.groups.get(name)
        if group is None:
            return codes.UNKNOWN_MEMBER_ID if name else codes.INVALID_GROUP_ID
        return group.heartbeat(member_id, instance_id, generation, now_ms)

    def leave(
        self, name: str, leavers: Iterable[tuple[str, str | None]], now_ms: int
    ) -> tuple[int, list[int]]:
        """An error code for all, and one for each."""
        leavers = list(leavers)
        if not name:
            return codes.INVALID_GROUP_ID, []
        group = self.groups.get(name)
        if group is None:
            return 0, [codes.UNKNOWN_MEMBER_ID] * len(leavers)
        result = group.leave(leavers, now_ms)
        self._note(group)
        return 0, result

    def drop(self, name: str) -> None:
        """Forget a group that has no members."""
        group = self.groups.pop(name, None)
        if group is not None:
            group.die()

    def tick(self, now_ms: int) -> None:
        """What is due by now."""
        while self._dues and self._dues[0][0] <= now_ms:
            due_ms, name = heappop(self._dues)
            group = self.groups.get(name)
            if group is not None and group.noted_ms == due_ms:  # else it is noted for another time
                group.expire(now_ms)
                group.noted_ms = NEVER_MS
                self._note(group)

    def carry(self, jump_ms: int) -> None:
        """The clock jumps: everybody is waited for as long as before."""
        self._dues.clear()
        for group in self.groups.values():
            group.carry(jump_ms)
            group.noted_ms = NEVER_MS
            self._note(group)

    def saved(self, name: str, then: Callable[[int, int], None], code: int, now_ms: int) -> None:
        """A row of a group was saved, or could not be."""
        then(code, now_ms)
        group = self.groups.get(name)
        if group is not None:
            self._note(group)

    def _note(self, group: Group) -> None:
        """Look at a group no later than it needs it; heartbeats only make that later."""
        due_ms = group.due_ms
        if due_ms < group.noted_ms:
            group.noted_ms = due_ms
            heappush(self._dues, (due_ms, group.name))


class KafkaGroups:
    """The groups of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        config = core.config
        self._core = core
        self.table = GroupTable(
            Limits(
                initial_delay_ms=config.kafka_initial_rebalance_delay_ms,
                session_min_ms=config.kafka_session_min_ms,
                session_max_ms=config.kafka_session_max_ms,
                size_max=config.kafka_group_size_max,
                bytes_max=config.kafka_group_bytes_max,
            ),
            config.kafka_groups_max,
        )
        self.rebalance_count = 0
        self._is_working = False

    # ------------------------------------------------------------------------------------- requests

    def join(self, name: str, request: JoinRequest, to: Callable[[Joined], None]) -> None:
        self.table.join(name, request, to, self._core.now_ms())
        self._work()

    def sync(self, name: str, request: SyncRequest, to: Callable[[Synced], None]) -> None:
        self.table.sync(name, request, to, self._core.now_ms())
        self._work()

    def heartbeat(self, name: str, member_id: str, instance_id: str | None, generation: int) -> int:
        return self.table.heartbeat(name, member_id, instance_id, generation, self._core.now_ms())

    def leave(self, name: str, leavers: Iterable[tuple[str, str | None]]) -> tuple[int, list[int]]:
        result = self.table.leave(name, leavers, self._core.now_ms())
        self._work()
        return result

    def check_commit(
        self,
        name: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        *,
        transactional: bool = False,
        missing_code: int = codes.ILLEGAL_GENERATION,
    ) -> int:
        """Whether offsets may be committed; the group is there afterwards if they may."""
        group = self.table.get(name)
        if group is None:
            if len(name) > NAME_MAX:
                return codes.INVALID_GROUP_ID
            if generation >= 0:
                return missing_code
            group = self.table.make(name, self._core.now_ms())
            if group is None:
                return codes.COORDINATOR_NOT_AVAILABLE
        code = group.check_commit(member_id, instance_id, generation, transactional=transactional)
        if not code and not transactional and group.state in (State.STABLE, State.PREPARING):
            group.touch(member_id, self._core.now_ms())
        return code

    # -------------------------------------------------------------------------------------- looking

    def get(self, name: str) -> Group | None:
        return self.table.get(name)

    def all(self) -> Iterator[Group]:
        yield from self.table.groups.values()

    def subscribed(self, name: str) -> frozenset[str] | None:
        """The topics (Kafka's names) that members read; None: nobody can tell."""
        group = self.table.get(name)
        if group is None or group.protocol_type != CONSUMER_PROTOCOL:
            return None
        topics: set[str] = set()
        for member in group.members.values():
            data = member.protocols.get(group.protocol or "")
            if data is None and member.protocols:
                data = next(iter(member.protocols.values()))
            found = subscribed_topics(data or b"")
            if found is None:
                return None
            topics |= found
        return frozenset(topics)

    # ----------------------------------------------------------------------------- deleting, saving

    def delete(self, name: str) -> int:
        """Delete a group that has no members; its offsets are somebody else's to delete."""
        group = self.table.get(name)
        if group is None:
            return codes.GROUP_ID_NOT_FOUND
        if group.state != State.EMPTY:
            return codes.NON_EMPTY_GROUP
        self.table.drop(name)
        if self._core.store.state.newest(KAFKA_GROUP_TABLE, name) is not None:
            self._save(name, None, None)
        return 0

    def start(self) -> None:
        now_ms = self._core.now_ms()
        for name, row in self._core.store.table(KAFKA_GROUP_TABLE).items():
            self.table.restore(name, row, now_ms)

    def carry(self, jump_ms: int) -> None:
        """The clock jumps, and takes the members of all groups along."""
        self.table.carry(jump_ms)

    def tick(self, now_ms: int) -> None:
        self.table.tick(now_ms)
        self._work()

    def _work(self) -> None:
        """Do what is to be done; that may bring more of it."""
        if self._is_working:
            return
        self._is_working = True
        try:
            while self.table.effects:
                # One by one: where an answer fails, the others are left for the next time.
                effect = self.table.effects.pop(0)
                if isinstance(effect, Answer):
                    effect.to(effect.body)
                else:
                    self._save(effect.name, effect.row, effect.then)
        finally:
            self._is_working = False

    def _save(
        self,
        name: str,
        row: dict[str, Any] | None,
        then: Callable[[int, int], None] | None,
    ) -> None:
        core = self._core
        if row is not None and len(orjson.dumps(row)) > _ROW_BYTES_MAX:
            row = {**row, "members": [], "leader": None, "protocol": None}
        if row is not None and row["members"]:
            self.rebalance_count += 1

        def saved(error: SluiceError | None) -> None:
            if error is not None:
                log_lines.error("group %s could not be saved: %s", name[:200], error)
            if then is not None:
                code = 0 if error is None else codes.COORDINATOR_NOT_AVAILABLE
                self.table.saved(name, then, code, core.now_ms())
                self._work()

        try:
            core.store.change([(KAFKA_GROUP_TABLE, name, row)], saved)
        except SluiceError as error:
            saved(error)
            return
        core.ask_turn()
