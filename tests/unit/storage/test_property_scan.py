"""Properties of many entries at once: whose they are, and that damage is not passed over."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sluice.errors import RecordDamaged
from sluice.model import Message, PropertyFilter
from sluice.protocol import records
from sluice.storage.reads import SCREENED_UNITS_MAX, ReadStatus
from tests.unit.storage.store_kit import Disk
from tests.unit.storage.test_property_reads import EVEN, bodies, filled, read

SCREENED = PropertyFilter(EVEN.test, 1, re.compile(rb"n\x01even\x02"))


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

    read(disk, accept=PropertyFilter(test, 1, re.compile(rb"a\x01")))
    assert all(data[0] == data[-1] == 2 for data in tested)
    assert [data.strip(b"\x02").partition(b"\x02__CRC32#")[0] for data in tested] == [
        text.rstrip(b"\x02") for text in texts if text.startswith(b"a")
    ]


def test_nothing_passes_where_the_screen_finds_nothing() -> None:
    disk = filled(SCREENED_UNITS_MAX + 1, segment_bytes=1 << 20)
    wanted = PropertyFilter(lambda data: True, 1, re.compile(rb"m\x01"))
    result = read(disk, accept=wanted)
    nothing = (ReadStatus.NO_MATCHED_MESSAGE, SCREENED_UNITS_MAX)
    assert (result.status, result.next_offset) == nothing


@pytest.mark.parametrize("at", [3, 35, 84])
def test_an_entry_unlike_its_unit_is_damage_though_the_screen_would_not_find_it(at: int) -> None:
    """A byte of its size, its place and its body's size."""
    disk = filled(90, segment_bytes=1 << 20)
    entry_bytes = len(read(disk, count_max=1).slices[0])
    path = next(iter(disk.paths("/store/commitlog")))
    disk.files.flip(path, (entry_bytes + at) * 8)
    wanted = PropertyFilter(lambda data: True, 1, re.compile(rb"m\x01"))
    with pytest.raises(RecordDamaged):
        read(disk, accept=wanted)


def mixed(count: int, **changes: Any) -> Disk:
    """Entries of a topic among those of others, with bodies that look like properties."""
    disk = Disk(segment_bytes=1 << 20, **changes)
    disk.open()
    for number in range(count):
        body = (b"n\x01even\x02", b"", b"x" * 50, b"n\x01", b"\x02n\x01even\x02")[number % 5]
        words = b"n\x01%b\x02" % (b"odd" if number % 3 else b"even")
        for topic, text in (("t", words), ("other", b"n\x01even\x02"), ("t", b"z\x01n\x02")):
            disk.store.stage(Message(topic, 0, b"%d " % number + body, text))
    disk.store.write_staged()
    return disk


@pytest.mark.parametrize("limits", [{}, {"count_max": 3}, {"bytes_max": 700}])
def test_what_bodies_and_other_topics_hold_is_not_taken_for_properties(
    limits: dict[str, Any],
) -> None:
    disk = mixed(300)
    offset = 0
    seen: list[bytes] = []
    while offset < 600:
        plain = read(disk, offset, accept=EVEN, **limits)
        screened = read(disk, offset, accept=SCREENED, **limits)
        assert screened.messages == plain.messages
        assert screened.next_offset == plain.next_offset
        seen += [bytes(records.decode(message).body) for message in screened.messages]
        offset = plain.next_offset
    assert [int(body.split()[0]) for body in seen] == list(range(0, 300, 3))


def test_entries_whose_properties_end_without_a_separator_are_found() -> None:
    disk = Disk(segment_bytes=1 << 20, message_crc=False)
    disk.open()
    for _ in range(60):
        disk.store.stage(Message("t", 0, b"0", b"n\x01even"))
    disk.store.write_staged()
    assert read(disk, accept=SCREENED).count == 60


def test_entries_with_properties_of_very_different_sizes_are_found() -> None:
    disk = Disk(segment_bytes=1 << 20)
    disk.open()
    words = b"n\x01even\x02"
    for number in range(90):
        long = (
            (b"a\x01%b\x02" % (b"x" * 9_000)) if number == 50 else b"a\x01%b\x02" % (b"x" * number)
        )
        disk.store.stage(Message("t", 0, b"%d" % number, long + (words if number % 4 else b"")))
    disk.store.write_staged()
    expected = [number for number in range(90) if number % 4]
    assert bodies(read(disk, accept=SCREENED)) == expected
    assert bodies(read(disk, 51, accept=SCREENED)) == expected[expected.index(51) :]
