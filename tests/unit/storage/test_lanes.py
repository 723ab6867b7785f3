"""Lanes: the same entries, units and keys as the plain way, and nothing forgotten when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import DiskFull, MessageIllegal, SluiceError
from sluice.model import Message
from sluice.protocol import records
from sluice.protocol.batch_presses import Presses
from sluice.protocol.message_batches import join_batch, split_batch
from sluice.protocol.record_runs import Run
from sluice.storage.background import Steps
from sluice.storage.lanes import Arrived, Lane, PlacedBatch, tell
from sluice.storage.runs import stage_run
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk

HOST = b"\x0a\0\0\1\0\0\x30\x39"
MESSAGES = [
    (b"", b"UNIQ_KEY\x01A1\x02"),
    (b"body", b"UNIQ_KEY\x01A2\x02KEYS\x01k1 k2\x02TAGS\x01TagA\x02"),
    (b"x" * 900, "TAGS\x01中文\x02UNIQ_KEY\x01A3\x02".encode()),
] * 5


def opened(segment_bytes: int = SEGMENT_BYTES) -> Disk:
    disk = Disk(segment_bytes=segment_bytes)
    store = disk.open()
    store.stage(Message("t", 3, b"first", born_host=HOST))
    store.write_staged()
    return disk


def lane_of(disk: Disk, sys_flag: int = 1) -> Lane:
    assert Lane.fits(disk.store, "t", 3, sys_flag, HOST)
    return Lane(disk.store, "t", 3, sys_flag)


def plain_ones(properties: bytes) -> bool:
    return b"SPECIAL" in properties


def keyed(disk: Disk, key: str) -> list[bytes]:
    found: list[bytes] = []
    disk.store.query_key("t", key, lambda entries, _: found.extend(map(bytes, entries or [])))
    return found


def test_the_same_bytes_as_the_plain_way() -> None:
    plain, quick = opened(), opened()
    lane = lane_of(quick)
    for body, properties in MESSAGES:
        keys = records.message_keys(properties)
        placed = plain.store.stage(Message("t", 3, body, properties, 0, 1, 1234, HOST), None, keys)
        place = lane.place(body, properties, keys, 1234, HOST)
        assert place == (placed.position, placed.size, placed.queue_offset)
        plain.store.write_staged()
        quick.store.write_staged()
    assert len(plain.store.log.segments) > 1
    for disk in (plain, quick):
        disk.close()
    for path in plain.paths("/store/commitlog"):
        assert quick.files.read(path, 1 << 20) == plain.files.read(path, 1 << 20)
    for disk in (plain, quick):
        disk.open()
    for key in ("A2", "k2", "T#TagA"):
        assert keyed(plain, key)
        assert keyed(plain, key) == keyed(quick, key)


Part = tuple[int, bytes, bytes]


def alike(
    count: int, before: bytes = b"", after: bytes = b"", body_bytes: int = 30, key_bytes: int = 6
) -> list[Part]:
    """Messages of one size, with bodies and unique keys of their own."""
    return [
        (
            0,
            bytes((number + at) % 256 for at in range(body_bytes)),
            before + b"UNIQ_KEY\x01%0*d\x02" % (key_bytes, number) + after,
        )
        for number in range(count)
    ]


ONE_BY_ONE = [(7, body, properties) for body, properties in MESSAGES]
FLAGS = [(number % 3, body, properties) for number, (_, body, properties) in enumerate(alike(9))]
ALIKE = [
    *(alike(8), alike(30), alike(9, b"WAIT\x01true\x02", b"TAGS\x01TagA\x02", 1, 1)),
    *(alike(20, "KEYS\x01k1 中\x02".encode(), b"", 200, 32), alike(7), alike(8, body_bytes=0)),
    *(FLAGS, [(5, body, properties) for _, body, properties in FLAGS]),
]


@pytest.mark.parametrize(
    "batches", [[ONE_BY_ONE[:1], ONE_BY_ONE[:3], ONE_BY_ONE[1:5]] * 8, [*ALIKE, ONE_BY_ONE] * 2]
)
def test_a_batch_has_the_same_bytes_as_the_plain_way(batches: list[list[Part]]) -> None:
    plain, quick = opened(1 << 13), opened(1 << 13)
    lane = lane_of(quick)
    for part in batches:
        keys = [records.message_keys(properties) for _, _, properties in part]
        run = Run("t", 3, 1, 1234, HOST, 0, part)
        placed = stage_run(plain.store, run, keys, lambda _: None)
        quickly = lane.place_batch(join_batch(part), 1234, HOST, plain_ones)
        codes = {records.java_hash(tag) for _, _, tag in keys}
        assert quickly is not None
        packed = pack(f">{len(quickly.positions)}q", *quickly.positions)
        assert (list(quickly[0]), *quickly[1:]) == (*placed, keys[0][0], codes, packed)
        plain.store.write_staged()
        quick.store.write_staged()
    assert len(plain.store.log.segments) > 1
    assert plain.store.max_offset("t", 3) == quick.store.max_offset("t", 3)
    for disk in (plain, quick):
        disk.close()
    for directory in ("commitlog", "index", "consumequeue"):
        paths = [*plain.paths(f"/store/{directory}")]
        assert paths
        for path in paths:
            assert quick.files.read(path, 1 << 20) == plain.files.read(path, 1 << 20)


def lanes_of(disk: Disk) -> list[Lane]:
    """Lanes to queues of one topic, that find each other's presses."""
    presses = Presses()
    return [Lane(disk.store, "t", queue_id, 1, presses) for queue_id in (3, 5, 4)]


