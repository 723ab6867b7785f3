"""This module reads and writes the Kafka messages that carry records, by hand.

A produced batch is not copied: it is handed on as a slice of the request. The answer to a fetch is
a list of buffers, among them slices of the log, which go out as they lie. Ids of topics stay the
bytes that they are: they come with every request, and making a UUID takes its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from sluice.model import Buffer
from sluice.protocol.kafka import put_uvarint, skip_tags
from sluice.protocol.kafka_bounds import ITEMS_MAX, BadRequest, read_uvarint

_I16: Final = Struct(">h")
_I32: Final = Struct(">i")
_ACKS: Final = Struct(">hi")
_PART_SIZE: Final = Struct(">ii")
_PART_HEAD: Final = Struct(">iBB")  # number, and a length as most batches have it
PRODUCE_FLEXIBLE: Final = 9
PRODUCE_IDS: Final = 13
FETCH_FLEXIBLE: Final = 12
FETCH_IDS: Final = 13
_ID_BYTES: Final = 16

_COUNTS: Final = tuple(bytes((count + 1,)) for count in range(0x7F))
_new_tuple = tuple.__new__  # half the time of a named tuple's own

TopicKey = str | bytes  # topics are named in older versions and have ids in newer ones


class ProducePart(NamedTuple):
    """What is sent to one partition; None where the client left it out."""

    partition: int
    records: memoryview | None


class ProduceTopic(NamedTuple):
    """What is sent to one topic."""

    topic: TopicKey
    parts: list[ProducePart]


class ProduceRequest(NamedTuple):
    """One request to store batches."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[ProduceTopic]


class Faults(NamedTuple):
    """Why a batch was refused, and for which of its records."""

    reason: str
    records: Sequence[int]


class ProducedPart(NamedTuple):
    """What became of the batch of one partition."""

    partition: int
    code: int
    base_offset: int = -1
    append_ms: int = -1
    start_offset: int = -1
    reason: str | Faults | None = None


class FetchPart(NamedTuple):
    """What is asked of one partition."""

    partition: int
    leader_epoch: int
    offset: int
    bytes_max: int


class FetchRequest(NamedTuple):
    """One request to read. `forgotten`: what a session is to leave out from now on."""

    wait_ms: int
    min_bytes: int
    bytes_max: int
    isolation: int
    session_id: int
    session_epoch: int
    topics: list[tuple[TopicKey, list[FetchPart]]]
    forgotten: list[tuple[TopicKey, tuple[int, ...]]]


class FetchedPart(NamedTuple):
    """What was read of one partition. `aborted`: producer ids and first offsets; None where the
    reader did not ask for them.
    """

    partition: int
    code: int
    high: int = -1
    stable: int = -1
    start: int = -1
    aborted: Sequence[tuple[int, int]] | None = None
    slices: Sequence[Buffer] = ()
    byte_count: int = 0


# ----------------------------------------------------------------------------------------- produce


def read_produce(frame: bytes | memoryview, at: int, version: int) -> ProduceRequest:
    """The request from `at` on; raises `BadRequest`."""
    try:
        return _read_produce(frame, at, version)
    except (error, IndexError, ValueError) as bad:
        raise BadRequest(f"a produce request that ends early or lies: {bad}") from bad


