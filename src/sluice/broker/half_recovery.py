"""This module finds out at a start which half messages are open.

A half message is open unless an operation says that it is done, or something was made of it that
names it as its origin: a crash may have kept that and lost the operation. Of several copies of one
half message the newest counts. It reads the log and waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from sluice.broker.browsing import queue_units
from sluice.broker.half_messages import ASKED_TAG, DONE_TAG, Half, read_half, read_operation
from sluice.broker.half_table import HalfTable
from sluice.broker.topics import HALF_TOPIC, OP_TOPIC
from sluice.errors import RecordDamaged
from sluice.storage.origins import made_since, origin_at
from sluice.storage.store import ColdRead, ReadResult, Store

T = TypeVar("T")

FILLER_SIZE: Final = 0x7FFFFFFF  # of a queue's entry that stands for nothing
_UNITS: Final = 1024
_READ_COUNT: Final = 512
_READ_BYTES: Final = 1 << 20


class Found(NamedTuple):
    """What a start has to go on with."""

    done: list[tuple[int, int]]  # half messages that are done, and where what was made of them is
    operations: list[tuple[int, int]]  # each with the highest half message that it is about
    next_operation: int


def recover(
    store: Store, table: HalfTable, half: int, operation: int, walk: int, due_ms: int
) -> Found:
    """Fill the table from what the log holds, and what was noted of it before."""
    _read_halves(store, table, half, due_ms)
    operations, next_operation = _read_operations(store, table, operation)
    done: list[tuple[int, int]] = []
    _find_copies(store, table, done)
    _find_made(store, table, walk, done)
    table.order()
    return Found(done, operations, next_operation)


def _now(ask: Callable[[], T]) -> T:
    while True:
        try:
            return ask()
        except ColdRead as cold:
            cold.work()


def _read_halves(store: Store, table: HalfTable, half: int, due_ms: int) -> None:
    high = _now(lambda: store.max_offset(HALF_TOPIC, 0))
    table.skip_to(min(high, max(half, store.min_offset(HALF_TOPIC, 0))))
    while table.next_offset < high:
        units = _now(lambda: queue_units(store, HALF_TOPIC, 0, table.next_offset, _UNITS))
        assert units, "what lies between the lowest and the highest offset can be read"
        for position, size, _, offset in units:
            if size == FILLER_SIZE:
                table.skip_to(offset + 1)
            else:
                table.add_slot(offset, position, due_ms)


def _read_operations(
    store: Store, table: HalfTable, operation: int
) -> tuple[list[tuple[int, int]], int]:
    """Apply operations; returns those that are still needed, and the offset of the next one."""
    rows = []
    offset = max(operation, store.min_offset(OP_TOPIC, 0))
    high = _now(lambda: store.max_offset(OP_TOPIC, 0))
    while offset < high:
        try:
            result = _read(store, offset)
        except RecordDamaged as damaged:
            offset = max(offset + 1, damaged.next_queue_offset)
            continue
        for number, stored in enumerate(result.messages):
            tag, about = read_operation(stored)
            for each in about:
                if tag == DONE_TAG and table.is_open(each):
                    table.close(each)
                elif tag == ASKED_TAG:
                    table.note_asked(each)
            rows.append((offset + number, max(about, default=0)))
        offset = max(offset + 1, result.next_offset)
    return rows, high


def _read(store: Store, offset: int) -> ReadResult:
    return _now(
        lambda: store.read(OP_TOPIC, 0, offset, count_max=_READ_COUNT, bytes_max=_READ_BYTES)
    )


def _find_copies(store: Store, table: HalfTable, done: list[tuple[int, int]]) -> None:
    for offset in table.open_from(0):
        position = table.position(offset)
        origin = origin_at(store.log, position)
        if not origin:
            continue
        try:
            half = _half_at(store, position)
        except RecordDamaged:
            continue
        if half is None or half.first_position == position:
            continue
        older = table.find(origin)
        if older is not None and table.is_open(older):
            table.close(older)
            done.append((older, position))
        table.note_copy(offset, origin)


def _half_at(store: Store, position: int) -> Half | None:
    stored = _now(lambda: store.entry_at(position))
    return None if stored is None else read_half(stored)


def _find_made(store: Store, table: HalfTable, walk: int, done: list[tuple[int, int]]) -> None:
    lowest = table.lowest_open
    if not table.is_open(lowest):
        return
    # Nothing was made of a half message before it was stored.
    for made in made_since(store.log, max(walk, table.position(lowest))):
        offset = table.find(made.origin) if made.topic != HALF_TOPIC else None
        if (
            offset is not None
            and table.is_open(offset)
            and table.first_position(offset) == made.origin
        ):
            table.close(offset)
            done.append((offset, made.position))
