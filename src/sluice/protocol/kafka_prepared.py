"""This module knows requests and answers of which all but a few numbers is known beforehand.

A client that sends record after record to one partition, or reads one, says the same again and
again, but for a number of the request, its place and the records. Here are the forms of such
requests, which compare all that must be the same in one go, and of the answers to them:

    request   key, version · number · [ all up to the partition, or the session's id ] · ...
    answer    length · number · [ all up to the partition ] · what is new · [ the end ]

The bytes are those of `kafka_fast.py` and `kafka.py`, from which the forms are made. Flexible
versions only: older clients take the long way. It knows neither broker nor store.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from sluice.model import Buffer
from sluice.protocol.kafka import frame_answer, put_uvarint
from sluice.protocol.kafka_codes import FETCH, PRODUCE
from sluice.protocol.kafka_fast import (
    FETCH_IDS,
    PRODUCE_FLEXIBLE,
    FetchedPart,
    ProducedPart,
    TopicKey,
    write_fetched,
    write_produced,
)

_HEAD_BYTES: Final = 8  # of a request: key, version, number
_ANSWER_HEAD_BYTES: Final = 8  # of an answer: length, number
_LIMITS_BYTES: Final = 13  # of a fetch: longest wait, fewest and most bytes, isolation
_RECORDS_END: Final = b"\0\0\0"  # behind the records of a request with one partition: no tags
_ONE_BYTE_MAX: Final = 0x7F
_TWO_BYTES_MAX: Final = 0x3FFF
_THREE_BYTES_MAX: Final = 0x1FFFFF
# The system takes one part sooner than two, and so many bytes are copied in no time.
_JOINED_BYTES_MAX: Final = 4096
_PLACE: Final = Struct(">iiq12xi")  # partition, leader's epoch, offset, bytes at most
_PLACE_BEFORE: Final = 18  # one topic, its id, one partition
_STORED: Final = Struct(">ihqqq")
_FETCHED: Final = Struct(">ihqqq")


class Sent(NamedTuple):
    """A request to store one batch: its number, what is said of where it goes, and the batch."""

    correlation_id: int
    said: bytes
    records: memoryview


class SentForm:
    """Requests with one batch whose place is told in so many bytes as in the one it is made from.

    Two requests that say the same (`Sent.said`) are of one client, have the same version, acks and
    time limit, are of no transaction, and go to the same partition.
    """

    __slots__ = ("_head", "_said_end")

    def __init__(self, records_at: int) -> None:
        """`records_at`: where the length of the records stands."""
        self._said_end = records_at
        self._head = Struct(f">4si{records_at - _HEAD_BYTES}s")

    def read(self, frame: bytes | memoryview) -> Sent | None:
        """None where it cannot be such a request."""
        at, end = self._said_end, len(frame) - len(_RECORDS_END)
        if end < at + 3 or frame[end:] != _RECORDS_END:
            return None
        low, second = frame[at], frame[at + 1]
        if low <= _ONE_BYTE_MAX:
            size, at = low, at + 1
        elif second <= _ONE_BYTE_MAX:
            size, at = low & 0x7F | second << 7, at + 2
        elif frame[at + 2] <= _ONE_BYTE_MAX:
            size, at = low & 0x7F | (second & 0x7F) << 7 | frame[at + 2] << 14, at + 3
        else:
            return None
        if at + size - 1 != end:
            return None
        api, correlation_id, said = self._head.unpack_from(frame)
        return Sent(correlation_id, api + said, memoryview(frame)[at:end])


def sent_form(frame: bytes | memoryview, version: int, records: memoryview) -> SentForm | None:
    """The form of a request that has this one batch; None where it has none."""
    if version < PRODUCE_FLEXIBLE or frame[-len(_RECORDS_END) :] != _RECORDS_END:
        return None
    size = len(records) + 1
    if size > _THREE_BYTES_MAX:
        return None
    size_bytes = 1 if size <= _ONE_BYTE_MAX else 2 if size <= _TWO_BYTES_MAX else 3
    records_at = len(frame) - len(_RECORDS_END) - len(records) - size_bytes
    return SentForm(records_at) if records_at > _HEAD_BYTES else None


class StoredAnswer:
    """Answers to requests with one batch that was stored."""

    __slots__ = ("_before", "_behind", "_pack", "_partition", "_size")

    def __init__(self, version: int, topic: TopicKey, partition: int) -> None:
        stored = ProducedPart(partition, 0, 0, -1, 0)
        body = write_produced(version, [(topic, [stored])])
        (framed,) = frame_answer(PRODUCE, version, 0, [body])
        whole = bytes(framed)
        at = whole.index(_STORED.pack(*stored[:5]))
        self._before = whole[_ANSWER_HEAD_BYTES:at]
        self._behind = whole[at + _STORED.size :]
        self._partition = partition
        self._size = len(whole) - 4
        self._pack = Struct(f">ii{len(self._before)}sihqqq{len(self._behind)}s").pack

    def of(self, correlation_id: int, base_offset: int, start_offset: int) -> bytes:
        """One answer, whole."""
        return self._pack(
            *(self._size, correlation_id, self._before, self._partition, 0),
            *(base_offset, -1, start_offset, self._behind),
        )


class Fetch(NamedTuple):
    """A fetch of a session with one partition. `place`: leader's epoch, offset and bytes at most,
    None where they are as before.
    """

    correlation_id: int
    epoch: int
    place: tuple[int, int, int] | None


class FetchForm:
    """Fetches of one client in one session, which has one partition, of a topic with an id."""

    __slots__ = ("_api", "_behind", "_front", "_head", "_nothing", "_said", "_whole_bytes")

    def __init__(self, frame: bytes | memoryview, body_at: int, version: int) -> None:
        """Made from one fetch of it."""
        epoch_at = body_at + (0 if version >= 15 else 4) + _LIMITS_BYTES + 4
        self._head = Struct(f">4si{epoch_at - _HEAD_BYTES}si")
        self._api, _, self._said, _ = self._head.unpack_from(frame)
        self._nothing = b""  # what follows where nothing is different
        self._front = self._behind = b""  # what is around the partition where something is
        self._whole_bytes = 0

    def learn(self, frame: bytes | memoryview, *, names_partition: bool) -> None:
        """A fetch of it that names its one partition, or none, and forgets none."""
        rest = bytes(frame[self._head.size :])
        if not names_partition:
            self._nothing = rest
            return
        self._front = rest[:_PLACE_BEFORE]
        self._behind = rest[_PLACE_BEFORE + _PLACE.size :]
        self._whole_bytes = len(frame)

    def read(self, frame: bytes | memoryview, partition: int) -> Fetch | None:
        """None where it is another one, or asks for something else."""
        head = self._head
        size = len(frame)
        if size < head.size:
            return None
        api, correlation_id, said, epoch = head.unpack_from(frame)
        if said != self._said or api != self._api:
            return None
        at = head.size
        if size != self._whole_bytes:
            if not self._nothing or frame[at:] != self._nothing:
                return None
            return Fetch(correlation_id, epoch, None)
        place_at = at + _PLACE_BEFORE
        behind_at = place_at + _PLACE.size
        if frame[at:place_at] != self._front or frame[behind_at:] != self._behind:
            return None
        number, leader_epoch, offset, bytes_max = _PLACE.unpack_from(frame, place_at)
        if number != partition:
            return None
        return Fetch(correlation_id, epoch, (leader_epoch, offset, bytes_max))


def fetch_form(frame: bytes | memoryview, body_at: int, version: int) -> FetchForm | None:
    """The form of a session's fetches; None where the version names topics."""
    return FetchForm(frame, body_at, version) if version >= FETCH_IDS else None


