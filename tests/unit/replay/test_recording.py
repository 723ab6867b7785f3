"""This module tests how messages become files: all of them, each once, whole or not at all."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from sluice.errors import ConfigError, DiskFull, SluiceError, StoreError, StoreInUse
from sluice.model import Message
from sluice.protocol import records
from sluice.protocol.message_batches import join_batch
from sluice.replay.fetching import Found, Lost, Piece
from sluice.replay.manifest import Manifest, read_manifest, sweep
from sluice.replay.places import Place, open_place
from sluice.replay.recording import Limits, Recorder
from tests.unit.replay.replay_kit import (
    NOW_MS,
    START_MS,
    FullDisk,
    GivenFetcher,
    message,
    names,
    piece,
    queue,
    record,
)

SOURCE = queue()


def rows(directory: Path) -> list[dict[str, Any]]:
    """All rows of the files that the manifest names."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    return [
        row
        for file in manifest["files"]
        for row in parquet.read_table(directory / file["name"]).to_pylist()
    ]


def bodies(directory: Path) -> list[bytes]:
    return [row["body"] for row in rows(directory)]


def some(count: int, start: int = 0) -> list[Message]:
    return [message(SOURCE, f"body {start + index}".encode()) for index in range(count)]


def test_all_of_a_message(tmp_path: Path) -> None:
    given = message(SOURCE, b"\x00body", 1234, KEYS="k1 k2", TAGS="A", UNIQ_KEY="U", color="größe")
    record(tmp_path, [piece(SOURCE, 7, [replace(given, flag=5)], START_MS + 2000)])
    (row,) = rows(tmp_path)
    assert row.pop("born_time").timestamp() * 1000 == START_MS + 1234
    assert row.pop("store_time").timestamp() * 1000 == START_MS + 2007
    assert dict(row.pop("properties")) == {
        "KEYS": "k1 k2",
        "TAGS": "A",
        "UNIQ_KEY": "U",
        "color": "größe",
    }
    assert row == {
        "topic": "orders",
        "broker": "broker-a",
        "queue": 0,
        "offset": 7,
        "kind": "normal",
        "key": "k1 k2",
        "tags": "A",
        "flag": 5,
        "body": b"\x00body",
    }


def test_kinds_and_bodies_of_every_form(tmp_path: Path) -> None:
    packed = message(SOURCE, zlib.compress(b"unpacked" * 99), REAL_TOPIC="orders")
    inner = join_batch([(0, b"first", b"a\x01b\x02"), (0, b"second", b"__SHARDINGKEY\x01s\x02")])
    batch = Message(
        "orders",
        0,
        inner,
        b"INNER_NUM\x012\x02INNER_BASE\x015\x02",
        sys_flag=records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP,
        born_ms=START_MS,
        count=2,
    )
    given = [
        message(SOURCE, b"plain"),
        replace(message(SOURCE, b"committed"), sys_flag=records.SYS_TX_COMMIT),
        message(SOURCE, b"late", TIMER_OUT_MS="5"),
        message(SOURCE, b"ordered", __SHARDINGKEY="s"),
        replace(packed, sys_flag=records.SYS_COMPRESSED),
        batch,
    ]
    record(tmp_path, [piece(SOURCE, 0, given[:4]), piece(SOURCE, 4, given[4:5])])
    record(tmp_path, [piece(SOURCE, 5, [batch])])
    assert [(row["offset"], row["kind"], row["body"]) for row in rows(tmp_path)] == [
        (0, "normal", b"plain"),
        (1, "transaction", b"committed"),
        (2, "delay", b"late"),
        (3, "fifo", b"ordered"),
        (4, "delay", b"unpacked" * 99),
        (5, "normal", b"first"),
        (6, "fifo", b"second"),
    ]


def test_messages_without_properties_and_with_odd_ones(tmp_path: Path) -> None:
    given = [
        message(SOURCE, b"none"),
        Message("orders", 0, b"odd", b"a\x01\x02\x01b\x02c\x02d\x01=\x02", born_ms=START_MS),
        Message("orders", 0, b"bytes", b"e\x01\xff\x02f\x01g", born_ms=START_MS),
    ]
    record(tmp_path, [piece(SOURCE, 0, given)])
    found = [dict(row["properties"]) for row in rows(tmp_path)]
    assert found == [{}, {"d": "="}, {"e": "�", "f": "g"}]


