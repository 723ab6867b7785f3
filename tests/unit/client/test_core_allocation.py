"""Allocation and hash selection give what RocketMQ 5.5.0's Java client gives for equal input.

The expected values were printed by that client's own classes.
"""

from __future__ import annotations

import pytest

from sluice.client.core import allocation
from sluice.client.core.messages import Message
from sluice.client.core.selectors import (
    hash_selector,
    java_hash_of,
    machine_room_selector,
    random_selector,
)
from sluice.errors import ConfigError, MessageInvalid, NoRoute
from sluice.protocol.json_members import MessageQueue

# strategy, brokers, queues each, broker names with rooms, members, each member's queues
JAVA = [
    ("averagely", 1, 4, False, 1, "a0,a1,a2,a3"),
    ("averagely_by_circle", 1, 4, False, 1, "a0,a1,a2,a3"),
    ("consistent_hash", 1, 4, False, 1, "a0,a1,a2,a3"),
    ("machine_room", 1, 4, True, 1, "a0,a1,a2,a3"),
    ("machine_room_nearby", 1, 4, True, 1, "a0,a1,a2,a3"),
    ("averagely", 1, 4, False, 3, "a0,a1 | a2 | a3"),
    ("averagely_by_circle", 1, 4, False, 3, "a0,a3 | a1 | a2"),
    ("consistent_hash", 1, 4, False, 3, "a2,a3 | a0 | a1"),
    ("machine_room", 1, 4, True, 3, "a0,a3 | a1 | a2"),
    ("machine_room_nearby", 1, 4, True, 3, "a0,a1 | a2,a3 | "),
    ("averagely", 2, 4, False, 3, "a0,a1,a2 | a3,b0,b1 | b2,b3"),
    ("averagely_by_circle", 2, 4, False, 3, "a0,a3,b2 | a1,b0,b3 | a2,b1"),
    ("consistent_hash", 2, 4, False, 3, "a2,a3,b0,b2 | a0,b1 | a1,b3"),
    ("machine_room", 2, 4, True, 3, "a0,a3 | a1 | a2"),
    ("machine_room_nearby", 2, 4, True, 3, "a0,a1 | a2,a3 | b0,b1,b2,b3"),
    ("averagely", 2, 4, False, 5, "a0,a1 | a2,a3 | b0,b1 | b2 | b3"),
    ("averagely_by_circle", 2, 4, False, 5, "a0,b1 | a1,b2 | a2,b3 | a3 | b0"),
    ("consistent_hash", 2, 4, False, 5, "a2,a3,b0 | a0 | b2 | a1,b1 | b3"),
    ("machine_room", 2, 4, True, 5, "a0 | a1 | a2 | a3 | "),
    ("machine_room_nearby", 2, 4, True, 5, "a0,a1 | a2 | a3 | b0,b1 | b2,b3"),
    ("averagely", 1, 2, False, 3, "a0 | a1 | "),
    ("averagely_by_circle", 1, 2, False, 3, "a0 | a1 | "),
    ("consistent_hash", 1, 2, False, 3, " | a0 | a1"),
    ("machine_room", 1, 2, True, 3, "a0 | a1 | "),
    ("machine_room_nearby", 1, 2, True, 3, "a0 | a1 | "),
    ("averagely", 3, 5, False, 4, "a0,a1,a2,a3 | a4,b0,b1,b2 | b3,b4,c0,c1 | c2,c3,c4"),
    ("averagely_by_circle", 3, 5, False, 4, "a0,a4,b3,c2 | a1,b0,b4,c3 | a2,b1,c0,c4 | a3,b2,c1"),
    ("consistent_hash", 3, 5, False, 4, "a2,a3,b0,b2,c0,c2,c3 | a0,b4 | a1,b1 | a4,b3,c1,c4"),
    ("machine_room", 3, 5, True, 4, "a0,a1,c3 | a2,a3,c4 | a4,c0 | c1,c2"),
    ("machine_room_nearby", 3, 5, True, 4, "a0,a1,a2,a3,a4 | c0,c1,c2,c3,c4 | b0,b1,b2 | b3,b4"),
]


