"""This module tests the route table: the rules of RocketMQ's RouteInfoManager, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import Busy, SluiceError
from sluice.nameserver.routes import BrokerEntry, Notice, RouteTable, Rules, in_zone
from sluice.protocol.remoting_bodies import DataVersion, QueueData, Registration, TopicConfig

A = BrokerEntry(
    cluster="C", name="a", address="a:1", broker_id=0, ha_address="a:2", acting_master=False
)
A_COPY = replace(A, address="a1:1", broker_id=1, ha_address="a1:2")
B = replace(A, name="b", address="b:1", ha_address="b:2")
CHANNEL = "channel"


def told(
    *topics: str, counter: int = 1, state: int = 0, perm: int = 6, queues: int = 4
) -> Registration:
    configs = {name: TopicConfig(name, queues, queues, perm) for name in topics}
    return Registration(configs, DataVersion(counter, state))


def register(
    table: RouteTable, entry: BrokerEntry, registration: Registration | None = None, now_ms: int = 0
) -> None:
    done = table.register(entry, registration or told("T", "U"), CHANNEL, now_ms)
    assert not done.ignored


def addresses(table: RouteTable, topic: str = "T") -> dict[str, dict[int, str]]:
    route = table.route(topic)
    return {} if route is None else {b.name: b.addresses for b in route.brokers}


def perms(table: RouteTable, topic: str = "T") -> list[int]:
    route = table.route(topic)
    assert route is not None
    return [queue.perm for queue in route.queues]


# Registration -----------------------------------------------------------------------------------


def test_a_route_names_the_brokers_and_queues_of_a_topic() -> None:
    table = RouteTable()
    register(table, B, told("T", "X", queues=2))
    register(table, A)
    register(table, A_COPY)
    assert addresses(table) == {"a": {0: "a:1", 1: "a1:1"}, "b": {0: "b:1"}}
    route = table.route("T")
    assert route is not None
    assert route.queues == (QueueData("a", 4, 4, 6), QueueData("b", 2, 2, 6))
    assert (route.filter_servers, route.queue_mappings) == ({}, None)
    assert table.route("nothing") is None


def test_what_was_returned_does_not_change_later() -> None:
    table = RouteTable()
    register(table, A)
    before = table.route("T")
    register(table, A_COPY)
    table.wipe_write_permission("a")
    assert before is not None
    assert (before.brokers[0].addresses, before.queues[0].perm) == ({0: "a:1"}, 6)


def test_topics_are_taken_over_when_the_data_version_differs() -> None:
    table = RouteTable()
    register(table, A, told("T", "U", queues=4, counter=1))
    register(table, A, told("T", "U", queues=9, counter=1))
    route = table.route("T")
    assert route is not None
    assert route.queues[0].read_queue_count == 4
    register(table, A, told("T", "U", queues=9, counter=2))
    route = table.route("T")
    assert route is not None
    assert route.queues[0].read_queue_count == 9


def test_a_topic_that_is_not_known_yet_is_taken_over_in_any_case() -> None:
    table = RouteTable()
    register(table, A, told("T", "U"))
    register(table, A, told("T", "U", "V"))
    assert table.topics() == ["T", "U", "V"]


def test_a_topic_that_is_no_longer_told_stays_unless_the_rules_say_otherwise() -> None:
    for forget, left in ((False, ["T", "U", "V"]), (True, ["T", "U"])):
        table = RouteTable(Rules(forget_topics=forget))
        register(table, A, told("T", "U", "V"))
        register(table, A, told("T", "U", counter=2))
        assert table.topics() == left


def test_a_copy_does_not_tell_topics_while_there_is_a_leader() -> None:
    table = RouteTable()
    register(table, A)
    register(table, A_COPY, told("T", "V"))
    assert table.topics() == ["T", "U"]
    register(table, replace(A_COPY, name="lonely", address="x:1"), told("W", "X"))
    assert table.topics() == ["T", "U", "W", "X"]  # the lowest id of its group speaks for it


def test_a_copy_from_before_5_0_never_tells_topics() -> None:
    table = RouteTable()
    register(table, replace(A_COPY, acting_master=None))
    assert table.topics() == []
    assert [broker.addresses for broker in table.brokers()] == [{1: "a1:1"}]


def test_a_copy_is_told_where_its_leader_is() -> None:
    table = RouteTable()
    alone = table.register(A_COPY, told("T", "U"), CHANNEL, 0)
    assert (alone.ha_address, alone.master_address, alone.is_new) == (None, None, True)
    leader = table.register(A, told("T", "U"), CHANNEL, 0)
    assert (leader.ha_address, leader.master_address) == (None, None)
    again = table.register(A_COPY, told("T", "U"), CHANNEL, 0)
    assert (again.ha_address, again.master_address, again.is_new) == ("a:2", "a:1", False)


def test_an_address_has_one_id() -> None:
    table = RouteTable()
    register(table, A)
    register(table, A_COPY)
    table.unregister("C", "a:1", "a", 0)
    register(table, replace(A_COPY, broker_id=0))  # the copy was promoted
    assert addresses(table) == {"a": {0: "a1:1"}}


def test_an_older_state_does_not_take_an_id_away() -> None:
    table = RouteTable()
    register(table, A, told("T", "U", state=5))
    other = replace(A, address="other:1")
    done = table.register(other, told("T", "U", state=4), CHANNEL, 0)
    assert "a:1 has the id 0 of a with state 5" in done.ignored
    assert addresses(table) == {"a": {0: "a:1"}}
    assert table.version_of("C", "other:1") is None
    register(table, other, told("T", "U", state=6))
    assert addresses(table) == {"a": {0: "other:1"}}


def test_one_topic_alone_is_told_only_by_a_broker_that_is_known() -> None:
    table = RouteTable()
    with pytest.raises(SluiceError, match=r"^register broker failed$"):
        table.register(A, told("T"), CHANNEL, 0)
    assert (table.brokers(), table.topics()) == ([], [])
    register(table, A, told("T", "U"))
    register(table, A, told("V", counter=2))
    assert table.topics() == ["T", "U", "V"]
    register(table, B, told())  # no topic at all is no such case
    assert len(table.brokers()) == 2


def test_filter_servers_and_queue_mappings_are_passed_on() -> None:
    table = RouteTable()
    register(table, B)
    info = {"bname": "a", "totalQueues": 4}
    register(table, A, replace(told("T", "U"), filter_servers=("f:1",), queue_mappings={"T": info}))
    route = table.route("T")
    assert route is not None
    assert route.filter_servers == {"a:1": ("f:1",), "b:1": None}
    assert route.queue_mappings == {"a": info}
    register(table, A)
    route = table.route("T")
    assert route is not None
    assert (route.filter_servers, route.queue_mappings) == ({}, {"a": info})
    table.delete_topic("T")
    register(table, A, told("T", "U", counter=2))
    route = table.route("T")
    assert route is not None
    assert route.queue_mappings is None


def test_one_topic_of_known_brokers_can_be_registered() -> None:
    table = RouteTable()
    register(table, A)
    queues = [QueueData("a", 1, 1, 6), QueueData("b", 1, 1, 6)]
    assert not table.register_topic("N", queues)
    assert table.route("N") is None
    register(table, B)
    assert table.register_topic("N", queues)
    assert list(addresses(table, "N")) == ["a", "b"]
    assert table.register_topic("N", [QueueData("a", 3, 3, 4)])
    assert perms(table, "N") == [4, 6]


def test_the_table_is_bounded() -> None:
    table = RouteTable(Rules(brokers_max=2, entries_max=4))
    register(table, A)
    register(table, B)
    with pytest.raises(Busy, match=r"2 brokers are registered \(brokers_max\)"):
        table.register(A_COPY, told("T", "U"), CHANNEL, 0)
    with pytest.raises(Busy, match="5 entries, over 4"):
        table.register(A, told("T", "U", "V", counter=2), CHANNEL, 0)
    with pytest.raises(Busy, match="5 entries"):
        table.register_topic("V", [QueueData("a", 1, 1, 6)])
    register(table, A, told("T", "U", counter=2))  # what is known goes on
    table.delete_topic("U")
    assert table.register_topic("V", [QueueData("a", 1, 1, 6)])
    assert table.topics() == ["T", "V"]


# Leaving ----------------------------------------------------------------------------------------


def test_topics_leave_with_the_last_copy_of_their_brokers() -> None:
    table = RouteTable()
    register(table, A)
    register(table, A_COPY)
    register(table, B, told("T", "X"))
    table.unregister("C", "a:1", "a", 0)
    assert addresses(table) == {"a": {1: "a1:1"}, "b": {0: "b:1"}}
    table.unregister("C", "a1:1", "a", 1)
    assert addresses(table) == {"b": {0: "b:1"}}
    assert table.topics() == ["T", "X"]
    table.unregister("C", "b:1", "b", 0)
    assert (table.topics(), table.brokers(), table.system_topics()) == ([], [], ([], None))
    assert table.unregister("C", "b:1", "b", 0) is None  # nobody is there any more


def test_a_closed_channel_takes_the_brokers_that_last_registered_over_it() -> None:
    table = RouteTable()
    table.register(A, told("T", "U"), "old", 0)
    table.register(A, told("T", "U"), "new", 10)
    table.register(B, told("T", "X"), "shared", 20)
    table.register(replace(B, name="c", address="c:1"), told("T", "Y"), "shared", 20)
    assert table.lost("old", 30) == []
    gone = table.lost("shared", 30)
    assert [(g.address, g.silent_ms, g.channel) for g in gone] == [
        ("b:1", 10, "shared"),
        ("c:1", 10, "shared"),
    ]
    assert list(addresses(table)) == ["a"]


def test_a_silent_broker_expires_after_its_own_time_or_the_usual_one() -> None:
    table = RouteTable()
    register(table, A, now_ms=1000)
    register(table, replace(B, timeout_ms=10_000), told("T", "X"), now_ms=1000)
    assert table.expire(11_000) == []
    assert [gone.address for gone in table.expire(11_001)] == ["b:1"]
    assert list(addresses(table)) == ["a"]
    table.heard("C", "a:1", 2000)
    table.heard("C", "unknown:1", 2000)
    assert table.expire(122_000) == []
    assert [(gone.address, gone.silent_ms) for gone in table.expire(122_001)] == [("a:1", 120_001)]
    assert table.topics() == []


def test_the_data_version_is_known_while_the_broker_lives() -> None:
    table = RouteTable()
    assert table.version_of("C", "a:1") is None
    register(table, A, told("T", "U", counter=9, state=3))
    assert table.version_of("C", "a:1") == DataVersion(9, 3)
    table.lost(CHANNEL, 0)
    assert table.version_of("C", "a:1") is None


# Acting for a leader ------------------------------------------------------------------------------


def acting(entry: BrokerEntry) -> BrokerEntry:
    return replace(entry, acting_master=True)


def test_the_lowest_copy_acts_for_a_leader_that_is_gone_to_read_only() -> None:
    for enabled, wanted in ((True, {0: "a1:1", 2: "a2:1"}), (False, {1: "a1:1", 2: "a2:1"})):
        table = RouteTable(Rules(acting_master=enabled))
        register(table, acting(A))
        register(table, acting(A_COPY))
        register(table, acting(replace(A_COPY, address="a2:1", broker_id=2)))
        table.unregister("C", "a:1", "a", 0)
        assert addresses(table) == {"a": wanted}
        assert perms(table) == [4]


def test_nobody_acts_where_the_brokers_do_not_offer_it() -> None:
    table = RouteTable(Rules(acting_master=True))
    register(table, A)
    register(table, A_COPY)
    table.unregister("C", "a:1", "a", 0)
    assert (addresses(table), perms(table)) == ({"a": {1: "a1:1"}}, [6])


def test_the_topics_of_an_acting_copy_cannot_be_written_until_the_leader_returns() -> None:
    table = RouteTable(Rules(acting_master=True))
    register(table, acting(A_COPY))
    assert (addresses(table), perms(table)) == ({"a": {0: "a1:1"}}, [4])
    register(table, acting(A))
    assert (addresses(table), perms(table)) == ({"a": {0: "a:1", 1: "a1:1"}}, [6])


def test_members_find_each_other_by_a_topic_where_nobody_acts() -> None:
    table = RouteTable(Rules(acting_master=True))
    name = "rmq_sys_SYNC_BROKER_MEMBER_a"
    register(table, acting(A_COPY), told(name, "T"))
    assert addresses(table, name) == {"a": {1: "a1:1"}}


def test_a_new_lowest_id_is_told_to_the_others() -> None:
    table = RouteTable()
    first = table.register(acting(A_COPY), told("T", "U"), CHANNEL, 0)
    assert first.notice is None  # RocketMQ takes 0 for the lowest id of an empty group
    leader = table.register(acting(A), told("T", "U"), CHANNEL, 0)
    assert leader.notice == Notice(("a1:1",), 0, "a:1", None, "a:2")
    assert table.register(acting(A), told("T", "U"), CHANNEL, 0).notice is None
    assert table.unregister("C", "a:1", "a", 0) == Notice(("a1:1",), 1, "a1:1", "a:1", None)
    assert table.unregister("C", "a1:1", "a", 1) is None


# Administration ---------------------------------------------------------------------------------


def test_write_permission_is_wiped_and_added() -> None:
    table = RouteTable()
    register(table, A, told("T", "U", perm=7))
    register(table, B, told("T", "X"))
    assert table.wipe_write_permission("a") == 2
    assert perms(table) == [5, 6]
    register(table, A, told("T", "U", perm=7))
    assert perms(table) == [5, 6]  # as long as the data version is the same
    assert table.add_write_permission("a") == 2
    assert perms(table) == [6, 6]
    register(table, A, told("T", "U", perm=7, counter=2))
    assert perms(table) == [6, 6]
    assert table.wipe_write_permission("nobody") == 0


def test_a_wipe_holds_though_another_topic_of_the_broker_changes() -> None:
    table = RouteTable()
    register(table, A)
    table.wipe_write_permission("a")
    register(table, A, told("T", "U", "V", counter=2))
    assert (perms(table), perms(table, "U"), perms(table, "V")) == ([4], [4], [6])
    more = Registration(
        {**told("T", "V").topics, "U": TopicConfig("U", 9, 9, 6)}, DataVersion(3, 0)
    )
    register(table, A, more)
    assert (perms(table), perms(table, "U"), perms(table, "V")) == ([4], [6], [6])
    assert table.add_write_permission("a") == 3
    register(table, A, told("T", "U", "V", counter=4))
    assert perms(table) == [6]


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_wipe_ends_when_the_broker_comes_anew(has_copy: bool) -> None:
    table = RouteTable()
    register(table, A)
    if has_copy:
        register(table, A_COPY)
    table.wipe_write_permission("a")
    table.unregister(A.cluster, A.address, A.name, A.broker_id)
    register(table, A)
    assert perms(table) == [6]


def test_a_topic_that_was_deleted_after_a_wipe_comes_back_as_it_is_told() -> None:
    table = RouteTable()
    register(table, A)
    table.wipe_write_permission("a")
    table.delete_topic("T")
    register(table, A, told("T", "U", counter=2))
    assert (perms(table), perms(table, "U")) == ([6], [4])


def test_a_topic_is_deleted_everywhere_or_in_one_cluster() -> None:
    table = RouteTable()
    register(table, A)
    register(table, replace(B, cluster="D"), told("T", "X"))
    table.delete_topic("T", "nowhere")
    assert list(addresses(table)) == ["a", "b"]
    table.delete_topic("T", "C")
    assert list(addresses(table)) == ["b"]
    table.delete_topic("T", "D")
    table.delete_topic("U")
    table.delete_topic("unknown")
    assert table.topics() == ["X"]


def test_lists() -> None:
    table = RouteTable()
    register(table, A)
    register(table, A_COPY)
    register(table, replace(B, cluster="D"), told("T", "X"))
    assert table.topics_of_cluster("C") == ["T", "U"]
    assert table.topics_of_cluster("D") == ["T", "X"]
    assert table.topics_of_cluster("nowhere") == []
    assert table.system_topics() == (["C", "D", "a", "b"], "a:1")
    assert table.member_group("C", "a").addresses == {0: "a:1", 1: "a1:1"}
    assert table.member_group("C", "nobody").addresses == {}
    assert [(b.cluster, b.name) for b in table.brokers()] == [("C", "a"), ("D", "b")]


def test_topics_by_their_unit_flags() -> None:
    table = RouteTable()
    configs = {f"T{flag}": TopicConfig(f"T{flag}", sys_flag=flag) for flag in range(4)}
    register(table, A, Registration(configs))
    assert table.topics_by_flag(1) == ["T1", "T3"]
    assert table.topics_by_flag(2) == ["T2", "T3"]
    assert table.topics_by_flag(2, without_bits=1) == ["T2"]


def test_a_client_of_a_zone_gets_the_brokers_of_its_zone_and_those_without_a_leader() -> None:
    table = RouteTable()
    register(table, replace(A, zone="North"))
    register(table, replace(B, zone="south"), replace(told("T", "X"), filter_servers=("f:1",)))
    register(table, replace(A_COPY, name="c", address="c:1", zone="south"), told("T", "Y"))
    route = table.route("T")
    assert route is not None
    near = in_zone(route, "north")
    assert [broker.name for broker in near.brokers] == ["a", "c"]
    assert [queue.broker_name for queue in near.queues] == ["a", "c"]
    assert list(near.filter_servers) == ["a:1", "c:1"]


# Whatever happens -------------------------------------------------------------------------------

entries = st.builds(
    BrokerEntry,
    cluster=st.sampled_from("CD"),
    name=st.sampled_from("ab"),
    address=st.sampled_from(["x:1", "y:1", "z:1"]),
    broker_id=st.integers(0, 2),
    timeout_ms=st.sampled_from([None, 5]),
    acting_master=st.sampled_from([None, False, True]),
)
registrations = st.builds(
    told,
    st.just("T"),
    st.sampled_from("UV"),
    counter=st.integers(0, 1),
    state=st.integers(0, 2),
)
steps = st.one_of(
    st.tuples(st.just("register"), entries, registrations, st.sampled_from("pq")),
    st.tuples(st.just("unregister"), entries),
    st.tuples(st.just("lost"), st.sampled_from("pq")),
    st.tuples(st.just("expire"), st.integers(0, 200_000)),
    st.tuples(st.just("delete"), st.sampled_from("TUV"), st.sampled_from(["", "C", "D"])),
)


def consistent(table: RouteTable) -> None:
    assert table._entry_count == sum(map(len, table._topics.values()))
    names = {broker.name for broker in table.brokers()}
    for broker in table.brokers():
        assert broker.addresses
        assert len(set(broker.addresses.values())) == len(broker.addresses)
    assert {name for group in table._clusters.values() for name in group} == names
    for topic in table.topics():
        route = table.route(topic)
        assert route is not None
        assert {queue.broker_name for queue in route.queues} <= names


@given(st.lists(steps, max_size=30))
def test_no_order_of_events_leaves_half_an_entry(events: list[tuple[object, ...]]) -> None:
    table = RouteTable(Rules(acting_master=True))
    for kind, *arguments in events:
        match (kind, arguments):
            case ("register", [BrokerEntry() as entry, Registration() as registration, channel]):
                table.register(entry, registration, str(channel), 0)
            case ("unregister", [BrokerEntry() as entry]):
                table.unregister(entry.cluster, entry.address, entry.name, entry.broker_id)
            case ("lost", [channel]):
                table.lost(str(channel), 0)
            case ("expire", [int(now_ms)]):
                table.expire(now_ms)
            case ("delete", [topic, cluster]):
                table.delete_topic(str(topic), str(cluster))
        consistent(table)


def test_copies_that_listen_everywhere_are_seen_where_the_client_dialled() -> None:
    table = RouteTable()
    everywhere = replace(A, everywhere="0.0.0.0")  # noqa: S104
    register(table, everywhere)
    register(table, replace(A_COPY, everywhere=""))
    (group,) = table.brokers()
    _, _, port = A.address.rpartition(":")

    def seen(host: str) -> dict[int, str]:
        return table.dialled(group, host).addresses

    assert seen("192.0.2.9") == {0: f"192.0.2.9:{port}", 1: A_COPY.address}
    assert seen("") == seen("2001:db8::1") == {0: A.address, 1: A_COPY.address}
    assert table.system_topics("192.0.2.9")[1] == f"192.0.2.9:{port}"
    register(table, replace(A, everywhere="::"))
    assert seen("2001:db8::1")[0] == f"[2001:db8::1]:{port}"
    register(table, A)
    assert seen("192.0.2.9")[0] == A.address