def test_what_was_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    good = piece(SOURCE, 0, some(3))
    data = bytearray(good.chunk.data)
    data[100] ^= 1
    bad = good._replace(chunk=good.chunk._replace(data=bytes(data)))
    before = piece(queue(1), 0, [message(queue(1), b"good")])
    with pytest.raises(SluiceError, match="damaged"):
        record(tmp_path, [before, bad])
    assert bodies(tmp_path) == [b"good"]


def test_a_file_is_written_when_there_is_enough_for_it(tmp_path: Path) -> None:
    pieces = [piece(SOURCE, start, some(100, start)) for start in range(0, 500, 100)]
    recorder = record(tmp_path, pieces, Limits(file_bytes=10_000))
    assert recorder.progress.files == len(names(tmp_path)) - 1 > 2
    assert recorder.progress.messages == 500
    assert names(tmp_path)[:3] == [
        "manifest.json",
        "part-000001.parquet",
        "part-000002.parquet",
    ]
    assert bodies(tmp_path) == [f"body {index}".encode() for index in range(500)]


def test_a_recording_goes_on_where_it_was(tmp_path: Path) -> None:
    record(tmp_path, [piece(SOURCE, 3, some(2))])
    place = open_place("--to", str(tmp_path))
    manifest = read_manifest(place)
    assert manifest is not None
    assert [(state.first, state.next) for state in manifest.queues] == [(3, 5)]
    record(tmp_path, [piece(SOURCE, 5, some(2, 2))])
    assert [row["offset"] for row in rows(tmp_path)] == [3, 4, 5, 6]


def test_what_a_killed_one_left_behind_is_swept_and_never_read(tmp_path: Path) -> None:
    """Killed between the file and the manifest, or within a file."""
    record(tmp_path, [piece(SOURCE, 0, some(2))])
    before = (tmp_path / "manifest.json").read_bytes()
    record(tmp_path, [piece(SOURCE, 2, some(2, 2))])
    (tmp_path / "manifest.json").write_bytes(before)
    (tmp_path / ".part-000003.parquet.new").write_bytes(b"half")
    assert bodies(tmp_path) == [b"body 0", b"body 1"]
    place = open_place("--to", str(tmp_path))
    sweep(place, read_manifest(place))
    assert names(tmp_path) == ["manifest.json", "part-000001.parquet"]
    record(tmp_path, [piece(SOURCE, 2, some(2, 2))])
    assert bodies(tmp_path) == [b"body 0", b"body 1", b"body 2", b"body 3"]


@pytest.mark.parametrize("name", ["letter.txt", "part-000001.parquet", ".hidden", "part-0.new"])
def test_a_directory_of_somebody_else_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    """Other programs call their files part-, too."""
    (tmp_path / name).write_text("dear")
    with pytest.raises(StoreError, match="holds other files"):
        sweep(open_place("--to", str(tmp_path)), None)
    assert names(tmp_path) == [name]


def test_files_of_others_beside_a_recording_stay(tmp_path: Path) -> None:
    record(tmp_path, [piece(SOURCE, 0, some(2))])
    for name in ("notes.txt", "part-00000-aa.snappy.parquet", ".part-7.parquet.new"):
        (tmp_path / name).write_text("mine")
    place = open_place("--to", str(tmp_path))
    sweep(place, read_manifest(place))
    assert {"notes.txt", "part-00000-aa.snappy.parquet"} < set(names(tmp_path))


