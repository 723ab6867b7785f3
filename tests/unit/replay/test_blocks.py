"""This module tests how a recording is read for a replay, and what is said of a damaged one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import ConfigError, StoreError
from sluice.replay.blocks import By, open_recording
from sluice.replay.manifest import read_manifest
from sluice.replay.places import open_place
from sluice.replay.recording import Limits
from tests.unit.replay.replay_kit import START_MS, message, piece, queue, record, recording


def replayed(directory: Path, by: By = "born") -> list[tuple[int, bytes]]:
    """Time since the start and body of all messages, as a replay gets them."""
    found = open_recording(open_place("DIR", str(directory)), ())
    return [
        (int(time) - START_MS, row.body)
        for window in found.windows(by)
        for time, row in zip(window.times_ms, window.rows, strict=True)
    ]


def test_queues_are_merged_by_time(tmp_path: Path) -> None:
    recording(tmp_path, {0: [0, 10, 20], 1: [5, 10, 11], 2: []})
    assert replayed(tmp_path) == [
        (0, b"0/0"),
        (5, b"1/0"),
        (10, b"0/1"),
        (10, b"1/1"),
        (11, b"1/2"),
        (20, b"0/2"),
    ]


def test_the_order_of_a_queue_beats_its_clocks(tmp_path: Path) -> None:
    recording(tmp_path, {0: [50, 0, 60], 1: [10]})
    assert replayed(tmp_path) == [(10, b"1/0"), (50, b"0/0"), (50, b"0/1"), (60, b"0/2")]


def test_by_the_time_of_the_store(tmp_path: Path) -> None:
    first, second = queue(0), queue(1)
    pieces = [
        piece(first, 0, [message(first, b"a", 900)], START_MS),
        piece(second, 5, [message(second, b"b", 1)], START_MS),
    ]
    record(tmp_path, pieces)
    assert replayed(tmp_path, "store") == [(0, b"a"), (5, b"b")]
    assert replayed(tmp_path, "born") == [(1, b"b"), (900, b"a")]
    found = open_recording(open_place("DIR", str(tmp_path)), ())
    assert found.span_ms("store") == (START_MS, START_MS + 5)
    assert found.span_ms("born") == (START_MS + 1, START_MS + 900)


def test_many_files_and_row_groups_are_one_stream(tmp_path: Path) -> None:
    first, second = queue(0), queue(1)
    pieces = []
    for start in range(0, 60, 20):
        for source, shift in ((first, 0), (second, 5)):
            messages = [
                message(source, b"%d/%d" % (source.queue_id, index), 10 * index + shift)
                for index in range(start, start + 20)
            ]
            pieces.append(piece(source, start, messages))
    record(tmp_path, pieces, Limits(file_bytes=2000))
    manifest = read_manifest(open_place("DIR", str(tmp_path)))
    assert manifest is not None
    assert len(manifest.files) >= 3
    expected = [(10 * i + 5 * q, b"%d/%d" % (q, i)) for i in range(60) for q in (0, 1)]
    assert replayed(tmp_path) == expected


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.integers(0, 3), st.lists(st.integers(0, 50), min_size=1, max_size=12), min_size=1
    )
)
def test_any_recording_is_in_order_and_whole(
    tmp_path_factory: pytest.TempPathFactory, times: dict[int, list[int]]
) -> None:
    directory = tmp_path_factory.mktemp("recording")
    recording(directory, times)
    found = replayed(directory)
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    for number, born in times.items():
        own = [body for _, body in found if body.startswith(b"%d/" % number)]
        assert own == [b"%d/%d" % (number, index) for index in range(len(born))]


def test_some_topics(tmp_path: Path) -> None:
    a, b = queue(0, "a"), queue(0, "b")
    record(tmp_path, [piece(a, 0, [message(a, b"1")]), piece(b, 0, [message(b, b"2")])])
    place = open_place("DIR", str(tmp_path))
    found = open_recording(place, ["b"])
    assert (found.topics, found.rows) == (["b"], 1)
    with pytest.raises(ConfigError, match="--topic c: the recording has a, b"):
        open_recording(place, ["c"])


def test_what_brokers_wrote_is_not_sent_again(tmp_path: Path) -> None:
    source = queue()
    names = ("UNIQ_KEY", "WAIT", "REAL_TOPIC", "REAL_QID", "DELAY", "TIMER_OUT_MS", "PGROUP")
    own = dict.fromkeys((*names, "TRAN_MSG", "CLUSTER", "MSG_REGION"), "x")
    given = [
        message(source, b"a", 0, **own),
        message(source, b"b", 0, KEYS="k", TAGS="t", color="red", __KAFKA_RECORD="1", **own),
        message(source, b"c"),
        message(source, b"d", __SHARDINGKEY="s", size="größe"),
    ]
    record(tmp_path, [piece(source, 0, given)])
    found = open_recording(open_place("DIR", str(tmp_path)), ())
    (window,) = found.windows("born")
    assert [row.size for row in window.rows][2:] == [1, 1 + 13 + 1 + 2 + 4 + 7 + 2]
    assert [(row.key, row.tags, dict(row.properties)) for row in window.rows] == [
        (None, None, {}),
        ("k", "t", {"color": "red", "__KAFKA_RECORD": "1"}),
        (None, None, {}),
        (None, None, {"__SHARDINGKEY": "s", "size": "größe"}),
    ]


# --------------------------------------------------------------------------------- what is damaged


def test_no_recording(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreError, match="holds no recording"):
            open_recording(open_place("DIR", str(directory)), ())


def test_an_empty_recording(tmp_path: Path) -> None:
    record(tmp_path, [])
    with pytest.raises(StoreError, match="the recording is empty"):
        open_recording(open_place("DIR", str(tmp_path)), ())


def change(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that says something else, with a checksum that fits."""
    table = json.loads((directory / "manifest.json").read_bytes())
    table.pop("check")
    edit(table)
    table["check"] = zlib.crc32(orjson.dumps(table))
    (directory / "manifest.json").write_bytes(orjson.dumps(table))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "foreign": (lambda table: table.update(format="delta"), "is not that of a recording"),
    "newer": (lambda table: table.update(version=2), "version 2; this Sluice reads version 1"),
    "no queues": (lambda table: table.pop("queues"), "damaged"),
    "a queue twice": (lambda t: t["queues"].append(t["queues"][0]), "twice"),
    "a path": (lambda t: t["files"][0].update(name="../x"), "a file is called"),
    "a hidden file": (lambda t: t["files"][0].update(name=".x"), "a file is called"),
    "rows": (lambda t: t["files"][0].update(rows="many"), "no number"),
    "a number below zero": (lambda t: t["queues"][0].update(first=-1), "no number"),
    "offsets": (lambda t: t["files"][0]["stretches"][0].__setitem__(3, 99), "do not follow"),
    "a queue that is not": (lambda t: t["files"][0]["stretches"][0].__setitem__(0, 9), "damaged"),
    "half a stretch": (lambda t: t["files"][0]["stretches"][0].pop(), "of 7 numbers"),
    "a name": (lambda t: t["queues"][0].update(topic=""), "no name"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_that_is_not_right(tmp_path: Path, name: str) -> None:
    recording(tmp_path, {0: [1, 2]})
    edit, problem = EDITS[name]
    change(tmp_path, edit)
    with pytest.raises(StoreError, match=problem):
        open_recording(open_place("DIR", str(tmp_path)), ())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff"])
def test_a_manifest_that_is_no_manifest(tmp_path: Path, data: bytes) -> None:
    recording(tmp_path, {0: [1, 2]})
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(StoreError, match=r"manifest\.json is"):
        open_recording(open_place("DIR", str(tmp_path)), ())


def test_a_changed_digit_is_found(tmp_path: Path) -> None:
    recording(tmp_path, {0: [1, 2]})
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"first":0', b'"first":1'))
    with pytest.raises(StoreError, match="checksum"):
        open_recording(open_place("DIR", str(tmp_path)), ())


def test_files_that_are_missing_cut_or_changed(tmp_path: Path) -> None:
    recording(tmp_path, {0: list(range(100))})
    path = tmp_path / "part-000001.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(StoreError, match="bytes instead of"):
        replayed(tmp_path)
    for at in range(40, len(data) - 8, 41):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            found = replayed(tmp_path)
        except StoreError:
            continue
        # Only what is no message: statistics, names of columns that a replay does not ask for.
        assert [body for _, body in found] == [b"0/%d" % index for index in range(100)]
    path.unlink()
    with pytest.raises(StoreError, match="is missing"):
        replayed(tmp_path)