def _read_produce(frame: bytes | memoryview, at: int, version: int) -> ProduceRequest:
    flexible = version >= PRODUCE_FLEXIBLE
    view = memoryview(frame)
    if not view.readonly:
        view = view.toreadonly()
    byte_count = len(view)
    transactional_id, at = _text(view, at, flexible)
    acks, timeout_ms = _ACKS.unpack_from(view, at)
    topic_count, at = _count(view, at + _ACKS.size, flexible)
    items = topic_count
    topics: list[ProduceTopic] = []
    for _ in range(topic_count):
        topic, at = _topic(view, at, flexible, version >= PRODUCE_IDS)
        part_count, at = _count(view, at, flexible)
        items += part_count
        if items > ITEMS_MAX:
            raise _too_many()
        parts: list[ProducePart] = []
        for _ in range(part_count):
            if flexible:
                # A batch of a producer that has much to send takes nearly 16 KiB: two bytes.
                index, low, high = _PART_HEAD.unpack_from(view, at)
                if low > 0x7F and high <= 0x7F:
                    size = (low & 0x7F | high << 7) - 1
                    at += 6
                else:
                    size, at = read_uvarint(view, at + 4)
                    size -= 1
            else:
                index, size = _PART_SIZE.unpack_from(view, at)
                at += 8
            if size < 0:
                parts.append(ProducePart(index, None))
            else:
                end = at + size
                if end > byte_count:
                    raise BadRequest(f"records of {size} bytes that are not all there")
                parts.append(_new_tuple(ProducePart, (index, view[at:end])))
                at = end
            if flexible:
                at = skip_tags(view, at) if view[at] else at + 1
        if flexible:
            at = skip_tags(view, at) if view[at] else at + 1
        topics.append(_new_tuple(ProduceTopic, (topic, parts)))
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _topic(view: memoryview, at: int, flexible: bool, has_id: bool) -> tuple[TopicKey, int]:
    if has_id:
        topic_id = bytes(view[at : at + _ID_BYTES])
        if len(topic_id) < _ID_BYTES:
            raise BadRequest("a topic's id that is not all there")
        return topic_id, at + _ID_BYTES
    name, at = _text(view, at, flexible)
    if name is None:
        raise BadRequest("a topic without a name")
    return name, at


def _text(view: memoryview, at: int, flexible: bool) -> tuple[str | None, int]:
    if flexible:
        if not view[at]:
            return None, at + 1
        size, at = read_uvarint(view, at)
        size -= 1
    else:
        (size,) = _I16.unpack_from(view, at)
        at += 2
    if size < 0:
        return None, at
    if at + size > len(view):
        raise BadRequest(f"a text of {size} bytes that is not all there")
    return str(view[at : at + size], "utf-8"), at + size


def _count(view: memoryview, at: int, flexible: bool) -> tuple[int, int]:
    """The number of items of an array; none of them is shorter than a byte."""
    if flexible and 0 < view[at] < 0x80:
        count, at = view[at] - 1, at + 1
    elif flexible:
        count, at = read_uvarint(view, at)
        count -= 1
    else:
        (count,) = _I32.unpack_from(view, at)
        at += 4
    if not 0 <= count <= len(view) - at:
        raise BadRequest(f"{count} items in {len(view) - at} bytes")
    return count, at


def _too_many() -> BadRequest:
    return BadRequest(f"more than {ITEMS_MAX} items in one request")


_OFFSETS: Final = Struct(">ihqqq")  # index, code, base offset, append time, start offset
_OFFSETS_4: Final = Struct(">ihqq")  # of versions that tell no start offset
_TOLD_RECORDS_MAX: Final = 100
_NO_REASON: Final = b"\x01\x00\x00"  # no errors of single records, no text, no tags
_NO_REASON_8: Final = b"\x00\x00\x00\x00\xff\xff"
_STORED: Final = Struct(f">ihqqq{len(_NO_REASON)}s")  # the usual result of a flexible version


def write_produced(
    version: int, topics: Sequence[tuple[TopicKey, Sequence[ProducedPart]]]
) -> bytes:
    """The body of the answer to a produce request."""
    flexible = version >= PRODUCE_FLEXIBLE
    out: list[bytes] = []
    _put_count(out, len(topics), flexible)
    for topic, parts in topics:
        _put_topic(out, topic, flexible)
        _put_count(out, len(parts), flexible)
        for partition, code, base, append_ms, start, reason in parts:
            if flexible and reason is None:
                out.append(_STORED.pack(partition, code, base, append_ms, start, _NO_REASON))
                continue
            if version >= 5:
                out.append(_OFFSETS.pack(partition, code, base, append_ms, start))
            else:
                out.append(_OFFSETS_4.pack(partition, code, base, append_ms))
            if version >= 8:
                if reason is None:
                    out.append(_NO_REASON_8)
                else:
                    _put_reason(out, reason, flexible)
        if flexible:
            out.append(b"\0")
    out.append(b"\0\0\0\0\0" if flexible else b"\0\0\0\0")
    return b"".join(out)


