"""This module tests that files are followed: rotated, truncated, while the broker is away."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sluice.collector import collecting, following, sources
from sluice.collector.collecting import Stopped
from sluice.collector.following import Followed
from sluice.collector.lines import Rules
from sluice.collector.places import PlaceBook
from sluice.collector.sending import Shape
from sluice.errors import ConfigError, LinkLost, MessageIllegal, SendFailed
from tests.unit.collector.collect_kit import QUICK, Bench, eventually, run

LONG = "x" * 80  # a line with it is long enough to know a copy by


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no machine crashes here


def properties(bench: Bench) -> list[dict[str, str]]:
    return [dict(message.properties or {}) for message in bench.sender.messages]


# ------------------------------------------------------------------------------------------- once


def test_once_reads_what_is_there_and_only_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append("one\ntwo\nunfinished")
    bench.append("other\n", "b.log")
    done = run(bench.once())
    assert sorted(bench.sender.bodies) == ["one", "other", "two", "unfinished"]
    assert (done.progress.lines, done.progress.files, done.progress.behind_bytes) == (4, 2, 0)
    run(bench.once())
    assert len(bench.sender.messages) == 4
    bench.append(" line\nthree\n")
    run(bench.once())
    assert bench.sender.bodies[4:] == [" line", "three"]


def test_messages_say_where_they_are_from(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.options.shape = Shape("logs-{name}", "host-1", "web", "id", (("env", "test"),))
    bench.append('{"id": 7, "x": 1}\nno json\n{"id": "two words"}\n{"id": true}\n{broken\n[1]\n')
    run(bench.once())
    first = bench.sender.messages[0]
    assert (first.topic, first.tags, first.keys) == ("logs-app", "web", "7")
    assert [m.keys for m in bench.sender.messages[1:]] == ["", "two words", "", "", ""]
    seen = properties(bench)
    assert seen[0] == {
        "env": "test",
        "path": str(bench.log),
        "host": "host-1",
        "file": seen[0]["file"],
        "offset": "0",
    }
    assert seen[1]["offset"] == str(len('{"id": 7, "x": 1}\n'))


def test_a_path_of_any_bytes_can_be_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "*")
    name = os.fsdecode(b"b\xe4d \x01name.log")
    bench.append("line\n", name)
    bench.options.shape = Shape("{name}", "here")
    run(bench.once())
    assert properties(bench)[0]["path"].endswith(r"b\xe4d \x01name.log")
    assert bench.sender.messages[0].topic == "b-d-name"


def test_a_long_line_has_its_parts_across_runs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rules=Rules(line_bytes_max=16), batch_count=1)
    bench.append("a" * 40 + "\nnext\n")
    run(bench.once())
    assert [(p.get("part"), p["offset"]) for p in properties(bench)] == [
        ("1", "0"),
        ("2", "16"),
        ("3", "32"),
        (None, "41"),
    ]


def test_batches_are_bounded_and_a_file_stays_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_bytes=50, batch_count=10)
    bench.append("".join(f"line {i}\n" for i in range(100)))
    run(bench.once())
    assert bench.sender.bodies == [f"line {i}" for i in range(100)]
    assert all(count <= 10 for _, count in bench.sender.batches)
    assert {lane for lane, _ in bench.sender.batches} == {str(bench.log)}


def test_few_files_are_under_way_at_a_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for number in range(60):
        bench.append("line\n" * 5, f"{number}.log")
    run(bench.once())
    assert len(bench.sender.messages) == 300
    assert 1 < bench.sender.under_way_most <= 16


def test_once_gives_up_on_a_broker_that_is_away(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.options.timing = QUICK._replace(give_up=0.05)
    bench.append("line\n")
    bench.sender.is_away = True
    with pytest.raises(SendFailed, match=r"gave up after .* nobody is there"):
        run(bench.once())
    bench.sender.is_away = False
    run(bench.once())
    assert bench.sender.bodies == ["line"]


def test_a_refused_line_does_not_hold_up_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    bench.append("".join(f"{i}\n" for i in range(4)))
    too_large = MessageIllegal("no")
    # All four; then the first two, of them the first; the others are taken.
    bench.sender.failures = [too_large, too_large, too_large]
    done = run(bench.once())
    assert bench.sender.bodies == ["1", "2", "3"]
    assert (done.progress.refused, done.progress.lines) == (1, 3)
    assert "the line at byte 0 is refused" in caplog.text


def test_a_wrong_setting_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append("line\n")
    bench.sender.failures = [ConfigError("topic 'x y': letters")]

    async def work() -> None:
        async with bench.running() as collector:
            await eventually(lambda: collector._failed is not None)

    with pytest.raises(ConfigError, match="x y"):
        run(work())


def test_a_wrong_setting_is_told_also_where_it_is_stopped_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    looks: list[object] = []
    followed_look = Followed.look

    async def work() -> None:
        async with bench.running() as collector:

            def look(followed: Followed, found: Any) -> None:
                followed_look(followed, found)
                looks.append(found)
                collector._failed = ConfigError("topic 'x y': letters")
                collector.stop()

            monkeypatch.setattr(Followed, "look", look)
            await eventually(lambda: bool(looks))

    with pytest.raises(ConfigError, match="x y"):
        run(work())


def test_once_that_is_stopped_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append("line\n")

    async def work() -> None:
        book = PlaceBook.open(str(bench.state))
        try:
            collector = bench.collector(book)
            collector.stop()
            with pytest.raises(Stopped):
                await collector.run_once()
        finally:
            book.release()

    run(work())
    assert bench.sender.messages == []


# -------------------------------------------------------------------------------------- following


def test_lines_and_files_that_come_are_sent(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "*.log", "sub/**/*.txt")
    bench.append("one\n")

    async def work() -> None:
        async with bench.running():
            await bench.has("one")
            bench.append("two\nthr")
            await bench.has("one", "two")
            bench.append("ee\n")
            await bench.has("one", "two", "three")
            (bench.directory / "sub" / "deep").mkdir(parents=True)
            bench.append("four\n", "sub/deep/new.txt")
            await bench.has("one", "two", "three", "four")

    run(work())


def test_what_is_less_than_a_batch_lingers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_bytes=100)
    bench.options.timing = QUICK._replace(linger=3600)
    bench.append("a few bytes\n")

    async def work() -> None:
        async with bench.running() as collector:
            await eventually(lambda: collector.progress.behind_bytes > 0)
            bench.append("x" * 100 + "\n")
            await bench.has("a few bytes", "x" * 100)

    run(work())


def test_events_of_several_lines(tmp_path: Path) -> None:
    rules = Rules(start=re.compile(rb"^\d", re.MULTILINE))
    bench = Bench(tmp_path, rules=rules)
    bench.append("1 error\n  at a\n")

    async def work() -> None:
        async with bench.running():
            bench.append("  at b\n2 fine\n")
            # The first is over when the second begins, the second when nothing follows.
            await bench.has("1 error\n  at a\n  at b", "2 fine")

    run(work())


@pytest.mark.parametrize("pattern", ["app.log", "app.log*"])
def test_a_renamed_file_is_read_to_its_end_before_the_new_one(tmp_path: Path, pattern: str) -> None:
    bench = Bench(tmp_path, pattern)
    bench.append("one\n")

    async def work() -> None:
        async with bench.running():
            await bench.has("one")
            writer = bench.log.open("a")
            bench.log.rename(bench.directory / "app.log.1")
            bench.append("three\n")
            writer.write("two\n")
            writer.close()
            await bench.has("one", "two", "three")
            assert [p["path"] for p in properties(bench)] == [str(bench.log)] * 3

    run(work())


def test_a_deleted_file_is_read_to_its_end_and_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append("one\n")

    async def work() -> None:
        async with bench.running() as collector:
            await bench.has("one")
            with bench.log.open("a") as writer:
                writer.write("two\nunfinished")
                writer.flush()
                bench.log.unlink()
            await bench.has("one", "two", "unfinished")
            await eventually(lambda: collector.progress.files == 0)

    run(work())
    assert json.loads((bench.state / "places.json").read_bytes())["places"] == []


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append("one\ntwo\n")

    async def work() -> None:
        async with bench.running():
            await bench.has("one", "two")
            bench.log.write_text("new\n")  # shorter
            await bench.has("one", "two", "new")
            bench.log.write_text("many, many more\nlines\n")  # longer
            await bench.has("one", "two", "new", "many, many more", "lines")
            bench.log.write_text("many, many more\nLINES\n")  # of the same size
            await eventually(lambda: len(bench.sender.messages) == 7)
            assert len({p["file"] for p in properties(bench)}) == 4

    run(work())


@pytest.mark.parametrize("pattern", ["app.log", "app*"])
@pytest.mark.parametrize("copy_name", ["app.log.1", "app-20240102.log"])
def test_what_was_copied_and_truncated_is_read_once(
    tmp_path: Path, pattern: str, copy_name: str
) -> None:
    bench = Bench(tmp_path, pattern)
    bench.append(f"one {LONG}\n")

    async def work() -> None:
        async with bench.running():
            await bench.has(f"one {LONG}")
            bench.append("two\n")
            # In one go, so that the collector may have seen nothing of it in between.
            shutil.copy(bench.log, bench.directory / copy_name)
            bench.log.write_text("three\n")
            await eventually(lambda: len(bench.sender.messages) >= 3)
            assert sorted(bench.sender.bodies) == [f"one {LONG}", "three", "two"]
            bench.append("four\n")
            await eventually(lambda: "four" in bench.sender.bodies)
            assert len(bench.sender.messages) == 4

    run(work())


def test_an_unfinished_copy_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "app*")
    bench.append(f"one {LONG}\n")

    async def work() -> None:
        async with bench.running() as collector:
            await bench.has(f"one {LONG}")
            copy = bench.directory / "app.log.1"
            copy.write_text(f"one {LONG}"[:40])
            identity = (copy.stat().st_dev, copy.stat().st_ino)
            await eventually(lambda: identity in collector._followed._held)
            bench.append("two\n")
            await bench.has(f"one {LONG}", "two")
            copy.write_text(bench.log.read_text())
            bench.log.write_text("three\n")
            await bench.has(f"one {LONG}", "two", "three")

    run(work())


def test_a_copy_of_a_file_that_stays_is_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_COPY_SECONDS", 0.05)
    bench = Bench(tmp_path, "app*")
    bench.append(f"one {LONG}\n")

    async def work() -> None:
        async with bench.running():
            await bench.has(f"one {LONG}")
            shutil.copy(bench.log, bench.directory / "app.backup")
            await bench.has(f"one {LONG}", f"one {LONG}")

    run(work())


def test_files_that_rest_are_closed_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_IDLE_SECONDS", 0.02)
    bench = Bench(tmp_path, "app.log")
    bench.append("one\n")

    async def work() -> None:
        async with bench.running() as collector:
            await bench.has("one")
            await eventually(lambda: not list(collector._followed))
            assert collector.progress.files == 1
            bench.append("two\n")
            await bench.has("one", "two")
            await eventually(lambda: not list(collector._followed))
            bench.log.write_text("new\n")
            await bench.has("one", "two", "new")
            await eventually(lambda: not list(collector._followed))
            # Written to and renamed between two looks.
            with bench.log.open("a") as writer:
                writer.write("rest\n")
            bench.log.rename(bench.directory / "app.log.1")
            await bench.has("one", "two", "new", "rest")

    run(work())


def test_a_file_that_may_not_be_read_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.append("one\n")
    refused = 3
    open_file = sources.open_file

    def refuse(path: str) -> int:
        nonlocal refused
        refused -= 1
        if refused >= 0:
            raise PermissionError(13, "Permission denied", path)
        return open_file(path)

    monkeypatch.setattr(sources, "open_file", refuse)

    async def work() -> None:
        async with bench.running():
            await bench.has("one")

    run(work())
    assert caplog.text.count("Permission denied") == 1


# ------------------------------------------------------------------------ restarts, brokers, places


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append("one\n")
    run(bench.once())
    bench.append("two\n")

    async def work() -> None:
        async with bench.running():
            await bench.has("one", "two")

    run(work())


@pytest.mark.parametrize("pattern", ["app.log", "app*"])
@pytest.mark.parametrize("way", ["rename", "copytruncate"])
def test_what_was_rotated_while_nobody_looked_is_read(
    tmp_path: Path, pattern: str, way: str
) -> None:
    bench = Bench(tmp_path, pattern)
    bench.append(f"one {LONG}\n")
    run(bench.once())
    bench.append("two\n")
    old = bench.directory / "app.1.log"
    if way == "rename":
        bench.log.rename(old)
    else:
        shutil.copy(bench.log, old)
    bench.log.write_text("three\n")
    run(bench.once())
    assert sorted(bench.sender.bodies) == [f"one {LONG}", "three", "two"]


def test_a_disk_with_another_number_has_the_same_files(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append(f"one {LONG}\n")
    bench.append(f"other {LONG}\n", "b.log")
    run(bench.once())
    places = bench.state / "places.json"
    table = json.loads(places.read_bytes())
    for place in table["places"]:
        place["device"] += 7
    places.write_text(json.dumps(table))
    bench.append("two\n")
    (bench.directory / "b.log").write_text(f"another one {LONG}\n")
    run(bench.once())
    assert sorted(bench.sender.bodies[2:]) == [f"another one {LONG}", "two"]


def test_from_the_end_means_the_first_time_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.options.from_end = True
    bench.append("old\nunfinish")
    run(bench.once())
    assert bench.sender.bodies == ["unfinish"]
    bench.append("ed\n")
    bench.append("created while nobody looked\n", "b.log")
    run(bench.once())
    assert sorted(bench.sender.bodies[1:]) == ["created while nobody looked", "ed"]
    bench.patterns.append(str(bench.directory / "*.txt"))
    bench.append("old\n", "c.txt")
    run(bench.once())
    assert len(bench.sender.messages) == 3


def test_from_the_end_is_noted_before_anything_is_sent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.options.from_end = True
    bench.append("old\n")

    async def work() -> None:
        async with bench.running() as collector:
            await eventually(lambda: collector.progress.files == 1)

    run(work())
    bench.append("new\n")
    run(bench.once())
    assert bench.sender.bodies == ["new"]


def test_a_broker_that_is_away_stops_the_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    bench.sender.is_away = True
    for number in range(40):
        bench.append("line\n" * 10, f"{number}.log")

    async def work() -> None:
        async with bench.running() as collector:
            await eventually(lambda: "reading waits" in caplog.text)
            await eventually(lambda: collector.progress.behind_bytes == 40 * 50)
            bench.sender.is_away = False
            await eventually(lambda: len(bench.sender.messages) == 400)

    run(work())
    assert caplog.text.count("reading waits") == 1
    assert caplog.text.count("reading goes on") == 1
    assert bench.sender.under_way_most <= 16


def test_it_stops_while_the_broker_is_away(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.sender.is_away = True
    bench.append("line\n")

    async def work() -> None:
        async with bench.running() as collector:
            await eventually(lambda: bool(collector._tasks))

    run(work())
    bench.sender.is_away = False
    run(bench.once())
    assert bench.sender.bodies == ["line"]


def test_a_send_without_an_answer_is_repeated_as_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.append("one\ntwo\n")
    bench.sender.failures = [LinkLost("no answer")]
    bench.sender.stores_what_fails = True
    run(bench.once())
    assert bench.sender.bodies == ["one", "two", "one", "two"]
    seen = properties(bench)
    assert seen[:2] == seen[2:]  # so that whoever reads them can tell


def test_nothing_is_sent_while_places_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.collector.noting._AGAIN_SECONDS", 0.002)
    bench = Bench(tmp_path)
    bench.append("one\n")
    obstacle = bench.state / "places.json.new"

    async def work() -> None:
        async with bench.running():
            await bench.has("one")
            await eventually(lambda: not obstacle.exists())
            obstacle.mkdir()
            bench.append("two\n")
            await eventually(lambda: "nothing is sent until they can" in caplog.text)
            bench.append("three\n")
            bench.append("new file\n", "b.log")
            obstacle.rmdir()
            await eventually(lambda: len(bench.sender.messages) == 4)

    run(work())
    assert caplog.text.count("nothing is sent") == 1
    assert "can be written again" in caplog.text


def test_what_happens_to_files_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sluice.collector")
    bench = Bench(tmp_path)
    bench.append("one\n")
    run(bench.once())
    bench.log.write_text("1\n")
    run(bench.once())
    assert "was truncated or written anew" in caplog.text
