"""This module knows the layout of a stored message: bytes of the commit log <-> values, nothing
else.

The layout is Apache RocketMQ's, byte for byte, and it is also what a pull returns: a message is
encoded once, at the append, and served as it lies. Everything is big-endian.

      0  i32 size          whole entry, this field included
      4  u32 magic         V1 daa320a7 | V2 daa320ab | end of file cbd43194
      8  u32 body CRC      crc32 & 7fffffff of the body as stored
     12  i32 queue id 16  i32 flag          the producer's own 20  i64 queue offset 28  i64 position
     where this entry lies in the log: an entry names its own place 36  i32 sys flag      0x10 born
     host is IPv6, 0x20 store host is IPv6, 0x80 a batch stored whole, ... 40  i64 born ms 48  born
     host         4 + 4 bytes, or 16 + 4
         i64 store ms
         store host        4 + 4 bytes, or 16 + 4
         i32 reconsume times
         i64 prepared transaction offset
         i32 body size, body
         u8  topic size (V1) or i16 (V2, topics over 127 bytes), topic
         i16 properties size, properties: name 0x01 value 0x02, repeated

The last property may be the checksum of all bytes before it: "__CRC32#" 0x01, ten decimal digits
with the least significant first, 0x02. Sluice writes it unless told not to, because the body CRC
alone leaves headers, topic and properties unprotected.

At the end of a file that has no room for the next entry stands `i32 room left, u32 cbd43194`.

This module may not do IO, read a clock, or log. What it is given may be damaged in any bit: every
reader here either returns what was written or raises `BadRecord`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import ne
from struct import Struct
from typing import Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.errors import MessageIllegal
from sluice.model import Buffer, Message
from sluice.protocol.lifetimes import EXPIRES_NAME, with_end

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGIC_BLANK: Final = 0xCBD43194
BLANK_BYTES: Final = 8  # an entry must leave room for the end-of-file mark

SYS_COMPRESSED: Final = 0x1
SYS_TX_MASK: Final = 0xC
SYS_TX_PREPARED: Final = 0x4
SYS_TX_COMMIT: Final = 0x8
SYS_TX_ROLLBACK: Final = 0xC
SYS_BORN_V6: Final = 0x10
SYS_STORE_V6: Final = 0x20
SYS_NEED_UNWRAP: Final = 0x40
SYS_INNER_BATCH: Final = 0x80

TOPIC_BYTES_MAX: Final = 255
PROPERTIES_BYTES_MAX: Final = 32767
SCHEDULE_TOPIC: Final = b"SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC: Final = b"rmq_sys_wheel_timer"
TIMED_TOPICS: Final = (SCHEDULE_TOPIC, TIMER_TOPIC)  # whose queue entries say when they are due

CRC_NAME: Final = b"__CRC32#\x01"
CRC_PROPERTY_BYTES: Final = len(CRC_NAME) + 11  # ten digits and the separator
_MASK_31: Final = 0x7FFFFFFF

_PREFIX: Final = Struct(">iI")
_FIXED: Final = Struct(">iIIiiqqiq")  # up to and with the born time
_AFTER_BODY: Final = 3  # least bytes after the body: topic size and properties size
_LEAST_BYTES: Final = 91
_I16: Final = Struct(">h")
_I32: Final = Struct(">i")
_I64: Final = Struct(">q")
_HEADS: Final = {
    (8, 8): Struct(">iIIiiqqiq8sq8siqi"),
    (8, 20): Struct(">iIIiiqqiq8sq20siqi"),
    (20, 8): Struct(">iIIiiqqiq20sq8siqi"),
    (20, 20): Struct(">iIIiiqqiq20sq20siqi"),
}
_HEAD_V4: Final = _HEADS[8, 8]
_HOST_BYTES: Final = (8, 20)


class BadRecord(ValueError):
    """These bytes are not an entry that was written here; the text says what gave it away."""


class Entry(NamedTuple):
    """One stored message, taken apart. `body` is a slice of the buffer it was read from."""

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    position: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    body: memoryview
    topic: str
    properties: bytes


class Summary(NamedTuple):
    """What the indexes need to know of an entry; cheap to make for millions of them."""

    size: int
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_ms: int
    topic: bytes
    properties: bytes


# ------------------------------------------------------------------------------------------ writing


class Encoder:
    """Writes entries for one store: its address, its limits, with or without the whole-message
    checksum.

    `measure` and `encode` run once per message, so they hold more in one place than is pretty.
    """

    __slots__ = (
        "_base_bytes",
        "_store_flag",
        "_topic_fields",
        "body_bytes_max",
        "crc_bytes",
        "entry_bytes_max",
        "properties_bytes_max",
        "store_host",
    )

    def __init__(
        self, store_host: bytes, *, with_crc: bool, body_bytes_max: int, entry_bytes_max: int
    ) -> None:
        assert len(store_host) in _HOST_BYTES, "an address is 4 or 16 bytes and a 4-byte port"
        self.store_host = store_host
        self.crc_bytes = CRC_PROPERTY_BYTES if with_crc else 0
        self._base_bytes = _LEAST_BYTES + self.crc_bytes + len(store_host) - 8
        self.body_bytes_max = body_bytes_max
        self.entry_bytes_max = entry_bytes_max
        self.properties_bytes_max = PROPERTIES_BYTES_MAX - self.crc_bytes
        self._store_flag = SYS_STORE_V6 if len(store_host) == 20 else 0
        # Magic, size and name of each topic as entries carry them; as many as the store has topics.
        self._topic_fields: dict[bytes, tuple[int, bytes]] = {}

    def measure(self, message: Message, topic: bytes) -> int:
        """The bytes that `encode` will return; refuses what can never be stored."""
        properties_bytes = len(message.properties)
        if properties_bytes and self.crc_bytes and message.properties[-1] != 2:
            properties_bytes += 1
        body_bytes = len(message.body)
        size = self._base_bytes + body_bytes + len(topic) + properties_bytes
        if len(topic) > 127:
            size += 1
        if len(message.born_host) != 8:
            size += 12
        if (
            body_bytes <= self.body_bytes_max
            and properties_bytes <= self.properties_bytes_max
            and 0 < len(topic) <= TOPIC_BYTES_MAX
            and len(message.born_host) in _HOST_BYTES
            and 0 <= message.queue_id <= _MASK_31
            and size <= self.entry_bytes_max
            # What we do not end in a checksum must not seem to: reading would take it for damaged.
            and (self.crc_bytes or not _nearly_a_checksum(message.properties[-CRC_PROPERTY_BYTES:]))
        ):
            return size
        raise MessageIllegal(self._why_not(message, topic, size, properties_bytes))

    def _why_not(self, message: Message, topic: bytes, size: int, properties_bytes: int) -> str:
        known = (  # to clients, which look for it
            "the message is illegal, maybe msg body or properties length not matched. msg body "
            f"length limit {self.body_bytes_max}B, msg properties length limit 32KB. "
        )
        if len(message.body) > self.body_bytes_max:
            return (
                f"{known}body of {len(message.body)} bytes is over the limit of "
                f"{self.body_bytes_max} (message_bytes_max); send it in parts or raise the limit"
            )
        if properties_bytes > self.properties_bytes_max:
            return (
                f"{known}properties of {properties_bytes} bytes are over the limit of "
                f"{self.properties_bytes_max}; put large values into the body"
            )
        if not 0 < len(topic) <= TOPIC_BYTES_MAX:
            return f"topic name of {len(topic)} bytes: allowed are 1 to {TOPIC_BYTES_MAX}"
        if len(message.born_host) not in _HOST_BYTES:
            return "born host is neither an IPv4 nor an IPv6 address with a port"
        if not 0 <= message.queue_id <= _MASK_31:
            return f"queue id {message.queue_id} is outside of 0..{_MASK_31}"
        if size <= self.entry_bytes_max:
            return "the property __CRC32# is the store's own; send the message without it"
        return (
            f"message of {size} bytes does not fit into a log file (at most "
            f"{self.entry_bytes_max} bytes here); raise segment_bytes"
        )

    def encode(
        self,
        message: Message,
        topic: bytes,
        size: int,
        queue_offset: int,
        position: int,
        store_ms: int,
    ) -> bytes:
        """The entry, ready to be written at `position`; `size` is what `measure` gave."""
        body = message.body
        properties = message.properties
        born_host = message.born_host
        crc_bytes = self.crc_bytes
        if crc_bytes and properties and properties[-1] != 2:
            properties += b"\x02"
        head_struct, magic, topic_field, sys_flag = self.shape(topic, message.sys_flag, born_host)
        head = head_struct.pack(
            size,
            magic,
            crc32(body) & _MASK_31,
            message.queue_id,
            message.flag,
            queue_offset,
            position,
            sys_flag,
            message.born_ms,
            born_host,
            store_ms,
            self.store_host,
            message.reconsume_times,
            message.prepared_offset,
            len(body),
        )
        properties_size = _I16.pack(len(properties) + crc_bytes)
        entry = b"".join((head, body, topic_field, properties_size, properties))
        if crc_bytes:
            return entry + crc_property(crc32(entry))
        return entry

    def shape(
        self, topic: bytes, sys_flag: int, born_host: bytes
    ) -> tuple[Struct, int, bytes, int]:
        """What entries of a topic and a producer have in common: the layout of the head, magic,
        topic with its size, flags.
        """
        magic_and_topic = self._topic_fields.get(topic)
        if magic_and_topic is None:
            magic_and_topic = self._topic_fields[topic] = field_of_topic(topic)
        magic, topic_field = magic_and_topic
        sys_flag = sys_flag & ~(SYS_BORN_V6 | SYS_STORE_V6) | self._store_flag
        if len(born_host) == 8 and not self._store_flag:
            return _HEAD_V4, magic, topic_field, sys_flag
        if len(born_host) == 20:
            sys_flag |= SYS_BORN_V6
        return _HEADS[len(born_host), len(self.store_host)], magic, topic_field, sys_flag


def field_of_topic(topic: bytes) -> tuple[int, bytes]:
    """Which magic an entry of this topic has, and the topic with its size in front."""
    if len(topic) > 127:
        return MAGIC_V2, _I16.pack(len(topic)) + topic
    return MAGIC_V1, bytes((len(topic),)) + topic


# The digits of numbers below 10,000, least significant first: formatting takes three times as long.
# With what stands before the first four of a checksum and after the last two.
_DIGITS: Final = tuple(f"{number:04d}"[::-1].encode() for number in range(10_000))
_FIRST_DIGITS: Final = tuple(CRC_NAME + digits for digits in _DIGITS)
_LAST_DIGITS: Final = tuple(_DIGITS[number][:2] + b"\x02" for number in range(100))
DIGIT_TABLES: Final = (_FIRST_DIGITS, _DIGITS, _LAST_DIGITS)  # what `crc_parts` picks from


def crc_parts(crc: int) -> tuple[bytes, bytes, bytes]:
    """The property that closes an entry, in parts: the checksum's decimal digits, least
    significant first.
    """
    rest, low = divmod(crc & _MASK_31, 10_000)
    high, middle = divmod(rest, 10_000)
    return _FIRST_DIGITS[low], _DIGITS[middle], _LAST_DIGITS[high]


def crc_property(crc: int) -> bytes:
    """The same as a whole."""
    return b"".join(crc_parts(crc))


def blank(room_bytes: int) -> bytes:
    """The mark at the end of a file that has no room for the next entry."""
    assert room_bytes >= BLANK_BYTES, "appends always leave room for the end-of-file mark"
    return _PREFIX.pack(room_bytes, MAGIC_BLANK)


# ------------------------------------------------------------------------------------------ reading


def peek(buffer: Buffer, at: int) -> tuple[int, int]:
    """Size and magic of what stands at `at`: (0, 0) is the untouched rest of a file."""
    if len(buffer) - at < BLANK_BYTES:
        return 0, 0
    size, magic = _PREFIX.unpack_from(buffer, at)
    return size, magic


def summarize(buffer: Buffer, at: int, position: int) -> Summary:
    """Take apart and check the entry that should lie at `at` and call itself `position`.

    Every length must add up, the entry must name its own place, and every checksum it carries must
    hold.
    """
    room = len(buffer) - at
    if room < _LEAST_BYTES:
        raise BadRecord(f"only {room} bytes left, an entry takes at least {_LEAST_BYTES}")
    fields = _HEAD_V4.unpack_from(buffer, at)
    size, magic, body_crc, queue_id, _, queue_offset, own_position, sys_flag = fields[:8]
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise BadRecord(f"magic {magic:08x} is not a message's")
    if not _LEAST_BYTES <= size <= room:
        raise BadRecord(f"size {size} does not fit into the {room} bytes that are left")
    if own_position != position:
        raise BadRecord(f"the entry says that it lies at {own_position}, it lies at {position}")
    if not sys_flag & (SYS_BORN_V6 | SYS_STORE_V6):
        store_ms, body_bytes, body_at = fields[10], fields[14], at + 88
    else:
        store_at = at + (68 if sys_flag & SYS_BORN_V6 else 56)
        (store_ms,) = _I64.unpack_from(buffer, store_at)
        body_at = store_at + 8 + (20 if sys_flag & SYS_STORE_V6 else 8) + 16
        if body_at - at + _AFTER_BODY > size:
            raise BadRecord("the addresses do not fit into the entry")
        (body_bytes,) = _I32.unpack_from(buffer, body_at - 4)
    end = at + size
    topic_at = body_at + body_bytes
    if body_bytes < 0 or topic_at + _AFTER_BODY > end:
        raise BadRecord(f"body of {body_bytes} bytes does not fit into an entry of {size}")
    if magic == MAGIC_V1:
        topic_bytes = buffer[topic_at]
        topic_at += 1
    else:
        (topic_bytes,) = _I16.unpack_from(buffer, topic_at)
        topic_at += 2
    properties_at = topic_at + topic_bytes + 2
    if topic_bytes <= 0 or properties_at > end:
        raise BadRecord(f"topic of {topic_bytes} bytes does not fit into an entry of {size}")
    (properties_bytes,) = _I16.unpack_from(buffer, properties_at - 2)
    if properties_bytes < 0 or properties_at + properties_bytes != end:
        raise BadRecord(f"the parts do not add up to the size {size}")
    _check_sums(buffer, at, end, body_crc, body_at, body_bytes, properties_bytes)
    return Summary(
        size,
        queue_id,
        queue_offset,
        sys_flag,
        store_ms,
        bytes(buffer[topic_at : properties_at - 2]),
        bytes(buffer[properties_at:end]),
    )


def require_whole(properties: bytes) -> None:
    """Refuse an entry of which the end may be missing although its sizes add up.

    A torn write leaves zeros. Where they stand in the place of the whole-message checksum nothing
    else gives them away, so an entry without that checksum must have no zero in its properties.
    """
    if not properties[-CRC_PROPERTY_BYTES:].startswith(CRC_NAME) and 0 in properties:
        raise BadRecord("the end of the entry is missing: zeros where its checksum must be")


def _check_sums(
    buffer: Buffer,
    at: int,
    end: int,
    body_crc: int,
    body_at: int,
    body_bytes: int,
    properties_bytes: int,
) -> None:
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    if properties_bytes >= CRC_PROPERTY_BYTES:  # else it would be a body that only looks like one
        trailer = bytes(view[end - CRC_PROPERTY_BYTES : end])
        if trailer.startswith(CRC_NAME):
            if crc_property(crc32(view[at : end - CRC_PROPERTY_BYTES])) != trailer:
                raise BadRecord("the whole-message checksum does not match")
            return  # it covers the body and the body's own checksum
        if _nearly_a_checksum(trailer):
            # One damaged byte in the checksum's own name must not turn the check off.
            raise BadRecord("the whole-message checksum's name is damaged")
    if crc32(view[body_at : body_at + body_bytes]) & _MASK_31 != body_crc:
        raise BadRecord("the body's checksum does not match")


def _nearly_a_checksum(trailer: bytes) -> bool:
    return len(trailer) == CRC_PROPERTY_BYTES and sum(map(ne, trailer, CRC_NAME)) <= 1


def decode(buffer: Buffer, at: int = 0, position: int | None = None) -> Entry:
    """The whole entry at `at`, checked; without `position` the entry's own word is taken for it."""
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    if len(view) - at < _FIXED.size:
        raise BadRecord("too short for an entry")
    fixed = _FIXED.unpack_from(view, at)
    summary = summarize(view, at, fixed[6] if position is None else position)
    size, magic, body_crc, queue_id, flag, queue_offset, own, sys_flag, born_ms = fixed
    born_bytes = 20 if sys_flag & SYS_BORN_V6 else 8
    store_bytes = 20 if sys_flag & SYS_STORE_V6 else 8
    head = _HEADS[born_bytes, store_bytes]
    fields = head.unpack_from(view, at)
    body_at = at + head.size
    return Entry(
        size,
        magic,
        body_crc,
        queue_id,
        flag,
        queue_offset,
        own,
        sys_flag,
        born_ms,
        fields[9],
        summary.store_ms,
        fields[11],
        fields[12],
        fields[13],
        view[body_at : body_at + fields[14]],
        summary.topic.decode("utf-8", "replace"),
        summary.properties,
    )


