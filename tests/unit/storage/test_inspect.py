"""`sluice inspect`: what it shows is true, it changes nothing, and it finds damage."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.model import Message, Placed, message_id
from sluice.protocol import records
from sluice.storage import inspect as command
from sluice.storage.files import RealFile, RealFiles, lock_holder
from sluice.storage.inspect_text import hex_dump, human_bytes, local_time, printable, safe
from sluice.storage.inspection import inspect_store
from tests.unit.storage.store_kit import SEGMENT_BYTES, flip, read_all, real_store, tree_digest

TOPIC = "orders"
COUNT = 60


def message(number: int, queues: int = 3) -> Message:
    properties = records.format_properties({"KEYS": f"k{number}", "TAGS": f"tag{number % 2}"})
    return Message(TOPIC, number % queues, b"body %04d" % number * 20, properties)


def fill(directory: Path, **changes: Any) -> list[Placed]:
    with real_store(directory, **changes) as store:
        store.change([("topic", TOPIC, {"readQueueNums": 3, "writeQueueNums": 3, "perm": 6})])
        store.change([("group", "billing", {"consumeEnable": True, "retryMaxTimes": 16})])
        placed = [store.put(message(number)) for number in range(COUNT)]
        store.commit_offset("billing", TOPIC, 1, 5)
    return placed


@pytest.fixture
def placed(tmp_path: Path) -> list[Placed]:
    """Where the messages of the store below are."""
    return fill(tmp_path / "store")


@pytest.fixture
def store(tmp_path: Path, placed: list[Placed]) -> Path:
    return tmp_path / "store"


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    status = command.main([str(word) for word in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def values(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    _, out, _ = run(capsys, *argv, "--json")
    found: dict[str, Any] = json.loads(out)
    return found


def log_path(directory: Path, position: int) -> Path:
    return directory / "commitlog" / f"{position - position % SEGMENT_BYTES:020d}"


def damage(directory: Path, placed: Placed) -> Path:
    """Flip a bit in the middle of an entry."""
    path = log_path(directory, placed.position)
    flip(path, placed.position % SEGMENT_BYTES + placed.size // 2)
    return path


# ------------------------------------------------------------------------------------ a whole store


@pytest.mark.parametrize("options", [[], ["--verify"], ["--json"], ["--topic", TOPIC]])
def test_nothing_is_changed_and_the_exit_code_is_0(
    store: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    before = tree_digest(store)
    status, out, err = run(capsys, store, *options)
    assert (status, err) == (0, "")
    assert out
    assert tree_digest(store) == before


@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_queues_offsets_and_settings_are_those_of_the_store(
    store: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    found = values(capsys, store, *options)
    queues = {(q["topic"], q["queue_id"]): q for q in found["queues"]}
    for queue_id in range(3):
        queue = queues[TOPIC, queue_id]
        assert (queue["min_offset"], queue["max_offset"]) == (0, COUNT // 3)
        assert (queue["entry_count"], queue["kind"]) == (COUNT // 3, "simple")
    assert found["topics"][TOPIC]["readQueueNums"] == 3
    assert found["groups"]["billing"]["retryMaxTimes"] == 16
    assert found["committed"] == [
        {"group": "billing", "topic": TOPIC, "queue_id": 1, "offset": 5, "lag": COUNT // 3 - 5}
    ]
    assert found["whole"] is True
    assert found["first_bad"] is None
    assert found["segment_bytes"] == SEGMENT_BYTES
    assert sum(index["entry_count"] for index in found["index"]) == 2 * COUNT


def test_segments_tell_what_they_hold(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, store, "--verify")
    segments = found["segments"]
    names = sorted(path.name for path in (store / "commitlog").iterdir())
    assert [segment["name"] for segment in segments] == names
    used = [segment for segment in segments if segment["state"] in ("closed", "active")]
    assert [segment["state"] for segment in used] == ["closed"] * (len(used) - 1) + ["active"]
    assert sum(segment["entry_count"] for segment in used) == found["scanned_entry_count"]
    times = [t for segment in used for t in (segment["first_ms"], segment["last_ms"])]
    assert times == sorted(times)
    assert found["log_end"] == used[-1]["start"] + used[-1]["used_bytes"]
    assert found["durable"] == found["log_end"]


def test_quick_reads_only_what_follows_the_snapshot(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = values(capsys, store)
    assert found["scanned_from"] == found["snapshot"]["log_offset"] == found["log_end"]
    assert found["scanned_entry_count"] == 0
    # Files that were not read are at least known by their first entry.
    closed = [segment for segment in found["segments"] if segment["state"] == "closed"]
    assert closed
    assert all(segment["first_ms"] and segment["last_ms"] for segment in closed)


@pytest.mark.parametrize("lost", ["sluice", "config", "consumequeue", "index", "checkpoint"])
def test_it_needs_none_of_the_derived_files(
    store: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    whole = values(capsys, store, "--verify")
    path = store / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = values(capsys, store, "--verify")
    assert found["whole"] is True
    for name in ("queues", "topics", "groups", "committed", "log_end"):
        assert found[name] == whole[name], name


def test_the_text_has_tables_and_no_colour(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, store, "--verify")
    assert "\x1b" not in out
    assert re.search(r"^verdict +whole$", out, re.MULTILINE)
    assert re.search(r"^  orders +1 +simple +0 +20 +20$", out, re.MULTILINE)
    assert re.search(r"^  billing +orders +1 +5 +15$", out, re.MULTILINE)
    for title in ("commitlog", "queues", "topic settings", "committed offsets", "disk use"):
        assert f"\n{title}\n" in out


def test_one_topic(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, store, "--topic", TOPIC)
    assert {queue["topic"] for queue in found["queues"]} == {TOPIC}
    status, out, err = run(capsys, store, "--topic", "nobody")
    assert (status, out) == (2, "")
    assert "no topic 'nobody'" in err


def test_a_batch_queue_counts_offsets_not_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with real_store(tmp_path) as store:
        store.change([("topic", "b", {"attributes": {"queue.type": "BatchCQ"}})])
        for count in (3, 1, 40_000):
            properties = b"INNER_NUM\x01%d\x02" % count
            flags = records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP
            store.put(Message("b", 0, b"x", properties, sys_flag=flags, count=count))
    for options in ([], ["--verify"]):
        found = values(capsys, tmp_path, *options)
        (queue,) = [queue for queue in found["queues"] if queue["topic"] == "b"]
        assert (queue["kind"], queue["max_offset"], queue["entry_count"]) == ("batch", 40_004, 3)
        assert found["whole"] is True


# ------------------------------------------------------------------------- a store that is not idle


def test_a_store_in_use_is_shown_and_keeps_its_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with real_store(tmp_path) as store:
        store.put(message(0))
        status, out, _ = run(capsys, tmp_path, "--verify")
        assert status == 0
        assert f"in use by process {os.getpid()}" in out
        # The lock is still ours: another process must be refused.
        refused = subprocess.run(
            [sys.executable, "-c", _OPEN, str(tmp_path), "0"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 1
        assert "another process uses this store" in refused.stderr
        store.put(message(1))
    assert values(capsys, tmp_path)["holder_pid"] is None


_OPEN = f"""
import sys
from sluice.config import StoreConfig
from sluice.model import Message
from sluice.storage.blocking import BlockingStore
config = StoreConfig(directory=sys.argv[1], segment_bytes={SEGMENT_BYTES}, queue_file_units=16,
    key_index_slots=16, key_index_entries=64)