def _put_reason(out: list[bytes], reason: str | Faults, flexible: bool) -> None:
    records: Sequence[int] = ()
    if isinstance(reason, Faults):
        reason, records = reason
    text = reason.encode()
    if flexible:
        size: list[bytes] = []
        put_uvarint(size, len(text) + 1)
        text = b"".join((*size, text))
    else:
        text = _I16.pack(len(text)) + text
    tags, no_text = (b"\0", b"\0") if flexible else (b"", b"\xff\xff")
    _put_count(out, len(records), flexible)
    for at, record in enumerate(records):
        # Of many records it is not said again and again: they have the text of all.
        out += [_I32.pack(record), text if at < _TOLD_RECORDS_MAX else no_text, tags]
    out += [text, tags]


def _put_count(out: list[bytes], count: int, flexible: bool) -> None:
    if flexible and count < 0x7F:
        out.append(_COUNTS[count])
    elif flexible:
        put_uvarint(out, count + 1)
    else:
        out.append(_I32.pack(count))


def _put_topic(out: list[bytes], topic: TopicKey, flexible: bool) -> None:
    if isinstance(topic, bytes):
        out.append(topic)
        return
    name = topic.encode()
    if flexible:
        put_uvarint(out, len(name) + 1)
    else:
        out.append(_I16.pack(len(name)))
    out.append(name)


# ------------------------------------------------------------------------------------------- fetch

NO_EPOCH: Final = -1  # of a leader: the client knows none
_NO_SESSION: Final = (0, -1)  # id and epoch of those who know no sessions
_LIMITS: Final = Struct(">iiib")  # longest wait, fewest and most bytes, isolation
_FETCH_SESSION: Final = Struct(">ii")
# Partition, leader's epoch, offset, bytes at most. What followers tell is stepped over: the epoch
# that they read last, and where their log begins.
_FETCH_PARTS: Final = {
    4: Struct(">iqi"),
    **dict.fromkeys(range(5, 9), Struct(">iq8xi")),
    **dict.fromkeys(range(9, FETCH_FLEXIBLE), Struct(">iiq8xi")),
}
_FETCH_PART: Final = Struct(">iiq4x8xi")


def read_fetch(frame: bytes | memoryview, at: int, version: int) -> FetchRequest:
    """The request from `at` on, of version 4 or newer; raises `BadRequest`."""
    try:
        return _read_fetch(memoryview(frame), at, version)
    except (error, IndexError, ValueError) as bad:
        raise BadRequest(f"a fetch that ends early or lies: {bad}") from bad


