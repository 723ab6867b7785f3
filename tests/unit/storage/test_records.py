"""The stored message: RocketMQ's bytes, every layout there and back, nothing believed unchecked."""

from __future__ import annotations

import zlib
from struct import pack_into

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.config import StoreConfig
from sluice.errors import MessageIllegal
from sluice.model import Message, QueueKey, message_id
from sluice.protocol import records
from sluice.storage import whole_batches
from sluice.storage.queue_index import BATCH_UNIT, SIMPLE_UNIT, BatchQueueIndex, QueueIndex
from tests.unit.storage.store_kit import Disk

# One record as Apache's broker stored it: ROCKETMQ's own bytes, 278 of them.
APACHE_PROPERTIES = (
    b"uk\1uv\2MSG_REGION\1DefaultRegion\2"
    b"UNIQ_KEY\1FD0000000000000000000000000000021B2830946E094C671ED60000\2"
    b"CLUSTER\1DefaultCluster\2TAGS\1TagA\2KEYS\1key1 key2\2WAIT\1true\2TRACE_ON\1true\2"
)
APACHE_RECORD = (
    bytes.fromhex(
        "00000116daa320a74603f9e80000000100000007000000000000000200000000"
        "00000b7d00000000000001a1e0cf06d67f0000010000a9de000001a1e0cf06f1"
        "7f000001000078bf0000000000000000000000000000000a68656c6c6f2d626f"
        "6479084c6162546f70696300a9"
    )
    + APACHE_PROPERTIES
)
POSITION = 2941
BORN_HOST = bytes.fromhex("7f0000010000a9de")
STORE_HOST = bytes.fromhex("7f000001000078bf")

V4 = bytes([10, 1, 2, 3]) + (4321).to_bytes(4, "big")
V6 = bytes(range(16)) + (4321).to_bytes(4, "big")
I32 = st.integers(-(1 << 31), (1 << 31) - 1)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)


def encoder(
    host: bytes = STORE_HOST, *, with_crc: bool = False, body_max: int = 1 << 22
) -> records.Encoder:
    return records.Encoder(
        host, with_crc=with_crc, body_bytes_max=body_max, entry_bytes_max=1 << 30
    )


def encode(message: Message, *, with_crc: bool = True, host: bytes = STORE_HOST) -> bytes:
    writer = encoder(host, with_crc=with_crc)
    topic = message.topic.encode()
    return writer.encode(message, topic, writer.measure(message, topic), 5, 4096, 77)


# ------------------------------------------------------------------------------ vectors from Apache


def test_apaches_record_is_read_field_by_field() -> None:
    entry = records.decode(APACHE_RECORD, 0, POSITION)
    assert (entry.size, entry.magic, entry.body_crc) == (278, records.MAGIC_V1, 1174665704)
    assert (entry.queue_id, entry.flag, entry.queue_offset) == (1, 7, 2)
    assert (entry.position, entry.sys_flag, entry.reconsume_times) == (POSITION, 0, 0)
    assert (entry.born_ms, entry.store_ms) == (0x1A1E0CF06D6, 0x1A1E0CF06F1)
    assert (entry.born_host, entry.store_host) == (BORN_HOST, STORE_HOST)
    assert bytes(entry.body) == b"hello-body"
    assert (entry.topic, entry.properties) == ("LabTopic", APACHE_PROPERTIES)
    assert message_id(STORE_HOST, POSITION) == "7F000001000078BF0000000000000B7D"


def test_we_write_apaches_record_byte_for_byte() -> None:
    message = Message(
        "LabTopic", 1, b"hello-body", APACHE_PROPERTIES, 7, 0, 0x1A1E0CF06D6, BORN_HOST
    )
    writer = encoder()
    size = writer.measure(message, b"LabTopic")
    assert writer.encode(message, b"LabTopic", size, 2, POSITION, 0x1A1E0CF06F1) == APACHE_RECORD


def test_its_queue_entry() -> None:
    summary = records.summarize(APACHE_RECORD, 0, POSITION)
    code = records.tags_code(summary.topic, summary.properties, summary.store_ms, ())
    queue = QueueIndex(QueueKey("LabTopic", 1), "/store", 16)
    unit = queue.pack(POSITION, summary.size, code, summary.store_ms, 2, 1)
    assert SIMPLE_UNIT.unpack(unit) == (2941, 278, 2598919)