Group = list[tuple[int, bytes]]  # which lane, and a batch


def groups() -> list[Group]:
    """Batches that are alike within each group."""
    made: list[Group] = []
    for number, lanes in enumerate([[0], [0, 1], [1, 0, 2], [2, 2], [0, 1, 2, 0], [1] * 4] * 3):
        parts = [
            [
                (flag, bytes([number, at, *body[2:]]), properties)
                for flag, body, properties in alike(8 + number % 3, b"TAGS\x01T\x02", b"", 20)
            ]
            for at in range(len(lanes))
        ]
        made.append([(lane, join_batch(part)) for lane, part in zip(lanes, parts, strict=True)])
    return made


def place_together(lanes: list[Lane], group: Group) -> list[PlacedBatch] | None:
    arrived: list[Arrived] = [
        (lanes[lane], data, 1000 + number, HOST) for number, (lane, data) in enumerate(group)
    ]
    return lanes[group[0][0]].place_alike(arrived, plain_ones)


def test_batches_together_have_the_same_bytes_as_each_by_itself() -> None:
    single, together = opened(1 << 18), opened(1 << 18)
    lanes, others = lanes_of(single), lanes_of(together)
    assert all(one.goes_with(other) for one in lanes for other in lanes)
    assert not lanes[0].goes_with(others[0])
    for group in groups():
        alone = [
            lanes[lane].place_batch(data, 1000 + number, HOST, plain_ones)
            for number, (lane, data) in enumerate(group)
        ]
        assert place_together(others, group) == alone
        single.store.write_staged()
        together.store.write_staged()
    for disk in (single, together):
        disk.close()
    for directory in ("commitlog", "index", "consumequeue"):
        paths = [*single.paths(f"/store/{directory}")]
        assert paths
        for path in paths:
            assert together.files.read(path, 1 << 20) == single.files.read(path, 1 << 20)


def test_batches_together_lie_in_one_file() -> None:
    disk = opened(1 << 13)
    lanes = lanes_of(disk)
    first_bodies: list[bytes] = []
    for group in groups():
        placed = place_together(lanes, group)
        if placed is None:
            # All of them are longer than a file. Nothing was done by halves.
            assert not disk.store.staged
            for number, (lane, data) in enumerate(group):
                placed_one = lanes[lane].place_batch(data, 1000 + number, HOST, plain_ones)
                assert placed_one is not None
        else:
            files = {each.positions[at] >> 13 for each in placed for at in (0, -1)}
            assert len(files) == 1
        first_bodies += [data[20:22] for lane, data in group if lane == 0]
        disk.store.write_staged()
    assert len(disk.store.log.segments) > 3
    disk.reopen()
    found: list[bytes] = []
    for body in [*disk.bodies("t", 3).values()][1:]:
        found += [body[:2]] * (found[-1:] != [body[:2]])
    assert found == first_bodies