class FetchedAnswer:
    """Answers to fetches of a session with one partition, which nobody's transaction is in."""

    __slots__ = ("_before", "_middle", "_nothing", "_pack", "_partition")

    def __init__(
        self, version: int, session_id: int, topic: TopicKey, partition: int, *, tells_aborted: bool
    ) -> None:
        def framed(*topics: tuple[TopicKey, list[FetchedPart]]) -> bytes:
            body = write_fetched(version, 0, session_id, topics)
            return b"".join(frame_answer(FETCH, version, 0, body))

        part = FetchedPart(partition, 0, 0, 0, 0, [] if tells_aborted else None)
        whole = framed((topic, [part]))
        at = whole.index(_FETCHED.pack(*part[:5]))
        self._before = whole[_ANSWER_HEAD_BYTES:at]
        # Up to the records' length: a byte where there are none, with three that end it all.
        self._middle = whole[at + _FETCHED.size : -4]
        self._nothing = framed()[_ANSWER_HEAD_BYTES:]
        self._partition = partition
        self._pack = Struct(f">ii{len(self._before)}sihqqq{len(self._middle)}s").pack

    def nothing(self, correlation_id: int) -> bytes:
        """The consumer knows all there is to be known."""
        return b"".join(
            (
                (len(self._nothing) + 4).to_bytes(4, "big"),
                correlation_id.to_bytes(4, "big", signed=True),
                self._nothing,
            )
        )

    def of(
        self, correlation_id: int, high: int, start: int, slices: list[Buffer], byte_count: int
    ) -> list[Buffer]:
        """What the partition has; all of it is decided, up to `high`."""
        coded: list[bytes] = []  # byte by byte
        put_uvarint(coded, byte_count + 1)
        size = 4 + len(self._before) + _FETCHED.size + len(self._middle) + len(coded) + byte_count
        head = self._pack(
            *(size + 3, correlation_id, self._before),
            *(self._partition, 0, high, high, start, self._middle),
        )
        if size <= _JOINED_BYTES_MAX:
            return [b"".join((head, *coded, *slices, b"\0\0\0"))]
        return [b"".join((head, *coded)), *slices, b"\0\0\0"]
