"""Copies made as a table: the bytes, units and keys that they get one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sluice.model import Message
from sluice.protocol import records
from sluice.storage.copies import Keys, TargetQueue, stage_copies
from sluice.storage.copy_tables import COUNT_MIN, Names, stage_alike
from sluice.storage.store import Store
from tests.unit.storage.store_kit import Disk

HOST = b"\x0a\x00\x00\x01\x00\x00\x20\x00"
NAMES = Names(places=frozenset((b"TO",)), free=frozenset((b"AT",)))
COUNT = 3 * COUNT_MIN
Line = Callable[[int], bytes]


def usual(number: int) -> bytes:
    place = b"TO\x01%d\x02AT\x01%03d\x02" % (number % 3, number * 7)
    return b"UNIQ_KEY\x01u%04d\x02TAGS\x01t\x02" % number + place


def message(number: int, line: Line) -> Message:
    body = b"body %04d" % number
    return Message("from", 0, body, line(number), number, 0, 55 + number, HOST, number % 2)


def filled(line: Line, count: int = COUNT, segment_bytes: int = 1 << 16) -> tuple[Disk, list[int]]:
    """A store with some messages, two of each millisecond."""
    disk = Disk(flush="sync", segment_bytes=segment_bytes)
    disk.open()
    positions = []
    for number in range(count):
        positions.append(disk.put_message(message(number, line)).position)
        disk.now_ms += number % 2
    return disk, positions


class Chooser:
    """Chooses by the property TO, and adds the store time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked = 0

    def __call__(self, properties: bytes, store_ms: int) -> tuple[TargetQueue, bytes, Keys] | None:
        self.asked += 1
        place = records.property_value(properties, b"TO")
        if place is None or not place.isdigit():
            return None
        queue = self._store.queue("to", int(place))
        return queue, b"STORED\x01%d\x02" % store_ms, records.message_keys(properties)


def everything(disk: Disk, uniques: list[bytes]) -> list[object]:
    """What a store holds: its log, its queues, and what is found by keys."""
    store = disk.store
    store.write_staged()
    log = store.log
    units = [
        queue.units(0, queue.next_offset, store.queue_files, wait=True)
        for _, queue in sorted(store.queues.items())
        if queue.next_offset
    ]
    found: list[bytes] = []
    for unique in uniques:
        store.query_key(
            "to", unique.decode(), lambda views, _: found.extend(map(bytes, views or ()))
        )
    assert len(found) >= len(uniques)
    return [bytes(log.view(0, log.written)), units, found]


@pytest.mark.parametrize(
    "line",
    [
        usual,
        lambda number: usual(0),
        lambda number: b"KEYS\x01k%03d\x02" % number + usual(number),
        lambda number: b"KEYS\x01same\x02" + usual(number),
        lambda number: usual(number).replace(b"TAGS\x01t\x02", b""),
        lambda number: usual(number) + b"mine\x01x\x02",
    ],
)
def test_a_table_gives_what_they_get_one_by_one(line: Line) -> None:
    (table, positions), (plain, _) = filled(line), filled(line)
    choose = Chooser(table.store)
    shares = stage_alike(table.store, positions, choose, NAMES)
    assert sum(share.message_count for share in shares) == COUNT
    assert choose.asked < COUNT, "what they have in common is asked for once"
    singly = stage_copies(plain.store, positions, Chooser(plain.store))
    key = lambda share: share.queue.key  # noqa: E731
    assert [share[1:] for share in sorted(shares, key=key)] == [
        share[1:] for share in sorted(singly, key=key)
    ]
    uniques = [records.message_keys(line(number))[0] for number in range(COUNT)]
    assert everything(table, uniques) == everything(plain, uniques)
    table.reopen()
    for queue_id in {int(share.queue.key.queue_id) for share in shares}:
        for offset in range(table.store.max_offset("to", queue_id)):
            (view,) = table.read("to", queue_id, offset, count_max=1).slices
            assert records.decode(view).prepared_offset in positions


