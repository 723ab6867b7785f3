"""`sluice admin deadLetters` and `resendDeadLetters` against a running broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from sluice.client.administration import business
from sluice.model import Message
from sluice.protocol import records
from tests.unit.client.admin_kit import CLUSTER, Site, cluster


@pytest.fixture
def site() -> Iterator[Site]:
    with cluster() as site:
        site.ok("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "1", "-w", "1")
        site.ok("updateSubGroup", "-c", CLUSTER, "-g", "billing")
        yield site


def kill(site: Site, count: int, topic: str = "orders") -> None:
    """Messages that a consumer of the group gives up at once."""
    for number in range(count):
        site.send(topic, f"body-{number}", 0, "-k", f"order-{number}")
    for message in site.json("printMsg", "-t", topic)["messages"]:
        site.give_up("billing", message["commitLogOffset"])


def offsets(rows: list[dict[str, Any]]) -> list[int]:
    return [row["offset"] for row in rows]


def test_letters_are_listed(site: Site) -> None:
    kill(site, 3)
    document = site.json("deadLetters", "-g", "billing")
    assert (document["group"], document["count"], document["resent"]) == ("billing", 3, 0)
    rows = document["deadLetters"]
    assert offsets(rows) == [0, 1, 2]
    assert rows[1]["originTopic"] == "orders"
    assert (rows[1]["originQueueId"], rows[1]["originOffset"], rows[1]["keys"]) == (0, 1, "order-1")
    assert offsets(site.json("deadLetters", "-g", "billing", "-k", "order-2")["deadLetters"]) == [2]
    assert site.json("deadLetters", "-g", "billing", "-t", "payroll")["count"] == 0
    assert site.json("deadLetters", "-g", "billing", "-c", "2")["count"] == 2
    dead_ms = rows[2]["deadTimestamp"]
    later = site.json("deadLetters", "-g", "billing", "-b", str(dead_ms + 1))
    assert later["count"] == 0
    lines = site.lines("deadLetters", "-g", "billing")
    assert len(lines) == 4
    assert "from orders/0 1 tried 1 times keys=order-1" in lines[1]
    assert lines[3] == "3 dead letters of group billing, 0 sent again"


def test_letters_are_sent_again_once(site: Site) -> None:
    kill(site, 4)
    rows = site.json("deadLetters", "-g", "billing")["deadLetters"]
    ids = f"{rows[0]['msgId']},{rows[3]['msgId']}"
    first = site.json("resendDeadLetters", "-g", "billing", "-i", ids)
    assert [(row["offset"], row["outcome"]) for row in first["outcomes"]] == [
        (0, "resent"),
        (3, "resent"),
    ]
    again = site.json("resendDeadLetters", "-g", "billing", "-i", ids)
    assert again["counts"] == {"already resent": 2}
    by_key = site.json("resendDeadLetters", "-g", "billing", "-k", "order-1")
    assert [(row["offset"], row["outcome"]) for row in by_key["outcomes"]] == [(1, "resent")]
    everything = site.json("resendDeadLetters", "-g", "billing", "--all")
    assert [(row["offset"], row["outcome"]) for row in everything["outcomes"]] == [(2, "resent")]
    assert site.json("resendDeadLetters", "-g", "billing", "--all")["outcomes"] == []
    assert site.json("deadLetters", "-g", "billing")["resent"] == 4
    copies = site.json("printMsg", "-t", "%RETRY%billing")["messages"]
    assert sorted(copy["keys"] for copy in copies) == [f"order-{n}" for n in range(4)]


def test_letters_go_to_their_topic(site: Site) -> None:
    kill(site, 1)
    lines = site.lines("resendDeadLetters", "-g", "billing", "--all", "--toTopic")
    assert lines == ["broker-a/0 0 resent", "Outcome Dead letters", "resent 1"]
    bodies = [m["body"] for m in site.json("printMsg", "-t", "orders")["messages"]]
    assert bodies == ["body-0", "body-0"]


def test_many_letters_go_page_by_page(site: Site) -> None:
    kill(site, 7)
    with (
        mock.patch.object(business, "_PAGE", 2),
        mock.patch.object(business, "_CHUNK", 1),
    ):
        document = site.json("resendDeadLetters", "-g", "billing", "--all")
    assert document["counts"] == {"resent": 7}
    assert offsets(document["outcomes"]) == list(range(7))


def test_what_cannot_be_sent_is_named_and_fails(site: Site) -> None:
    kill(site, 2)
    site.ok("updateTopicPerm", "-c", CLUSTER, "-t", "orders", "-p", "4")
    done = site.admin("resendDeadLetters", "-g", "billing", "--all", "--toTopic")
    assert done.status == 1
    assert done.out.count("failed: Sending message to topic[orders] is forbidden.") == 2


def test_what_is_asked_for_wrongly(site: Site) -> None:
    assert "no dead letters" in site.refused("deadLetters", "-g", "nobody")
    assert "say which" in site.wrong("resendDeadLetters", "-g", "billing")
    assert "leave the others out" in site.wrong(
        "resendDeadLetters", "-g", "billing", "-i", "A", "--all"
    )
    kill(site, 1)
    order = site.json("printMsg", "-t", "orders")["messages"][0]
    for foreign in (order["offsetMsgId"], "0" * 32):
        refusal = site.refused("resendDeadLetters", "-g", "billing", "-i", foreign)
        assert foreign in refusal


@pytest.mark.soak
def test_a_hundred_thousand_letters(site: Site) -> None:
    count = 100_000
    core = site.broker.core

    async def fill() -> None:
        for name in ("%DLQ%billing", "%RETRY%billing"):
            core.topics.create_inner(name, 1)
        core.ask_turn()
        for number in range(count):
            properties = {"UNIQ_KEY": f"U{number}", "RETRY_TOPIC": "orders"}
            text = records.format_properties(properties)
            core.append(Message("%DLQ%billing", 0, b"body", text, reconsume_times=17))
            if number % 1_000 == 0:
                await asyncio.sleep(0)
        await site.broker.registrar.registered()

    site.call(fill())
    for expected in (count, 0):
        document = site.json("resendDeadLetters", "-g", "billing", "--all")
        assert len(document["outcomes"]) == expected
    assert site.json("deadLetters", "-g", "billing")["resent"] == count
    assert core.store.max_offset("%RETRY%billing", 0) == count