def store_time_ms(buffer: Buffer, at: int) -> int:
    """The store time of the entry at `at`, without checking anything else."""
    (sys_flag,) = _I32.unpack_from(buffer, at + 36)
    (store_ms,) = _I64.unpack_from(buffer, at + (68 if sys_flag & SYS_BORN_V6 else 56))
    return int(store_ms)


def origin_place(sys_flag: int) -> int:
    """Where in an entry the position stands that it was made from (0: from none)."""
    hosts = (20 if sys_flag & SYS_BORN_V6 else 8) + (20 if sys_flag & SYS_STORE_V6 else 8)
    return 60 + hosts


# --------------------------------------------------------------------- properties and queue entries


def property_value(properties: bytes, name: bytes) -> bytes | None:
    """The value of one property; the last one counts where a name stands twice, as in RocketMQ."""
    mark = _marks.get(name) or _mark(name)
    start = properties.rfind(mark)
    if start >= 0:
        start += len(mark)
    elif properties.startswith(mark[1:]):
        start = len(mark) - 1
    else:
        return None
    stop = properties.find(b"\x02", start)
    return properties[start:] if stop < 0 else properties[start:stop]


_UNIQUE_NAME: Final = b"UNIQ_KEY\x01"
NO_KEYS: Final = (b"", b"", b"")
_PARTS_MAX: Final = 4096
_PART_BYTES_MAX: Final = 512
# Keys and tag by what stands before and after the unique key; see `message_keys`.
_keys_around: Final[dict[tuple[bytes, bytes], tuple[bytes, bytes]]] = {}


