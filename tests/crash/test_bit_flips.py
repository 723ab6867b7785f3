"""This module flips every bit of a store, one at a time: the damage is noticed, or it does no harm.

The log is large, so its entries are checked one by one: 1 MiB of them, every bit, through the
function that every reader uses. The small files, and a sample of the log, are flipped in a whole
store that is then opened and read: either it says which file is damaged and where, or it serves
exactly what was stored, all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from sluice.errors import RecordDamaged, StoreCorrupt
from sluice.model import LOOPBACK_HOST, Message
from sluice.protocol import records
from sluice.storage.memory_files import KeepAll, MemoryFiles
from sluice.storage.state import GROUP_TABLE, OFFSET_TABLE, TOPIC_TABLE
from sluice.storage.store import Store
from tests.crash.crash_points import open_again
from tests.property.store_driver import LONG_TOPIC, QUEUES, ROOT, V6_HOST, Driver, small_config
from tests.property.store_model import Contents, contents

LOG_BYTES = 1 << 20
PARTS = 16  # the log's megabyte, in as many tests
LOG_SAMPLE_COUNT = 3_000

flipped: dict[int, int] = {}


# ----------------------------------------------------------------------------------------- entries


def make_entries(random: Random, total_bytes: int, *, with_crc: bool) -> Iterator[bytes]:
    """Entries of all layouts that together take at least so many bytes."""
    encoder = records.Encoder(
        LOOPBACK_HOST, with_crc=with_crc, body_bytes_max=1 << 22, entry_bytes_max=1 << 22
    )
    position = 0
    while position < total_bytes:
        number = random.getrandbits(30)
        message = Message(
            random.choice(("A", "topic", LONG_TOPIC)), number % 8,
            random.randbytes(random.choice((0, 10, 500, 2000))),
            random.choice((b"", b"TAGS\x01t\x02", b"KEYS\x01a b\x02UNIQ_KEY\x01u")),
            flag=number, sys_flag=random.choice((0, records.SYS_COMPRESSED)), born_ms=number,
            born_host=random.choice((LOOPBACK_HOST, V6_HOST)),
        )  # fmt: skip
        topic = message.topic.encode()
        size = encoder.measure(message, topic)
        yield encoder.encode(message, topic, size, number, position, number)
        position += size


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_bit_of_the_log(part: int) -> None:
    count = 0
    for original in make_entries(Random(part), LOG_BYTES // PARTS, with_crc=True):
        position = int.from_bytes(original[28:36], "big")
        assert records.summarize(original, 0, position).size == len(original)
        entry = bytearray(original)
        view = memoryview(entry)
        for at in range(len(entry)):
            for bit in (1, 2, 4, 8, 16, 32, 64, 128):
                entry[at] ^= bit
                try:
                    records.summarize(view, 0, position)
                except records.BadRecord:
                    pass
                else:
                    pytest.fail(f"bit {bit} of byte {at} of {bytes(original)!r} is not noticed")
                entry[at] ^= bit
        count += 8 * len(entry)
    flipped[part] = count


def test_number_of_flips() -> None:
    if len(flipped) < PARTS:
        pytest.skip("only a part of the log was flipped, there is nothing to count")
    assert sum(flipped.values()) >= 8 * LOG_BYTES


def test_without_the_checksum_the_body_is_safe() -> None:
    """Entries without the whole-message checksum: another body is never taken for the right one."""
    for original in make_entries(Random(1), LOG_BYTES // 64, with_crc=False):
        position = int.from_bytes(original[28:36], "big")
        body = bytes(records.decode(original, 0, position).body)
        entry = bytearray(original)
        view = memoryview(entry)
        for at in range(len(entry)):
            for bit in (1, 2, 4, 8, 16, 32, 64, 128):
                entry[at] ^= bit
                with suppress(records.BadRecord):
                    assert records.decode(view, 0, position).body == body
                entry[at] ^= bit


# ----------------------------------------------------------------------------------- whole stores


class Sample:
    """A small store with everything in it, as it lies on the disk, and what it serves."""

    def __init__(self, *, clean: bool) -> None:
        random = Random(5)
        driver = Driver(small_config())
        for number in range(24):
            driver.put(QUEUES[number % len(QUEUES)], random, random.choice((0, 30, 200)))
            driver.settle()
        driver.change(GROUP_TABLE, "g", {"n": 1})
        driver.commit("g", QUEUES[0], 2)
        driver.tick(5_000)
        driver.settle()
        driver.checkpoint()
        driver.settle()
        driver.put(QUEUES[0], random, 10)
        driver.change(GROUP_TABLE, "h", {"n": 2})
        driver.settle()
        self.config = driver.config
        self.log_end = driver.store.log.written
        self.log_files = [s.file.path for s in driver.store.log.segments.values()]
        if clean:
            driver.shut()
        self.files = driver.files.crash(KeepAll())
        store = open_again(self.config, self.files.crash(KeepAll()))
        self.contents = contents(store)
        self.tables = tables(store)
        assert sum(len(entries) for _, _, entries in self.contents.values()) == 25

    def paths(self, directory: str = ROOT) -> Iterator[str]:
        for name in self.files.names(directory):
            path = f"{directory}/{name}"
            if self.files.is_directory(path):
                yield from self.paths(path)
            else:
                yield path

    def flip(self, path: str, bit: int) -> bool:
        """Open and read the store with one bit flipped; returns whether the damage was noticed."""
        disk = self.files.crash(KeepAll())
        disk.flip(path, bit)
        try:
            store = open_again(self.config, disk)
            served = contents(store)
        except (StoreCorrupt, RecordDamaged) as error:
            damage = error
        else:
            self.compare(served, tables(store), f"bit {bit} of {path}")
            return False
        assert damage.path.startswith(ROOT)
        assert damage.offset >= 0
        return True

    def compare(self, served: Contents, found: dict[str, Any], where: str) -> None:
        assert served == self.contents, f"{where} changed what is served"
        assert found == self.tables, f"{where} changed the settings"


def tables(store: Store) -> dict[str, Any]:
    return {name: dict(store.table(name)) for name in (TOPIC_TABLE, GROUP_TABLE, OFFSET_TABLE)}


@pytest.fixture(scope="module", params=[True, False], ids=["closed", "killed"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return Sample(clean=request.param)


def used_bytes(files: MemoryFiles, path: str) -> int:
    """The bytes of a file up to the last that is not zero, and a few more."""
    data = files.read(path, 1 << 20)
    return min(len(data), len(data.rstrip(b"\0")) + 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", ["sluice/", "config/", "consumequeue/", "batchconsumequeue/", "index/", "checkpoint",
              "abort", "lock"]
)  # fmt: skip
def test_every_bit_of_small_files(sample: Sample, group: str) -> None:
    paths = [path for path in sample.paths() if path.startswith(f"{ROOT}/{group}")]
    if group == "abort" and not paths:
        pytest.skip("a store that was closed has no such file")
    assert paths
    for number, path in enumerate(paths):
        # One queue file stands for all; the key index is advice, it cannot change what is served.
        step = 8 if group == "index/" or (group.endswith("queue/") and number) else 1
        for bit in range(0, 8 * used_bytes(sample.files, path), step):
            sample.flip(path, bit + bit // 8 % step)


@pytest.mark.slow
def test_bits_of_the_log(sample: Sample) -> None:
    """End to end: no damage of an entry goes by unnoticed."""
    random = Random(3)
    segment_bytes = sample.config.segment_bytes
    noticed = 0
    for _ in range(LOG_SAMPLE_COUNT):
        position = random.randrange(sample.log_end)
        path = sample.log_files[position // segment_bytes]
        noticed += sample.flip(path, position % segment_bytes * 8 + random.randrange(8))
    # All but the unused bytes behind an end-of-file mark.
    assert noticed > LOG_SAMPLE_COUNT * 0.8


def test_bits_behind_the_end(sample: Sample) -> None:
    """What is no entry is no message, whatever it is."""
    random = Random(4)
    segment_bytes = sample.config.segment_bytes
    start = sample.log_end % segment_bytes
    for _ in range(300):
        byte = random.randrange(start, segment_bytes)
        assert not sample.flip(sample.log_files[-1], byte * 8 + random.randrange(8))
