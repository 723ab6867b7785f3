"""What can be concluded from what the members of a group say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.client.group_checks import (
    GroupMember,
    allocate,
    disagreements_of,
    rebalance_problems,
    stuck_queues,
)
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_clients import SQL92, ConnectionInfo, Subscription
from sluice.protocol.remoting_reports import RunningInfo


def queue(number: int) -> MessageQueue:
    return MessageQueue("orders", "broker-a", number)


def member(
    name: str,
    *subscriptions: Subscription,
    queues: dict[MessageQueue, dict[str, Any]] | None = None,
    **properties: str,
) -> GroupMember:
    told = {"PROP_CONSUME_TYPE": "CONSUME_PASSIVELY", **properties}
    info = RunningInfo(told, subscriptions, queues or {}, {}, {}, {}, None)
    return GroupMember(ConnectionInfo(name, "10.0.0.1:1", "JAVA", 513), info)


def silent(name: str) -> GroupMember:
    return GroupMember(ConnectionInfo(name, "10.0.0.1:1", "JAVA", 513), None, "no answer")


def test_members_that_agree() -> None:
    wanted = Subscription("orders", "TagA", 1)
    later = Subscription("orders", "TagA", 2)
    assert disagreements_of([member("a", wanted), member("b", later), silent("c")]) == []
    assert disagreements_of([]) == []


def test_members_that_want_other_tags_another_language_or_nothing() -> None:
    tags = Subscription("orders", "TagA", 1)
    sql = Subscription("orders", "TagA", 1, expression_type=SQL92)
    extra = Subscription("bills", "*", 1)
    assert disagreements_of([member("a", tags), member("b", sql, extra), member("c", tags)]) == [
        "bills: '(not subscribed)' by a, c; '*' by b",
        "orders: 'TagA' by a, c; 'SQL92 TagA' by b",
    ]


def test_retry_topics_say_nothing() -> None:
    own = Subscription("%RETRY%group", "*", 1)
    assert disagreements_of([member("a", own), member("b")]) == []


def test_queues_read_twice_and_by_nobody() -> None:
    members = [member("a", queues={queue(0): {}, queue(1): {}}), member("b", queues={queue(1): {}})]
    wanted = {"orders": [queue(0), queue(1), queue(2)]}
    assert rebalance_problems(members, wanted) == [
        "orders broker-a/1 is read by a and b",
        "orders broker-a/2 is read by nobody",
    ]
    assert rebalance_problems([*members, silent("c")], wanted) == []


@pytest.mark.parametrize(
    ("row", "orderly", "found"),
    [
        ({"lastConsumeTimestamp": 900_000, "cachedMsgCount": 3}, "false", "consumes nothing since"),
        ({"lastConsumeTimestamp": 900_000, "cachedMsgCount": 0}, "false", ""),
        ({"lastConsumeTimestamp": 990_000, "cachedMsgCount": 3}, "false", ""),
        ({"locked": False, "lastLockTimestamp": 999_000}, "true", "has no lock since 1000 ms"),
        ({"locked": True, "droped": True, "tryUnlockTimes": 4}, "true", "after 4 attempts"),
        ({"locked": True}, "true", ""),
    ],
)
def test_queues_that_do_not_move(row: dict[str, Any], orderly: str, found: str) -> None:
    one = member("a", queues={queue(0): row}, PROP_CONSUMEORDERLY=orderly)
    problems = stuck_queues([one, silent("b")], 1_000_000)
    assert len(problems) == bool(found)
    assert all(found in problem for problem in problems)


def test_pull_consumers_are_never_stuck() -> None:
    row = {"lastConsumeTimestamp": 0, "cachedMsgCount": 3}
    one = member("a", queues={queue(0): row}, PROP_CONSUME_TYPE="CONSUME_ACTIVELY")
    assert stuck_queues([one], 1_000_000) == []


@pytest.mark.parametrize(
    ("queues", "clients", "shares"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])],
)
def test_queues_are_shared_as_evenly_as_can_be(
    queues: int, clients: int, shares: list[int]
) -> None:
    everything = [queue(number) for number in range(queues)]
    names = [f"client-{number}" for number in range(clients)]
    result = allocate(everything, names)
    assert [len(result[name]) for name in names] == shares
    assert [one for name in names for one in result[name]] == everything