def test_the_queue_entry_of_a_delayed_message_has_its_delivery_time() -> None:
    levels = StoreConfig().delay_levels_ms
    schedule = records.SCHEDULE_TOPIC
    assert records.tags_code(schedule, b"DELAY\x011\x02", 393018, levels) == 394018
    assert records.tags_code(schedule, b"DELAY\x0199\x02", 0, levels) == 7_200_000, "the highest"
    assert records.tags_code(schedule, b"TAGS\x01d\x02", 0, levels) == 100
    assert records.tags_code(b"other", b"DELAY\x011\x02", 393018, levels) == 0
    assert records.tags_code(schedule, b"DELAY\x01x\x02", 393018, levels) == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("LabTopic", -1910206526),
        ("中文", 646394),
        ("d", 100),
        ("", 0),
    ],
)
def test_java_hashes(text: str, value: int) -> None:
    assert records.java_hash(text.encode()) == value


def test_hashes_that_the_key_index_uses() -> None:
    assert abs(records.java_hash(b"LabTopic#key1")) == 91726381
    assert abs(records.java_hash(b"LabTopic#T#TagA")) == 1324785335
    long = b"x" * 1000
    assert records.java_hash(long) == records.java_hash(long)
    assert records.java_hash("😀".encode()) == 0xD83D * 31 + 0xDE00, "two UTF-16 units"


@pytest.mark.parametrize(
    ("crc", "digits"),
    [(792697812, b"2187962970"), (774026313, b"3136204770"), (1565488856, b"6588845651")],
)
def test_the_checksum_property(crc: int, digits: bytes) -> None:
    assert records.crc_property(crc) == b"__CRC32#\x01" + digits + b"\x02"
    assert records.crc_property(crc | 0x80000000) == b"__CRC32#\x01" + digits + b"\x02"
    assert len(records.crc_property(0)) == records.CRC_PROPERTY_BYTES


def test_apaches_batch_queue_entry() -> None:
    vector = bytes.fromhex(
        "000000000000848c0000016c0000000000000000000001a1e0dc18670000000000000000"
        "0003ffffffff00000000"
    )
    queue = BatchQueueIndex(QueueKey("t", 0), "/store", 16)
    assert queue.pack(0x848C, 364, 0, 0x1A1E0DC1867, 0, 3) == vector
    wide = queue.pack(0, 1, 0, 0, 0, 40_000)
    assert BATCH_UNIT.unpack(wide)[5:] == (32767, -1, 40_000)


# --------------------------------------------------------------------------------- there and back

PROPERTY_TEXT = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=9
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    wide = draw(st.booleans())
    topic = draw(st.text("abc%-_", min_size=128 if wide else 1, max_size=255 if wide else 127))
    properties = records.format_properties(
        draw(st.dictionaries(PROPERTY_TEXT, PROPERTY_TEXT, max_size=4))
    )
    return Message(
        topic,
        draw(st.integers(0, (1 << 31) - 1)),
        draw(st.binary(max_size=300)),
        properties,
        draw(I32),
        draw(st.integers(0, 0xFFF)) & ~0x30,
        draw(I64),
        draw(st.sampled_from([V4, V6])),
        draw(I32),
        draw(I64),
    )


@given(messages(), st.sampled_from([V4, V6]), st.booleans(), I64, I64, I64, st.binary(max_size=40))
@example(Message("t", 0, b""), V4, False, 0, 0, 0, b"")
@example(Message("t" * 255, 0, b"", born_host=V6), V6, True, 0, 0, 0, b"")
def test_every_layout_there_and_back(
    message: Message,
    host: bytes,
    with_crc: bool,
    offset: int,
    position: int,
    store_ms: int,
    before: bytes,
) -> None:
    topic = message.topic.encode()
    writer = encoder(host, with_crc=with_crc)
    size = writer.measure(message, topic)
    data = writer.encode(message, topic, size, offset, position, store_ms)
    assert len(data) == size
    for buffer in (before + data, bytearray(before + data), memoryview(before + data + b"after")):
        entry = records.decode(buffer, len(before), position)
        assert entry.magic == (records.MAGIC_V2 if len(topic) > 127 else records.MAGIC_V1)
        assert (entry.size, entry.queue_offset, entry.position) == (size, offset, position)
        assert (entry.topic, entry.queue_id) == (message.topic, message.queue_id)
        assert bytes(entry.body) == bytes(message.body)
        assert (entry.flag, entry.born_ms, entry.store_ms) == (
            message.flag,
            message.born_ms,
            store_ms,
        )
        assert (entry.born_host, entry.store_host) == (message.born_host, host)
        assert (entry.reconsume_times, entry.prepared_offset) == (
            message.reconsume_times,
            message.prepared_offset,
        )
        assert entry.sys_flag & ~0x30 == message.sys_flag
        assert bool(entry.sys_flag & records.SYS_BORN_V6) == (message.born_host == V6)
        assert bool(entry.sys_flag & records.SYS_STORE_V6) == (host == V6)
        assert entry.properties.startswith(message.properties)
        tail = entry.properties[len(message.properties) :]
        assert len(tail) == (records.CRC_PROPERTY_BYTES if with_crc else 0)
        assert records.store_time_ms(buffer, len(before)) == store_ms


