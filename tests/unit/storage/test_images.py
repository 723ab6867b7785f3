"""Images: the same entries, units and keys as the plain way; large entries as all others."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sluice.errors import DiskFull, MessageIllegal, SluiceError
from sluice.model import Buffer, Message
from sluice.protocol import records
from sluice.protocol.record_images import Images, read_images
from sluice.storage import images as storage_images
from sluice.storage.images import place_images, stage_large, takes_images
from sluice.storage.key_batches import KeyBatch, KeyColumns
from sluice.storage.key_index_file import Ints
from sluice.storage.lanes import tell
from sluice.storage.store import Store
from tests.unit.protocol.image_kit import Part, images_of
from tests.unit.storage.store_kit import Disk

HOST = b"\x0a\0\0\1\0\0\x30\x39"
V6 = b"\0" * 15 + b"\x01\0\0\x2a\x9f"
KEYED = [(n, b"%d" % n * (n + 1), b"KEYS\x01k%d\x02" % (n % 9)) for n in range(12)]
FORMS: dict[str, list[Part]] = {
    "keys": KEYED,
    "some keys": [*KEYED[:3], (7, b"x", b""), *KEYED[3:]],
    "other letters": [(0, b"x", "KEYS\x01größe\x02".encode()), *KEYED],
    "nothing": [(0, b"x" * n, b"") for n in range(1, 9)],
    "tags": [(0, b"x", b"TAGS\x01t%d\x02KEYS\x01a k1\x02" % n) for n in range(5)],
}


def opened(**changes: Any) -> Disk:
    disk = Disk(**changes)
    disk.open()
    return disk


def images(parts: list[Part], topic: bytes = b"t") -> Images:
    body = images_of(parts, topic)
    seal = read_images(body, len(parts), topic).seal()
    return read_images(body + seal, len(parts), topic, is_sealed=True)


def keyed(disk: Disk, key: str) -> list[bytes]:
    found: list[bytes] = []
    disk.store.query_key("t", key, lambda entries, _: found.extend(map(bytes, entries or [])))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_bytes", [1, 500, 1 << 20])
def test_the_same_bytes_units_and_keys_as_the_plain_way(
    form: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_images, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(storage_images, "_EARLY_BYTES", 0)
    plain, quick = opened(), opened()
    parts = FORMS[form]
    codes = {records.java_hash(b"t%d" % n) for n in range(5)} if form == "tags" else {0}
    outcome: list[SluiceError | None] = []
    for _ in range(3):
        messages = [Message("t", 3, b, p, f, 0, 1234, HOST, 0, 99) for f, b, p in parts]
        plain.store.stage_batch(messages)
        plain.store.write_staged()
        assert takes_images(quick.store, "t", 3, HOST)
        placed = place_images(quick.store, images(parts), "t", 3, 1234, HOST, 99)
        tell(quick.store, outcome.append)
        quick.store.write_staged()
        assert (placed.message_count, placed.tags_codes) == (len(parts), codes)
    assert outcome == [None] * 3
    assert quick.store.log.written == plain.store.log.written
    for disk in (plain, quick):
        disk.close()
    for path in [*plain.paths("/store/commitlog"), *plain.paths("/store/consumequeue/t/3")]:
        assert quick.files.read(path, 1 << 20) == plain.files.read(path, 1 << 20)
    for disk in (plain, quick):
        disk.open()
    for key in ("k1", "größe", "T#t1", "a"):
        assert keyed(plain, key) == keyed(quick, key)
    assert form == "nothing" or keyed(quick, "k1")


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_write_that_fails_takes_everything_back(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_images, "_BLOCK_BYTES", 500)
    monkeypatch.setattr(storage_images, "_EARLY_BYTES", 0)
    disk = opened()
    outcome: list[SluiceError | None] = []
    disk.store.stage(Message("t", 3, b"first", born_host=HOST))
    disk.store.write_staged()
    disk.files.fail("pwritev", nth=nth, error=errno.ENOSPC, within="/commitlog/")
    place_images(disk.store, images(KEYED), "t", 3, 1234, HOST, 99)
    tell(disk.store, outcome.append)
    disk.store.write_staged()
    assert isinstance(outcome[0], DiskFull)
    assert disk.store.queues["t", 3].next_offset == 1
    place_images(disk.store, images(KEYED), "t", 3, 1234, HOST, 99)
    disk.store.write_staged()
    assert disk.store.max_offset("t", 3) == 13


def test_queues_that_take_no_images() -> None:
    assert not takes_images(opened().store, "t", 3, V6)
    assert not takes_images(opened(message_crc=False).store, "t", 3, HOST)
    assert not takes_images(opened().store, "SCHEDULE_TOPIC_XXXX", 3, HOST)


@pytest.mark.parametrize("host", [HOST, V6])
@pytest.mark.parametrize("message_crc", [True, False])
def test_a_large_entry_is_one_as_all_others(host: bytes, message_crc: bool) -> None:
    plain, quick = opened(message_crc=message_crc), opened(message_crc=message_crc)
    properties = b"a\x01b\x02"
    outcome: list[SluiceError | None] = []
    for count in (1, 3):
        parts = [b"part-%d" % n * 20 for n in range(count)]
        message = Message("own", 0, b"".join(parts), properties, born_ms=5, born_host=host)
        placed = plain.store.stage(message, None, records.NO_KEYS)
        whole: tuple[Buffer, ...] = (*parts[:-1], memoryview(parts[-1]))
        large = stage_large(quick.store, "own", whole, properties, 5, host, outcome.append)
        assert large == placed.position
        for disk in (plain, quick):
            disk.store.write_staged()
    assert outcome == [None, None]
    for disk in (plain, quick):
        disk.close()
    for path in [*plain.paths("/store/commitlog"), *plain.paths("/store/consumequeue/own/0")]:
        assert quick.files.read(path, 1 << 20) == plain.files.read(path, 1 << 20)


def test_a_large_entry_may_be_longer_than_a_message_but_not_than_a_file() -> None:
    store: Store = opened(message_bytes_max=1024, segment_bytes=8192).store
    outcome: list[SluiceError | None] = []
    done: Callable[[SluiceError | None], None] = outcome.append
    stage_large(store, "own", (b"x" * 5000,), b"", 5, HOST, done)
    with pytest.raises(MessageIllegal, match="does not fit into a log file"):
        stage_large(store, "own", (b"x" * 8192,), b"", 5, HOST, done)
    store.write_staged()
    assert outcome == [None]


def test_columns_of_keys_are_hashed_as_keys_one_by_one() -> None:
    many, single = KeyBatch(), KeyBatch()
    single.add(b"first", b"KEYS\x01k\x02", 5, 1)
    many.add(b"first", b"KEYS\x01k\x02", 5, 1)
    place = 10
    for topic, keys in (
        (b"t", [b"a", b"bb", b"a" * 300]),
        ("größe".encode(), [b"a", b"bb"]),
        (b"t", ["größe".encode(), b"b"]),
    ):
        columns = KeyColumns(
            topic,
            b"".join(keys),
            *(np_array([len(key) for key in keys]), np_array([*range(place, place + len(keys))])),
            store_ms=place,
        )
        many.add_found([columns])
        assert (columns.message_count, columns.position) == (len(keys), place)
        for key in keys:
            single.add(topic, b"KEYS\x01" + key + b"\x02", place, columns.store_ms)
            place += 1
    assert many.message_count == single.message_count
    assert (many.first_position, many.end_position) == (5, single.end_position)
    for found, wanted in zip(many.hashed(), single.hashed(), strict=True):
        assert found.tolist() == wanted.tolist()
    assert many.spread()[0] == single.spread()[0]


def np_array(values: list[int]) -> Ints:
    return np.array(values, np.int64)
