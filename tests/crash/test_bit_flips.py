"""This module flips the bits of a whole store, one at a time: it is noticed, or it does no harm.

The store is small: for each bit it is opened, lives on for a moment, and is asked everything that
can be asked. Each answer is right or an error that names a file and a byte. What a larger store
adds to this is in the module beside it. The soak tests flip every bit of every file.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from random import Random

import pytest

from sluice.model import LOOPBACK_HOST, Message
from sluice.protocol import records
from sluice.storage.memory_files import KeepAll
from sluice.storage.snapshot import read_snapshot
from tests.crash.flip_kit import (
    BITS,
    DAMAGE,
    LARGE_LOG_BYTES,
    Answer,
    FlipStore,
    ask,
    judge,
    large_store,
    open_flipped,
    spread,
    tiny_store,
)
from tests.property.store_driver import ROOT

SOAK_FLIPS = 100_000
# What stands for all: bytes that nobody reads, a few of them.
UNUSED_BYTES = 8


def flip(store: FlipStore, path: str, bit: int, *, deep: bool) -> bool:
    """Open the store with one bit flipped and ask it everything; returns whether it noticed."""
    disk = store.files.crash(KeepAll())
    disk.flip(path, bit)
    found: Iterable[Answer]
    try:
        opened = open_flipped(store.config, disk)
    except DAMAGE as damage:
        found = [(("open",), damage)]
    else:
        found = ask(opened, store.placed, deep=deep)
    return judge(store.answers, found, f"bit {bit} of {path}")


def used_bytes(store: FlipStore, path: str) -> int:
    """The bytes of a file up to the last that is not zero, and some more."""
    data = store.files.read(path, 1 << 20)
    return min(len(data), len(data.rstrip(b"\0")) + UNUSED_BYTES)


Part = tuple[bool, str, range]
PART_BITS = 512


def flip_part(part: Part) -> int:
    """How many flips of some bits of a file were noticed."""
    closed, path, bits = part
    store = tiny_store(closed=closed)
    # Damage in the log of a store that was killed is met when it is opened.
    deep = path.startswith(f"{ROOT}/index") or (closed and path.startswith(f"{ROOT}/commitlog"))
    return sum(flip(store, path, bit, deep=deep) for bit in bits)


def flip_store(*, closed: bool, log_step: int, step: int) -> None:
    """Each of so many bits of the log, and each of so many of all else."""
    store = tiny_store(closed=closed)
    parts: list[Part] = []
    for path in store.paths():
        count = 8 * used_bytes(store, path)
        every = log_step if path.startswith(f"{ROOT}/commitlog") else step
        parts += [
            (closed, path, range(start, min(start + PART_BITS * every, count), every))
            for start in range(0, count, PART_BITS * every)
        ]
    names = {path.removeprefix(f"{ROOT}/").partition("/")[0] for _, path, _ in parts}
    assert names - {"abort"} == {
        "batchconsumequeue", "checkpoint", "commitlog", "config", "consumequeue", "index", "lock",
        "sluice",
    }  # fmt: skip
    assert ("abort" in names) != closed
    noticed = dict.fromkeys(names, 0)
    for part, count in zip(parts, spread(flip_part, parts), strict=True):
        noticed[part[1].removeprefix(f"{ROOT}/").partition("/")[0]] += count
    # Nothing of an entry goes by unnoticed, and nothing of a unit.
    assert noticed["commitlog"] == len(range(0, 8 * store.log_end, log_step))
    units = sum(queue_end * width for queue_end, width in unit_counts(store))
    in_units = noticed["consumequeue"] + noticed["batchconsumequeue"]
    assert 8 * units // step <= in_units <= 8 * units // step + len(unit_counts(store))
    assert (noticed["index"] > 0) == closed, "after a crash it is compared and made again at once"
    # All else can be made again from the log.
    assert sum(noticed.values()) == sum(
        noticed[name] for name in ("commitlog", "consumequeue", "batchconsumequeue", "index")
    )


# Neither three nor seven divides eight: no bit is left out of all bytes.
@pytest.mark.slow
def test_bits_of_a_small_store() -> None:
    flip_store(closed=True, log_step=3, step=7)


@pytest.mark.slow
def test_bits_of_a_small_store_that_was_killed() -> None:
    flip_store(closed=False, log_step=7, step=7)


@pytest.mark.soak
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_every_bit_of_a_small_store(closed: bool) -> None:
    flip_store(closed=closed, log_step=1, step=1)


def unit_counts(store: FlipStore) -> list[tuple[int, int]]:
    """How many units lie in the files of each queue, and how long they are."""
    snapshot = read_snapshot(store.files, ROOT)
    assert snapshot is not None
    return [(row[5], 20 if row[2] == "s" else 46) for row in snapshot["queues"]]


def test_without_the_checksum_the_body_is_safe() -> None:
    """Entries without the whole-message checksum: another body is never taken for the right one."""
    encoder = records.Encoder(
        LOOPBACK_HOST, with_crc=False, body_bytes_max=1 << 22, entry_bytes_max=1 << 22
    )
    for store_number, (queue, placed, _) in enumerate(large_store(closed=True).placed[:40]):
        message = Message(queue.topic, queue.queue_id, b"%d" % store_number * 40, b"TAGS\x01t\x02")
        topic = message.topic.encode()
        size = encoder.measure(message, topic)
        position = placed.position
        entry = bytearray(encoder.encode(message, topic, size, 7, position, placed.store_ms))
        view = memoryview(entry)
        for at in range(len(entry)):
            for bit in BITS:
                entry[at] ^= bit
                with suppress(records.BadRecord):
                    assert records.decode(view, 0, position).body == message.body
                entry[at] ^= bit


# ------------------------------------------------------------------------------- 1 MiB, end to end


def flip_large(bits: list[tuple[str, int]]) -> int:
    return sum(flip(large_store(closed=True), path, bit, deep=False) for path, bit in bits)


def spread_large(bits: list[tuple[str, int]]) -> int:
    """How many of these flips were noticed by a store of 1 MiB that is opened for each."""
    large_store(closed=True)  # before the processes begin, so that they share it
    return sum(spread(flip_large, [bits[n::16] for n in range(16)]))


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_every_field_of_every_layout_end_to_end(step: int) -> None:
    """Eight entries of different layouts, of each byte of their heads and ends another bit.

    Of all these bytes each of so many: in the one layout those that the other leaves out.
    """
    store = large_store(closed=True)
    bits = []
    for number, position in enumerate(layouts(store)):
        path, at = store.log_place(position)
        raw = store.answers["entry", position]
        body_bytes = len(records.decode(raw, 0, position).body)
        head_bytes = 112 if len(raw) > 112 else 88
        places = [*range(head_bytes), *range(head_bytes + body_bytes, len(raw))]
        bits += [
            (path, 8 * (at + place) + (place + number) % 8)
            for place in places[number % step :: step]
        ]
    assert len(bits) > 1000 // step
    assert spread_large(bits) == len(bits)


def layouts(store: FlipStore) -> list[int]:
    """Positions of entries, no two of which have the same shape."""
    found: dict[tuple[object, ...], int] = {}
    for queue, placed, keys in store.placed:
        entry = records.decode(store.answers["entry", placed.position], 0, placed.position)
        shape = (entry.magic, entry.sys_flag, bool(keys), queue.topic)
        found.setdefault(shape, placed.position)
    assert {shape[0] for shape in found} == {records.MAGIC_V1, records.MAGIC_V2}
    return list(found.values())[:8]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_soak(seed: int) -> None:
    """Any bits of the store, wherever they are."""
    random = Random(seed)
    store = large_store(closed=True)
    sizes = {path: used_bytes(store, path) for path in store.paths()}
    assert sum(sizes.values()) > LARGE_LOG_BYTES
    paths = random.choices(list(sizes), list(sizes.values()), k=SOAK_FLIPS // 20)
    assert spread_large([(path, random.randrange(8 * sizes[path])) for path in paths]) > 0
