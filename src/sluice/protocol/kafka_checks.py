"""This module looks at the records of a batch that a producer sent, before anybody stores them:
whether they are as many as the batch says, end where it ends, and have fields that fit into them.

Records of one batch are mostly alike: equally long, with fields at the same places. Such are looked
at column by column, the bytes that say how long something is; all others one after the other. The
numbers of records count up from 0, because readers take their offsets from them.

Nothing here makes an object of a record, and what is unpacked is bounded by the caller.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from sluice.model import Buffer
from sluice.protocol.kafka_batches import (
    CODEC_MASK,
    HEAD_BYTES,
    BadBatch,
    BatchHead,
    unpack,
    varint_from,
)
from sluice.protocol.kafka_codes import INVALID_RECORD

# Behind so many records their numbers take a byte more.
_RUN_RECORDS: Final = 64
_LONG_RUN_RECORDS: Final = 512
_RUN_MIN: Final = 4  # fewer are looked at one by one; one alone when such a batch is new
_RECORD_MIN_BYTES: Final = 7
_ALIKE_MAX: Final = 320  # records of a batch whose form is kept
_COLUMNS_MAX: Final = 32  # records with more fields than that are looked at one by one
_RUNS_KEPT: Final = 256
_HIGH: Final = bytes(range(0x80, 0x100))  # bytes of a varint that goes on

# Forms of batches whose records are alike: the first two bytes of a record, how many there are, the
# size of all; with what finds their lengths and the fields of the first, and those.
_alike: dict[tuple[int, int, int, int], tuple[Struct, tuple[int | bytes, ...]]] = {}
_FORMS_MAX: Final = 256
# Those of batches with one record, of which there are many, that were seen once.
_seen_alone: set[tuple[int, int, int, int]] = set()


class _Layout(NamedTuple):
    """Where a record has what, counted from its first byte."""

    time_at: int
    number_at: int
    key_at: int
    lengths: tuple[int, ...]  # bytes that say how long fields are, and how many headers there are


def has_alike(data: memoryview, attributes: int, count: int) -> bool:
    """Whether a batch holds so many records of one length, uncompressed, and nothing else; those
    whose numbers take a byte more may be longer. Where it does `check_records` need not be asked.

    Of a form that was seen before, the lengths of all records are looked at, and the fields of the
    first of each length.
    """
    size = len(data)
    is_alone = count == 1
    if not (is_alone or _RUN_MIN <= count <= _ALIKE_MAX) or attributes & CODEC_MASK:
        return False
    if count * _RECORD_MIN_BYTES > size - HEAD_BYTES:
        return False
    key = (data[HEAD_BYTES], data[HEAD_BYTES + 1], count, size)
    known = _alike.get(key)
    if known is not None and known[0].unpack_from(data, HEAD_BYTES) == known[1]:
        return True
    if is_alone and (known is not None or not _came_before(key)):
        return False
    codes = _alike_codes(data, count)
    if codes is None:
        return False
    # Most batches of a producer are of one form: their lengths are looked at in one go from now on.
    if len(_alike) >= _FORMS_MAX:
        _alike.clear()
    form = Struct(f">{codes}")
    _alike[key] = form, form.unpack_from(data, HEAD_BYTES)
    return True


def _came_before(key: tuple[int, int, int, int]) -> bool:
    """Whether a batch like this was seen: what takes as long as looking at it is worth it then."""
    if key in _seen_alone:
        return True
    if len(_seen_alone) >= _FORMS_MAX:
        _seen_alone.clear()
    _seen_alone.add(key)
    return False


def _alike_codes(data: memoryview, count: int) -> str | None:
    """What takes out of a batch the bytes that its form is known by; None where its records are
    not alike.
    """
    at, number, codes = HEAD_BYTES, 0, ""
    try:
        while number < count:
            run = count - number if number else min(count, _RUN_RECORDS)
            stop = _run_end(data, at, run, len(data))
            step = (stop - at) // run
            layout = _layout(data, at, at + step) if stop else None
            if layout is None or not _has_layout(data, at, run, step, number, layout):
                return None
            length_bytes, kind = (2, "H") if data[at] > 0x7F else (1, "B")
            # The time of a batch's first record is 0, that of a later one anything.
            first = layout.number_at if number else layout.time_at
            places = (*range(first, layout.key_at), *layout.lengths)
            codes += f"{kind}{_picked(length_bytes, places, step)}"
            codes += f"{kind}{step - length_bytes}x" * (run - 1)
            at = stop
            number += run
    except IndexError:
        return None
    return codes if at == len(data) else None


def _picked(at: int, places: tuple[int, ...], end: int) -> str:
    """The form that takes the bytes at these places, from one place to an end."""
    form = ""
    for place in places:
        form += f"{place - at}x1s" if place > at else "1s"
        at = place + 1
    return f"{form}{end - at}x"


def check_records(head: BatchHead, data: Buffer, bytes_max: int) -> None:
    """Refuse a batch whose records are not as many as it says, do not end where it ends, or have
    fields that are longer than they are.

    A compressed batch is unpacked for it, to `bytes_max` at most.
    """
    codec = head.attributes & CODEC_MASK
    inside = memoryview(data)[HEAD_BYTES:]
    found = bytes(unpack(codec, inside, bytes_max) if codec else inside)  # quicker than a view
    at, end, left = 0, len(found), head.record_count
    if left * _RECORD_MIN_BYTES > end - at:
        raise BadBatch(INVALID_RECORD, f"{head.record_count} records in {end - at} bytes")
    run_max, number = _RUN_RECORDS, 0
    try:
        while left:
            run = left if left < run_max else run_max
            stop = _alike_end(found, at, run, end, number) if run >= _RUN_MIN else 0
            if not stop:
                run = min(run, _RUN_RECORDS)
                stop = _records_end(found, at, run, number)
            at = stop
            left -= run
            number += run
            run_max = _LONG_RUN_RECORDS
    except IndexError:
        raise BadBatch(INVALID_RECORD, "the records are longer than their batch") from None
    if at != end:
        raise BadBatch(
            INVALID_RECORD, f"{head.record_count} records end {end - at} bytes before their batch"
        )


# ------------------------------------------------------------------------------- many at a time


def _alike_end(data: bytes, at: int, count: int, end: int, number: int) -> int:
    """Where so many records end if each is like the first; 0 where they are not. `number`: that of
    the first.
    """
    stop = _run_end(data, at, count, end)
    if not stop:
        return 0
    step = (stop - at) // count
    layout = _layout(data, at, at + step)
    if layout is None or not _has_layout(data, at, count, step, number, layout):
        return 0
    return stop


def _run_end(data: Buffer, at: int, count: int, end: int) -> int:
    """Where so many records end if each is as long as the first; 0 where they are not."""
    first, second = data[at], data[at + 1]
    if first <= 0x7F:
        step = (first >> 1) + 1
    elif second <= 0x7F:
        step = ((first & 0x7F | second << 7) >> 1) + 2
    else:
        return 0
    stop = at + step * count
    if first & 1 or stop > end or bytes(data[at:stop:step]) != bytes((first,)) * count:
        return 0
    if first > 0x7F and bytes(data[at + 1 : stop : step]) != bytes((second,)) * count:
        return 0
    return stop


def _layout(data: Buffer, begin: int, end: int) -> _Layout | None:
    """How a record is laid out, from its length to its end; None where its fields do not fill it,
    or are many.
    """
    lengths: list[int] = []
    try:
        _, time_at = varint_from(data, begin)
        time_at += 1  # behind the attributes
        _, number_at = varint_from(data, time_at)
        _, key_at = varint_from(data, number_at)
        value_at = _field_end(data, key_at, begin, lengths)
        headers_at = _field_end(data, value_at, begin, lengths)
        count, at = varint_from(data, headers_at)  # fields: a name and a value each
        lengths += range(headers_at - begin, at - begin)
        if count & 1 or count > _COLUMNS_MAX:
            return None
        for place in range(count):
            if data[at] & 1 and not place & 1:
                return None  # a name is never left out
            at = _field_end(data, at, begin, lengths)
    except (BadBatch, IndexError):
        return None
    if at != end or len(lengths) > _COLUMNS_MAX:
        return None
    return _Layout(time_at - begin, number_at - begin, key_at - begin, tuple(lengths))


def _field_end(data: Buffer, at: int, begin: int, lengths: list[int]) -> int:
    """Where a field ends; the places of its length are noted, counted from the record's."""
    size, behind = varint_from(data, at)
    lengths += range(at - begin, behind - begin)
    return behind if size & 1 else behind + (size >> 1)


