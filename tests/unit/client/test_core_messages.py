"""What goes out and comes in: properties, frames, pulled messages, results."""

from __future__ import annotations

import zlib
from datetime import UTC, datetime, timedelta

import pytest

from sluice.client.aio.pulls import Pulled
from sluice.client.core.ids import BatchKeys, UniqueKeys
from sluice.client.core.messages import (
    COMPRESSED_ZLIB,
    Message,
    SendResult,
    SendStatus,
    read_pulled,
)
from sluice.errors import MessageInvalid, ProtocolError
from sluice.model import Message as Stored
from sluice.protocol import records, remoting, remoting_fast
from sluice.protocol.client_frames import (
    SEND_BATCH,
    SendTemplate,
    SentFields,
    answer_mark,
    keyed_batch,
)
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.message_batches import join_batch, split_batch

QUEUE = MessageQueue("orders", "broker-a", 3)
HOST = b"\x7f\0\0\1\0\0\x2a\x9f"
BORN_MS = 1_794_800_000_123


def entry(body: bytes, offset: int = 7, topic: str = "orders", **changes: object) -> bytes:
    """A message as a broker stores it."""
    encoder = records.Encoder(HOST, with_crc=True, body_bytes_max=1 << 20, entry_bytes_max=1 << 20)
    fields = {"properties": b"TAGS\x01A\x02UNIQ_KEY\x01U1\x02", "born_ms": BORN_MS, **changes}
    message = Stored(topic, 3, body, **fields)  # type: ignore[arg-type]
    size = encoder.measure(message, topic.encode())
    return encoder.encode(message, topic.encode(), size, offset, 1000, BORN_MS + 5)


# -------------------------------------------------------------------------------------- outgoing


def test_properties_of_a_plain_message() -> None:
    message = Message("orders", "hello", tags="A")
    assert message.body == b"hello"
    properties = records.parse_properties(message.wire_properties("U1"))
    assert properties == {"UNIQ_KEY": "U1", "WAIT": "true", "TAGS": "A"}
    assert message.is_plain


def test_properties_of_a_message_with_everything() -> None:
    message = Message(
        *("orders", b"hello"),
        tags="A",
        keys=["k1", "k2"],
        properties={"colour": "red"},
        sharding_key="s",
        delay_seconds=1.5,
    ).with_extra(TTL="3000")
    assert records.parse_properties(message.wire_properties("U1")) == {
        "UNIQ_KEY": "U1",
        "WAIT": "true",
        "TAGS": "A",
        "KEYS": "k1 k2",
        "__SHARDINGKEY": "s",
        "colour": "red",
        "TIMER_DELAY_MS": "1500",
        "TTL": "3000",
    }
    assert not message.is_plain