store = BlockingStore.open(config)
for number in range(int(sys.argv[2])):
    store.put(Message("orders", 0, b"%d" % number))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(tmp_path), "30"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_a_store_of_another_process_and_after_its_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other_process: subprocess.Popen[str]
) -> None:
    found = values(capsys, tmp_path, "--verify")
    assert found["holder_pid"] == other_process.pid == lock_holder(f"{tmp_path}/lock")
    assert found["whole"] is True
    status, _, err = run(capsys, tmp_path, "--salvage", tmp_path / "out")
    assert (status, "in use by process" in err) == (2, True)
    other_process.kill()
    other_process.wait()
    status, out, _ = run(capsys, tmp_path)
    assert status == 0
    assert "abort is there" in out
    assert re.search(r"^  orders +0 +simple +0 +30 +30$", out, re.MULTILINE)


def test_a_torn_tail_is_no_damage(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = values(capsys, store)["log_end"]
    path = log_path(store, end)
    torn = bytes(path.read_bytes()[:150])  # the beginning of some entry, but not at its place
    with path.open("r+b") as file:
        file.seek(end % SEGMENT_BYTES)
        file.write(torn)
    found = values(capsys, store)
    assert found["whole"] is True
    assert found["log_end"] == end
    assert found["first_bad"]["kind"] == "torn tail"
    assert (found["first_bad"]["path"], found["first_bad"]["offset"]) == (
        str(path),
        end % SEGMENT_BYTES,
    )
    status, out, _ = run(capsys, store)
    assert status == 0
    assert "the next start takes it off" in out
    with real_store(store) as opened:
        assert len(read_all(lambda offset: opened.read(TOPIC, 0, offset))) == COUNT // 3
    (cut,) = values(capsys, store)["cut"]
    assert cut["byte_count"] == len(torn.rstrip(b"\0"))


# ------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("number", [0, 17, COUNT - 1])
def test_the_first_bad_byte_and_what_follows_it(
    store: Path, placed: list[Placed], capsys: pytest.CaptureFixture[str], number: int
) -> None:
    path = damage(store, placed[number])
    before = tree_digest(store)
    status, out, _ = run(capsys, store, "--verify")
    assert status == 1
    found = values(capsys, store, "--verify")
    assert tree_digest(store) == before
    bad = found["first_bad"]
    at = placed[number].position % SEGMENT_BYTES
    assert (bad["kind"], bad["path"], bad["offset"]) == ("damage", str(path), at)
    assert bad["reason"] == "the whole-message checksum does not match"
    # All messages behind it, and the entry with the committed offset.
    assert bad["intact_after_count"] == COUNT - number
    assert bad["gap_bytes"] >= placed[number].size
    assert f"{path}: at byte {at}: the whole-message checksum does not match" in out
    assert "--salvage" in out


def test_a_quick_look_finds_a_file_that_does_not_begin_with_an_entry(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_path(store, SEGMENT_BYTES)
    flip(path, 5)
    status, out, _ = run(capsys, store)
    assert status == 1
    assert f"{path}: at byte 0" in out


def test_zeros_in_the_middle_are_damage(
    store: Path, placed: list[Placed], capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_path(store, placed[20].position)
    with path.open("r+b") as file:
        file.seek(placed[20].position % SEGMENT_BYTES)
        file.write(bytes(placed[20].size))
    bad = values(capsys, store, "--verify")["first_bad"]
    assert bad["reason"] == "zeros where entries must be"
    assert bad["intact_after_count"] == COUNT - 20
    assert bad["gap_bytes"] == placed[20].size


def test_damage_without_any_mark_is_damage_because_entries_follow(
    store: Path, placed: list[Placed], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, placed[-2])
    shutil.rmtree(store / "sluice")
    status, out, _ = run(capsys, store)
    assert status == 1
    assert "entries follow it" in out


def test_a_missing_a_foreign_and_a_short_file(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_path(store, SEGMENT_BYTES).unlink()
    (store / "commitlog" / "notes.txt").write_text("mine")
    with log_path(store, 2 * SEGMENT_BYTES).open("r+b") as file:
        file.truncate(1000)
    status, out, _ = run(capsys, store)
    assert status == 1
    assert f"{log_path(store, SEGMENT_BYTES)}: at byte 0: the file is missing" in out
    assert f"{store}/commitlog/notes.txt: at byte 0: not a log file's name" in out
    assert f"{log_path(store, 2 * SEGMENT_BYTES)}: at byte 1000: 1000 bytes long" in out


def test_no_log_files_but_a_mark(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (store / "commitlog").iterdir():
        path.unlink()
    status, out, _ = run(capsys, store)
    assert status == 1
    assert "no log files, but the log was durable up to position" in out


@pytest.mark.parametrize(("at", "what"), [(0, "points to position"), (19, "has the tags code")])
def test_verify_holds_every_queue_unit_against_the_log(
    store: Path, capsys: pytest.CaptureFixture[str], at: int, what: str
) -> None:
    path = store / "consumequeue" / TOPIC / "1" / f"{0:020d}"
    flip(path, 7 * 20 + at)
    assert run(capsys, store)[0] == 0, "a quick look does not read queue files"
    status, out, _ = run(capsys, store, "--verify")
    assert status == 1
    assert f"{path}: at byte 140: {what}" in out
    assert f"{path}: at byte 0: the queue file does not match its checksum" in out
    # Without a snapshot there is no checksum, but the log is still there to compare with.
    shutil.rmtree(store / "sluice")
    _, out, _ = run(capsys, store, "--verify")
    assert f"{path}: at byte 140: {what}" in out


def test_a_unit_for_which_there_is_no_entry(
    store: Path, placed: list[Placed], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, placed[30])  # queue 0, offset 10
    _, out, _ = run(capsys, store, "--verify")
    path = store / "consumequeue" / TOPIC / "0" / f"{0:020d}"
    where = f"points to position {placed[30].position}, where the log has no such entry"
    assert f"{path}: at byte 200: {where}" in out


def test_damaged_settings_are_named(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "config" / "topics.json"
    path.write_bytes(path.read_bytes().replace(b'"perm": 6', b'"perm": 4'))
    status, out, _ = run(capsys, store)
    assert status == 1
    assert f"{path}: at byte 0: the file is damaged" in out
    found = values(capsys, store, "--verify")
    assert found["topics"][TOPIC]["perm"] == 6, "taken from the log"


def test_sectors_that_cannot_be_read(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(store)
    fill(store, segment_bytes=4 * SEGMENT_BYTES)
    bad_path = str(store / "commitlog" / f"{0:020d}")
    pread = RealFile.pread

    def failing(self: RealFile, size: int, offset: int) -> bytes:
        if self.path == bad_path and offset < 8192 and offset + size > 4096:
            raise OSError(5, "Input/output error", bad_path)
        return pread(self, size, offset)

    monkeypatch.setattr(RealFile, "pread", failing)
    status, out, _ = run(capsys, store, "--verify")
    assert status == 1
    assert f"{bad_path}: at byte 4096: 4096 bytes: Input/output error" in out
    found = values(capsys, store, "--verify")
    assert found["first_bad"]["intact_after_count"] > 0
    assert 4096 <= found["first_bad"]["gap_bytes"] < 3 * 4096


# ---------------------------------------------------------------------------------------- a message


def test_one_message_by_position_and_by_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with real_store(tmp_path) as store:
        store.put(message(0))
        placed = store.put(message(1))
        name = store.message_id(placed)
    status, out, _ = run(capsys, tmp_path, "--message", str(placed.position))
    assert status == 0
    assert out == run(capsys, tmp_path, "--message", name)[1]
    assert f"queue      {TOPIC}/1 offset 0" in out
    assert f"message    {name}" in out
    assert "tags       tag1" in out
    assert "keys       k1" in out
    assert "  body 0001body 0001" in out
    found = values(capsys, tmp_path, "--message", str(placed.position))
    assert found["body_text"] == "body 0001" * 20
    assert found["message_id"] == message_id(records.decode(_entry(tmp_path, placed)).store_host,
                                             placed.position)  # fmt: skip
    assert found["properties"]["KEYS"] == "k1"


def _entry(directory: Path, placed: Placed) -> bytes:
    data = log_path(directory, placed.position).read_bytes()
    at = placed.position % SEGMENT_BYTES
    return data[at : at + placed.size]


def test_bodies_that_a_terminal_would_obey_are_dumped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with real_store(tmp_path) as store:
        evil = store.put(Message("t", 0, b"\x1b[2J" + bytes(range(256)) * 3, b"a\x01\x1b[1m\x02"))
        packed = store.put(Message("t", 0, zlib.compress(b"hello " * 50), sys_flag=1))
    _, out, _ = run(capsys, tmp_path, "--message", str(evil.position))
    assert "\x1b" not in out
    assert r"a = \x1b[1m" in out
    assert "00000000  1b 5b 32 4a 00 01 02" in out
    assert "... and 260 more bytes" in out
    _, out, _ = run(capsys, tmp_path, "--message", str(packed.position))
    assert "  hello hello" in out
    assert "zlib, 300 bytes inflated" in out


def test_a_damaged_message_is_shown_as_such(
    store: Path, placed: list[Placed], capsys: pytest.CaptureFixture[str]
) -> None:
    path = damage(store, placed[3])
    position = str(placed[3].position)
    status, out, _ = run(capsys, store, "--message", position)
    assert status == 1
    at = placed[3].position % SEGMENT_BYTES
    assert out.startswith(f"{path}: at byte {at}: the whole-message checksum does not match")
    assert values(capsys, store, "--message", position)["damaged"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1", "no message starts at byte 1"),
        ("99999999", "position 99999999 is not in the log"),
        ("7F000001ZZ", "neither a position in the log nor a message id"),
        ("Z" * 32, "neither a position in the log nor a message id"),
    ],
)
def test_no_such_message(
    store: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    status, out, err = run(capsys, store, "--message", text)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


# -------------------------------------------------------------------------------------- not a store


def test_what_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for path, complaint in [
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path / "file", "not a directory"),
        (tmp_path, "not a store: there is no commitlog/ in it"),
    ]:
        for option in ([], ["--message", "0"], ["--salvage", f"{tmp_path}/out"]):
            status, out, err = run(capsys, path, *option)
            assert (status, out) == (2, "")
            assert complaint in err
            assert err.count("\n") == 1
    with pytest.raises(SystemExit) as stopped:
        command.main([])
    assert stopped.value.code == 2


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_store(tmp_path):
        pass
    status, out, _ = run(capsys, tmp_path, "--verify")
    assert status == 0
    assert "log       0 .. 0" in out


# ------------------------------------------------------------------------------------- small things


def test_small_texts() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 1 << 30: "1.0 GiB", 3 << 60: "3072.0 PiB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
    assert local_time(None) == "-"
    assert local_time(-5) == "-5"
    assert local_time(1 << 62) == str(1 << 62)
    assert re.fullmatch(r"2026-11-\d\d \d\d:\d\d:\d\d\.018", local_time(1_794_772_393_018))
    assert safe("naïve 中文") == "naïve 中文"
    assert safe("a\x1bb") == r"a\x1bb"
    assert printable(b"zwei\nZeilen") == "zwei\nZeilen"
    assert printable(b"\x00") is None
    assert printable(b"\xff") is None
    assert hex_dump(b"AB\n") == ["  00000000  41 42 0a" + " " * 39 + "  AB."]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colour_and_a_bar_that_goes_away(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert command.main([str(store), "--verify"]) == 0
    assert "\x1b[1mqueues\x1b[0m" in out.getvalue()
    assert "100 %" in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")
    monkeypatch.setenv("NO_COLOR", "1")
    out.truncate(0)
    assert command.main([str(store)]) == 0
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("verify", [False, True])
def test_it_finds_no_damage_in_a_store_that_is_being_written_and_deleted(
    tmp_path: Path, verify: bool
) -> None:
    looks = 0
    with real_store(tmp_path, checkpoint_interval_ms=1, flush="async") as store:
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                store.put(message(number))
                if number % 50 == 0:
                    with store._lock:
                        written = store.store.log.written
                        if written > 6 * SEGMENT_BYTES and not store.store.housekeeping._deleting:
                            keep = written - written % SEGMENT_BYTES - 3 * SEGMENT_BYTES
                            store.store.housekeeping.delete_before(keep)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(40):
                found = inspect_store(
                    RealFiles(), str(tmp_path), verify=verify, holder_pid=os.getpid()
                )
                assert found.problems == []
                looks += 1
        finally:
            stop.set()
            writer.join()
    assert looks == 40
    assert inspect_store(RealFiles(), str(tmp_path), verify=True).problems == []
