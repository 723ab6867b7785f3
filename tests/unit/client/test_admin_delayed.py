"""`sluice admin delayed` against a running broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice.link import RemotingLink
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import send_fields
from tests.unit.client.admin_kit import CLUSTER, Site, cluster


@pytest.fixture
def site() -> Iterator[Site]:
    with cluster() as site:
        for topic in ("orders", "bills"):
            site.ok("updateTopic", "-c", CLUSTER, "-t", topic, "-r", "1", "-w", "1")
        yield site


def send(site: Site, topic: str, **properties: str) -> None:
    async def ask() -> None:
        link = await RemotingLink.open(site.broker.address)
        fields = {name: str(value) for name, value in send_fields(topic, 0, **properties).items()}
        answer = await link.request(Request.SEND_MESSAGE_V2, fields, b"body")
        assert answer.code == 0, answer.remark
        await link.close()

    site.call(ask())


def test_what_waits_is_listed(site: Site) -> None:
    send(site, "orders", TIMER_DELAY_SEC="600", UNIQ_KEY="U1", KEYS="order-1")
    send(site, "orders", DELAY="5", UNIQ_KEY="U2")
    send(site, "bills", TIMER_DELAY_SEC="30", UNIQ_KEY="U3")
    document = site.json("delayed")
    assert [row["uniqueKey"] for row in document["messages"]] == ["U3", "U2", "U1"]
    assert (document["count"], document["timerCount"], document["levelCount"]) == (3, 2, 1)
    assert site.json("delayed", "-t", "bills")["count"] == 1
    assert site.json("delayed", "-m", "2")["count"] == 2
    lines = site.lines("delayed", "-t", "orders")
    assert "orders/0 level 5 U2 4 bytes" in lines[0]
    assert "orders/0 timed U1 keys=order-1 4 bytes" in lines[1]
    assert lines[2] == "2 shown; 2 timed and 1 messages with a delay level wait in all"


def test_nothing_waits(site: Site) -> None:
    document = site.json("delayed")
    assert document == {"messages": [], "count": 0, "timerCount": 0, "levelCount": 0}