@given(st.dictionaries(PROPERTY_TEXT, PROPERTY_TEXT, max_size=6))
def test_properties_there_and_back(values: dict[str, str]) -> None:
    packed = records.format_properties(values)
    assert records.parse_properties(packed) == values
    for name, value in values.items():
        assert records.property_value(packed, name.encode()) == value.encode()
    assert records.property_value(packed, b"nobody has this name") is None


def test_properties_as_producers_may_send_them() -> None:
    assert records.property_value(b"a\x011\x02a\x012", b"a") == b"2", "the last one counts"
    assert records.property_value(b"ba\x011\x02", b"a") is None
    assert records.parse_properties(b"a\x01\x02\x01b\x02junk\x02c\x01d") == {"c": "d"}
    unfinished = Message("t", 0, b"x", b"a\x01b")
    entry = records.decode(encode(unfinished))
    assert entry.properties.startswith(b"a\x01b\x02__CRC32#\x01")
    assert records.decode(encode(unfinished, with_crc=False)).properties == b"a\x01b"
    for bad in ({"": "x"}, {"a\x01": "x"}, {"a": "x\x02"}):
        with pytest.raises(MessageIllegal):
            records.format_properties(bad)


def test_counts_and_places_in_a_queue() -> None:
    batch = records.SYS_INNER_BATCH
    assert records.offset_count(batch, b"INNER_NUM\x017\x02") == 7
    assert records.offset_count(0, b"INNER_NUM\x017\x02") == 1
    assert records.offset_count(batch, b"INNER_NUM\x010\x02") == 1
    assert records.offset_count(batch, b"INNER_NUM\x01" + b"9" * 10 + b"\x02") == 1
    assert [records.in_queue(flag) for flag in (0x0, 0x4, 0x8, 0xC)] == [True, False, True, False]


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Message("t", 0, b"x" * 101), "body of 101 bytes is over the limit of 100"),
        (Message("t", 0, b"", b"a\x01" + b"x" * 32765 + b"\x02"), "properties of 32768 bytes"),
        (Message("", 0, b""), "topic name of 0 bytes"),
        (Message("t" * 256, 0, b""), "topic name of 256 bytes"),
        (Message("t", 0, b"", born_host=b"1234"), "born host"),
        (Message("t", -1, b""), "queue id -1"),
        (Message("t", 1 << 31, b""), "queue id 2147483648"),
    ],
)
def test_messages_that_can_never_be_stored(message: Message, complaint: str) -> None:
    with pytest.raises(MessageIllegal, match=complaint):
        encoder(body_max=100).measure(message, message.topic.encode())


def test_the_largest_properties_fit_and_one_byte_more_does_not() -> None:
    for with_crc in (False, True):
        most = 32767 - (records.CRC_PROPERTY_BYTES if with_crc else 0)
        properties = b"a\x01" + b"x" * (most - 3) + b"\x02"
        data = encode(Message("t", 0, b"", properties), with_crc=with_crc)
        assert records.decode(data).properties[:most] == properties
        with pytest.raises(MessageIllegal):
            encode(Message("t", 0, b"", b"a" + properties), with_crc=with_crc)


def test_a_message_that_fits_no_file() -> None:
    writer = records.Encoder(V4, with_crc=False, body_bytes_max=5000, entry_bytes_max=4088)
    fitting = Message("t", 0, b"x" * (4088 - 92))
    assert writer.measure(fitting, b"t") == 4088
    with pytest.raises(MessageIllegal, match="does not fit into a log file"):
        writer.measure(Message("t", 0, b"x" * (4088 - 91)), b"t")


# ----------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("with_crc", [False, True])
@pytest.mark.parametrize("host", [V4, V6])
def test_every_prefix_and_every_wrong_place_is_noticed(with_crc: bool, host: bytes) -> None:
    data = encode(Message("topic", 1, b"body", b"a\x01b\x02"), with_crc=with_crc, host=host)
    for length in range(len(data)):
        with pytest.raises(records.BadRecord):
            records.summarize(data[:length], 0, 4096)
    with pytest.raises(records.BadRecord, match="says that it lies at 4096, it lies at 4097"):
        records.summarize(data, 0, 4097)
    with pytest.raises(records.BadRecord):
        records.decode(b"")


