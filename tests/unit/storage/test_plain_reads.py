"""The usual read in one walk gives what the general way gives, or leaves it to that."""

from __future__ import annotations

import random

import pytest

from sluice.errors import RecordDamaged
from sluice.storage import reads
from sluice.storage.plain_reads import Found, plain_slices
from sluice.storage.queue_index import FILLER_SIZE, SIMPLE_UNIT
from tests.unit.storage.store_kit import Disk


def filled(seed: int, count: int = 300) -> Disk:
    """Messages of several queues and sizes, over many files."""
    chance, disk = random.Random(seed), Disk(segment_bytes=1 << 14)
    disk.open()
    for _ in range(count):
        disk.put(f"t{chance.randrange(2)}", chance.randrange(3), bytes(chance.randrange(1, 300)))
    return disk


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_both_ways_give_the_same(
    monkeypatch: pytest.MonkeyPatch, seed: int, is_reopened: bool
) -> None:
    disk, chance = filled(seed), random.Random(seed)
    if is_reopened:
        disk.reopen()
    store, answered = disk.store, 0

    def watched(*place: object) -> Found | None:
        nonlocal answered
        found = plain_slices(*place)  # type: ignore[arg-type]
        answered += found is not None
        return found

    for topic, queue_id in [key for key in store.queues if key[0] in ("t0", "t1")]:
        for _ in range(60):
            offset = chance.randrange(store.max_offset(topic, queue_id) + 2)
            limits = {"count_max": chance.randrange(1, 40), "bytes_max": chance.randrange(5000)}
            monkeypatch.setattr(reads, "plain_slices", watched)
            quick = disk.read(topic, queue_id, offset, **limits)
            monkeypatch.setattr(reads, "plain_slices", lambda *_: None)
            general = disk.read(topic, queue_id, offset, **limits)
            assert quick == general
            assert list(map(bytes, quick.slices)) == list(map(bytes, general.slices))
    # After a start most entries have to be checked whole, which is not its business.
    assert (answered < 20) == is_reopened, answered


@pytest.mark.parametrize("field", ["position", "size"])
@pytest.mark.parametrize("which", [0, 3, 6])
@pytest.mark.parametrize("change", [1, -1, 1 << 20, -(1 << 20), FILLER_SIZE])
def test_a_unit_that_is_wrong_is_left_to_the_general_way(
    field: str, which: int, change: int
) -> None:
    disk = Disk(segment_bytes=1 << 16)
    disk.open()
    for number in range(7):
        disk.put("t", 0, bytes(100 + number))
    store = disk.store
    raw = bytearray(store.queue("t", 0).units(0, 7, store.queue_files, wait=True))
    place = (store.log, 0)
    assert plain_slices(*place, raw, 0, 1 << 20, 0, 0) is not None
    assert plain_slices(*place, raw, 1, 1 << 20, 0, 0) is None, "of another offset"
    assert plain_slices(store.log, 1, raw, 0, 1 << 20, 0, 0) is None, "of another queue"
    assert plain_slices(*place, b"", 0, 1 << 20, 0, 0) is None
    position, size, code = SIMPLE_UNIT.unpack_from(raw, which * SIMPLE_UNIT.size)
    if field == "position":
        position = min(max(position + change, -5), (1 << 62))
    else:
        size = min(max(size + change, -(1 << 31)), FILLER_SIZE)
    SIMPLE_UNIT.pack_into(raw, which * SIMPLE_UNIT.size, position, size, code)
    assert plain_slices(*place, raw, 0, 1 << 20, 0, 0) is None


def test_what_is_wrong_has_the_words_of_the_general_way() -> None:
    disk = Disk()
    disk.open()
    for _ in range(3):
        disk.put("t", 0, b"body")
    store = disk.store
    queue = store.queue("t", 0)
    position, size, code = SIMPLE_UNIT.unpack_from(queue.tail, SIMPLE_UNIT.size)
    SIMPLE_UNIT.pack_into(queue.tail, SIMPLE_UNIT.size, position + size, size, code)
    with pytest.raises(RecordDamaged, match="does not match"):
        store.read("t", 0, 0)
