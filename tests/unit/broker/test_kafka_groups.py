"""Kafka's consumer groups: joins, rounds, static members, time-outs, and what is refused."""

from __future__ import annotations

import pytest

from sluice.broker.kafka_group_values import Joined
from sluice.broker.kafka_groups import GroupTable
from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_group_kit import GROUP, Desk


def test_a_new_group_waits_for_others() -> None:
    desk = Desk()
    first = desk.join()
    desk.pass_ms(2_900)
    second = desk.join()
    assert desk.state == "PreparingRebalance"
    assert not desk.answers
    desk.pass_ms(3_000)  # each newcomer brings another delay
    assert not desk.answers
    desk.pass_ms(3_000)
    one, two = desk.joined(first), desk.joined(second)
    assert (one.generation, two.generation) == (1, 1)
    assert one.leader == two.leader == one.member_id
    assert [each[0] for each in one.members] == [one.member_id, two.member_id]
    assert two.members == ()
    assert (one.protocol, one.protocol_type) == ("range", "consumer")
    assert desk.state == "CompletingRebalance"


def test_the_wait_ends_with_the_rebalance_time() -> None:
    desk = Desk()
    first = desk.join(rebalance_ms=7_000)
    for _ in range(4):
        desk.pass_ms(2_000)
        desk.join(rebalance_ms=7_000)
    assert first in desk.answers


def test_no_delay_completes_at_once() -> None:
    desk = Desk(initial_delay_ms=0)
    assert desk.joined(desk.join()).generation == 1


def test_a_member_gets_an_id_first() -> None:
    desk = Desk(initial_delay_ms=0)
    told = desk.joined(desk.join(version=4))
    assert told.code == codes.MEMBER_ID_REQUIRED
    assert told.member_id == "client-1"
    assert desk.joined(desk.join(told.member_id, version=4)).generation == 1


def test_an_id_that_is_not_used_is_void() -> None:
    desk = Desk()
    told = desk.joined(desk.join(version=4))
    desk.pass_ms(10_000)
    late = desk.joined(desk.join(told.member_id, version=4))
    assert (late.code, late.member_id) == (codes.UNKNOWN_MEMBER_ID, told.member_id)


def test_a_round_waits_for_an_id_that_was_given_away() -> None:
    desk = Desk()
    (leader,) = desk.settle(1)
    pending = desk.joined(desk.join(version=4)).member_id
    again = desk.join(leader)  # a leader that joins again begins a round
    assert again not in desk.answers
    assert desk.leave(pending) == [0]
    assert desk.joined(again).generation == 2


def test_syncs_wait_for_the_leader_and_for_the_disk() -> None:
    desk = Desk(save_at_once=False)
    asked = [desk.join(), desk.join()]
    desk.wait(*asked)
    ids = [desk.joined(to).member_id for to in asked]
    follower = desk.sync(ids[1], 1)
    leader = desk.sync(ids[0], 1, {ids[0]: b"0", ids[1]: b"1"})
    assert follower not in desk.answers
    assert leader not in desk.answers
    desk.finish(desk.saves.pop())
    assert desk.synced(leader).assignment == b"0"
    assert desk.synced(follower) == (0, "consumer", "range", b"1")
    assert desk.state == "Stable"
    assert desk.synced(desk.sync(ids[1], 1)).assignment == b"1"  # as often as it asks


def test_an_assignment_that_cannot_be_saved_begins_a_new_round() -> None:
    desk = Desk(save_at_once=False)
    asked = desk.join()
    desk.pass_ms(3_000)
    leader = desk.joined(asked).member_id
    sync = desk.sync(leader, 1, {leader: b"0"})
    desk.finish(desk.saves.pop(), codes.COORDINATOR_NOT_AVAILABLE)
    assert desk.synced(sync).code == codes.COORDINATOR_NOT_AVAILABLE
    assert desk.state == "PreparingRebalance"
    assert desk.joined(desk.join(leader)).generation == 2


def test_a_late_save_does_not_touch_the_next_round() -> None:
    desk = Desk(save_at_once=False)
    asked = desk.join()
    desk.pass_ms(3_000)
    leader = desk.joined(asked).member_id
    sync = desk.sync(leader, 1, {leader: b"old"})
    other = desk.join()
    assert desk.synced(sync).code == codes.REBALANCE_IN_PROGRESS
    desk.finish(desk.saves.pop())
    assert desk.state == "PreparingRebalance"
    desk.join(leader)
    assert desk.joined(other).generation == 2