@pytest.mark.parametrize("host", [V4, V6])
@pytest.mark.parametrize("topic", ["t", "t" * 200])
def test_with_the_checksum_no_flipped_bit_gets_through(host: bytes, topic: str) -> None:
    message = Message(topic, 1, b"some body", b"TAGS\x01x\x02", born_host=host)
    data = bytearray(encode(message, host=host))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(records.BadRecord):
            records.summarize(data, 0, 4096)
        data[bit // 8] ^= 1 << bit % 8
    records.summarize(data, 0, 4096)


def test_without_the_checksum_the_body_is_still_safe() -> None:
    data = bytearray(encode(Message("topic", 1, b"some body"), with_crc=False))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        try:
            entry = records.decode(data, 0, 4096)
        except records.BadRecord:
            pass
        else:
            assert bytes(entry.body) == b"some body"
        data[bit // 8] ^= 1 << bit % 8


@given(st.binary(min_size=91, max_size=300), st.sampled_from([records.MAGIC_V1, records.MAGIC_V2]))
def test_noise_is_refused_and_nothing_else_happens(noise: bytes, magic: int) -> None:
    data = bytearray(noise)
    pack_into(">iI", data, 0, len(data), magic)
    pack_into(">q", data, 28, 0)
    try:
        entry = records.decode(data, 0, 0)
    except records.BadRecord:
        return
    assert entry.body_crc == zlib.crc32(entry.body) & 0x7FFFFFFF
    assert entry.size == len(data)


def test_the_end_of_file_mark() -> None:
    assert records.peek(records.blank(4096), 0) == (4096, records.MAGIC_BLANK)
    assert records.peek(bytes(100), 0) == (0, 0)
    assert records.peek(bytes(7), 0) == (0, 0)
    with pytest.raises(AssertionError):
        records.blank(7)


# ------------------------------------------------- messages that look like they carry a checksum

FORGED = [
    b"__CRC32#\x010000000000\x02",
    b"__CRC33#\x010000000000\x02",
    b"a\x01b\x02__CRC32#\x01123456789x\x02",
]


@pytest.mark.parametrize("properties", FORGED)
@pytest.mark.parametrize("message_crc", [False, True])
def test_a_forged_checksum_cannot_poison_the_store(properties: bytes, message_crc: bool) -> None:
    """A producer must not be able to send what later counts as damage."""
    disk = Disk(message_crc=message_crc)
    disk.open()
    disk.put("t", 0, b"before")
    try:
        disk.put("t", 0, b"forged", properties)
    except MessageIllegal:
        expected = {0: b"before", 1: b"after"}
    else:
        expected = {0: b"before", 1: b"forged", 2: b"after"}
    disk.put("t", 0, b"after")
    disk.close()
    disk.files.remove("/store/sluice/snapshot.json")  # so that the whole log is read
    disk.open()
    assert disk.bodies("t", 0) == expected


@pytest.mark.parametrize("message_crc", [False, True])
def test_a_body_that_ends_like_a_checksum_is_only_a_body(message_crc: bool) -> None:
    body = b"text __CRC32#\x01" + b"0" * 7
    for length in range(len(body) + 1):
        data = encode(Message("t", 0, body[:length]), with_crc=message_crc)
        assert bytes(records.decode(data).body) == body[:length]
    data = encode(Message("tt", 0, body + b"\x02"), with_crc=message_crc)
    assert bytes(records.decode(data).body) == body + b"\x02"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"UNIQ_KEY", b"KEYS", b"TAGS", b"MYTAGS", b"KEYS2", b"", b"x"]),
            st.binary(max_size=6).filter(lambda value: b"\x02" not in value),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_the_keys_of_an_append_are_those_that_property_value_finds(
    items: list[tuple[bytes, bytes]], closed: bool
) -> None:
    properties = b"\x02".join(name + b"\x01" + value for name, value in items)
    properties += b"\x02" if closed else b""
    assert records.message_keys(properties) == tuple(
        records.property_value(properties, name) or b"" for name in (b"UNIQ_KEY", b"KEYS", b"TAGS")
    )


@given(st.integers(0, 2**32 - 1))
def test_whole_batches_have_the_same_checksum(crc: int) -> None:
    assert whole_batches.crc_property(crc) == records.crc_property(crc)
