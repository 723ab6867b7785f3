"""This module encodes batches whose messages are alike: one table, filled column by column.

Many producers send messages of one size that differ in body and unique key only, batch after
batch. For such a form there is a `Press`: two buffers, for what comes and for what is stored, with
all columns and all pieces to sum up found once. Pressing a batch copies it in, moves its columns
with one call each, and copies out the entries and what stands for them in their queue. Batches of
one form that came together are pressed together: a call costs as much for four as for one. Those
are the bytes that `record_runs.py` gives; no batch that is not of this form is taken, and a test
holds the two together.

Presses belong to one thread. They keep nothing of a batch that anybody reads later.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from sluice.model import Buffer
from sluice.protocol import records
from sluice.protocol.message_batches import BATCH_COUNT_MAX
from sluice.protocol.record_runs import BatchShape

COUNT_MIN: Final = 8  # of fewer, each by itself is as fast
_KEPT_MAX: Final = 16  # presses of one owner
_KEPT_DATA_BYTES_MAX: Final = 512 * 1024  # of a batch; a press holds about twice as much
_TOGETHER_MAX: Final = 4  # batches that are pressed together
_TOGETHER_BYTES_MAX: Final = 256 * 1024  # of several batches
_HEAD_BYTES: Final = 20  # of a message in a batch: size, magic, checksum, flag, size of the body
_FRONT_BYTES: Final = 36  # of an entry: all up to and with its position
_UNIQUE_NAME: Final = b"UNIQ_KEY\x01"
_MASK_31: Final = 0x7FFFFFFF
# What stands for an entry in its queue; storage/queue_index.py draws it.
_UNIT_ROW: Final = np.dtype([("position", ">i8"), ("size", ">i4"), ("code", ">i8")])
_DIGITS_AT: Final = len(records.CRC_NAME)
# Decimal digits of a checksum, the last one first: four of them, and the two that are left.
_FOUR: Final = np.frombuffer(b"".join(records.DIGIT_TABLES[1]), np.uint32)
_TWO: Final = np.frombuffer(b"".join(t[:2] for t in records.DIGIT_TABLES[2]), np.uint16)

K = TypeVar("K", bound=Hashable)

# A producer's batch, the queue that it goes to, `BatchShape.middle` and its first offset there.
Sent = tuple[Buffer, int, bytes, int]


class Alike(NamedTuple):
    """The messages of a batch as what they have in common, and the unique keys, joined."""

    entries: bytes
    positions: bytes  # of each, eight bytes
    units: bytes  # for their queue
    uniques: bytes
    press: Press


class _Form(NamedTuple):
    """Where things are in a message of a batch, and what all of its messages share."""

    head: bytes
    message_bytes: int
    body_bytes: int
    before: bytes  # the unique key: size of the properties, and those up to the key
    unique_bytes: int
    after: bytes

    @property
    def properties_bytes(self) -> int:
        return len(self.before) - 2 + self.unique_bytes + len(self.after)

    def entry_bytes(self, shape: BatchShape) -> int:
        return shape.rest_bytes + self.body_bytes + self.properties_bytes

    @property
    def same(self) -> dict[str, bytes]:
        """The columns that are the same in all messages."""
        return {"head": self.head, "before": self.before, "after": self.after}

    @property
    def row(self) -> np.dtype[Any]:
        """A message of the batch as it comes."""
        unique_at = _HEAD_BYTES + self.body_bytes + len(self.before)
        return _dtype(
            self.message_bytes,
            head=(f"V{_HEAD_BYTES}", 0),
            body=(f"V{self.body_bytes}", _HEAD_BYTES),
            before=(f"V{len(self.before)}", unique_at - len(self.before)),
            unique=(f"V{self.unique_bytes}", unique_at),
            after=(f"V{len(self.after)}", unique_at + self.unique_bytes),
        )

    def entry_row(self, shape: BatchShape) -> np.dtype[Any]:
        """An entry of the log that is made of it."""
        size = self.entry_bytes(shape)
        body_at = _FRONT_BYTES + shape.middle_bytes + 4
        unique_at = body_at + self.body_bytes + len(shape.topic_field) + len(self.before)
        digits_at = size - records.CRC_PROPERTY_BYTES + _DIGITS_AT
        return _dtype(
            size,
            crc=(">u4", 8),
            queue_id=(">i4", 12),
            offset=(">i8", 20),
            position=(">i8", 28),
            middle=(f"V{shape.middle_bytes}", _FRONT_BYTES),
            body=(f"V{self.body_bytes}", body_at),
            unique=(f"V{self.unique_bytes}", unique_at),
            last_digits=("u4", digits_at),
            middle_digits=("u4", digits_at + 4),
            first_digits=("u2", digits_at + 8),
        )

    def entry(self, shape: BatchShape) -> bytes:
        """Such an entry, with zeros where it differs from others."""
        stored_bytes = self.properties_bytes + records.CRC_PROPERTY_BYTES
        return b"".join(
            (
                *(self.entry_bytes(shape).to_bytes(4, "big"), shape.magic.to_bytes(4, "big")),
                *(bytes(8), self.head[12:16], bytes(16 + shape.middle_bytes), self.head[16:]),
                *(bytes(self.body_bytes), shape.topic_field, stored_bytes.to_bytes(2, "big")),
                *(self.before[2:], bytes(self.unique_bytes), self.after, records.crc_property(0)),
            )
        )


class Press:
    """Encodes batches of one form for the queues of one topic."""

    def __init__(self, shape: BatchShape, form: _Form, count: int) -> None:
        self.message_count = count  # of each batch
        self.batch_bytes = form.message_bytes * count
        self.size = form.entry_bytes(shape)  # of each entry
        self.unique_bytes = form.unique_bytes  # of each key
        self.around = form.before[2:] + form.after  # the properties of all, without that key
        _, self.keys, self.tag = records.message_keys(self.around)
        self.tags_code = records.java_hash(self.tag) if self.tag else 0
        self._shape, self._form = shape, form
        room = count * together_max(self.batch_bytes)
        self._in = memoryview(bytearray(form.message_bytes * room))
        self._out = memoryview(bytearray(form.entry(shape)) * room)
        assert len(self._out) == self.size * room
        self._tables: dict[int, _Tables] = {}  # by how many batches they take

    def press(self, batches: Sequence[Sent], position: int) -> Alike | None:
        """The entries of batches of one size, at most `together_max`; None where one of them is not
        of this form. `position` is where the first entry goes, the others follow it.
        """
        count = len(batches)
        tables = self._tables.get(count)
        if tables is None:
            tables = _Tables(self, self._shape, self._form, self._in, self._out, count)
            self._tables[count] = tables
        return tables.press(batches, position)


class _Tables:
    """The columns of a press for so many batches at a time, in buffers that begin with them."""

    def __init__(
        self,
        press: Press,
        shape: BatchShape,
        form: _Form,
        arrived: memoryview,
        stored: memoryview,
        batch_count: int,
    ) -> None:
        self._press = press
        count = batch_count * press.message_count
        arrived = arrived[: press.batch_bytes * batch_count]
        self._in = _pieces(arrived, 0, press.batch_bytes, press.batch_bytes)
        rows = np.frombuffer(arrived, form.row)
        self._same = [(rows[name], each * count) for name, each in form.same.items()]
        self._uniques, self._bodies = rows["unique"], rows["body"]
        self._summed_bodies = _pieces(arrived, _HEAD_BYTES, form.body_bytes, form.message_bytes)
        self._out = stored[: press.size * count]
        table = np.frombuffer(self._out, form.entry_row(shape))
        # What the messages of a batch share or count by themselves: a row for each batch.
        places = (batch_count, press.message_count)
        self._queue_ids = table["queue_id"].reshape(places)
        self._offsets = table["offset"].reshape(places)
        self._middles = table["middle"].reshape(places)
        self._numbers = np.arange(press.message_count)
        self._stored_crcs, self._positions = table["crc"], table["position"]
        self._stored_bodies, self._stored_uniques = table["body"], table["unique"]
        self._last_digits, self._first_digits = table["last_digits"], table["first_digits"]
        self._middle_digits = table["middle_digits"]
        summed_bytes = press.size - records.CRC_PROPERTY_BYTES
        self._summed = _pieces(self._out, 0, summed_bytes, press.size)
        self._distances = np.arange(count) * press.size
        self._units = np.zeros(count, _UNIT_ROW)
        self._units["size"], self._units["code"] = press.size, press.tags_code
        self._unit_positions = self._units["position"]

    def press(self, batches: Sequence[Sent], position: int) -> Alike | None:
        """See `Press.press`."""
        for piece, batch in zip(self._in, batches, strict=True):
            piece[:] = batch[0]
        uniques = self._uniques.tobytes()
        for column, expected in self._same:
            if column.tobytes() != expected:
                return None
        if b"\x01" in uniques or b"\x02" in uniques:
            return None
        self._stored_bodies[...] = self._bodies
        self._stored_uniques[...] = self._uniques
        self._place(batches)
        self._positions[...] = self._unit_positions[...] = self._distances + position
        self._stored_crcs[...] = _sums(self._summed_bodies)
        upper, last_digits = np.divmod(_sums(self._summed), 10_000)
        first_digits, middle_digits = np.divmod(upper, 10_000)
        self._last_digits[...] = _FOUR[last_digits]
        self._middle_digits[...] = _FOUR[middle_digits]
        self._first_digits[...] = _TWO[first_digits]
        positions, units = self._positions.tobytes(), self._units.tobytes()
        return Alike(bytes(self._out), positions, units, uniques, self._press)

    def _place(self, batches: Sequence[Sent]) -> None:
        """Fill in what each batch has of its own."""
        kind = self._middles.dtype
        if len(batches) == 1:
            _, queue_id, middle, offset = batches[0]
            self._queue_ids[...] = queue_id
            self._middles[...] = np.frombuffer(middle, kind)
            self._offsets[...] = self._numbers + offset
            return
        _, queue_ids, middles, offsets = zip(*batches, strict=True)
        self._queue_ids[...] = np.array(queue_ids)[:, None]
        self._middles[...] = np.frombuffer(b"".join(middles), kind)[:, None]
        self._offsets[...] = np.array(offsets)[:, None] + self._numbers


class Presses:
    """The presses of one owner: a bounded number."""

    def __init__(self) -> None:
        # By what a batch begins with the newest; and all of them, by their forms.
        self._newest: dict[tuple[BatchShape, int, bytes], Press] = {}
        self._kept: dict[tuple[BatchShape, int, _Form], Press] = {}

    def press(self, shape: BatchShape, batches: Sequence[Sent], position: int) -> Alike | None:
        """The entries of batches of one size, of at most `together_max`; None where not all of
        their messages are alike. `shape` is the one of their topic, whatever the queue.
        """
        data = batches[0][0]
        begin = (shape, len(data), bytes(data[:_HEAD_BYTES]))
        press = self._newest.get(begin)
        if press is not None:
            alike = press.press(batches, position)
            if alike is not None:
                return alike
        form = _form_of(bytes(data[: int.from_bytes(data[:4], "big")]))
        if form is None or not _alike(data, form, shape):
            return None
        key = (shape, len(data), form)
        press = self._kept.get(key) or Press(shape, form, len(data) // form.message_bytes)
        if len(data) <= _KEPT_DATA_BYTES_MAX:
            _keep(self._newest, begin, press)
            _keep(self._kept, key, press)
        return press.press(batches, position)


def together_max(data_bytes: int) -> int:
    """How many batches of so many bytes are pressed together at most."""
    return max(1, min(_TOGETHER_MAX, _TOGETHER_BYTES_MAX // max(1, data_bytes)))


def _keep(presses: dict[K, Press], key: K, press: Press) -> None:
    if len(presses) >= _KEPT_MAX and key not in presses:
        presses.clear()
    presses[key] = press


def _form_of(message: bytes) -> _Form | None:
    """The form of a batch's first message; None where it has no unique key, or is no message."""
    body_bytes = int.from_bytes(message[16:20], "big")
    properties_at = _HEAD_BYTES + body_bytes + 2
    properties = message[properties_at:]
    name_at = properties.find(_UNIQUE_NAME)
    unique_at = name_at + len(_UNIQUE_NAME)
    unique_bytes = properties.find(b"\x02", unique_at) - unique_at
    if (
        not body_bytes
        or name_at < 0
        or (name_at > 0 and properties[name_at - 1] != 2)
        or unique_bytes <= 0
        or _UNIQUE_NAME in properties[unique_at:]
        or properties[-1] != 2
        or message[properties_at - 2 : properties_at] != len(properties).to_bytes(2, "big")
        or message[:4] != len(message).to_bytes(4, "big")
    ):
        return None
    before = message[properties_at - 2 : properties_at + unique_at]
    after = properties[unique_at + unique_bytes :]
    return _Form(message[:_HEAD_BYTES], len(message), body_bytes, before, unique_bytes, after)