def test_times() -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert Message("t", b"x", deliver_at=when).deliver_at_ms == 1_767_323_045_000
    assert Message("t", b"x", deliver_at=when.timestamp()).deliver_at_ms == 1_767_323_045_000
    properties = Message("t", b"x", delay_level=3).wire_properties("U")
    assert records.property_value(properties, b"DELAY") == b"3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"topic": ""}, "topic"),
        ({"topic": 5}, "topic"),
        ({"body": b""}, "empty body"),
        ({"body": {"a": 1}}, "json.dumps"),
        ({"tags": 5}, "tags must be a text"),
        ({"tags": "a\x01"}, "0x01"),
        ({"properties": {"KEYS": "x"}}, "RocketMQ's own"),
        ({"properties": {"": "x"}}, "must not be empty"),
        ({"properties": {"colour": ""}}, "'colour': name and value must not be empty"),
        ({"properties": {"n": 5}}, "property n must be a text"),
        ({"delay_level": 19}, "1 to 18"),
        ({"delay_level": 1, "delay_seconds": 2}, "give one of"),
        ({"delay_seconds": -1}, "no span of time"),
        ({"delay_seconds": float("nan")}, "no span of time"),
        ({"delay_seconds": float("inf")}, "no span of time"),
        ({"delay_seconds": 1e306}, "no span of time"),
        ({"delay_seconds": "5"}, "no span of time"),
        ({"deliver_at": "tomorrow"}, "deliver_at 'tomorrow' is no time; give a datetime"),
        ({"deliver_at": float("nan")}, "seconds since 1970"),
        ({"deliver_at": float("inf")}, "seconds since 1970"),
        ({"deliver_at": timedelta(hours=1)}, "seconds since 1970"),
        ({"deliver_at": datetime.min}, "seconds since 1970"),
        ({"keys": 5}, "keys 5: give a text, or a list of texts"),
        ({"keys": [1, 2]}, "a list of texts"),
        ({"keys": b"key"}, "a list of texts"),
        ({"properties": [("a", "b")]}, "a table of names and texts, not list"),
        ({"properties": "a=b"}, "a table of names and texts, not str"),
        ({"properties": {5: "x"}}, "the name of property 5 must be a text"),
        ({"properties": {"n": None}}, "property n must be a text"),
        ({"sharding_key": 7}, "sharding_key must be a text"),
        ({"flag": "1"}, "flag '1': give a number of 32 bits"),
        ({"flag": 1.5}, "32 bits"),
        ({"flag": 1 << 31}, "32 bits"),
        ({"body": "\ud800"}, "the body is no text that UTF-8 can hold"),
        ({"tags": "\ud800"}, "tags is no text that UTF-8 can hold"),
    ],
)
def test_what_is_no_message(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(MessageInvalid, match=words):
        Message(**{"topic": "orders", "body": b"x", **arguments})  # type: ignore[arg-type]


def test_unique_keys_differ_and_look_like_rocketmqs() -> None:
    keys = UniqueKeys(bytes(range(10)))
    made = {keys.make(BORN_MS) for _ in range(1000)}
    assert len(made) == 1000
    assert all(len(key) == 32 and key.isalnum() and key == key.upper() for key in made)


# ----------------------------------------------------------------------------------------- frames


@pytest.mark.parametrize("body", [b"x", b"y" * 5000])
def test_a_template_writes_what_the_codec_reads(body: bytes) -> None:
    template = SendTemplate("group-1", "orders", 3, "broker-a", sys_flag=1)
    properties = Message("orders", b"x", tags="A").wire_properties("U1")
    frame = template.frame(77, 0, BORN_MS, properties, body)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    command = remoting.decode(frame[4:])
    assert (command.opaque, command.flag, command.code) == (77, 0, 310)
    assert bytes(command.body) == body
    send = remoting_fast.read_send(command)
    assert send == remoting_fast.SendRequest(
        *("group-1", "orders", "TBW102", 4, 3, 1, BORN_MS, 0),
        *(properties.decode(), 0, False, None, False),
    )
    # And our own broker takes its short way with it.
    quick = remoting_fast.quick_send(frame[4:])
    assert quick is not None
    assert (quick[0], quick[2], quick[3]) == (77, BORN_MS, properties)
    assert frame[4 + quick[5] :] == body


def test_a_template_of_batches_is_quick_too() -> None:
    template = SendTemplate("group-1", "orders", 3, "broker-a", code=SEND_BATCH)
    keys = BatchKeys(bytes(range(10))).take(BORN_MS, 4)
    tail = b"TAGS\x01A\x02"
    messages = [(b"one", tail, 0), (b"two", b"", 5), (b"six", tail, 0), (b"seven", tail, 0)]
    body = keyed_batch(
        keys.stamp,
        keys.first,
        [body for body, _, _ in messages],
        [tail for _, tail, _ in messages],
        {1: 5},
    )
    assert body == join_batch(
        (flag, body, f"UNIQ_KEY\x01{keys.at(index)}\x02".encode() + tail)
        for index, (body, tail, flag) in enumerate(messages)
    )
    frame = template.frame(1, 0, BORN_MS, b"WAIT\x01true\x02", body)
    quick = remoting_fast.quick_send(frame[4:])
    assert quick is not None
    assert quick[4] == -1
    sent = split_batch(frame[4 + quick[5] :])
    assert [bytes(part[1]) for part in sent] == [body for body, _, _ in messages]


def test_a_template_serves_messages_of_all_sizes() -> None:
    template = SendTemplate("group-1", "orders", 3, "broker-a")
    for number, (flag, properties, body) in enumerate(
        [(0, b"p", b"x"), (0, b"p", b"y"), (2, b"p", b"y"), (0, b"p", b"y"), (0, b"pp", b"long")]
    ):
        command = remoting.decode(template.frame(number, flag, BORN_MS, properties, body)[4:])
        assert (command.opaque, command.flag, bytes(command.body)) == (number, flag, body)
        assert command.ext["i"] == properties.decode()


def test_ids_of_batches_follow_each_other() -> None:
    keys = BatchKeys(bytes(range(10)))
    ranges = [keys.take(BORN_MS, 40_000), keys.take(BORN_MS, 20_000), keys.take(BORN_MS + 1, 9_000)]
    ids = [each.at(index) for each in ranges for index in range(each.number)]
    assert len(set(ids)) == 69_000
    assert all(len(key) == 32 and key == key.upper() for key in ids)


def test_answers_are_read_when_they_are_asked_for() -> None:
    binary = remoting_fast.send_answer(remoting.BINARY, 9, "AA,BB", 3, 41, "U1")[4:]
    assert answer_mark(binary) == (9, 0)
    result = SendResult(SendStatus.OK, "U2", QUEUE, SentFields(binary), 1)
    assert (result.queue_offset, result.queue_id, result.offset_id) == (42, 3, "BB")
    assert result.transaction_id == "U1"
    assert result.recall_handle == ""
    json = remoting_fast.send_answer(remoting.JSON, 9, "AA", 3, 41, "U1")[4:]
    assert answer_mark(json) is None
    request = SendTemplate("g", "t", 0, "b").frame(1, 0, BORN_MS, b"", b"x")[4:]
    assert answer_mark(request) is None
    assert answer_mark(b"\x01\0\0\0") is None


def test_an_answer_that_lacks_something_says_so() -> None:
    result = SendResult(SendStatus.OK, "U", QUEUE, SentFields(None, {"msgId": "AA"}), 1)
    with pytest.raises(ProtocolError, match="queueOffset"):
        _ = result.queue_offset
    with pytest.raises(ProtocolError, match="less ids"):
        _ = result.offset_id


# --------------------------------------------------------------------------------------- incoming


def test_pulled_messages() -> None:
    data = entry(b"one") + entry(b"two", 8, reconsume_times=2, flag=4)
    first, second = read_pulled(data, QUEUE)
    assert (first.body, first.queue_offset, first.tags, first.message_id) == (b"one", 7, "A", "U1")
    assert (second.body, second.reconsume_times, second.flag) == (b"two", 2, 4)
    assert first.born_ms == BORN_MS
    assert first.store_ms == BORN_MS + 5
    assert first.position == 1000
    assert first.offset_id == (HOST + (1000).to_bytes(8, "big")).hex().upper()
    assert first.stored_bytes == len(entry(b"one"))
    assert first.properties["TAGS"] == "A"
    assert "orders/3@7" in repr(first)


def test_a_message_of_the_retry_topic_has_its_own_topic() -> None:
    properties = b"RETRY_TOPIC\x01orders\x02"
    data = entry(b"one", topic="%RETRY%g", properties=properties)
    (message,) = read_pulled(data, MessageQueue("%RETRY%g", "broker-a", 0))
    assert message.topic == "orders"
    assert message.queue.topic == "%RETRY%g"


def test_packed_bodies_are_unpacked_when_asked_for() -> None:
    packed = zlib.compress(b"z" * 1000)
    (message,) = read_pulled(entry(packed, sys_flag=COMPRESSED_ZLIB), QUEUE)
    assert message.body == b"z" * 1000
    assert message.stored_body == packed
    (old,) = read_pulled(entry(packed, sys_flag=1), QUEUE)
    assert old.body == b"z" * 1000
    (lz4,) = read_pulled(entry(packed, sys_flag=0x101), QUEUE)
    with pytest.raises(ProtocolError, match="LZ4"):
        _ = lz4.body
    (broken,) = read_pulled(entry(b"no zlib", sys_flag=1), QUEUE)
    with pytest.raises(ProtocolError, match="damaged"):
        _ = broken.body


def test_unusual_forms() -> None:
    long_topic = "t" * 200
    (message,) = read_pulled(entry(b"one", topic=long_topic), QUEUE)
    assert (message.body, message.tags) == (b"one", "A")
    address = bytes(15) + b"\x01" + (10911).to_bytes(4, "big")
    (message,) = read_pulled(entry(b"one", born_host=address), QUEUE)
    assert (message.body, message.queue_offset) == (b"one", 7)


def test_a_batch_that_is_stored_whole_is_taken_apart() -> None:
    body = join_batch([(0, b"one", b"TAGS\x01A\x02"), (0, b"two", b"TAGS\x01B\x02")])
    data = entry(
        body,
        10,
        properties=b"INNER_NUM\x012\x02INNER_BASE\x0110\x02",
        sys_flag=records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP,
    )
    found = read_pulled(data, QUEUE)
    assert [(m.body, m.queue_offset, m.tags) for m in found] == [
        (b"one", 10, "A"),
        (b"two", 11, "B"),
    ]


def test_a_reader_in_the_middle_of_a_batch_gets_its_rest() -> None:
    data = entry(
        join_batch([(0, b"%d" % number, b"") for number in range(3)]),
        10,
        properties=b"INNER_NUM\x013\x02INNER_BASE\x0110\x02",
        sys_flag=records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP,
    )
    pulled = Pulled(data + entry(b"next", 13), 2, 14)
    for begin in (9, 10, 11, 12, 13):
        offsets = [message.queue_offset for message in pulled.messages(QUEUE, begin)]
        assert offsets == list(range(max(10, begin), 14))
    assert Pulled(b"", 0, 14).messages(QUEUE, 11) == []


@pytest.mark.parametrize("at", [0, 5, 90, 91, 100])
def test_damage_is_never_handed_on(at: int) -> None:
    """A flipped bit in size, magic, body, topic size: an error, or the message as it was."""
    whole = entry(b"one")
    damaged = bytearray(whole)
    damaged[at] ^= 0x40
    try:
        found = read_pulled(bytes(damaged), QUEUE)
    except ProtocolError:
        return
    assert [message.body for message in found] == [b"one"]


@pytest.mark.parametrize("size", [1, 50, 92])
def test_what_is_cut_short_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        read_pulled(entry(b"one")[:size], QUEUE)


def alike(count: int, first: int = 0, body: bytes = b"body-%03d") -> list[bytes]:
    """Entries of one length each, which are taken apart many at a time."""
    return [entry(body % number, first + number, flag=number) for number in range(count)]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_many_messages_of_one_length_and_a_change_in_the_middle(kind: type) -> None:
    longer = [entry(b"longer-%03d" % number, 20 + number, flag=7) for number in range(3)]
    whole = [*alike(20), *longer, *alike(12, 23), entry(b"last", 35, reconsume_times=2)]
    found = read_pulled(kind(b"".join(whole)), QUEUE)
    assert [message.queue_offset for message in found] == list(range(36))
    assert [message.body for message in found] == [
        *(b"body-%03d" % number for number in range(20)),
        *(b"longer-%03d" % number for number in range(3)),
        *(b"body-%03d" % number for number in range(12)),
        b"last",
    ]
    assert [message.flag for message in found] == [*range(20), 7, 7, 7, *range(12), 0]
    assert [message.stored_bytes for message in found] == [len(each) for each in whole]
    assert {message.tags for message in found} == {"A"}
    assert {(message.born_ms, message.position) for message in found} == {(BORN_MS, 1000)}
    assert found[35].reconsume_times == 2


@pytest.mark.parametrize("row", [0, 1, 7, 8, 9, 15, 19])
@pytest.mark.parametrize("at", [1, 5, 9, 60, 86, 92, 96, 97, 99])
def test_damage_in_one_of_many_messages_is_never_handed_on(row: int, at: int) -> None:
    """In size, magic, checksum, size of the body, body, topic, size of the properties."""
    rows = alike(20)
    damaged = bytearray(rows[row])
    damaged[at] ^= 0x40
    rows[row] = bytes(damaged)
    try:
        found = read_pulled(b"".join(rows), QUEUE)
    except ProtocolError:
        return
    assert [message.body for message in found] == [b"body-%03d" % number for number in range(20)]


def test_a_damaged_body_among_many_is_refused() -> None:
    for row in (0, 7, 8, 9, 19):
        rows = alike(20)
        rows[row] = rows[row].replace(b"body-", b"bodi-")
        with pytest.raises(ProtocolError, match=f"the body at offset {row} is damaged"):
            read_pulled(b"".join(rows), QUEUE)


@pytest.mark.parametrize("missing", [1, 3, 50])
@pytest.mark.parametrize("count", [2, 9, 10, 20])
def test_many_messages_whose_last_is_cut_short_are_refused(count: int, missing: int) -> None:
    with pytest.raises(ProtocolError):
        read_pulled(b"".join(alike(count))[:-missing], QUEUE)