def test_together_with_special_ones_none_is_placed() -> None:
    disk = opened(1 << 18)
    lanes = lanes_of(disk)
    special = join_batch(alike(8, b"SPECIAL\x011\x02"))
    usual = join_batch(alike(8, b"SPECIES\x011\x02"))
    end = disk.store.log.end
    for group in ([special, special], [special, usual], [usual, special]):
        assert place_together(lanes, [*enumerate(group)]) is None
        assert not disk.store.staged
        assert disk.store.log.end == end
    assert place_together(lanes, [(0, usual), (1, usual)]) is not None


def test_batches_together_that_cannot_be_written_are_undone() -> None:
    disk = opened(1 << 18)
    lanes = lanes_of(disk)
    group = groups()[4]
    told: list[SluiceError | None] = []
    disk.files.capacity_bytes = 0
    assert place_together(lanes, group) is not None
    tell(disk.store, told.append)
    disk.store.write_staged()
    assert [type(error) for error in told] == [DiskFull]
    disk.files.capacity_bytes = None
    assert [disk.store.max_offset("t", queue_id) for queue_id in (3, 5, 4)] == [1, 0, 0]
    placed = place_together(lanes_of(disk), group)
    assert placed is not None
    assert [each.queue_offset for each in placed] == [1, 0, 0, 10]


@pytest.mark.parametrize("count", [8, 31])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda parts: parts.__setitem__(3, (0, parts[3][1] + b"x", parts[3][2])),
        lambda parts: parts.__setitem__(3, (1, *parts[3][1:])),
        lambda parts: parts.__setitem__(3, (0, parts[3][1][1:], parts[3][2] + b"a\x01\x02")),
        lambda parts: parts.__setitem__(
            3, (0, parts[3][1], b"TAGS\x01Other\x02" + parts[3][2][11:])
        ),
        lambda parts: parts.__setitem__(3, (0, parts[3][1], parts[3][2].replace(b"0", b"\x02"))),
    ],
)
def test_messages_that_are_not_quite_alike_are_told_apart(
    count: int, spoil: Callable[[list[Part]], None]
) -> None:
    parts = alike(count, b"TAGS\x01Tag-A\x02")
    disk = opened(1 << 13)
    spoil(parts)
    placed = lane_of(disk).place_batch(join_batch(parts), 1234, HOST, plain_ones)
    assert placed is not None
    disk.store.write_staged()
    entries = [records.decode(each) for each in disk.store.read("t", 3, 1, count_max=99).messages]
    stored = [(e.flag, bytes(e.body), records.without_checksum(e.properties)) for e in entries]
    assert stored == parts


@given(st.data())
def test_a_batch_that_is_not_as_usual_is_left_to_the_plain_way(data: st.DataObject) -> None:
    disk = Disk(segment_bytes=1 << 16)
    disk.open().stage(Message("t", 3, b"first", born_host=HOST))
    disk.store.write_staged()
    few = [(0, b"abc", b"UNIQ_KEY\x01A\x02"), (0, b"", b"a\x01b\x02")]
    raw = bytearray(join_batch(data.draw(st.sampled_from([few, alike(8), alike(8, key_bytes=1)]))))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    batch = bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw), 40, 10]))])
    placed = lane_of(disk).place_batch(batch, 1, HOST, plain_ones)
    if placed is None:
        assert not disk.store.staged
        return
    disk.store.write_staged()
    stored = disk.store.read("t", 3, 1).messages
    expected = [(flag, bytes(body), properties) for flag, body, properties in split_batch(batch)]
    entries = map(records.decode, stored)
    assert [
        (entry.flag, bytes(entry.body), entry.properties[: -records.CRC_PROPERTY_BYTES])
        for entry in entries
    ] == expected


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        join_batch([(0, b"x" * 1025, b"a\x01b\x02")]),
        join_batch([(0, b"x", b"")]),
        join_batch([(0, b"x", b"a\x01b")]),
        join_batch([(0, b"x", b"a\x01b\x02"), (0, b"x", b"SPECIAL\x01b\x02")]),
        join_batch([(0, b"x", b"a\x01b\x02")])[:-1],
    ],
)
def test_what_batch_is_not_as_usual(batch: bytes) -> None:
    disk = Disk(message_bytes_max=1024)
    disk.open().stage(Message("t", 3, b"first"))
    disk.store.write_staged()
    assert lane_of(disk).place_batch(batch, 1, HOST, plain_ones) is None
    assert not disk.store.staged


