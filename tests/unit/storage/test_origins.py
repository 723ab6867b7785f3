"""Entries that were made from others, found again by a walk."""

from __future__ import annotations

import pytest

from sluice.model import Message
from sluice.storage.origins import made_since
from tests.unit.storage.store_kit import Disk

V6_HOST = bytes(16) + b"\0\0\x2a\x9f"


@pytest.mark.parametrize("host", [b"\x7f\0\0\1\0\0\0\1", V6_HOST])
def test_what_was_made_from_others_is_found_across_files(host: bytes) -> None:
    disk = Disk()
    store = disk.open()
    expected = []
    first = store.log.written
    for number in range(60):
        origin = number * 7 if number % 3 == 0 else 0
        placed = store.stage(
            Message(f"t{number}", 0, b"x" * 200, born_host=host, prepared_offset=origin)
        )
        store.write_staged()
        if origin:
            expected.append((origin, placed.position, placed.size, f"t{number}"))
    assert len(store.log.segments) > 3
    assert [tuple(made) for made in made_since(store.log, first)] == expected
    later = expected[5][1]
    assert [tuple(made) for made in made_since(store.log, later)] == expected[5:]
    assert list(made_since(store.log, store.log.written)) == []
    disk.close()


def test_what_retention_took_is_left_out() -> None:
    disk = Disk()
    store = disk.open()
    for _ in range(60):
        store.stage(Message("t", 0, b"x" * 200, prepared_offset=9))
        store.write_staged()
    bases = list(store.log.segments)
    store.log.detach_before(bases[2])
    found = [made.position for made in made_since(store.log, 0)]
    assert found
    assert min(found) >= bases[2]