def test_the_protocol_that_most_like() -> None:
    desk = Desk()
    both = {"range": b"", "roundrobin": b""}
    asked = [desk.join(protocols=dict(sorted(both.items(), reverse=True))) for _ in range(2)]
    asked.append(desk.join(protocols={**both, "sticky": b""}))
    desk.wait(*asked)
    assert {desk.joined(to).protocol for to in asked} == {"roundrobin"}


def test_a_protocol_that_all_know_wins_over_a_loved_one() -> None:
    desk = Desk()
    asked = [desk.join(protocols={"new": b"", "old": b"o"}) for _ in range(2)]
    asked.append(desk.join(protocols={"old": b"o"}))
    desk.wait(*asked)
    assert {desk.joined(to).protocol for to in asked} == {"old"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"protocols": {}}, codes.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, codes.INCONSISTENT_GROUP_PROTOCOL),
        ({"group": ""}, codes.INVALID_GROUP_ID),
        ({"group": "g" * 1025}, codes.INVALID_GROUP_ID),
        ({"session_ms": 5_999}, codes.INVALID_SESSION_TIMEOUT),
        ({"session_ms": 1_800_001}, codes.INVALID_SESSION_TIMEOUT),
        ({"member_id": "nobody"}, codes.UNKNOWN_MEMBER_ID),
    ],
)
def test_joins_that_a_new_group_refuses(change: dict[str, object], code: int) -> None:
    desk = Desk()
    assert desk.joined(desk.join(**change)).code == code  # type: ignore[arg-type]
    assert not any(group.members for group in desk.table.groups.values())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"protocols": {"other": b""}}, codes.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": "connect"}, codes.INCONSISTENT_GROUP_PROTOCOL),
        ({"member_id": "nobody"}, codes.UNKNOWN_MEMBER_ID),
        ({"member_id": "nobody", "instance": "i"}, codes.UNKNOWN_MEMBER_ID),
    ],
)
def test_joins_that_a_stable_group_refuses(change: dict[str, object], code: int) -> None:
    desk = Desk()
    desk.settle(2)
    assert desk.joined(desk.join(**change)).code == code  # type: ignore[arg-type]
    assert desk.state == "Stable"


def test_a_full_group() -> None:
    desk = Desk(size_max=2)
    ids = desk.settle(2)
    assert desk.joined(desk.join()) == Joined(codes.GROUP_MAX_SIZE_REACHED)
    assert desk.state == "Stable"
    again = desk.join(ids[0])
    desk.join(ids[1])
    assert desk.joined(again).generation == 2  # those who are in stay in


def test_ids_given_away_have_a_bound() -> None:
    desk = Desk(size_max=2)
    codes_told = [desk.joined(desk.join(version=4)).code for _ in range(3)]
    assert codes_told == [
        *(codes.MEMBER_ID_REQUIRED, codes.MEMBER_ID_REQUIRED),
        codes.GROUP_MAX_SIZE_REACHED,
    ]


def test_what_members_say_has_a_bound() -> None:
    desk = Desk(bytes_max=100)
    desk.join(protocols={"range": b"x" * 90})
    assert desk.joined(desk.join(protocols={"range": b"x" * 90})).code == (
        codes.GROUP_MAX_SIZE_REACHED
    )


def test_groups_have_a_bound() -> None:
    desk = Desk(groups_max=1)
    desk.join()
    told = desk.joined(desk.join(group="another"))
    assert told.code == codes.COORDINATOR_NOT_AVAILABLE


def test_a_follower_that_comes_again_with_the_same_words_changes_nothing() -> None:
    desk = Desk()
    ids = desk.settle(2)
    told = desk.joined(desk.join(ids[1]))
    assert (told.code, told.generation, told.leader) == (0, 1, ids[0])
    assert desk.state == "Stable"
    desk.join(ids[1], protocols={"range": b"other topics"})
    assert desk.state == "PreparingRebalance"


def test_a_leader_that_comes_again_begins_a_round() -> None:
    desk = Desk()
    ids = desk.settle(2)
    again = desk.join(ids[0])
    assert desk.heartbeat(ids[1], 1) == codes.REBALANCE_IN_PROGRESS
    desk.join(ids[1])
    assert desk.joined(again).generation == 2


def test_a_join_that_was_answered_can_be_asked_again() -> None:
    desk = Desk()
    first = desk.join()
    desk.pass_ms(3_000)
    leader = desk.joined(first)
    assert desk.joined(desk.join(leader.member_id)) == leader
    assert desk.state == "CompletingRebalance"


