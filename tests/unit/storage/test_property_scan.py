"""Properties of many entries at once: whose they are, and that damage is not passed over."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sluice.errors import RecordDamaged
from sluice.model import Message, PropertyFilter
from sluice.storage.reads import SCAN_UNITS_MAX, ReadStatus
from tests.unit.storage.store_kit import Disk
from tests.unit.storage.test_property_reads import EVEN, bodies, filled, read

SCREENED = PropertyFilter(EVEN.test, 1, re.compile(rb"\x02n\x01even\x02"))


def test_a_screen_changes_nothing_but_the_work() -> None:
    disk = filled(500, segment_bytes=1 << 20)
    choices: list[dict[str, Any]] = [{}, {"count_max": 7}, {"bytes_max": 1000}]
    for limits in [*choices, {"count_max": 32, "bytes_max": 1}]:
        offset = 0
        while offset < 500:
            plain = read(disk, offset, accept=EVEN, **limits)
            screened = read(disk, offset, accept=SCREENED, **limits)
            assert screened == plain
            assert bodies(screened) == bodies(plain)
            offset = plain.next_offset


def test_what_passes_the_screen_is_tested_by_its_own_properties() -> None:
    disk = Disk(segment_bytes=1 << 20)
    disk.open()
    texts = [b"", b"a\x011\x02", b"a\x012", b"b\x01a\x02", b"a\x013\x02b\x014\x02", b""] * 20
    for text in texts:
        disk.store.stage(Message("t", 0, b"0", text))
    disk.store.write_staged()
    tested: list[bytes] = []

    def test(data: bytes) -> bool:
        tested.append(data)
        return True

    read(disk, accept=PropertyFilter(test, 1, re.compile(rb"\x02a\x01")))
    assert all(data[0] == data[-1] == 2 for data in tested)
    assert [data.strip(b"\x02").partition(b"\x02__CRC32#")[0] for data in tested] == [
        text.rstrip(b"\x02") for text in texts if text.startswith(b"a")
    ]


def test_nothing_passes_where_the_screen_finds_nothing() -> None:
    disk = filled(SCAN_UNITS_MAX + 1, segment_bytes=1 << 20)
    wanted = PropertyFilter(lambda data: True, 1, re.compile(rb"\x02m\x01"))
    result = read(disk, accept=wanted)
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, SCAN_UNITS_MAX)


@pytest.mark.parametrize("at", [3, 35, 84])
def test_an_entry_unlike_its_unit_is_damage_though_the_screen_would_not_find_it(at: int) -> None:
    """A byte of its size, its place and its body's size."""
    disk = filled(90, segment_bytes=1 << 20)
    entry_bytes = len(read(disk, count_max=1).slices[0])
    path = next(iter(disk.paths("/store/commitlog")))
    disk.files.flip(path, (entry_bytes + at) * 8)
    wanted = PropertyFilter(lambda data: True, 1, re.compile(rb"\x02m\x01"))
    with pytest.raises(RecordDamaged):
        read(disk, accept=wanted)
