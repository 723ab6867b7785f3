"""What Kafka's clients ask about groups and offsets, in every version that is spoken."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from sluice.broker.topic_deletion import delete_topic
from sluice.errors import SluiceError
from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_kit import TOPIC, KafkaBroker

GROUP = "readers of orders@home"  # Kafka's groups may have any name


def subscription(*topics: str) -> bytes:
    """What a consumer says when it joins."""
    parts = [b"\0\1", len(topics).to_bytes(4, "big")]
    parts += [len(name).to_bytes(2, "big") + name.encode() for name in topics]
    return b"".join((*parts, b"\xff\xff\xff\xff"))


def join(
    broker: KafkaBroker, version: int, member_id: str = "", group: str = GROUP, **values: Any
) -> Any:
    times = {"session_timeout": 10_000, "rebalance_timeout": 30_000}
    if version == 0:
        del times["rebalance_timeout"]
    protocols = [{"name": "range", "metadata": subscription(TOPIC)}]
    return broker.ask(
        codes.JOIN_GROUP,
        version,
        group_id=group,
        member_id=member_id,
        protocol_type="consumer",
        protocols=protocols,
        **{**times, **values},
    )


def member(broker: KafkaBroker, group: str = GROUP) -> Any:
    """A stable group of one member; the answer to its join."""
    joined = join(broker, 3, group=group)
    assert joined.error_code == 0
    synced = broker.ask(
        codes.SYNC_GROUP,
        0,
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        assignments=[{"member_id": joined.member_id, "assignment": b"all"}],
    )
    assert (synced.error_code, synced.assignment) == (0, b"all")
    return joined


def commit(
    broker: KafkaBroker,
    version: int = 8,
    *,
    group: str = GROUP,
    generation: int = -1,
    member_id: str = "",
    partition: int = 0,
    offset: int = 5,
    metadata: str | None = "note",
    topic: str = TOPIC,
) -> int:
    """Commit one offset; the error code."""
    line: dict[str, Any] = {
        "partition_index": partition,
        "committed_offset": offset,
        "committed_metadata": metadata,
    }
    if version >= 6:
        line["committed_leader_epoch"] = 3
    found = broker.core.kafka_topics.find(topic)
    if version >= 10:
        name: dict[str, Any] = {"topic_id": UUID(int=1) if found is None else found.id}
    else:
        name = {"name": topic}
    body = broker.ask(
        codes.OFFSET_COMMIT,
        version,
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member_id,
        topics=[{**name, "partitions": [line]}],
    )
    return int(body.topics[0].partitions[0].error_code)


def fetch(
    broker: KafkaBroker,
    version: int = 7,
    *,
    group: str = GROUP,
    all_topics: bool = False,
    stable: bool = False,
) -> Any:
    """What was committed for the first two partitions."""
    topics: Any = [{"name": TOPIC, "partition_indexes": [0, 1]}]
    if version >= 10:
        topics = [{"topic_id": broker.topic().id, "partition_indexes": [0, 1]}]
    if all_topics:
        topics = None
    more = {"require_stable": stable} if version >= 7 else {}
    if version < 8:
        return broker.ask(codes.OFFSET_FETCH, version, group_id=group, topics=topics, **more)
    groups = [{"group_id": group, "topics": topics}]
    body = broker.ask(codes.OFFSET_FETCH, version, groups=groups, **more)
    return body.groups[0]


@pytest.fixture
def broker() -> KafkaBroker:
    made = KafkaBroker()
    made.topic()
    return made


@pytest.mark.parametrize("version", range(7))
def test_who_coordinates(broker: KafkaBroker, version: int) -> None:
    if version >= 4:
        body = broker.ask(codes.FIND_COORDINATOR, version, key_type=1, coordinator_keys=["a", "b"])
        assert [each.key for each in body.coordinators] == ["a", "b"]
        body = body.coordinators[0]
    else:
        body = broker.ask(codes.FIND_COORDINATOR, version, key="a")
    assert (body.error_code, body.node_id, body.host, body.port) == (0, 0, "127.0.0.1", 9092)


def test_a_coordinator_of_something_unknown(broker: KafkaBroker) -> None:
    body = broker.ask(codes.FIND_COORDINATOR, 6, key_type=2, coordinator_keys=["a"])
    assert body.coordinators[0].error_code == codes.INVALID_REQUEST


@pytest.mark.parametrize("version", range(10))
def test_join_in_every_version(broker: KafkaBroker, version: int) -> None:
    joined = join(broker, version)
    if version >= 4:
        assert joined.error_code == codes.MEMBER_ID_REQUIRED
        assert joined.member_id.startswith("client-")
        joined = join(broker, version, joined.member_id)
    assert (joined.error_code, joined.generation_id, joined.protocol_name) == (0, 1, "range")
    assert joined.leader == joined.member_id
    assert [each.member_id for each in joined.members] == [joined.member_id]
    assert joined.members[0].metadata == subscription(TOPIC)


@pytest.mark.parametrize("version", range(10))
def test_a_join_that_is_refused_in_every_version(broker: KafkaBroker, version: int) -> None:
    joined = join(broker, version, session_timeout=1)
    assert joined.error_code == codes.INVALID_SESSION_TIMEOUT
    assert joined.protocol_name == (None if version >= 7 else "")


@pytest.mark.parametrize("version", range(6))
def test_sync_heartbeat_and_leave_in_every_version(broker: KafkaBroker, version: int) -> None:
    joined = join(broker, 3)
    names: dict[str, Any] = {"group_id": GROUP, "member_id": joined.member_id}
    more = {"protocol_type": "consumer", "protocol_name": "range"} if version >= 5 else {}
    synced = broker.ask(
        codes.SYNC_GROUP,
        version,
        **names,
        generation_id=1,
        assignments=[{"member_id": joined.member_id, "assignment": b"all"}],
        **more,
    )
    assert (synced.error_code, synced.assignment) == (0, b"all")
    if version <= 4:
        beat = broker.ask(codes.HEARTBEAT, version, **names, generation_id=1)
        assert beat.error_code == 0
    if version < 3:
        assert broker.ask(codes.LEAVE_GROUP, version, **names).error_code == 0
    else:
        members = [{"member_id": joined.member_id}, {"member_id": "nobody"}]
        body = broker.ask(codes.LEAVE_GROUP, version, group_id=GROUP, members=members)
        assert [each.error_code for each in body.members] == [0, codes.UNKNOWN_MEMBER_ID]
    group = broker.core.kafka_groups.get(GROUP)
    assert group is not None
    assert group.state == "Empty"


def test_a_static_member_gets_an_id_of_its_name(broker: KafkaBroker) -> None:
    joined = join(broker, 9, group_instance_id="till-7")
    assert joined.error_code == 0
    assert joined.member_id.startswith("till-7-")
    assert join(broker, 9, group_instance_id="").error_code == codes.INVALID_REQUEST


# ------------------------------------------------------------------------------------------ offsets


@pytest.mark.parametrize("version", range(2, 11))
def test_commit_in_every_version(broker: KafkaBroker, version: int) -> None:
    assert commit(broker, version) == 0
    found = fetch(broker).topics[0].partitions
    epoch = 3 if version >= 6 else -1
    assert (found[0].committed_offset, found[0].metadata) == (5, "note")
    assert found[0].committed_leader_epoch == epoch
    assert (found[1].committed_offset, found[1].metadata, found[1].error_code) == (-1, "", 0)


@pytest.mark.parametrize("version", range(1, 11))
def test_fetch_in_every_version(broker: KafkaBroker, version: int) -> None:
    commit(broker, offset=7)
    found = fetch(broker, version)
    assert [each.committed_offset for each in found.topics[0].partitions] == [7, -1]
    if version >= 2:
        found = fetch(broker, version, all_topics=True)
        assert len(found.topics) == 1
        assert [each.partition_index for each in found.topics[0].partitions] == [0]
        name = getattr(found.topics[0], "name", TOPIC)
        assert name == TOPIC
    assert fetch(broker, version, group="nobody").topics[0].partitions[0].committed_offset == -1


def test_several_groups_at_once(broker: KafkaBroker) -> None:
    commit(broker, group="a", offset=1)
    commit(broker, group="b", offset=2)
    topics = [{"name": TOPIC, "partition_indexes": [0]}]
    groups = [{"group_id": name, "topics": topics} for name in ("b", "a", "c")]
    body = broker.ask(codes.OFFSET_FETCH, 9, groups=groups)
    found = [(e.group_id, e.topics[0].partitions[0].committed_offset) for e in body.groups]
    assert found == [("b", 2), ("a", 1), ("c", -1)]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": "unknown"}, codes.UNKNOWN_TOPIC_OR_PARTITION),
        ({"topic": "unknown", "version": 10}, codes.UNKNOWN_TOPIC_ID),
        ({"partition": 2}, codes.UNKNOWN_TOPIC_OR_PARTITION),
        ({"partition": -1}, codes.UNKNOWN_TOPIC_OR_PARTITION),
        ({"metadata": "x" * 4097}, codes.OFFSET_METADATA_TOO_LARGE),
        ({"metadata": "x" * 4096}, 0),
        ({"metadata": None}, 0),
        ({"group": "g" * 1025}, codes.INVALID_GROUP_ID),
        ({"generation": 1, "member_id": "m"}, codes.ILLEGAL_GENERATION),
        ({"generation": 1, "member_id": "m", "version": 9}, codes.GROUP_ID_NOT_FOUND),
    ],
)
def test_commits_that_are_refused(broker: KafkaBroker, changes: dict[str, Any], code: int) -> None:
    assert commit(broker, **changes) == code
    assert (fetch(broker).topics[0].partitions[0].committed_offset == -1) == bool(code)


def test_only_members_commit_where_there_are_some(broker: KafkaBroker) -> None:
    joined = member(broker)
    assert commit(broker) == codes.UNKNOWN_MEMBER_ID
    assert commit(broker, generation=9, member_id=joined.member_id) == codes.ILLEGAL_GENERATION
    assert commit(broker, generation=1, member_id=joined.member_id) == 0


def test_a_commit_is_a_sign_of_life(broker: KafkaBroker) -> None:
    joined = member(broker)
    for _ in range(5):
        broker.tick(4_000)
        assert commit(broker, generation=1, member_id=joined.member_id) == 0
    broker.tick(10_100)
    assert commit(broker, generation=1, member_id=joined.member_id) == codes.UNKNOWN_MEMBER_ID


def test_offsets_survive_a_crash(broker: KafkaBroker) -> None:
    joined = member(broker)
    assert commit(broker, generation=1, member_id=joined.member_id, offset=3) == 0
    assert commit(broker, generation=1, member_id=joined.member_id, offset=4) == 0
    broker.crash()
    assert fetch(broker).topics[0].partitions[0].committed_offset == 4
    # Its members go on as if nothing had happened.
    assert commit(broker, generation=1, member_id=joined.member_id, offset=5) == 0


def test_offsets_of_both_worlds_are_apart(broker: KafkaBroker) -> None:
    stored = broker.topic().stored
    broker.core.offsets.commit("g", stored, 0, 100)
    commit(broker, group="g", offset=2)
    assert broker.core.offsets.committed("g", stored, 0) == 100
    assert fetch(broker, group="g").topics[0].partitions[0].committed_offset == 2


# ---------------------------------------------------------------------------------------- deleting


def delete_offsets(broker: KafkaBroker, topic: str = TOPIC) -> tuple[int, list[int]]:
    topics = [{"name": topic, "partitions": [{"partition_index": 0}]}]
    body = broker.ask(codes.OFFSET_DELETE, 0, group_id=GROUP, topics=topics)
    return body.error_code, [int(p.error_code) for t in body.topics for p in t.partitions]


def test_offsets_are_deleted(broker: KafkaBroker) -> None:
    assert delete_offsets(broker) == (codes.GROUP_ID_NOT_FOUND, [])
    commit(broker)
    assert delete_offsets(broker, "unknown") == (0, [codes.UNKNOWN_TOPIC_OR_PARTITION])
    assert delete_offsets(broker) == (0, [0])
    assert fetch(broker).topics[0].partitions[0].committed_offset == -1
    broker.crash()
    assert fetch(broker).topics[0].partitions[0].committed_offset == -1


def test_offsets_of_a_topic_that_is_read_are_not_deleted(broker: KafkaBroker) -> None:
    broker.topic("other")
    joined = member(broker)
    commit(broker, generation=1, member_id=joined.member_id)
    assert delete_offsets(broker) == (0, [codes.GROUP_SUBSCRIBED_TO_TOPIC])
    assert delete_offsets(broker, "other") == (0, [0])


def test_groups_are_deleted(broker: KafkaBroker) -> None:
    member(broker, "busy")
    commit(broker, group="idle")
    body = broker.ask(codes.DELETE_GROUPS, 2, groups_names=["busy", "idle", "nobody"])
    assert {each.group_id: each.error_code for each in body.results} == {
        "busy": codes.NON_EMPTY_GROUP,
        "idle": 0,
        "nobody": codes.GROUP_ID_NOT_FOUND,
    }
    broker.crash()
    assert fetch(broker, group="idle").topics[0].partitions[0].committed_offset == -1
    assert broker.core.kafka_groups.get("idle") is None


@pytest.mark.parametrize("key", [codes.DESCRIBE_GROUPS, codes.LIST_GROUPS, codes.DELETE_GROUPS])
def test_who_is_overdue_is_out_when_an_administrator_asks(broker: KafkaBroker, key: int) -> None:
    """Tools wait for as long as a session takes, and delete the group."""
    member(broker)
    broker.now_ms += 10_000  # the session, and no tick of the clock follows
    if key == codes.DELETE_GROUPS:
        (deleted,) = broker.ask(key, 2, groups_names=[GROUP]).results
        assert deleted.error_code == 0
        return
    asked = {"groups": [GROUP]} if key == codes.DESCRIBE_GROUPS else {}
    (group,) = broker.ask(key, 4, **asked).groups
    assert group.group_state == "Empty"


def test_offsets_go_with_their_topic(broker: KafkaBroker) -> None:
    commit(broker)
    outcome: list[SluiceError | None] = []
    delete_topic(broker.core, broker.topic().stored, outcome.append)
    broker.settle()
    assert outcome == [None]
    broker.topic()
    assert fetch(broker).topics[0].partitions[0].committed_offset == -1
    broker.crash()
    assert fetch(broker).topics[0].partitions[0].committed_offset == -1


def test_offsets_of_a_group_without_members_get_old(broker: KafkaBroker) -> None:
    day_ms = 24 * 3_600_000
    joined = member(broker)
    commit(broker, generation=1, member_id=joined.member_id)
    commit(broker, group="simple")
    for _ in range(80):
        broker.pass_ms(8_000)
        broker.ask(codes.HEARTBEAT, 0, group_id=GROUP, member_id=joined.member_id, generation_id=1)
    broker.now_ms += 6 * day_ms
    broker.ask(codes.LEAVE_GROUP, 0, group_id=GROUP, member_id=joined.member_id)
    broker.pass_ms(day_ms)
    assert broker.core.kafka_groups.get("simple") is None  # seven days after its commit
    assert fetch(broker).topics[0].partitions[0].committed_offset == 5
    broker.pass_ms(6 * day_ms + 1_000)  # seven days after its last member left
    assert fetch(broker).topics[0].partitions[0].committed_offset == -1
    assert broker.core.kafka_groups.get(GROUP) is None
    broker.crash()
    assert broker.core.kafka_groups.get(GROUP) is None


# ---------------------------------------------------------------------------------------- looking


@pytest.mark.parametrize("version", range(7))
def test_describe_in_every_version(broker: KafkaBroker, version: int) -> None:
    joined = member(broker)
    body = broker.ask(codes.DESCRIBE_GROUPS, version, groups=[GROUP, "nobody"])
    found, missing = body.groups
    assert (found.group_state, found.protocol_type, found.protocol_data) == (
        *("Stable", "consumer"),
        "range",
    )
    assert [each.member_id for each in found.members] == [joined.member_id]
    assert (found.members[0].client_id, found.members[0].client_host) == ("client", "/127.0.0.1")
    assert found.members[0].member_metadata == subscription(TOPIC)
    assert found.members[0].member_assignment == b"all"
    assert missing.group_state == "Dead"
    assert missing.error_code == (codes.GROUP_ID_NOT_FOUND if version >= 6 else 0)


@pytest.mark.parametrize("version", range(6))
def test_list_in_every_version(broker: KafkaBroker, version: int) -> None:
    member(broker, "busy")
    commit(broker, group="idle")
    body = broker.ask(codes.LIST_GROUPS, version)
    assert {each.group_id: each.protocol_type for each in body.groups} == {
        "busy": "consumer",
        "idle": "",
    }
    if version >= 4:
        body = broker.ask(codes.LIST_GROUPS, version, states_filter=["stable"])
        assert [(each.group_id, each.group_state) for each in body.groups] == [("busy", "Stable")]
    if version >= 5:
        body = broker.ask(codes.LIST_GROUPS, version, types_filter=["consumer"])
        assert body.groups == ()
        body = broker.ask(codes.LIST_GROUPS, version, types_filter=["Classic"])
        assert {each.group_type for each in body.groups} == {"classic"}