def test_who_does_not_join_again_in_time_is_out() -> None:
    desk = Desk()
    ids = desk.settle(2, session_ms=100_000)
    again = desk.join(ids[0], session_ms=100_000)
    desk.pass_ms(29_000)
    assert again not in desk.answers
    desk.pass_ms(1_000)
    told = desk.joined(again)
    assert [each[0] for each in told.members] == [ids[0]]
    assert desk.heartbeat(ids[1], 2) == codes.UNKNOWN_MEMBER_ID


def test_who_never_syncs_is_out() -> None:
    desk = Desk()
    asked = [desk.join(session_ms=100_000), desk.join(session_ms=100_000)]
    desk.pass_ms(6_000)
    ids = [desk.joined(to).member_id for to in asked]
    desk.sync(ids[0], 1, {})
    desk.pass_ms(30_000)
    assert desk.state == "PreparingRebalance"
    assert list(desk.table.groups[GROUP].members) == [ids[0]]


def test_who_is_silent_is_out() -> None:
    desk = Desk()
    ids = desk.settle(2)
    for _ in range(4):
        desk.pass_ms(2_400)
        assert desk.heartbeat(ids[0], 1) == 0
    assert desk.state == "Stable"
    desk.pass_ms(2_400)
    assert desk.heartbeat(ids[0], 1) == codes.REBALANCE_IN_PROGRESS
    assert desk.joined(desk.join(ids[0])).generation == 2


def test_a_new_member_is_kept_while_it_waits() -> None:
    desk = Desk(new_member_ms=300_000)
    ids = desk.settle(1, session_ms=1_000_000, rebalance_ms=1_000_000)
    newcomer = desk.join(session_ms=6_000, rebalance_ms=1_000_000)
    desk.pass_ms(299_000)
    assert newcomer not in desk.answers
    desk.pass_ms(1_000)
    assert desk.joined(newcomer).code == codes.UNKNOWN_MEMBER_ID
    assert list(desk.table.groups[GROUP].members) == ids


def test_a_member_that_waits_for_the_round_needs_no_heartbeats() -> None:
    desk = Desk()
    ids = desk.settle(2, session_ms=6_000, rebalance_ms=100_000)
    again = desk.join(ids[0], session_ms=6_000, rebalance_ms=100_000)
    for _ in range(10):
        desk.pass_ms(4_000)
        assert desk.heartbeat(ids[1], 1) == codes.REBALANCE_IN_PROGRESS
    assert again not in desk.answers
    desk.join(ids[1], session_ms=6_000, rebalance_ms=100_000)
    assert desk.joined(again).code == 0


@pytest.mark.parametrize(
    ("member", "instance", "generation", "code"),
    [
        (0, None, 1, 0),
        (0, None, 0, codes.ILLEGAL_GENERATION),
        (0, None, 2, codes.ILLEGAL_GENERATION),
        (None, None, 1, codes.UNKNOWN_MEMBER_ID),
        (0, "i", 1, codes.UNKNOWN_MEMBER_ID),
    ],
)
def test_heartbeats_and_syncs_are_checked(
    member: int | None, instance: str | None, generation: int, code: int
) -> None:
    desk = Desk()
    ids = desk.settle(1)
    name = "nobody" if member is None else ids[member]
    assert desk.heartbeat(name, generation, instance) == code
    assert desk.synced(desk.sync(name, generation, instance=instance)).code == code


def test_a_sync_with_another_protocol() -> None:
    desk = Desk()
    (leader,) = desk.settle(1)
    for asked in (
        desk.sync(leader, 1, protocol="sticky"),
        desk.sync(leader, 1, protocol_type="connect"),
    ):
        assert desk.synced(asked).code == codes.INCONSISTENT_GROUP_PROTOCOL
    asked = desk.sync(leader, 1, protocol_type="consumer", protocol="range")
    assert desk.synced(asked).code == 0


def test_requests_of_groups_that_are_not_there() -> None:
    desk = Desk()
    assert desk.heartbeat("m", 1) == codes.UNKNOWN_MEMBER_ID
    assert desk.heartbeat("m", 1, group="") == codes.INVALID_GROUP_ID
    assert desk.synced(desk.sync("m", 1)).code == codes.UNKNOWN_MEMBER_ID
    assert desk.synced(desk.sync("m", 1, group="")).code == codes.INVALID_GROUP_ID
    assert desk.leave("m") == [codes.UNKNOWN_MEMBER_ID]
    assert desk.leave("m", group="") == [codes.INVALID_GROUP_ID]


