"""Images become the entries that the encoder writes; what is no image is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import MessageIllegal
from sluice.model import Message
from sluice.protocol import records
from sluice.protocol.record_images import Images, completed, read_images, rest_bytes
from sluice.protocol.record_runs import BatchShape
from tests.unit.protocol.image_kit import Part, image_of, images_of

HOST = b"\x7f\0\0\1\0\0\x2a\x9f"
TOPICS = (b"T", b"long" * 40)
KEYED = [(n, b"%d" % n * (n + 1), b"KEYS\x01key-%d\x02" % (n * n)) for n in range(12)]

properties = st.dictionaries(
    st.text("abcKEYS", min_size=1, max_size=8), st.text("xyz ", min_size=1, max_size=20), max_size=3
).map(lambda pairs: b"".join(f"{k}\x01{v}\x02".encode() for k, v in pairs.items()))
flags = st.integers(-(1 << 31), (1 << 31) - 1)
null_properties = properties.map(lambda own: own + b"__KAFKA_NULL\x011\x02")
parts_of = st.lists(
    st.tuples(flags, st.binary(min_size=1, max_size=60), properties)
    | st.tuples(flags, st.just(b""), null_properties),
    min_size=1,
    max_size=8,
)


def sealed(parts: list[Part], topic: bytes) -> Images:
    body = images_of(parts, topic)
    seal = read_images(body, len(parts), topic).seal()
    return read_images(body + seal, len(parts), topic, is_sealed=True)


@given(
    parts=parts_of,
    topic=st.sampled_from(TOPICS),
    block_bytes=st.sampled_from((1, 400, 1 << 20)),
)
def test_images_become_what_the_encoder_writes(
    parts: list[Part], topic: bytes, block_bytes: int
) -> None:
    encoder = records.Encoder(HOST, with_crc=True, body_bytes_max=999, entry_bytes_max=9999)
    expected = b""
    for number, (flag, body, own) in enumerate(parts):
        message = Message(topic.decode(), 3, body, own, flag, 0, 1234, HOST, 0, 777)
        size, at = encoder.measure(message, topic), 5000 + len(expected)
        expected += encoder.encode(message, topic, size, 40 + number, at, 5678)
    magic, field = records.field_of_topic(topic)
    shape = BatchShape(magic, field, 0, 3, rest_bytes(topic), 999, 999, 9999, HOST)
    images = sealed(parts, topic)
    middle = shape.middle(1234, HOST, 5678, 777)
    assert b"".join(completed(images, shape, middle, 40, 5000, block_bytes)) == expected
    assert [(f, bytes(b), p) for f, b, p in images.parts()] == parts
    assert [(f, bytes(b), p) for f, b, p in images.parts(slice(1, None))] == parts[1:]
    assert images.properties() == b"".join(own for _, _, own in parts)


def test_the_keys_of_messages_that_have_nothing_else() -> None:
    keys = sealed([*KEYED[:3], (0, b"x", b""), *KEYED[3:]], b"T").keys()
    assert keys is not None
    assert keys.joined == b"".join(b"key-%d" % (n * n) for n in range(12))
    assert keys.lengths.sum() == len(keys.joined)
    assert keys.rows.tolist() == [0, 1, 2, *range(4, 13)]
    nothing = sealed([(0, b"x", b"")] * 3, b"T").keys()
    assert nothing is not None
    assert not len(nothing.rows)


@pytest.mark.parametrize(
    "other",
    [
        b"TAGS\x01a\x02",
        b"KEYS\x01a b\x02",
        b"KEYS\x01\x02",
        b"KEYS\x01a\x02TAGS\x01b\x02",
        b"KEYS\x01a\x01\x02",
        b"UNIQ_KEY\x01abc\x02",
        b"\x02",
        b"\x02\x02\x02\x02\x02\x02\x02",
    ],
)
def test_other_properties_are_looked_at_one_by_one(other: bytes) -> None:
    for parts in ([*KEYED, (0, b"x", other)], [(0, b"x", other), *KEYED], [(0, b"x", other)]):
        assert sealed(parts, b"T").keys() is None


def changed(at: int, data: bytes) -> bytes:
    """Three images, the second of which is wrong at a place."""
    first, second, third = (image_of(part, b"T") for part in KEYED[:3])
    at %= len(second)
    wrong = second[:at] + data + second[at + len(data) :]
    sizes = b"".join(len(each).to_bytes(4, "big") for each in (first, second, third))
    return first + wrong + third + sizes


BODY_AT = 84
TOPIC_AT = 88 + len(KEYED[1][1])


@pytest.mark.parametrize(
    ("at", "data", "words"),
    [
        (0, b"\0\0\0\x10", "fit into its size"),
        (0, b"\xff\xff\xff\xff", "fit into its size"),
        (4, records.MAGIC_BLANK.to_bytes(4, "big"), "fit into its size"),
        (4, records.MAGIC_V2.to_bytes(4, "big"), "fit into its size"),
        (BODY_AT, b"\0\0\0\0", "do not add up"),
        (BODY_AT, b"\0\0\0\x01", "do not add up"),
        (BODY_AT, b"\0\0\0\x03", "do not add up"),
        (BODY_AT, b"\0\0\x40\0", "fit into its size"),
        (BODY_AT, b"\x80\0\0\0", "fit into its size"),
        (TOPIC_AT, b"\x01U", "another topic"),
        (TOPIC_AT, b"\x02T", "another topic"),
        (TOPIC_AT + 2, b"\0\0", "do not add up"),
        (-records.CRC_PROPERTY_BYTES - 1, b"x", "separator"),
    ],
)
def test_what_does_not_add_up_is_refused(at: int, data: bytes, words: str) -> None:
    assert len(read_images(changed(at, b""), 3, b"T")) == 3
    with pytest.raises(MessageIllegal, match=words):
        read_images(changed(at, data), 3, b"T")


def test_records_without_a_value_and_with_an_empty_one_have_no_body() -> None:
    null = b"__KAFKA_NULL\x011\x02"
    for properties in (null, b"KEYS\x01k\x02" + null, b"", b"KEYS\x01k\x02"):
        parts = [KEYED[0], (0, b"", properties)]
        assert [(f, bytes(b), p) for f, b, p in sealed(parts, b"T").parts()] == parts


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 4, 32768, 1 << 31])
def test_counts_that_are_wrong(count: int) -> None:
    with pytest.raises(MessageIllegal):
        read_images(images_of(KEYED[:3], b"T"), count, b"T")


@given(data=st.binary(max_size=700), count=st.integers(1, 4), cut=st.integers(0, 700))
def test_any_bytes_are_images_or_refused(data: bytes, count: int, cut: int) -> None:
    whole = images_of(KEYED[:count], b"T")
    for body in (data, whole[:cut], whole[:cut] + data, data + whole[-4 * count :]):
        try:
            read_images(body, count, b"T").parts()
        except MessageIllegal:
            continue
