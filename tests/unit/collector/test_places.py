"""This module tests what is noted of files: locking, durability, damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sluice.clock import wall_ms
from sluice.collector.places import PlaceBook, new_place
from sluice.errors import ConfigError, StoreInUse


def test_places_are_there_again(tmp_path: Path) -> None:
    book = PlaceBook.open(str(tmp_path / "a" / "state"))
    place = new_place("/logs/\udce4.log", (7, 8))
    place.offset = 99
    book.put(place)
    book.patterns.add("/logs/*")
    book.write(book.image())
    book.release()
    again = PlaceBook.open(str(tmp_path / "a" / "state"))
    assert list(again) == [place]
    assert again.find((7, 8)) == place
    assert again.patterns == {"/logs/*"}
    again.release()


def test_the_directory_is_private(tmp_path: Path) -> None:
    PlaceBook.open(str(tmp_path / "state")).release()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "places.json").stat().st_mode & 0o777 == 0o600


def test_a_second_collector_is_refused(tmp_path: Path) -> None:
    book = PlaceBook.open(str(tmp_path))
    with pytest.raises(StoreInUse, match=rf"process {os.getpid()}\) .* --state"):
        PlaceBook.open(str(tmp_path))
    book.release()
    PlaceBook.open(str(tmp_path)).release()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory; name another with --state"):
        PlaceBook.open(str(tmp_path / "file" / "state"))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "places.json.new").mkdir()
    with pytest.raises(ConfigError, match="places cannot be written"):
        PlaceBook.open(str(tmp_path))
    (tmp_path / "places.json.new").rmdir()
    PlaceBook.open(str(tmp_path)).release()  # the lock was given back


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "patterns": [], "places": []}',
        '{"version": 1, "patterns": [3], "places": []}',
        '{"version": 1, "patterns": [], "places": [{"path": "x"}]}',
        '{"version": 1, "patterns": [], "places": [{"path": "x", "file": "y", "device": 1, '
        '"inode": 2, "offset": -3}]}',
        '{"version": 1, "patterns": [], "places": [{"path": "x", "file": "y", "device": true, '
        '"inode": 2}]}',
        '{"version": 1, "patterns": [], "places": [{"path": 1, "file": "y", "device": 1, '
        '"inode": 2}]}',
        '{"version": 1, "patterns": [], "places": [{"wrong": 1}]}',
    ],
)
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "places.json").write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        PlaceBook.open(str(tmp_path))
    assert (tmp_path / "places.json").read_text() == text


def test_a_write_that_was_interrupted_leaves_the_old_places(tmp_path: Path) -> None:
    book = PlaceBook.open(str(tmp_path))
    book.put(new_place("/a", (1, 2)))
    book.write(book.image())
    book.release()
    (tmp_path / "places.json.new").write_text("{half")
    again = PlaceBook.open(str(tmp_path))
    assert [place.path for place in again] == ["/a"]
    again.release()


def test_old_places_are_forgotten(tmp_path: Path) -> None:
    book = PlaceBook.open(str(tmp_path))
    for inode, path in ((1, "there"), (2, "gone"), (3, "gone lately")):
        book.put(new_place(path, (0, inode)))
    for place in book:
        if place.path != "gone lately":
            place.seen_ms = wall_ms() - 8 * 86_400_000
    book.forget_old({(0, 1)})
    assert [place.path for place in book] == ["there", "gone lately"]
    assert json.loads(book.image())["version"] == 1
    book.release()