def test_who_waits_is_told_once_with_everything_before_it() -> None:
    disk = opened()
    lane = lane_of(disk)
    told: list[tuple[str, SluiceError | None]] = []
    disk.store.stage(Message("t", 3, b"x"), lambda error: told.append(("plain", error)))
    tell(disk.store, lambda error: told.append(("group", error)))
    lane.place(b"x", b"UNIQ_KEY\x01A\x02", (b"A", b"", b""), 0, HOST)
    tell(disk.store, lambda error: told.append(("later", error)))
    assert told == []
    disk.store.write_staged()
    assert told == [("plain", None), ("group", None), ("later", None)]


def test_who_asks_after_the_write_is_told_when_it_is_safe() -> None:
    steps = Steps()
    disk = Disk(steps)
    disk.open().stage(Message("t", 3, b"first", born_host=HOST))
    disk.store.write_staged()
    steps.run_all()
    lane_of(disk).place(b"x", b"UNIQ_KEY\x01A\x02", (b"A", b"", b""), 0, HOST)
    disk.store.write_staged()
    told: list[SluiceError | None] = []
    tell(disk.store, told.append)
    assert told == [], "the disk has not said so yet"
    steps.run_all()
    assert told == [None]
    tell(disk.store, told.append)
    assert told == [None, None]


def test_what_cannot_be_written_is_undone() -> None:
    disk = Disk(segment_bytes=1 << 20)
    disk.open().stage(Message("t", 3, b"first"))
    disk.store.write_staged()
    lane = lane_of(disk)
    told: list[SluiceError | None] = []
    before = disk.store.max_offset("t", 3)
    disk.files.capacity_bytes = 0
    lane.place(b"x" * 9000, b"UNIQ_KEY\x01A\x02", (b"A", b"", b""), 0, HOST)
    tell(disk.store, told.append)
    disk.store.write_staged()
    assert [type(error) for error in told] == [DiskFull]
    disk.files.capacity_bytes = None
    place = lane.place(b"x", b"UNIQ_KEY\x01B\x02", (b"B", b"", b""), 0, HOST)
    assert place[2] == before
    disk.store.write_staged()
    assert disk.store.max_offset("t", 3) == before + 1


def test_too_long_is_refused_in_words_and_leaves_nothing() -> None:
    disk = Disk(message_bytes_max=1024)
    disk.open().stage(Message("t", 3, b"first"))
    disk.store.write_staged()
    lane = lane_of(disk)
    end = disk.store.log.end
    for body, properties in ((b"x" * 1025, b"a\x01b\x02"), (b"", b"a\x01" + b"b" * 33_000)):
        with pytest.raises(MessageIllegal):
            lane.place(body, properties, (b"A", b"", b""), 0, HOST)
    assert disk.store.log.end == end
    assert not disk.store.staged


def test_it_ends_with_its_queue_and_with_the_settings_it_was_made_for() -> None:
    disk = opened()
    lane = lane_of(disk)
    assert lane.is_current
    disk.store.delete_topic("t")
    assert [lane.is_current] == [False]
    disk = opened()
    lane = lane_of(disk)
    disk.store.reconfigure(replace(disk.config, message_bytes_max=2048))
    assert [lane.is_current] == [False]


@pytest.mark.parametrize(
    ("queue_id", "sys_flag", "host"),
    [(3, 4, HOST), (3, 8, HOST), (3, 0x80, HOST), (3, 0, bytes(20))],
)
def test_what_takes_no_lane(queue_id: int, sys_flag: int, host: bytes) -> None:
    assert not Lane.fits(opened().store, "t", queue_id, sys_flag, host)


def test_a_queue_that_has_nothing_yet_takes_one() -> None:
    """Delayed messages go to one for long before anything is stored in it."""
    assert Lane.fits(opened().store, "t", 9, 0, HOST)