def test_killed_while_the_first_manifest_was_written(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.new").write_text("{")
    place = open_place("--to", str(tmp_path))
    with place.held():
        sweep(place, read_manifest(place))
    assert names(tmp_path) == []


def test_bytes_at_most(tmp_path: Path) -> None:
    """The message that reaches the limit is the last one, over all runs."""
    limits = Limits(max_bytes=13)
    record(tmp_path, [piece(SOURCE, 0, some(9)), piece(SOURCE, 9, some(9))], limits)
    assert bodies(tmp_path) == [b"body 0", b"body 1", b"body 2"]
    recorder = record(tmp_path, [piece(SOURCE, 3, some(3, 3))], limits)
    assert recorder.progress.messages == 0
    assert len(rows(tmp_path)) == 3
    record(tmp_path, [piece(SOURCE, 3, some(3, 3))])
    assert [row["offset"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_nothing_from_the_end_on(tmp_path: Path) -> None:
    """What was stored at the end's millisecond or later is left out, in each queue."""
    other = queue(1)
    late = [piece(other, 0, [message(other, b"x"), message(other, b"y")], START_MS)]
    pieces = [piece(SOURCE, 0, some(5), START_MS), piece(SOURCE, 5, some(5, 5), START_MS), *late]
    found = [Found(SOURCE, 0), Found(other, 0)]
    record(tmp_path, pieces, Limits(until_ms=START_MS + 3), found)
    assert bodies(tmp_path) == [b"body 0", b"body 1", b"body 2", b"x", b"y"]
    manifest = read_manifest(open_place("--to", str(tmp_path)))
    assert manifest is not None
    assert [state.next for state in manifest.queues] == [3, 2]


def test_what_is_gone_is_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = Lost(SOURCE, 0, 10, "offsets below 10 are gone")
    recorder = record(tmp_path, [gone, piece(SOURCE, 10, some(1))])
    assert recorder.progress.lost == 10
    assert "gone" in caplog.text
    manifest = read_manifest(open_place("--to", str(tmp_path)))
    assert manifest is not None
    assert [(state.first, state.next, state.lost) for state in manifest.queues] == [(0, 11, 10)]


def test_an_old_file_is_written_though_it_is_small(tmp_path: Path) -> None:
    pieces = [piece(SOURCE, start, some(2, start)) for start in (0, 2, 4)]
    recorder = record(tmp_path, pieces, Limits(file_seconds=0))
    assert recorder.progress.files == 3
    assert [row["offset"] for row in rows(tmp_path)] == list(range(6))


def test_a_queue_that_comes_later_is_recorded_too(tmp_path: Path) -> None:
    other = queue(4)
    items: list[Found | Piece] = [Found(other, 0), piece(other, 0, [message(other, b"new")])]
    record(tmp_path, items, found=[Found(SOURCE, 0)])
    assert [(row["queue"], row["body"]) for row in rows(tmp_path)] == [(4, b"new")]


def test_a_broker_that_fails_leaves_what_was_read(tmp_path: Path) -> None:
    place = open_place("--to", str(tmp_path))
    fetcher = GivenFetcher([Found(SOURCE, 0)], [piece(SOURCE, 0, some(3))])
    fetcher.failure = SluiceError("the broker is away")
    recorder = Recorder(place, Manifest(0, 0), fetcher, Limits(), now_ms=lambda: NOW_MS)
    with pytest.raises(SluiceError, match="away"):
        recorder.run()
    assert fetcher.is_stopped
    assert len(rows(tmp_path)) == 3


# ----------------------------------------------------------------------------------------- places


def test_a_disk_without_room_leaves_nothing_half_written(tmp_path: Path) -> None:
    disk = FullDisk(tmp_path)
    place = disk.place()
    record(place, [piece(SOURCE, 0, some(2))])
    disk.room_bytes = 1500
    big = [message(SOURCE, bytes(range(256)) * 300) for _ in range(3)]
    with pytest.raises(DiskFull, match=r"part-000002\.parquet cannot be written: no room is left"):
        record(place, [piece(SOURCE, 2, big)])
    assert names(tmp_path / "bucket") == ["manifest.json", "part-000001.parquet"]
    disk.room_bytes = None
    record(place, [piece(SOURCE, 2, some(1, 2))])
    assert bodies(tmp_path / "bucket") == [b"body 0", b"body 1", b"body 2"]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    disk = FullDisk(tmp_path)
    place = disk.place()
    record(place, [piece(SOURCE, 0, some(2))])
    before = (tmp_path / "bucket" / "manifest.json").read_bytes()
    disk.room_bytes = 10
    with pytest.raises(DiskFull, match=r"manifest\.json cannot be written"):
        record(place, [])
    assert (tmp_path / "bucket" / "manifest.json").read_bytes() == before
    assert names(tmp_path / "bucket") == ["manifest.json", "part-000001.parquet"]


def test_one_recorder_holds_a_directory(tmp_path: Path) -> None:
    place = open_place("--to", str(tmp_path))
    with place.held():
        with pytest.raises(StoreInUse, match="another"), place.held():
            pass
        with FullDisk(tmp_path).place().held():
            pass  # a bucket has no lock
    with place.held():
        pass


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a directory or s3"),
        ("s3://key:secret@bucket/path", "no keys in an address"),
        ("nowhere://bucket", "nowhere://"),
    ],
)
def test_places_that_make_no_sense(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        open_place("--to", text)
    assert "secret" not in str(refused.value)


def test_a_uri_of_a_directory_is_that_directory(tmp_path: Path) -> None:
    place = open_place("--to", f"file://{tmp_path}")
    assert isinstance(place, Place)
    assert place.is_local
    place.write("x", b"y")
    assert (tmp_path / "x").read_bytes() == b"y"


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        open_place("--to", str(tmp_path / "file" / "inner")).make()