def message_keys(properties: bytes) -> tuple[bytes, bytes, bytes]:
    """Unique key, keys (separated by blanks) and tag; empty where a message has none.

    What `property_value` finds for the three. It runs once per message, and of a producer's
    properties mostly the unique key alone differs: the rest is looked up by its bytes.
    """
    before, name, rest = properties.rpartition(_UNIQUE_NAME)
    if name and (not before or before[-1] == 2):
        unique, _, after = rest.partition(b"\x02")
        around = _keys_around.get((before, after))
        if around is not None:
            return unique, around[0], around[1]
        around = _find_keys(before + after)
        # Keys of its own would make every message a new one.
        if not around[0] and len(before) + len(after) <= _PART_BYTES_MAX:
            if len(_keys_around) >= _PARTS_MAX:
                _keys_around.clear()
            _keys_around[before, after] = around
        return unique, around[0], around[1]
    return property_value(properties, b"UNIQ_KEY") or b"", *_find_keys(properties)


def _find_keys(properties: bytes) -> tuple[bytes, bytes]:
    return property_value(properties, b"KEYS") or b"", property_value(properties, b"TAGS") or b""


_marks: Final[dict[bytes, bytes]] = {}


def _mark(name: bytes) -> bytes:
    """How a property's name stands between others; remembered for the few names that are asked
    for.
    """
    mark = b"\x02" + name + b"\x01"
    if len(_marks) < 256:
        _marks[name] = mark
    return mark