def queues_of(brokers: int, each: int, rooms: bool) -> list[MessageQueue]:
    return sorted(
        MessageQueue("orders", (f"room{b % 2}@" if rooms else "") + f"broker-{chr(97 + b)}", q)
        for b in range(brokers)
        for q in range(each)
    )


def members_of(count: int) -> list[str]:
    return sorted(f"{'west' if i % 2 else 'east'}-10.0.0.{i * 7}@{4000 + i}" for i in range(count))


def room_of(queue: MessageQueue) -> str:
    if queue.broker_name.startswith("room0"):
        return "east"
    return "west" if "-b" in queue.broker_name else "north"


STRATEGIES: dict[str, allocation.Strategy] = {
    "averagely": allocation.averagely,
    "averagely_by_circle": allocation.averagely_by_circle,
    "consistent_hash": allocation.consistent_hash(),
    "machine_room": allocation.by_machine_room(["room0"]),
    "machine_room_nearby": allocation.machine_room_nearby(
        allocation.averagely, room_of, lambda member: member.split("-")[0]
    ),
}


@pytest.mark.parametrize(("name", "brokers", "each", "rooms", "count", "expected"), JAVA)
def test_as_java(
    name: str, brokers: int, each: int, rooms: bool, count: int, expected: str
) -> None:
    queues, members = queues_of(brokers, each, rooms), members_of(count)
    shares = [STRATEGIES[name](member, members, queues) for member in members]
    shown = [",".join(f"{q.broker_name[-1]}{q.queue_id}" for q in share) for share in shares]
    assert shown == [part.strip() for part in expected.split("|")]
    if not rooms:
        assert sorted(queue for share in shares for queue in share) == queues


@pytest.mark.parametrize("name", STRATEGIES)
def test_who_is_no_member_gets_nothing(name: str) -> None:
    assert STRATEGIES[name]("stranger-1", members_of(2), queues_of(2, 4, rooms=True)) == []


def test_by_config_gives_what_exists_of_the_list() -> None:
    queues = queues_of(1, 4, rooms=False)
    gone = MessageQueue("orders", "broker-a", 9)
    strategy = allocation.by_config([queues[2], gone])
    assert strategy("anybody", ["anybody"], queues) == [queues[2]]


def test_a_room_has_to_be_known() -> None:
    strategy = allocation.machine_room_nearby(allocation.averagely, lambda _: "", lambda _: "east")
    with pytest.raises(ConfigError, match="no machine room"):
        strategy("m", ["m"], queues_of(1, 1, rooms=False))


def test_strategies_by_name() -> None:
    assert allocation.strategy_of("averagely") is allocation.averagely
    assert allocation.strategy_of(allocation.averagely_by_circle) is allocation.averagely_by_circle
    with pytest.raises(ConfigError, match="averagely_by_circle"):
        allocation.strategy_of("avg")


@pytest.mark.parametrize(
    ("key", "code", "queue_id"),
    [
        ("order-1", -1207111310, 6),
        ("order-2", -1207111309, 5),
        ("", 0, 0),
        ("中文", 646394, 0),
        ("\U0001f600 smile", -1559691765, 2),
        (5, 5, 5),
        (-5, -5, 5),
        (-(1 << 31), -(1 << 31), 2),
        (5_000_000_000, 705032705, 6),
        (-5_000_000_000, 705032702, 3),
        (True, 1231, 6),
    ],
)
def test_hashes_as_java(key: object, code: int, queue_id: int) -> None:
    message = Message("orders", b"x")
    assert java_hash_of(key) == code
    chosen = hash_selector(queues_of(1, 7, rooms=False), message, key)
    assert chosen.queue_id == queue_id


def test_a_hash_of_anything_else_is_refused() -> None:
    with pytest.raises(MessageInvalid, match="float"):
        java_hash_of(1.5)


def test_selectors() -> None:
    message = Message("orders", b"x", sharding_key="order-1")
    queues = queues_of(2, 4, rooms=True)
    assert hash_selector(queues, message, None) == hash_selector(queues, message, "order-1")
    assert random_selector(queues, message, None) in queues
    near = machine_room_selector(["room1"])
    assert {near(queues, message, None).broker_name for _ in range(20)} == {"room1@broker-b"}
    with pytest.raises(NoRoute, match="room7"):
        machine_room_selector(["room7"])(queues, message, None)
