"""This module tests what is said of a replay: for programs, and on the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import StoreError
from sluice.replay.lanes import Shape
from sluice.replay.pacing import Schedule
from sluice.replay.replay_command import bar
from sluice.replay.report import page_of, report_of, write_report
from sluice.replay.sending import Limits, Replayer
from sluice.replay.texts import read_speed
from tests.unit.replay.replay_kit import START_MS, VirtualTime, names
from tests.unit.replay.test_sending import Broker

ABOUT = {"recording": "<friday>", "topics": {"orders": "orders-replay"}, "pace": "5x"}


def replayer() -> Replayer:
    """One that has sent for two and a half seconds."""
    time = VirtualTime()
    schedule = Schedule(read_speed("--speed", "5x"), START_MS)
    made = Replayer(Broker(time), schedule, {}, Shape(None, {}), Limits(), now=time.now)
    for second, (wanted, sent, failed) in enumerate([(100, 90, 0), (100, 80, 20), (50, 60, 0)]):
        interval = made.series.at(second)
        interval.wanted, interval.sent, interval.failed = wanted, sent, failed
        interval.late_ms = 10.0 * second
        interval.answers.add(second + 1.0, sent)
    made.progress.total, made.progress.sent, made.progress.failed = 300, 230, 20
    made.progress.seconds = 2.5
    made.reasons["SendFailed: <b>no</b>"] = 20
    return made


def test_the_report() -> None:
    report = report_of(replayer(), ABOUT)
    assert report["is_complete"]
    assert report["outcome"] == "complete"
    assert report["messages"] == {
        "total": 300,
        "sent": 230,
        "failed": 20,
        "empty": 0,
        "not_sent": 50,
    }
    assert (report["rate"], report["late_ms_max"]) == (92, 20)
    assert report["latency_ms"]["max"] == 3
    assert [each["second"] for each in report["intervals"]] == [0, 1, 2]
    assert report["intervals"][1]["failed"] == 20
    assert report["intervals"][1]["latency_ms"]["p50"] == 2


class Page(HTMLParser):
    """What stands in a page, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def read(report: dict[str, Any]) -> Page:
    page = Page()
    page.feed(page_of(report))
    page.close()
    assert page.open == []
    return page


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page_of(report_of(replayer(), ABOUT))
    page = read(report_of(replayer(), ABOUT))
    assert page.tags.count("svg") == 4
    assert {"script", "link", "img", "b", "friday"}.isdisjoint(page.tags)
    assert "<friday>" in page.words
    assert "SendFailed: <b>no</b>" in page.words
    assert "230 of 300 (92/s)" in page.words
    assert re.findall(r"(?:src|href|url)\s*[=(]", text) == []


def test_wanted_and_reached_are_drawn_as_steps() -> None:
    """The last interval is half as long as the others: 50 within it are 100 a second."""
    text = page_of(report_of(replayer(), ABOUT))
    reached, wanted = re.findall(r'points="([^"]*)"', text)[:2]
    xs = [float(point.split(",")[0]) for point in wanted.split()]
    assert xs == [78, 384.4, 384.4, 690.8, 690.8, 844]
    heights = [[float(point.split(",")[1]) for point in line.split()] for line in (wanted, reached)]
    assert len(set(heights[0])) == 1
    assert heights[1][4] < heights[0][4] < heights[1][0]


def test_a_replay_that_sent_nothing_has_a_page_too() -> None:
    made = replayer()
    made.series.intervals.clear()
    made.reasons.clear()
    page = read(report_of(made, ABOUT))
    assert page.tags.count("svg") == 4
    assert "Errors " not in page.words.replace("Errors a second", "")


def test_both_files_are_written_whole(tmp_path: Path) -> None:
    report = report_of(replayer(), ABOUT)
    for given in ("r", "r.json", "r.html"):
        assert write_report(str(tmp_path / given), report) == (
            str(tmp_path / "r.json"),
            str(tmp_path / "r.html"),
        )
    assert names(tmp_path) == ["r.html", "r.json"]
    assert json.loads((tmp_path / "r.json").read_bytes())["pace"] == "5x"
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        write_report(str(tmp_path / "none" / "r"), report)


def test_the_bar() -> None:
    made = replayer()
    assert bar(made, 10.0) == (
        "[=================   ]  83% 250 of 300, wanted 100/s, reached 80/s, 20 errors, "
        "0.0 s behind, 8 s to go"
    )
    # Behind the plan: what is left at the rate so far.
    made.progress.total = 2750
    assert bar(made, 2.0).endswith("0.0 s behind, 25 s to go")
    assert bar(made, 9.5).endswith("0.0 s behind, 7 s to go")
    made.progress.late_seconds = 1.5
    assert bar(made, 9.5).endswith("1.5 s behind, 25 s to go")
