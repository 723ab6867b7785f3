"""This module drives Kafka's consumer groups with a clock that a test turns, without a broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.broker.kafka_group_values import (
    Answer,
    Joined,
    JoinRequest,
    Limits,
    Save,
    Synced,
    SyncRequest,
)
from sluice.broker.kafka_groups import GroupTable

GROUP = "g"
TICK_MS = 50


class Desk:
    """Groups, their answers in the order they came, and what was saved."""

    def __init__(self, groups_max: int = 100, *, save_at_once: bool = True, **limits: int) -> None:
        self.table = GroupTable(Limits(**limits), groups_max)
        self.now_ms = 1_000_000
        self.answers: dict[str, Joined | Synced] = {}
        self.rows: dict[str, dict[str, Any] | None] = {}
        self.save_at_once = save_at_once
        self.saves: list[Save] = []
        self._fresh = 0
        self._asked = 0

    def work(self) -> None:
        effects = self.table.effects
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Answer):
                assert effect.to not in self.answers, "answered twice"
                self.answers[effect.to] = effect.body
            elif self.save_at_once:
                self.finish(effect)
            else:
                self.saves.append(effect)

    def finish(self, save: Save, code: int = 0) -> None:
        """A row was saved, or could not be."""
        if not code:
            self.rows[save.name] = save.row
        if save.then is not None:
            self.table.saved(save.name, save.then, code, self.now_ms)
        self.work()

    def pass_ms(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms = min(end_ms, self.now_ms + TICK_MS)
            self.table.tick(self.now_ms)
            self.work()

    def wait(self, *asked: str) -> None:
        """Time passes until these are answered."""
        for _ in range(12_000):
            if all(to in self.answers for to in asked):
                return
            self.pass_ms(TICK_MS)
        raise AssertionError("no answer in ten minutes")

    def join(
        self,
        member_id: str = "",
        *,
        instance: str | None = None,
        protocols: Mapping[str, bytes] | None = None,
        group: str = GROUP,
        session_ms: int = 10_000,
        rebalance_ms: int = 30_000,
        version: int = 3,
        protocol_type: str = "consumer",
    ) -> str:
        """Join; the name that the answer will be found under."""
        self._fresh += 1
        self._asked += 1
        to = f"join-{self._asked}"
        request = JoinRequest(
            member_id,
            instance,
            "client",
            "/127.0.0.1",
            session_ms,
            rebalance_ms,
            protocol_type,
            tuple((protocols if protocols is not None else {"range": b"r"}).items()),
            f"{instance or 'client'}-{self._fresh}",
            needs_known_id=version >= 4,
            can_skip_assignment=version >= 9,
        )
        self.table.join(group, request, to, self.now_ms)
        self.work()
        return to

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: Mapping[str, bytes] | None = None,
        *,
        instance: str | None = None,
        group: str = GROUP,
        **told: str | None,
    ) -> str:
        self._asked += 1
        to = f"sync-{self._asked}"
        request = SyncRequest(
            member_id, instance, generation, **told, assignments=assignments or {}
        )
        self.table.sync(group, request, to, self.now_ms)
        self.work()
        return to

    def heartbeat(
        self, member_id: str, generation: int, instance: str | None = None, group: str = GROUP
    ) -> int:
        code = self.table.heartbeat(group, member_id, instance, generation, self.now_ms)
        self.work()
        return code

    def leave(self, *leavers: str | tuple[str, str | None], group: str = GROUP) -> list[int]:
        pairs = [each if isinstance(each, tuple) else (each, None) for each in leavers]
        code, result = self.table.leave(group, pairs, self.now_ms)
        self.work()
        return result if not code else [code]

    # -------------------------------------------------------------------------------------- answers

    def joined(self, to: str) -> Joined:
        body = self.answers[to]
        assert isinstance(body, Joined)
        return body

    def synced(self, to: str) -> Synced:
        body = self.answers[to]
        assert isinstance(body, Synced)
        return body

    @property
    def state(self) -> str:
        return self.table.groups[GROUP].state.value

    def settle(self, count: int, **join: Any) -> list[str]:
        """A stable group of so many members; the first leads."""
        asked = [self.join(**join) for _ in range(count)]
        self.wait(*asked)
        ids = [self.joined(to).member_id for to in asked]
        generation = self.joined(asked[0]).generation
        for member_id in ids[1:]:
            self.sync(member_id, generation)
        self.sync(ids[0], generation, {each: each.encode() for each in ids})
        assert self.state == "Stable"
        return ids