def without_checksum(properties: bytes) -> bytes:
    """The properties of a stored entry as they were before it was stored."""
    if properties[-CRC_PROPERTY_BYTES:].startswith(CRC_NAME):
        return properties[:-CRC_PROPERTY_BYTES]
    return properties


def parse_properties(properties: bytes) -> dict[str, str]:
    """All properties as text; entries with an empty name or value do not count, as in RocketMQ."""
    result = {}
    for item in properties.decode("utf-8", "replace").split("\x02"):
        name, mark, value = item.partition("\x01")
        if mark and name and value:
            result[name] = value
    return result


def format_properties(properties: dict[str, str]) -> bytes:
    """The wire form of a set of properties."""
    for name, value in properties.items():
        if not name or "\x01" in name + value or "\x02" in name + value:
            raise MessageIllegal(f"property {name!r} is empty or holds a separator (0x01, 0x02)")
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


def java_hash(text: bytes) -> int:
    """Java's String.hashCode of a UTF-8 text, signed: what filters and the key index compare."""
    # Tags are few and short; long texts would only take the memory of the short ones.
    return _short_hash(text) if len(text) <= _HASHED_BYTES_MAX else _hash(text)


def _hash(text: bytes) -> int:
    units = text.decode("utf-8", "replace").encode("utf-16-be", "surrogatepass")
    value = 0
    for at in range(0, len(units), 2):
        value = (31 * value + (units[at] << 8) + units[at + 1]) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


