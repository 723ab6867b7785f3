"""Kafka's consumer groups under any order of requests, delays, failing disks and restarts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sluice.broker.kafka_group_values import Joined, Synced
from sluice.broker.kafka_groups import GroupTable
from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_group_kit import GROUP, Desk

PROTOCOLS = ({"range": b"r"}, {"range": b"R", "sticky": b"s"}, {"sticky": b"s", "range": b"r"})
RETRIED = (codes.REBALANCE_IN_PROGRESS, codes.COORDINATOR_NOT_AVAILABLE)


class GroupMachine(RuleBasedStateMachine):
    """Clients that do anything at any time, and what must hold whatever they do."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(save_at_once=False, size_max=6)
        self.joins: dict[str, str | None] = {}  # asked -> instance
        self.syncs: dict[str, tuple[str, int]] = {}  # asked -> member, generation
        self.known: list[tuple[str, str | None, int]] = []  # member, instance, generation
        self.plans: dict[tuple[int, str], set[bytes]] = {}  # what leaders gave to whom
        self.generation = 0

    # ------------------------------------------------------------------------------------- requests

    @rule(
        instance=st.sampled_from([None, None, "a", "b"]),
        protocols=st.sampled_from(PROTOCOLS),
        version=st.sampled_from([3, 5, 9]),
    )
    def join(self, instance: str | None, protocols: dict[str, bytes], version: int) -> None:
        to = self.desk.join(instance=instance, protocols=protocols, version=version)
        self.joins[to] = instance
        self.learn()

    @rule(data=st.data(), protocols=st.sampled_from(PROTOCOLS), version=st.sampled_from([3, 9]))
    def join_again(self, data: st.DataObject, protocols: dict[str, bytes], version: int) -> None:
        if self.known:
            member, instance, _ = data.draw(st.sampled_from(self.known))
            to = self.desk.join(member, instance=instance, protocols=protocols, version=version)
            self.joins[to] = instance
            self.learn()

    @rule(data=st.data())
    def sync(self, data: st.DataObject) -> None:
        if not self.known:
            return
        member, instance, generation = data.draw(st.sampled_from(self.known))
        group = self.desk.table.groups.get(GROUP)
        plan: dict[str, bytes] = {}
        if group is not None and group.leader == member and group.generation == generation:
            text = f"{generation}/{len(self.syncs)}/"
            plan = {each: f"{text}{each}".encode() for each in group.members}
            for each, part in plan.items():
                self.plans.setdefault((generation, each), set()).add(part)
        to = self.desk.sync(member, generation, plan, instance=instance)
        self.syncs[to] = (member, generation)

    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        if self.known:
            member, instance, generation = data.draw(st.sampled_from(self.known))
            self.desk.heartbeat(member, generation, instance)

    @rule(data=st.data(), by_instance=st.booleans())
    def leave(self, data: st.DataObject, *, by_instance: bool) -> None:
        if self.known:
            member, instance, _ = data.draw(st.sampled_from(self.known))
            self.desk.leave(("", instance) if by_instance and instance else (member, instance))

    # ---------------------------------------------------------------------------------- disk, clock

    @rule(code=st.sampled_from([0, 0, 0, codes.COORDINATOR_NOT_AVAILABLE]))
    def save(self, code: int) -> None:
        if self.desk.saves:
            self.desk.finish(self.desk.saves.pop(0), code)

    @rule(ms=st.sampled_from([50, 1_000, 3_000, 11_000, 40_000]))
    def wait(self, ms: int) -> None:
        self.desk.pass_ms(ms)
        self.learn()

    @rule()
    def restart(self) -> None:
        desk = self.desk
        table = GroupTable(desk.table.limits, 100)
        desk.table.effects.clear()
        row = desk.rows.get(GROUP)
        # What was not saved is lost, and so are the connections of those who wait.
        desk.saves.clear()
        self.joins.clear()
        self.syncs.clear()
        self.generation = 0 if row is None else row["generation"]
        desk.table = table
        if row is not None:
            table.restore(GROUP, row, desk.now_ms)

    def learn(self) -> None:
        """Members keep what they were told last."""
        for to, instance in list(self.joins.items()):
            told = self.desk.answers.get(to)
            if told is None:
                continue
            del self.joins[to]
            assert isinstance(told, Joined)
            if told.code in (0, codes.MEMBER_ID_REQUIRED):
                self.known = [each for each in self.known if each[0] != told.member_id]
                self.known.append((told.member_id, instance, told.generation))
                del self.known[:-8]

    # ------------------------------------------------------------------------------- what must hold

    @invariant()
    def generations_never_go_back(self) -> None:
        group = self.desk.table.groups.get(GROUP)
        now = 0 if group is None else group.generation
        assert now >= self.generation
        self.generation = now

    @invariant()
    def a_part_is_given_to_its_member_only(self) -> None:
        for to, (member, generation) in list(self.syncs.items()):
            told = self.desk.answers.get(to)
            if told is None:
                continue
            del self.syncs[to]
            assert isinstance(told, Synced)
            if not told.code and told.assignment:
                # A static member goes on with what it had under its old name.
                parts = {
                    p for (g, _), all_of in self.plans.items() if g == generation for p in all_of
                }
                assert told.assignment in parts
                mine = self.plans.get((generation, member))
                assert mine is None or told.assignment in mine

    @invariant()
    def nobody_has_the_same_part(self) -> None:
        group = self.desk.table.groups.get(GROUP)
        if group is not None and group.state == "Stable":
            parts = [m.assignment for m in group.members.values() if m.assignment]
            assert len(parts) == len(set(parts))

    @invariant()
    def the_books_are_right(self) -> None:
        group = self.desk.table.groups.get(GROUP)
        if group is None:
            return
        assert group.byte_count == sum(member.size for member in group.members.values())
        assert group.leader in group.members or (group.leader is None and not group.members)
        assert set(group.statics.values()) == {
            m.member_id for m in group.members.values() if m.instance_id is not None
        }
        assert len(group.members) <= 6
        assert not (group.state == "Empty" and group.members)
        assert group.members.keys() >= group.unsynced

    def teardown(self) -> None:
        """Whatever waits is answered in the end."""
        while self.desk.saves:
            self.desk.finish(self.desk.saves.pop(0))
        for _ in range(40):
            self.desk.pass_ms(30_000)
            while self.desk.saves:
                self.desk.finish(self.desk.saves.pop(0))
        assert all(to in self.desk.answers for to in (*self.joins, *self.syncs))
        group = self.desk.table.groups.get(GROUP)
        assert group is None or group.state == "Empty"


GroupMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestGroupMachine = GroupMachine.TestCase