def test_members_leave() -> None:
    desk = Desk()
    ids = desk.settle(3)
    assert desk.leave(ids[0], "nobody") == [0, codes.UNKNOWN_MEMBER_ID]
    assert desk.state == "PreparingRebalance"
    again = [desk.join(each) for each in ids[1:]]
    assert {desk.joined(to).leader for to in again} == {ids[1]}  # another one leads
    assert desk.leave(*ids[1:]) == [0, 0]
    assert desk.state == "Empty"
    row = desk.rows[GROUP]
    assert row is not None
    assert (row["generation"], row["members"]) == (3, [])


def test_generations_go_on_in_an_empty_group() -> None:
    desk = Desk()
    (member,) = desk.settle(1)
    desk.leave(member)
    asked = desk.join()
    desk.pass_ms(3_000)
    assert desk.joined(asked).generation == 3


def test_a_member_that_leaves_while_it_waits_is_answered() -> None:
    desk = Desk()
    asked = desk.join()
    (member_id,) = desk.table.groups[GROUP].members
    assert desk.leave(member_id) == [0]
    assert desk.joined(asked).code == codes.UNKNOWN_MEMBER_ID


# ------------------------------------------------------------------------------------------- static


def test_a_static_member_comes_back_without_a_round() -> None:
    desk = Desk()
    first = [desk.join(instance=name) for name in ("a", "b")]
    desk.wait(*first)
    old = [desk.joined(to).member_id for to in first]
    desk.sync(old[1], 1, instance="b")
    desk.sync(old[0], 1, {old[0]: b"0", old[1]: b"1"}, instance="a")
    told = desk.joined(desk.join(instance="b", version=9))
    assert (told.code, told.generation, told.leader) == (0, 1, old[0])
    assert not told.skip_assignment
    assert told.member_id != old[1]
    assert desk.state == "Stable"
    assert desk.synced(desk.sync(told.member_id, 1, instance="b")).assignment == b"1"
    # Whoever has the old id is shut out, however it asks.
    assert desk.heartbeat(old[1], 1, "b") == codes.FENCED_INSTANCE_ID
    assert desk.synced(desk.sync(old[1], 1, instance="b")).code == codes.FENCED_INSTANCE_ID
    assert desk.joined(desk.join(old[1], instance="b")).code == codes.FENCED_INSTANCE_ID
    assert desk.leave((old[1], "b")) == [codes.FENCED_INSTANCE_ID]
    assert desk.heartbeat(told.member_id, 1, "b") == 0


@pytest.mark.parametrize(("version", "skips"), [(9, True), (8, False)])
def test_a_static_leader_comes_back(version: int, *, skips: bool) -> None:
    desk = Desk()
    first = desk.join(instance="a")
    desk.pass_ms(3_000)
    old = desk.joined(first).member_id
    desk.sync(old, 1, {old: b"mine"}, instance="a")
    told = desk.joined(desk.join(instance="a", version=version))
    assert told.skip_assignment == skips
    # An old client must not take itself for the leader: it would assign anew.
    assert (told.leader == told.member_id) == skips
    assert bool(told.members) == skips
    assert desk.synced(desk.sync(told.member_id, 1, instance="a")).assignment == b"mine"


def test_a_static_member_that_waits_is_shut_out_by_its_double() -> None:
    desk = Desk()
    first = desk.join(instance="a")
    second = desk.join(instance="a")
    told = desk.joined(first)
    assert told.code == codes.FENCED_INSTANCE_ID
    desk.wait(second)
    assert desk.joined(second).generation == 1
    assert len(desk.table.groups[GROUP].members) == 1


def test_a_static_member_with_other_protocols_begins_a_round() -> None:
    desk = Desk()
    first = desk.join(instance="a", protocols={"range": b"", "sticky": b""})
    desk.pass_ms(3_000)
    old = desk.joined(first).member_id
    desk.sync(old, 1, {}, instance="a")
    told = desk.joined(desk.join(instance="a", protocols={"sticky": b"", "range": b""}))
    assert (told.generation, told.protocol) == (2, "sticky")


def test_a_static_member_during_the_syncs_begins_a_round() -> None:
    desk = Desk()
    asked = [desk.join(instance="a"), desk.join(instance="b")]
    desk.wait(*asked)
    ids = [desk.joined(to).member_id for to in asked]
    waiting = desk.sync(ids[1], 1, instance="b")
    back = desk.join(instance="a")
    assert desk.synced(waiting).code == codes.REBALANCE_IN_PROGRESS
    desk.join(ids[1], instance="b")
    assert desk.joined(back).generation == 2


