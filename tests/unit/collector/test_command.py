"""This module tests `sluice collect` as a person runs it, beside a broker."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import PullConsumer, ReceivedMessage, cli
from sluice.collector import command
from sluice.collector.places import PlaceBook
from tests.unit.client.admin_kit import Done, Site, sluice


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    running = Site()
    running.start()
    yield running
    running.stop()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "web.log"
    path.write_text("one\ntwo\nthree\n")
    return path


def collect(site: Site, tmp_path: Path, *words: str) -> Done:
    state = str(tmp_path / "state")
    return sluice("collect", "--state", state, "-n", site.nameserver.address, *words)


def test_once(site: Site, tmp_path: Path, log: Path) -> None:
    done = collect(site, tmp_path, "--once", "--topic", "collected", "--tag", "web", str(log))
    assert done == Done(0, "sent 3 lines (11 bytes) of 1 files\n", "")
    address = site.nameserver.address
    found: list[ReceivedMessage] = []
    with PullConsumer(address, group="reader", topics="collected", start_at="first") as consumer:
        while len(found) < 3:
            found += consumer.poll(timeout_seconds=60)
    assert [(bytes(message.body), message.tags) for message in found] == [
        (b"one", "web"),
        (b"two", "web"),
        (b"three", "web"),
    ]
    assert [message.properties["offset"] for message in found] == ["0", "4", "8"]
    assert {message.queue_id for message in found} == {found[0].queue_id}
    again = collect(site, tmp_path, "--once", "--topic", "collected", str(log))
    assert again.out == "sent 0 lines (0 bytes) of 1 files\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_json", [False, True])
def test_it_follows_and_says_so_until_a_signal_comes(
    site: Site, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, is_json: bool
) -> None:
    monkeypatch.setattr(command, "_PROGRESS_SECONDS", 0.01)
    shown, said = Terminal(), io.StringIO()
    ended = threading.Event()

    def end() -> None:
        out = said if is_json else shown
        while not ended.wait(0.01):
            if '"lines":3,' in out.getvalue() or "1 files, 3 lines sent" in out.getvalue():
                signal.raise_signal(signal.SIGTERM)
                return

    ender = threading.Thread(target=end)
    ender.start()
    words = ["collect", str(log), "--state", str(tmp_path / "state"), "--topic", "followed"]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(shown):
            more = ["--json"] if is_json else []
            status = cli.main([*words, "-n", site.nameserver.address, *more])
    finally:
        ended.set()
        ender.join()
    assert status == 0
    if is_json:
        first, last = said.getvalue().splitlines()[0], said.getvalue().splitlines()[-1]
        assert json.loads(first)["files"] in (0, 1)
        assert json.loads(last)["lines"] == 3
    else:
        assert said.getvalue() == "sent 3 lines (11 bytes) of 1 files\n"
        assert shown.getvalue().endswith("\r\x1b[K")  # the line of progress is gone


def test_json(site: Site, tmp_path: Path, log: Path) -> None:
    done = collect(site, tmp_path, "--once", "--json", str(log))
    result = json.loads(done.out.splitlines()[-1])
    seconds = result.pop("seconds")
    assert seconds >= 0
    assert result == {"files": 1, "lines": 3, "sent_bytes": 11, "refused": 0, "behind_bytes": 0}


def test_a_line_that_the_broker_refuses_is_told(site: Site, tmp_path: Path, log: Path) -> None:
    # More properties than a message can have.
    done = collect(site, tmp_path, "--once", "-p", f"large={'x' * 33_000}", str(log))
    assert done.status == 1
    assert done.out == "sent 0 lines (0 bytes) of 1 files, 3 refused\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--once", "LOGS/nothing.log"], "nothing.log: no such file; write a pattern"),
        (["LOGS/nothing.log"], "nothing.log: no such file; write a pattern"),
        (["--once", "LOGS/*.none"], "*.none: no file matches; is the path right?"),
        (["LOGS"], "is a directory; name its files"),
        (["/dev/null"], "/dev/null is no plain file"),
        (["LOGS/web.log", "--topic", "a b"], "--topic a b: letters, digits"),
        (["LOGS/web.log", "--topic", "{nam}"], "{nam} is not known; there are {name}"),
        (["LOGS/web.log", "--multiline-start", "("], "--multiline-start (: missing )"),
        (["LOGS/web.log", "-p", "x"], "-p x: write NAME=VALUE"),
        (["LOGS/web.log", "-p", "TAGS=x"], "property TAGS is RocketMQ's own"),
        (["LOGS/web.log", "--max-line-bytes", "4"], "--max-line-bytes 4: allowed are 16 to"),
        (["LOGS/web.log", "--poll-ms", "1"], "--poll-ms 1: allowed are 10 to"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    site: Site, tmp_path: Path, log: Path, words: list[str], message: str
) -> None:
    done = collect(site, tmp_path, *(word.replace("LOGS", str(log.parent)) for word in words))
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("sluice: ")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_second_collector_on_the_same_state(site: Site, tmp_path: Path, log: Path) -> None:
    book = PlaceBook.open(str(tmp_path / "state"))
    done = collect(site, tmp_path, "--once", str(log))
    book.release()
    assert done.status == 2
    assert f"another collector (process {os.getpid()}) uses the state directory" in done.err


def test_no_nameserver(tmp_path: Path, log: Path) -> None:
    words = ["--state", str(tmp_path / "state"), "-n", "127.0.0.1:1", "--give-up-seconds", "0.1"]
    done = sluice("collect", "--once", *words, str(log))
    assert done.status == 2
    assert "sluice: gave up after 0 s without a broker: " in done.err
    assert "127.0.0.1:1" in done.err


def test_links_and_packed_files_are_left_out_of_patterns(
    site: Site, tmp_path: Path, log: Path
) -> None:
    (tmp_path / "web.log.1.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "link.log").symlink_to(log)
    pattern = str(tmp_path / "logs" / "*")
    assert "no file matches" in collect(site, tmp_path, "--once", pattern).err
    done = collect(site, tmp_path, "--once", "--follow-links", pattern)
    assert done.out == "sent 3 lines (11 bytes) of 1 files\n"
    done = collect(site, tmp_path, "--once", str(tmp_path / "web.log*"))
    assert done.out == "sent 0 lines (0 bytes) of 1 files\n"
    # A link that is named is followed.
    named = str(tmp_path / "logs" / "link.log")
    assert collect(site, tmp_path, "--once", named).status == 0


def test_the_state_is_never_collected(site: Site, tmp_path: Path, log: Path) -> None:
    done = collect(site, tmp_path, "--once", str(tmp_path / "**"))
    assert done.out == "sent 3 lines (11 bytes) of 1 files\n"
