"""This module tests `sluice top`: its figures, its layout, its options, and the real screen."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from sluice.aio import Admin
from sluice.client.top_data import BrokerRow, GroupRow, TopicRow, View, Watcher, read_progress
from sluice.client.top_text import HELP, ORDERS, layout, next_order, to_json
from tests.unit.client.admin_kit import Site, cluster, one_line, sluice
from tests.unit.client.terminal import terminal
from tests.unit.loops import run_once

VIEW = View(
    1_700_000_000_000,
    (BrokerRow("broker-a", "10.0.0.1:10911", "V5_5_0", 1234.5, 0.25, 0.5, 3),),
    (
        TopicRow("orders", 8, 123_456, 900.0),
        TopicRow("bills", 4, 7, 0.0),
        TopicRow("audit", 1, 9, 12.34),
    ),
    (GroupRow("readers", "orders", 12_000, 800.0), GroupRow("copies", "bills", 0, 0.0)),
)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with cluster() as running:
        yield running


def texts(view: View, **options: Any) -> list[str]:
    return [line.text for line in layout(view, **{"title": "t", "order": "rate", **options})]


def words(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


# Layout -----------------------------------------------------------------------------------------


def test_everything_is_on_a_page_without_a_height() -> None:
    lines = words(texts(VIEW))
    assert lines[0][:3] == ["sluice", "top", "t"]
    assert lines[1:] == [
        [],
        ["BROKER", "ADDRESS", "IN/s", "OUT/s", "DISK", "HELD", "VERSION"],
        ["broker-a", "10.0.0.1:10911", "1,234", "0.2", "50%", "3", "V5_5_0"],
        [],
        ["TOPIC", "QUEUES", "MESSAGES", "IN/s"],
        ["orders", "8", "123,456", "900"],
        ["audit", "1", "9", "12"],
        ["bills", "4", "7", "0.0"],
        [],
        ["GROUP", "TOPIC", "LAG", "OUT/s"],
        ["readers", "orders", "12,000", "800"],
        ["copies", "bills", "0", "0.0"],
    ]


def test_figures_stand_under_their_heads() -> None:
    lines = texts(VIEW)
    head, first = lines[5], lines[6]
    assert head.index("MESSAGES") + len("MESSAGES") == first.index("123,456") + len("123,456")


@pytest.mark.parametrize(
    ("order", "topics", "groups"),
    [
        ("rate", ["orders", "audit", "bills"], ["readers", "copies"]),
        ("lag", ["orders", "audit", "bills"], ["readers", "copies"]),
        ("messages", ["orders", "audit", "bills"], ["readers", "copies"]),
        ("name", ["audit", "bills", "orders"], ["copies", "readers"]),
    ],
)
def test_orders(order: str, topics: list[str], groups: list[str]) -> None:
    lines = words(texts(VIEW, order=order))
    assert [line[0] for line in lines[6:9]] == topics
    assert [line[0] for line in lines[11:13]] == groups


def test_the_next_order_goes_round() -> None:
    order = ORDERS[0]
    seen = []
    for _ in ORDERS:
        seen.append(order)
        order = next_order(order)
    assert tuple(seen) == ORDERS
    assert order == ORDERS[0]


@pytest.mark.parametrize("height", range(1, 40))
@pytest.mark.parametrize("width", [1, 20, 200])
def test_a_page_fits_every_window(height: int, width: int) -> None:
    topics = tuple(TopicRow(f"topic-{n}", 1, n, float(n)) for n in range(30))
    lines = texts(VIEW._replace(topics=topics), width=width, height=height)
    assert 1 <= len(lines) <= max(1, height - 1)
    assert all(len(line) <= width for line in lines)


def test_what_does_not_fit_is_counted() -> None:
    topics = tuple(TopicRow(f"topic-{n}", 1, n, float(n)) for n in range(30))
    lines = texts(VIEW._replace(topics=topics), height=24)
    shown = [line for line in lines if line.startswith("topic-")]
    (head,) = [line for line in lines if line.startswith("TOPIC ")]
    assert head.endswith(f"and {30 - len(shown)} more")
    assert len(shown) > 5
    assert [line.split()[0] for line in lines if line.startswith(("readers", "copies"))]


def test_problems_and_warnings_come_first() -> None:
    view = VIEW._replace(
        brokers=(VIEW.brokers[0]._replace(warning="appends are refused"),),
        problems=("no broker at 10.0.0.2:10911; retrying",),
    )
    lines = layout(view, title="t", order="rate")
    assert [line.text for line in lines[1:3]] == [
        "no broker at 10.0.0.2:10911; retrying",
        "broker-a: appends are refused",
    ]
    assert [line.style for line in lines[:4]] == ["title", "warning", "warning", "plain"]


def test_a_name_cannot_move_the_cursor() -> None:
    view = VIEW._replace(topics=(TopicRow("a\x1b[2Jb\r\n\x9bc", 1, 1, 1.0),))
    assert all(text.isprintable() for text in texts(view))


def test_json_has_everything() -> None:
    view = json.loads(to_json(VIEW))
    assert view["topics"][0] == {
        "name": "orders",
        "queues": 8,
        "messages": 123_456,
        "in_rate": 900.0,
    }
    assert view["groups"][0]["lag"] == 12_000
    assert view["brokers"][0]["address"] == "10.0.0.1:10911"
    assert view["problems"] == []


# Figures ----------------------------------------------------------------------------------------


def test_progress_is_read_as_apaches_broker_writes_it() -> None:
    body = (
        b'{"brokerAddr":"10.0.0.1:10911","consumeStatsList":[{"readers":[{"consumeTps":2.5,'
        b'"offsetTable":{{"brokerName":"a","queueId":0,"topic":"orders"}:{"brokerOffset":10,'
        b'"consumerOffset":4,"lastTimestamp":0,"pullOffset":5},'
        b'{"brokerName":"a","queueId":1,"topic":"orders"}:{"brokerOffset":3,"consumerOffset":9,'
        b'"lastTimestamp":0,"pullOffset":9}}}]},{"nobody":[]}],"totalDiff":0}'
    )
    ((pair, counts),) = read_progress(body).items()
    assert pair == ("readers", "orders")
    assert (counts.total, counts.rate, counts.queues, counts.rest) == (13, 2.5, 2, 6)


def looks(site: Site, *between: Callable[[], object]) -> list[View]:
    """A look before, between and after these steps; two seconds lie between two of them."""
    views: list[View] = []

    async def work() -> None:
        moments = iter(range(0, 1000, 2))
        async with Admin(site.nameserver.address) as admin:
            watcher = Watcher(admin, clock=lambda: float(next(moments)))
            views.append(await watcher.look())
            for step in between:
                await asyncio.to_thread(step)
                views.append(await watcher.look())

    run_once(work())
    return views


def test_rates_are_what_happened_between_two_looks(site: Site) -> None:
    site.ok("updateTopic", "-c", "DefaultCluster", "-t", "rated", "-r", "2", "-w", "2")
    site.ok("updateSubGroup", "-c", "DefaultCluster", "-g", "raters")
    site.commit("raters", "rated", 0, 0)

    def send() -> None:
        for number in range(6):
            site.send("rated", "x", number % 2)

    def read() -> None:
        site.commit("raters", "rated", 0, 3)
        site.commit("raters", "rated", 1, 1)

    views = looks(site, send, read, lambda: None)
    topics = [next(row for row in view.topics if row.name == "rated") for view in views]
    groups = [next(row for row in view.groups if row.group == "raters") for view in views]
    assert topics[1:] == [
        TopicRow("rated", 2, 6, 3.0),
        TopicRow("rated", 2, 6, 0.0),
        TopicRow("rated", 2, 6, 0.0),
    ]
    assert groups[1:] == [
        GroupRow("raters", "rated", 6, 0.0),
        GroupRow("raters", "rated", 2, 2.0),
        GroupRow("raters", "rated", 2, 0.0),
    ]
    assert [view.brokers[0].in_rate for view in views[1:]] == [3.0, 0.0, 0.0]
    assert views[0].problems == ()


def test_a_topic_that_is_deleted_leaves_the_view(site: Site) -> None:
    site.ok("updateTopic", "-c", "DefaultCluster", "-t", "short-lived", "-r", "1", "-w", "1")
    views = looks(site, lambda: site.ok("deleteTopic", "-c", "DefaultCluster", "-t", "short-lived"))
    names = [[row.name for row in view.topics] for view in views]
    assert "short-lived" in names[0]
    assert "short-lived" not in names[1]
    assert views[1].problems == ()


def test_unequal_subscriptions_are_a_warning(site: Site) -> None:
    site.ok("updateTopic", "-c", "DefaultCluster", "-t", "torn", "-r", "1", "-w", "1")
    site.join("tearers", {"torn": "A"}, client_id="one")
    site.join("tearers", {"torn": "B"}, client_id="two")
    (view,) = looks(site)
    assert "unequal subscriptions: tearers: torn" in view.brokers[0].warning


def test_a_broker_that_is_not_there_is_a_line_and_the_others_are_shown() -> None:
    with cluster() as site:
        site.register_elsewhere("ghost", "DefaultCluster", "127.0.0.1:9")
        (view,) = looks(site)
        assert view.problems == ("no broker at 127.0.0.1:9; retrying",)
        assert [(row.name, row.version) for row in view.brokers] == [
            ("broker-a", "V5_5_0"),
            ("ghost", ""),
        ]
        done = sluice("top", "--once", "-n", site.nameserver.address)
        assert done.status == 1
        assert "no broker at 127.0.0.1:9; retrying" in done.out


# The command ------------------------------------------------------------------------------------


def test_once_prints_a_table_or_json_and_ends(site: Site) -> None:
    site.ok("updateTopic", "-c", "DefaultCluster", "-t", "seen", "-r", "1", "-w", "1")
    site.send("seen", "x")
    done = sluice("top", "--once", "-n", site.nameserver.address)
    assert (done.status, done.err) == (0, "")
    assert re.search(r"^seen +1 +1 +[\d.]+$", done.out, re.MULTILINE)
    assert "TBW102" not in done.out
    everything = sluice("top", "--once", "--all", "--sort", "name", "-n", site.nameserver.address)
    assert re.search(r"^TBW102 +\d+ +0 +0\.0$", everything.out, re.MULTILINE)
    done = sluice("top", "--once", "--json", "-n", site.nameserver.address)
    view = orjson.loads(done.out)
    assert "seen" in [row["name"] for row in view["topics"]]
    assert view["brokers"][0]["name"] == "broker-a"


def test_a_nameserver_that_is_not_there_is_one_line() -> None:
    line = one_line(sluice("top", "--once", "-n", "127.0.0.1:9"), 2)
    assert line.startswith("no nameserver answers (127.0.0.1:9: ")


def test_without_a_terminal_it_says_what_to_do(site: Site) -> None:
    line = one_line(sluice("top", "-n", site.nameserver.address), 2)
    assert line == "this is no terminal; use --once to look once, or --json for scripts"


@pytest.mark.parametrize("interval", ["0", "nan", "-1", "1e9"])
def test_an_interval_has_limits(interval: str) -> None:
    assert "--interval" in one_line(sluice("top", "--once", "--interval", interval), 2)


def test_the_screen_shows_a_rate_obeys_keys_and_the_window_and_outlives_the_broker() -> None:
    with cluster() as site:
        site.ok("updateTopic", "-c", "DefaultCluster", "-t", "orders", "-r", "2", "-w", "2")
        address = site.nameserver.address
        command = [sys.executable, "-m", "sluice", "top", "-n", address, "--interval", "0.1"]
        with terminal(command) as screen:
            lines = screen.wait_for(lambda lines: any(line.startswith("orders") for line in lines))
            assert lines[0].startswith(f"sluice top   {address}   every 0.1 s")
            assert lines[-1] == HELP

            def has_a_rate(lines: list[str]) -> object:
                site.send("orders", "x")
                row = next((line.split() for line in lines if line.startswith("orders")), [])
                return len(row) == 4 and row[1] == "2" and float(row[3].replace(",", "")) > 0

            screen.wait_for(has_a_rate)
            screen.press("s")
            screen.wait_for(lambda lines: lines[0].endswith("order: lag"))
            screen.resize(12, 60)
            lines = screen.wait_for(lambda lines: lines[-1] == HELP and len(lines) == 12)
            assert all(len(line) < 60 for line in lines)
            site.call(site.nameserver.stop())
            lines = screen.wait_for(
                lambda lines: f"no nameserver at {address}; retrying" in lines[1]
            )
            assert any(line.startswith("orders") for line in lines), "what was seen last stays"
            screen.press("q")
            assert screen.wait() == 0
            assert screen.process.stderr is not None
            assert screen.process.stderr.read() == b""


def test_a_signal_leaves_the_screen_in_order(site: Site) -> None:
    command = [sys.executable, "-m", "sluice", "top", "-n", site.nameserver.address]
    with terminal(command) as screen:
        screen.wait_for(lambda lines: lines[-1] == HELP)
        screen.process.terminate()
        assert screen.wait() == 0


def test_a_terminal_that_cannot_be_drawn_on_is_one_line(site: Site) -> None:
    command = ["env", "TERM=unheard-of", sys.executable, "-m", "sluice", "top"]
    with terminal([*command, "-n", site.nameserver.address]) as screen:
        assert screen.wait() == 2
        assert screen.process.stderr is not None
        error = screen.process.stderr.read().decode()
        assert error.startswith("sluice: cannot draw on this terminal (TERM=unheard-of): ")
        assert error.count("\n") == 1