def _has_layout(data: Buffer, at: int, count: int, step: int, number: int, layout: _Layout) -> bool:
    """Whether so many records have their fields where the first one has them."""
    stop = at + step * count
    numbers = _numbers(number, count)
    if layout.key_at - layout.number_at != len(numbers):
        return False
    for place, column in enumerate(numbers, at + layout.number_at):
        if bytes(data[place:stop:step]) != column:
            return False
    last_time_at = layout.number_at - 1
    if not bytes(data[at + last_time_at : stop : step]).isascii():
        return False
    for place in range(at + layout.time_at, at + last_time_at):
        if bytes(data[place:stop:step]).translate(None, _HIGH):
            return False
    return all(
        bytes(data[place:stop:step]) == bytes((data[place],)) * count
        for place in [at + each for each in layout.lengths]
    )


@lru_cache(_RUNS_KEPT)
def _numbers(first: int, count: int) -> tuple[bytes, ...]:
    """The bytes of the numbers of so many records, first bytes first; none where some are longer
    than others.
    """
    written = [_varint(number << 1) for number in range(first, first + count)]
    if len(written[0]) != len(written[-1]):
        return ()
    return tuple(map(bytes, zip(*written, strict=True)))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# -------------------------------------------------------------------------------- one by one


def _records_end(data: bytes, at: int, count: int, number: int) -> int:
    """Where so many records end, one after the other; `IndexError` where the bytes end before.

    Lengths of one and two bytes are read in place: a call for each takes longer than all the rest.
    """
    for wanted in range(number << 1, (number + count) << 1, 2):
        length = data[at]
        at += 1
        if length > 0x7F:
            byte = data[at]
            at += 1
            length = length & 0x7F | byte << 7
            if byte > 0x7F:
                length, at = varint_from(data, at - 2)
        if length & 1:
            raise BadBatch(INVALID_RECORD, "a record of negative length")
        end = at + (length >> 1)
        at += 2  # attributes, and what most times need
        if data[at - 1] > 0x7F:
            _, at = varint_from(data, at - 1)
        found = data[at]
        at += 1
        if found > 0x7F:
            byte = data[at]
            at += 1
            found = found & 0x7F | byte << 7
            if byte > 0x7F:
                found, at = varint_from(data, at - 2)
        if found != wanted:
            raise BadBatch(INVALID_RECORD, f"record {wanted >> 1} has another number")
        size = data[at]  # of the key
        at += 1
        if size > 0x7F:
            size, at = varint_from(data, at - 1)
        if not size & 1:  # a negative one: there is none
            at += size >> 1
        size = data[at]  # of the value
        at += 1
        if size > 0x7F:
            byte = data[at]
            at += 1
            size = size & 0x7F | byte << 7
            if byte > 0x7F:
                size, at = varint_from(data, at - 2)
        if not size & 1:
            at += size >> 1
        at = _headers_end(data, at, end) if data[at] else at + 1
        if at != end:
            raise BadBatch(INVALID_RECORD, "a record does not end where it says")
    return at


def _headers_end(data: bytes, at: int, end: int) -> int:
    """Where the headers of a record end; `at`: where their number is."""
    count, at = varint_from(data, at)
    if count & 1 or count > end - at:  # a name and a value each, of a byte at least
        raise BadBatch(INVALID_RECORD, f"{count >> 1} headers in {end - at} bytes")
    for place in range(count):
        size, at = varint_from(data, at)
        if size & 1:
            if not place & 1:
                raise BadBatch(INVALID_RECORD, "a header without a name")
        else:
            at += size >> 1
            if at > end:
                raise BadBatch(INVALID_RECORD, f"a header of {size >> 1} bytes")
    return at