def _read_fetch(view: memoryview, at: int, version: int) -> FetchRequest:
    flexible, has_ids = version >= FETCH_FLEXIBLE, version >= FETCH_IDS
    if version < 15:
        at += 4  # a follower's number
    wait_ms, min_bytes, bytes_max, isolation = _LIMITS.unpack_from(view, at)
    at += _LIMITS.size
    session_id, session_epoch = _NO_SESSION
    if version >= 7:
        session_id, session_epoch = _FETCH_SESSION.unpack_from(view, at)
        at += _FETCH_SESSION.size
    layout = _FETCH_PART if flexible else _FETCH_PARTS[version]
    unpack, part_bytes = layout.unpack_from, layout.size
    topics: list[tuple[TopicKey, list[FetchPart]]] = []
    topic_count, at = _count(view, at, flexible)
    items = topic_count
    for _ in range(topic_count):
        topic, at = _topic(view, at, flexible, has_ids)
        part_count, at = _count(view, at, flexible)
        items += part_count
        if items > ITEMS_MAX:
            raise _too_many()
        parts: list[FetchPart] = []
        for _ in range(part_count):
            found = unpack(view, at)
            if version < 9:
                found = (found[0], NO_EPOCH, *found[1:])
            parts.append(_new_tuple(FetchPart, found))
            at += part_bytes
            if flexible:
                at = skip_tags(view, at) if view[at] else at + 1
        if flexible:
            at = skip_tags(view, at) if view[at] else at + 1
        topics.append((topic, parts))
    forgotten: list[tuple[TopicKey, tuple[int, ...]]] = []
    if version >= 7:
        forgotten, at = _read_forgotten(view, at, flexible, has_ids, items)
    if version >= 11:
        _, at = _text(view, at, flexible)  # the reader's rack
    if flexible:
        skip_tags(view, at)
    limits = (wait_ms, min_bytes, bytes_max, isolation, session_id, session_epoch)
    return FetchRequest(*limits, topics, forgotten)


def _read_forgotten(
    view: memoryview, at: int, flexible: bool, has_ids: bool, items: int
) -> tuple[list[tuple[TopicKey, tuple[int, ...]]], int]:
    """`items`: how many the request has had before."""
    found: list[tuple[TopicKey, tuple[int, ...]]] = []
    topic_count, at = _count(view, at, flexible)
    items += topic_count
    for _ in range(topic_count):
        topic, at = _topic(view, at, flexible, has_ids)
        count, at = _count(view, at, flexible)
        items += count
        if items > ITEMS_MAX:
            raise _too_many()
        numbers = Struct(f">{count}i")
        found.append((topic, numbers.unpack_from(view, at)))
        at += numbers.size
        if flexible:
            at = skip_tags(view, at)
    return found, at


_FETCHED: Final = Struct(">ihqqq")  # index, code, high watermark, last stable, start
_FETCHED_4: Final = Struct(">ihqq")
_SESSION: Final = Struct(">ihi")  # throttle time, code, session
_ABORTED: Final = Struct(">qq")
_NO_REPLICA: Final = _I32.pack(-1)


def write_fetched(
    version: int,
    code: int,
    session_id: int,
    topics: Sequence[tuple[TopicKey, Sequence[FetchedPart]]],
) -> list[Buffer]:
    """The body of the answer to a fetch, in parts: what was read is not copied."""
    flexible = version >= FETCH_FLEXIBLE
    parts: list[Buffer] = []
    out: list[bytes] = [_SESSION.pack(0, code, session_id) if version >= 7 else bytes(4)]
    _put_count(out, len(topics), flexible)
    for topic, fetched in topics:
        _put_topic(out, topic, flexible)
        _put_count(out, len(fetched), flexible)
        for part in fetched:
            _put_fetched_head(out, version, part)
            if part.slices:
                parts.append(b"".join(out))
                parts += part.slices
                out = []
            if flexible:
                out.append(b"\0")
        if flexible:
            out.append(b"\0")
    if flexible:
        out.append(b"\0")
    parts.append(b"".join(out))
    return parts


def _put_fetched_head(out: list[bytes], version: int, part: FetchedPart) -> None:
    """All of a partition but its records, up to their length."""
    flexible = version >= FETCH_FLEXIBLE
    if version >= 5:
        out.append(_FETCHED.pack(part.partition, part.code, part.high, part.stable, part.start))
    else:
        out.append(_FETCHED_4.pack(part.partition, part.code, part.high, part.stable))
    if part.aborted is None:
        out.append(b"\0" if flexible else b"\xff\xff\xff\xff")
    else:
        _put_count(out, len(part.aborted), flexible)
        for producer_id, first in part.aborted:
            out.append(_ABORTED.pack(producer_id, first))
            if flexible:
                out.append(b"\0")
    if version >= 11:
        out.append(_NO_REPLICA)
    _put_count(out, part.byte_count, flexible)
