"""This module flips the bits of a store whose log holds 1 MiB of entries: all in the soak tests.

Eight million bits are too many to open the store for each. So each bit goes to the code that alone
decides about it, on the store as it is opened, and why that code alone decides is said here:

    an entry of the log   a reader checks it whole before it serves it (`_check_whole`); recovery
                          takes it only if the same checks pass, and stops at it otherwise (`Scan`).
                          Neither looks at any other byte to decide about this one
    a queue file          its units have one door, `QueueIndex.units`, which compares the file with
                          its checksum before anything of it is used
    a file of the index   is taken when the index is loaded, or searched, and compared before both
    small files           are read once, at the start, by one function each

That these verdicts are what a user meets is shown by the module beside this one, which opens and
reads a store for every bit of it, and this one for a bit of every field.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from sluice.errors import RecordDamaged, StoreCorrupt
from sluice.model import QueueKey
from sluice.protocol import records
from sluice.storage import snapshot as marks
from sluice.storage import state as states
from sluice.storage.key_index import IndexMark, KeyIndex
from sluice.storage.memory_files import KeepAll, MemoryFile, MemoryFiles
from sluice.storage.queue_index import QueueFiles, QueueIndex, Unit
from sluice.storage.recovery import Found, Scan
from sluice.storage.store import Store
from tests.crash.flip_kit import (
    BITS,
    LARGE_LOG_BYTES,
    FlipStore,
    answer,
    large_store,
    open_flipped,
    spread,
)
from tests.property.store_driver import ROOT, START_MS
from tests.property.store_model import patiently

LOG_PARTS = 32
FOREVER_MS = 1 << 60


def opened() -> Store:
    """The store, with nothing in it that this process wrote or scanned: all of it is checked."""
    store = large_store(closed=True)
    return open_flipped(store.config, store.files.crash(KeepAll()))


def memory(store: Store, path: str) -> memoryview:
    """The bytes of a file, to be changed behind everybody's back."""
    file = store.files.open(path)
    assert isinstance(file, MemoryFile)
    return file._node.image.memory


# ------------------------------------------------------------------------------------------ entries


def units_of(store: Store, queue: QueueIndex) -> list[Unit]:
    raw = queue.units(queue.first, queue.count, store.queue_files, wait=True)
    return queue.iterate(raw, queue.first)


def flip_entries(part: int, *, all_bits: bool) -> tuple[int, int]:
    """Bits of some entries; returns how many were read, and how many scanned.

    All bits, or one of each byte: the next one of the next byte, and another one in the next entry.
    """
    store = opened()
    check_whole = store.reader._check_whole
    scan = Scan(store.log, store.queue, lambda entry, store_ms: (), ())
    everything = [
        (queue, unit) for queue in store.queues.values() for unit in units_of(store, queue)
    ]
    read_count = scan_count = 0
    for number, (queue, unit) in enumerate(everything[part::LOG_PARTS]):
        position, size, _, offset, _ = unit
        path, at = store.log.path_of(position)
        assert store.reader._slices(queue, [unit])[0] == store.log.view(position, size)
        data, view = memory(store, path), store.log.view(position - at, store.log.segment_bytes)
        structure = structure_of(bytes(view[at : at + size]), position)
        for place in range(size):
            for bit in BITS if all_bits else (BITS[(number + place) % 8],):
                data[at + place] ^= bit
                read_count += 1
                try:
                    check_whole(queue, view, at, position, size, offset)
                except RecordDamaged:
                    pass
                else:
                    pytest.fail(f"bit {bit} of byte {place} of the entry at {position} is served")
                # Recovery decides with the same function: of what is neither head nor length nor
                # checksum some bits stand for the others.
                if place in structure or (place % 16 == 0 and bit in (1, 16)):
                    found = scan.run(position, 0)
                    assert (found.end, found.entry_count) == (position, 0), f"{position}+{place}"
                    assert found.stopped_by
                    scan_count += 1
                data[at + place] ^= bit
    return read_count, scan_count