def test_a_static_member_that_is_away_keeps_its_place_for_its_session() -> None:
    desk = Desk()
    asked = [desk.join(instance="a"), desk.join(instance="b")]
    desk.wait(*asked)
    ids = [desk.joined(to).member_id for to in asked]
    desk.sync(ids[1], 1, instance="b")
    desk.sync(ids[0], 1, {}, instance="a")
    desk.pass_ms(9_900)
    assert desk.state == "Stable"
    desk.pass_ms(200)
    assert desk.state == "Empty"


def test_an_administrator_removes_a_static_member() -> None:
    desk = Desk()
    first = desk.join(instance="a")
    desk.pass_ms(3_000)
    old = desk.joined(first).member_id
    desk.sync(old, 1, {}, instance="a")
    assert desk.leave(("", "nobody")) == [codes.UNKNOWN_MEMBER_ID]
    assert desk.leave(("", "a")) == [0]
    assert desk.state == "Empty"


def test_a_round_of_static_members_that_are_all_away_waits_for_them() -> None:
    desk = Desk()
    asked = [desk.join(instance="a", session_ms=1_000_000), desk.join(session_ms=1_000_000)]
    desk.wait(*asked)
    ids = [desk.joined(to).member_id for to in asked]
    desk.sync(ids[1], 1)
    desk.sync(ids[0], 1, {}, instance="a")
    assert desk.leave(ids[1]) == [0]
    desk.pass_ms(100_000)
    assert desk.state == "PreparingRebalance"
    assert desk.joined(desk.join(ids[0], instance="a")).generation == 2


# ------------------------------------------------------------------------------------------ commits


@pytest.mark.parametrize(
    ("state", "who", "generation", "code", "code_in_transaction"),
    [
        ("Empty", "", -1, 0, 0),
        ("Empty", "nobody", 1, codes.UNKNOWN_MEMBER_ID, codes.UNKNOWN_MEMBER_ID),
        ("Stable", "member", 1, 0, 0),
        ("Stable", "member", 0, codes.ILLEGAL_GENERATION, codes.ILLEGAL_GENERATION),
        ("Stable", "nobody", 1, codes.UNKNOWN_MEMBER_ID, codes.UNKNOWN_MEMBER_ID),
        ("Stable", "", -1, codes.UNKNOWN_MEMBER_ID, 0),
        ("PreparingRebalance", "member", 1, 0, 0),
        ("CompletingRebalance", "member", 1, codes.REBALANCE_IN_PROGRESS, 0),
    ],
)
def test_who_may_commit(
    state: str, who: str, generation: int, code: int, code_in_transaction: int
) -> None:
    desk = Desk()
    if state == "CompletingRebalance":
        asked = desk.join()
        desk.pass_ms(3_000)
        member = desk.joined(asked).member_id
    else:
        (member,) = desk.settle(1)
    if state == "PreparingRebalance":
        desk.join()
    if state == "Empty":
        desk.leave(member)
    assert desk.state == state
    group = desk.table.groups[GROUP]
    name = member if who == "member" else who
    for transactional, expected in ((False, code), (True, code_in_transaction)):
        told = group.check_commit(name, None, generation, transactional=transactional)
        assert told == expected


# ------------------------------------------------------------------------------------------- saving


def test_a_saved_group_goes_on() -> None:
    desk = Desk()
    asked = [desk.join(instance="a"), desk.join()]
    desk.wait(*asked)
    ids = [desk.joined(to).member_id for to in asked]
    desk.sync(ids[1], 1)
    desk.sync(ids[0], 1, {ids[0]: b"0", ids[1]: b"1"}, instance="a")
    row = desk.rows[GROUP]
    assert row is not None
    again = Desk()
    again.table = GroupTable(again.table.limits, 10)
    again.table.restore(GROUP, row, again.now_ms)
    assert again.state == "Stable"
    assert again.heartbeat(ids[1], 1) == 0
    assert again.synced(again.sync(ids[0], 1, instance="a")).assignment == b"0"
    assert again.heartbeat("another", 1, "a") == codes.FENCED_INSTANCE_ID
    again.pass_ms(60_000)  # nobody is heard of
    assert again.state == "Empty"
    assert again.table.groups[GROUP].generation == 2