def test_copies_without_a_unique_key_are_found_by_their_keys() -> None:
    def line(number: int) -> bytes:
        return b"KEYS\x01k%03d\x02TO\x01%d\x02" % (number, number % 3)

    (table, positions), (plain, _) = filled(line), filled(line)
    shares = stage_alike(table.store, positions, Chooser(table.store), NAMES)
    assert sum(share.message_count for share in shares) == COUNT
    stage_copies(plain.store, positions, Chooser(plain.store))
    keys = [b"k%03d" % number for number in range(COUNT)]
    assert everything(table, keys) == everything(plain, keys)


def test_it_ends_at_the_end_of_a_file() -> None:
    disk, positions = filled(usual, 120, segment_bytes=1 << 14)
    made = rounds = 0
    while made < len(positions):
        rounds += 1
        rest = positions[made:]
        choose = Chooser(disk.store)
        shares = stage_alike(disk.store, rest, choose, NAMES)
        shares = shares or stage_copies(disk.store, rest, choose)
        made += sum(share.message_count for share in shares)
        disk.store.write_staged()
    assert rounds > 1
    disk.reopen()
    numbers = []
    for queue_id in range(3):
        for offset in range(disk.store.max_offset("to", queue_id)):
            (view,) = disk.read("to", queue_id, offset, count_max=1).slices
            numbers.append(records.decode(view).flag)
    assert sorted(numbers) == list(range(120))


def refused(line: Line, count: int = COUNT) -> bool:
    disk, positions = filled(line, count)
    shares = stage_alike(disk.store, positions, Chooser(disk.store), NAMES)
    assert disk.store.staged == [], "nothing is done by halves"
    return shares == []


@pytest.mark.parametrize(
    "line",
    [
        lambda number: b"other\x01%d\x02" % (number % 9) + usual(number),
        lambda number: b"TAGS\x01%d\x02" % (number % 9) + usual(number),
        lambda number: usual(number) + b"TO\x011\x02",
        lambda number: usual(number) + b"UNIQ_KEY\x01v%04d\x02" % number,
        lambda number: usual(number).replace(b"TO\x011", b"TO\x01x"),
        lambda number: b"_SYS_MSG_EXPIRES_MS_\x019999999999999\x02" + usual(number),
        # As long as the others, with other parts.
        lambda number: usual(number).replace(b"u0009", b"u\x02a\x013"),
        lambda number: b"no" + usual(number)[2:],
    ],
)
def test_what_differs_elsewhere_takes_the_other_way(line: Line) -> None:
    assert refused(line)


def test_too_few_take_the_other_way() -> None:
    assert refused(usual, COUNT_MIN - 1)
    assert not refused_count(COUNT_MIN)


def refused_count(count: int) -> bool:
    disk, positions = filled(usual, count)
    return stage_alike(disk.store, positions, Chooser(disk.store), NAMES) == []


def test_it_takes_those_before_one_of_another_size() -> None:
    def line(number: int) -> bytes:
        return usual(number) + (b"long\x01x\x02" if number == 20 else b"")

    disk, positions = filled(line)
    shares = stage_alike(disk.store, positions, Chooser(disk.store), NAMES)
    assert sum(share.message_count for share in shares) == 20


@pytest.mark.parametrize("position", [-1, 1 << 40, 3])
def test_positions_without_an_entry_are_left_alone(position: int) -> None:
    disk, positions = filled(usual)
    for wrong in ([position, *positions], [position] * COUNT):
        assert stage_alike(disk.store, wrong, Chooser(disk.store), NAMES) == []
    mixed = [*positions[:COUNT_MIN], position, *positions[COUNT_MIN:]]
    shares = stage_alike(disk.store, mixed, Chooser(disk.store), NAMES)
    assert sum(share.message_count for share in shares) == COUNT_MIN


def test_entries_of_another_kind_take_the_other_way() -> None:
    disk = Disk(flush="sync")
    disk.open()
    v6 = bytes(15) + b"\x01\x00\x00\x20\x00"
    positions = [
        disk.put_message(replace(message(number, usual), born_host=v6)).position
        for number in range(COUNT)
    ]
    assert stage_alike(disk.store, positions, Chooser(disk.store), NAMES) == []


def test_what_was_written_before_the_start_takes_the_other_way() -> None:
    """It may be damaged, and each is looked at by itself."""
    disk, positions = filled(usual)
    disk.reopen()
    assert stage_alike(disk.store, positions, Chooser(disk.store), NAMES) == []