def structure_of(raw: bytes, position: int) -> set[int]:
    """The bytes of an entry that say where its parts are, and its checksum."""
    entry = records.decode(raw, 0, position)
    head_bytes = 88 + 12 * bool(entry.sys_flag & 0x10) + 12 * bool(entry.sys_flag & 0x20)
    topic_at = head_bytes + len(entry.body)
    topic_end = topic_at + (1 if entry.magic == records.MAGIC_V1 else 2) + len(entry.topic)
    return {
        *range(head_bytes),
        *range(topic_at, topic_at + 2),
        *range(topic_end, topic_end + 2),
        *range(len(raw) - records.CRC_PROPERTY_BYTES, len(raw)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("all_bits", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_every_byte_of_every_entry(all_bits: bool) -> None:
    large_store(closed=True)
    counts = spread(partial(flip_entries, all_bits=all_bits), range(LOG_PARTS))
    read_count, scan_count = (sum(numbers) for numbers in zip(*counts, strict=True))
    assert read_count >= (8 if all_bits else 1) * LARGE_LOG_BYTES
    assert scan_count > read_count // 10


def test_every_bit_that_is_no_entry() -> None:
    """The marks at the ends of the log's files, what lies behind them, and behind the log's end."""
    store = opened()
    log = store.log
    units = [unit for queue in store.queues.values() for unit in units_of(store, queue)]
    lasts = {unit[0] - unit[0] % log.segment_bytes: unit for unit in sorted(units)}
    assert len(lasts) > 4
    scan = Scan(log, store.queue, lambda entry, store_ms: (), ())
    for base, (position, size, *_) in lasts.items():
        path, at = log.path_of(position)
        data = memory(store, path)
        end = at + size
        is_closed = position + size < log.written
        for place in range(end, min(len(data), end + 4096)):
            for bit in BITS:
                data[place] ^= bit
                found = Found(position)
                stopped_at, closed = scan._scan_segment(log.segments[base], position, found)
                # The last entry is there, and nothing is invented behind it.
                assert found.entry_count == 1
                if is_closed and place >= end + records.BLANK_BYTES:
                    assert (stopped_at, closed) == (base + log.segment_bytes, True)
                else:
                    # Where more was durable the store does not open now: the mark is damaged.
                    assert (stopped_at, closed) == (base + end, False)
                    assert found.stopped_by or place >= end + records.BLANK_BYTES
                data[place] ^= bit


# -------------------------------------------------------------------------------------- queue files


def flip_queue_file(part: tuple[QueueKey, int]) -> tuple[int, int]:
    """Every bit of one file of one queue; how many there are, and how many were noticed."""
    key, base = part
    store = opened()
    queue = store.queues[key]
    used, checksum = queue.unverified[base]
    path = queue.path_of(base)
    data = memory(store, path)
    first = queue.iterate(bytes(data[: queue.unit_bytes]), base)[0]
    expected = bytes(data[: used * queue.unit_bytes])
    noticed = 0
    for place in range(len(data)):
        for bit in BITS:
            data[place] ^= bit
            queue.unverified = {base: (used, checksum)}
            try:
                assert queue.units(base, base + used, store.queue_files, wait=True) == expected
            except StoreCorrupt as corrupt:
                found = corrupt
                noticed += 1
                if place % 16 == 0:
                    # What a reader meets, at the first entry of the file.
                    store.reader._store = QueueFiles(store.files)
                    said = answer(lambda: store.read(*key, first[3], count_max=1))
                    assert isinstance(said, StoreCorrupt)
                    assert said.path == found.path == path
            else:
                assert place >= len(expected)
            data[place] ^= bit
    assert noticed == 8 * len(expected)
    return 8 * len(data), noticed


@pytest.mark.slow
def test_every_bit_of_every_queue_file() -> None:
    store = opened()
    parts = [(queue.key, base) for queue in store.queues.values() for base in queue.unverified]
    assert len(parts) > 20
    counts = spread(flip_queue_file, parts)
    held = sum(8 * queue.written * queue.unit_bytes for queue in store.queues.values())
    assert sum(noticed for _, noticed in counts) == held
    on_disk = [path for path in large_store(closed=True).paths() if "consumequeue/" in path]
    assert sum(count for count, _ in counts) == 8 * sum(store.files.size(p) for p in on_disk)


# ---------------------------------------------------------------------------------------- key index


def index_of(store: FlipStore, files: MemoryFiles) -> KeyIndex:
    config = store.config
    return KeyIndex(
        files, f"{ROOT}/index", slots=config.key_index_slots,
        entries_max=config.key_index_entries, now_ms=lambda: START_MS,
    )  # fmt: skip


def flip_index_file(part: tuple[IndexMark, bool, int]) -> Counter[str]:
    """Each of so many bits of one file of the index; after a crash it is made again."""
    mark, clean, step = part
    store = large_store(closed=True)
    path = f"{ROOT}/index/{mark.name}"
    files = MemoryFiles()
    files.make_directory(f"{ROOT}/index")
    files.replace(path, store.files.read(path, 1 << 20))
    whole = index_of(store, files.crash(KeepAll()))
    whole.load([mark], clean)
    asked = {
        (queue.topic.encode(), key.encode()) for queue, _, keys in store.placed for key in keys
    }
    expected = {
        question: found
        for question in asked
        if (found := whole.query(*question, 0, FOREVER_MS, 1000))
    }
    assert expected
    counts: Counter[str] = Counter()
    for bit in range(0, 8 * files.size(path), step):
        disk = files.crash(KeepAll())
        disk.flip(path, bit)
        index = index_of(store, disk)
        if index.load([mark], clean) < mark.end_position:
            counts["made again"] += 1  # by the log, from there on
            continue
        try:
            for question, positions in expected.items():
                found = index.query(*question, 0, FOREVER_MS, 1000)
                assert found == positions, f"bit {bit} of {path}: {question} finds {found}"
            counts["harmless"] += 1
        except StoreCorrupt as corrupt:
            error = corrupt
            counts["noticed"] += 1
            if bit // step % 16 == 0:
                assert error.path == path
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_bits_of_every_index_file(clean: bool, step: int) -> None:
    store = large_store(closed=True)
    snapshot = marks.read_snapshot(store.files, ROOT)
    assert snapshot is not None
    parts = [(IndexMark(*mark), clean, step) for mark in snapshot["index"]]
    counts: Counter[str] = Counter()
    for each in spread(flip_index_file, parts):
        counts += each
    assert len(parts) > 5
    assert counts["noticed"] + counts["made again"] > counts["harmless"]
    sizes = [store.files.size(path) for path in store.paths(f"{ROOT}/index")]
    assert sum(counts.values()) >= 8 * sum(sizes) // step


# -------------------------------------------------------------------------------------- small files


def test_every_bit_of_the_small_files() -> None:
    """Each is read by one function, which says that it is as it was, or that it cannot be used."""
    store = large_store(closed=True)
    disk = store.files.crash(KeepAll())
    snapshot = marks.read_snapshot(disk, ROOT)
    durable = marks.DurableMark(disk, ROOT).read()
    checkpoint = marks.read_checkpoint(disk, ROOT)
    config = states.read_files(disk, f"{ROOT}/config")
    assert snapshot is not None
    assert durable == snapshot["log_offset"] == store.log_end
    assert not config.foreign
    seen = set()
    for path in disk.names(ROOT) + [f"sluice/{name}" for name in disk.names(f"{ROOT}/sluice")]:
        if disk.is_directory(f"{ROOT}/{path}"):
            continue
        seen.add(path)
        for bit in range(8 * disk.size(f"{ROOT}/{path}")):
            disk.flip(f"{ROOT}/{path}", bit)
            assert marks.read_snapshot(disk, ROOT) in (None, snapshot)
            assert marks.DurableMark(disk, ROOT).read() in (0, durable)
            used = bit < 8 * len(bytes.fromhex(checkpoint))
            found = marks.read_checkpoint(disk, ROOT)
            assert (found == checkpoint) == (path != "checkpoint" or not used)
            assert (found in snapshot["checkpoint"]) == (found == checkpoint)
            disk.flip(f"{ROOT}/{path}", bit)
    assert seen == {"checkpoint", "lock", "sluice/durable", "sluice/snapshot.json"}
    for name in disk.names(f"{ROOT}/config"):
        path = f"{ROOT}/config/{name}"
        for bit in range(8 * disk.size(path)):
            disk.flip(path, bit)
            flipped = states.read_files(disk, f"{ROOT}/config")
            assert not flipped.foreign, f"bit {bit} of {path}: taken for another broker's"
            assert flipped.damaged == [path] or flipped.ours == config.ours, f"bit {bit} of {path}"
            disk.flip(path, bit)


def test_a_reader_meets_what_the_checks_say() -> None:
    """A few bits of each queue's entries, through the door that all readers use."""
    store = opened()
    for queue in store.queues.values():
        units = units_of(store, queue)
        for number, (position, size, _, offset, _) in enumerate(units[:: max(1, len(units) // 20)]):
            path, at = store.log.path_of(position)
            data = memory(store, path)
            place, bit = at + number * 7 % size, BITS[number % 8]
            key, first = queue.key, offset
            data[place] ^= bit
            said = answer(lambda: store.read(*key, first, count_max=1))  # noqa: B023
            assert isinstance(said, RecordDamaged)
            assert (said.path, said.offset) == (path, at)
            data[place] ^= bit
            assert patiently(lambda: store.read(*key, first, count_max=1)).count == 1  # noqa: B023
