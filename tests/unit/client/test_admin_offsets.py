"""`sluice admin`: moving groups to a time, to the end, to where another one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice.clock import wall_ms
from sluice.errors import ConsumerOffline
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.client.admin_kit import BROKER, CLUSTER, Site, cluster


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with cluster() as running:
        running.ok("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "2", "-w", "2")
        for number in range(5):
            running.send("orders", f"body-{number}", 1)
        for group in ("moved", "away", "skipping", "source", "target"):
            running.ok("updateSubGroup", "-c", CLUSTER, "-g", group)
        yield running


def offset(site: Site, group: str, queue_id: int) -> int | None:
    return site.broker.core.offsets.committed(group, "orders", queue_id)


def test_reset_to_a_time(site: Site) -> None:
    reset = ("resetOffsetByTime", "-g", "moved", "-t", "orders")
    rows = site.lines(*reset, "-s", "now")
    assert rows[0].startswith("group moved goes on with topic orders at 20")
    assert rows[2:] == ["Broker Queue Offset", f"{BROKER} 0 0", f"{BROKER} 1 5"]
    assert offset(site, "moved", 1) == 5
    document = site.json(*reset, "-s", "0", "-f", "true", "--cplus")
    assert document["offsetTable"][1] == {"brokerName": BROKER, "queueId": 1, "offset": 0}
    assert offset(site, "moved", 1) == 0
    assert site.json(*reset, "-s", "2100-01-31#10:00:00:000")["offsetTable"][1]["offset"] == 5
    assert site.json(*reset, "-s", str(wall_ms() + 10_000))["timestamp"] > wall_ms()


def test_reset_of_one_queue(site: Site) -> None:
    reset = ("resetOffsetByTime", "-g", "moved", "-t", "orders", "-s", "0")
    document = site.json(*reset, "-b", site.broker.address, "-q", "1", "-o", "3")
    assert document["offsetTable"] == [{"brokerName": BROKER, "queueId": 1, "offset": 3}]
    assert offset(site, "moved", 1) == 3
    site.ok(*reset, "-b", site.broker.address, "-q", "1")
    assert offset(site, "moved", 1) == 0
    said = site.refused(*reset, "-b", site.broker.address, "-q", "1", "-o", "30")
    assert "Target offset 30 not in consume queue range [0-5]" in said
    assert "-b/--broker" in site.wrong(*reset, "-q", "1")
    assert "-q/--queue" in site.wrong(*reset, "-b", site.broker.address)


def test_reset_with_a_time_that_is_none(site: Site) -> None:
    for when in ("yesterday", "2026-01-31", "2026-01-31#10:00:00", "2026-13-31#10:00:00:000"):
        said = site.wrong("resetOffsetByTime", "-g", "moved", "-t", "orders", "-s", when)
        assert f"{when!r} is no time" in said


def test_reset_of_what_is_not_there(site: Site) -> None:
    said = site.refused("resetOffsetByTime", "-g", "unknown", "-t", "orders", "-s", "0")
    assert said == (
        f"{site.broker.address}: resetting group unknown on orders: Group unknown does not exist "
        "(code 26)"
    )
    said = site.refused("resetOffsetByTime", "-g", "moved", "-t", "unknown", "-s", "0")
    assert said.startswith("topic unknown is not known")


def test_brokers_that_only_move_connected_groups(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say that nobody is there; then each offset is committed."""

    def nobody(connection: Connection, command: RemotingCommand) -> None:
        raise ConsumerOffline("Consumer not online")

    code = Request.INVOKE_BROKER_TO_RESET_OFFSET
    monkeypatch.setitem(site.broker.api.handlers, code, nobody)
    reset = ("resetOffsetByTime", "-g", "away", "-t", "orders")
    assert site.json(*reset, "-s", "now")["offsetTable"][1]["offset"] == 5
    assert offset(site, "away", 1) == 5
    assert site.json(*reset, "-s", "0")["offsetTable"][1]["offset"] == 0
    assert offset(site, "away", 1) == 0
    site.ok("skipAccumulatedMessage", "-g", "away", "-t", "orders")
    assert offset(site, "away", 1) == 5


def test_skip_what_is_there(site: Site) -> None:
    rows = site.lines("skipAccumulatedMessage", "-g", "skipping", "-t", "orders")
    assert rows[0] == "group skipping goes on with topic orders at the end"
    assert rows[-1] == f"{BROKER} 1 5"
    assert offset(site, "skipping", 1) == 5
    document = site.json("skipAccumulatedMessage", "-g", "skipping", "-t", "orders")
    assert document["timestamp"] == -1


def test_clone_offsets(site: Site) -> None:
    site.commit("source", "orders", 1, 4)
    clone = ("cloneGroupOffset", "-s", "source", "-d", "target", "-t", "orders", "-o", "true")
    rows = site.lines(*clone)
    assert rows[0] == "group target goes on with topic orders where group source is"
    assert offset(site, "target", 1) == 4
    assert site.json(*clone)["offsetTable"][1]["offset"] == 4
    said = site.refused("cloneGroupOffset", "-s", "empty", "-d", "target", "-t", "orders")
    assert said == "group empty has no offsets on orders"
    assert offset(site, "target", 1) == 4
    said = site.refused("cloneGroupOffset", "-s", "source", "-d", "unknown", "-t", "orders")
    assert "Group unknown not exist!" in said


def test_offsets_that_a_reset_holds_are_not_said_to_be_cloned(site: Site) -> None:
    site.commit("source", "orders", 1, 4)
    site.ok("updateSubGroup", "-c", CLUSTER, "-g", "held")
    site.ok("resetOffsetByTime", "-g", "held", "-t", "orders", "-s", "0")
    said = site.refused("cloneGroupOffset", "-s", "source", "-d", "held", "-t", "orders")
    assert "Offset has been previously reset" in said
