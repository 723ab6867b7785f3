"""`sluice admin transactions` and `resumeCheckHalfMessage` against a running broker."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.unit.client.admin_kit import BROKER, CLUSTER, WAIT_SECONDS, Site, cluster


@pytest.fixture
def site() -> Iterator[Site]:
    with cluster(
        transaction_timeout_ms=50, transaction_check_interval_ms=50, transaction_check_count_max=1
    ) as site:
        for topic in ("orders", "bills"):
            site.ok("updateTopic", "-c", CLUSTER, "-t", topic, "-r", "1", "-w", "1")
        yield site


def test_what_is_open_is_listed_with_the_reason(site: Site) -> None:
    sent = site.begin("orders", "shop", "U1")
    site.begin("bills", "till", "U2")
    site.begin("orders", "till", "U3")
    document = site.json("transactions")
    rows = document["transactions"]
    assert [row["transactionId"] for row in rows] == ["U1", "U2", "U3"]
    assert (document["count"], document["openCount"]) == (3, 3)
    assert rows[0]["msgId"] == sent["msgId"]
    assert rows[0]["brokerName"] == BROKER
    assert (rows[0]["checkTimes"], rows[0]["nextCheckTimestamp"]) == (0, -1)
    assert site.json("transactions", "-g", "till")["count"] == 2
    assert site.json("transactions", "-g", "till", "-t", "bills")["count"] == 1
    assert site.json("transactions", "-m", "2")["count"] == 2
    (line, last) = site.lines("transactions", "-t", "orders", "-g", "shop")
    assert line.startswith(f"{sent['msgId']} U1 {BROKER} orders/0 of group shop, ")
    assert line.endswith(
        "asked 0 times, next nobody knows when: no producer of group shop is connected"
    )
    assert last == "1 shown; 3 transactions are open in all"


def test_a_parked_one_is_asked_about_anew(site: Site) -> None:
    site.begin("orders", "shop", "U1")
    site.join("readers", {"orders": "*"}, producer_groups=("shop",))
    deadline = time.monotonic() + WAIT_SECONDS
    while site.json("transactions")["openCount"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parked = site.json("queryMsgByOffset", "-t", "TRANS_CHECK_MAX_TIME_TOPIC", "-b", BROKER,
                       "-i", "0", "-o", "0")["messages"][0]  # fmt: skip
    message_id = parked["offsetMsgId"]
    said = site.ok("resumeCheckHalfMessage", "-i", message_id)
    assert said == f"{BROKER} asks about {message_id} anew\n"
    assert "already" in site.refused("resumeCheckHalfMessage", "-i", message_id)
    assert "no broker has" in site.refused("resumeCheckHalfMessage", "-i", "0" * 32)
    assert "is not the id" in site.wrong("resumeCheckHalfMessage", "-i", "U1")