def _alike(data: Buffer, form: _Form, shape: BatchShape) -> bool:
    """Whether there are enough messages, not too many or too large ones, all of the form."""
    if (
        len(data) % form.message_bytes
        or not COUNT_MIN <= len(data) // form.message_bytes <= BATCH_COUNT_MAX
        or form.body_bytes > shape.body_bytes_max
        or form.properties_bytes > shape.properties_bytes_max
        or form.entry_bytes(shape) > shape.entry_bytes_max
    ):
        return False
    rows = np.frombuffer(data, form.row)
    return all(rows[name].tobytes() == each * len(rows) for name, each in form.same.items())


def _pieces(buffer: memoryview, at: int, size: int, step: int) -> list[memoryview]:
    return [buffer[begin : begin + size] for begin in range(at, len(buffer), step)]


def _sums(pieces: list[memoryview]) -> npt.NDArray[np.int64]:
    """The checksums of pieces, as entries hold them."""
    return np.array(list(map(crc32, pieces)), np.int64) & _MASK_31


def _dtype(row_bytes: int, **columns: tuple[str, int]) -> np.dtype[Any]:
    return np.dtype(
        {
            "names": list(columns),
            "formats": [kind for kind, _ in columns.values()],
            "offsets": [at for _, at in columns.values()],
            "itemsize": row_bytes,
        }
    )