_HASHED_BYTES_MAX: Final = 64
_short_hash = lru_cache(maxsize=65536)(_hash)


def tags_code(
    topic: bytes, properties: bytes, store_ms: int, delay_levels_ms: Sequence[int]
) -> int:
    """The third field of a queue entry: the tag's hash, or for a delayed message its delivery
    time; of what takes a timed message back, that time below zero.
    """
    if topic == TIMER_TOPIC:
        due = property_value(properties, b"TIMER_OUT_MS")
        if due is not None and due.isdigit() and len(due) < 18:
            return -int(due) if property_value(properties, b"TIMER_DEL_UNIQKEY") else int(due)
    if topic == SCHEDULE_TOPIC:
        level_text = property_value(properties, b"DELAY")
        if level_text is not None and level_text.isdigit() and len(level_text) < 10:
            level = min(int(level_text), len(delay_levels_ms))
            if level > 0:
                return store_ms + delay_levels_ms[level - 1]
    tag = property_value(properties, b"TAGS")
    code = java_hash(tag) if tag else 0
    if EXPIRES_NAME in properties:
        return with_end(code, property_value(properties, EXPIRES_NAME))
    return code


def offset_count(sys_flag: int, properties: bytes) -> int:
    """How many queue offsets an entry takes: the inner count of a batch that is stored whole."""
    if sys_flag & SYS_INNER_BATCH:
        text = property_value(properties, b"INNER_NUM")
        if text is not None and text.isdigit() and len(text) < 10:
            return max(1, int(text))
    return 1


def in_queue(sys_flag: int) -> bool:
    """Whether an entry has a place in its queue: prepared and rolled back ones of old stores
    have none.
    """
    return sys_flag & SYS_TX_MASK not in (SYS_TX_PREPARED, SYS_TX_ROLLBACK)
