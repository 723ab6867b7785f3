"""This module tests how records are looked at before they are stored: one that is not what its
batch or its own lengths say is refused, whichever way it is looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol import kafka_batches, kafka_checks, kafka_codes, kafka_fast
from sluice.protocol.kafka_batches import BadBatch, Record
from sluice.protocol.kafka_bounds import ITEMS_MAX, BadRequest

UNPACKED_MAX = 1 << 20
HEADERS = (("name", b"v"), ("none", None))


def wrapped(records: list[bytes], codec: int = 0) -> bytes:
    """A batch of records that are written already."""
    inside = b"".join(records)
    if codec:
        codec, inside = kafka_batches.pack(codec, inside)
    count = len(records)
    return kafka_batches.wrap(0, 5, 5, inside, last_delta=count - 1, count=count, attributes=codec)


def written(*records: Record) -> list[bytes]:
    found = []
    for record in records:
        out = bytearray()
        kafka_batches.put_record(out, record)
        found.append(bytes(out))
    return found


def some(count: int, step: int = 0, size: int = 100) -> list[bytes]:
    """Records that are alike, or by and by longer."""
    return written(
        *(Record(at, 0, b"key", b"v" * (size + at * step), HEADERS) for at in range(count))
    )


def passes(data: bytes) -> bool:
    """Whether a batch is not refused as it should be where it lies."""
    head = kafka_batches.read_sent(data)
    try:
        kafka_checks.check_records(head, data, UNPACKED_MAX)
    except BadBatch as bad:
        return bad.code != kafka_codes.INVALID_RECORD
    return True


def replaced(record: bytes, old: bytes, new: bytes) -> bytes:
    assert record.count(old) >= 1
    return record.replace(old, new, 1)


LIES: dict[str, Callable[[bytes], bytes]] = {
    "a key that is longer": lambda record: replaced(record, b"\x06key", b"\x08key"),
    "a key that is longer than all": lambda record: replaced(record, b"\x06key", b"\x7ekey"),
    "no key": lambda record: replaced(record, b"\x06key", b"\x01key"),
    "more headers": lambda record: replaced(record, b"\x04\x08name", b"\x06\x08name"),
    "fewer headers": lambda record: replaced(record, b"\x04\x08name", b"\x02\x08name"),
    "a negative number of them": lambda record: replaced(record, b"\x04\x08name", b"\x03\x08name"),
    "a header without a name": lambda record: replaced(record, b"\x08name", b"\x01name"),
    "a header that is longer": lambda record: replaced(record, b"\x02v\x08", b"\x7ev\x08"),
    "another number": lambda record: record[:4] + b"\x7e" + record[5:],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("codec", [0, kafka_batches.CODEC_ZSTD])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("count", [1, 5, 60, 300])
def test_a_record_that_lies_is_refused(lie: str, codec: int, step: int, count: int) -> None:
    records = some(count, step)
    assert passes(wrapped(records, codec))
    for at in {0, count // 2, count - 1}:
        changed = records.copy()
        changed[at] = LIES[lie](changed[at])
        assert not passes(wrapped(changed, codec)), at


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("count", [30, 65, 150, 320])
def test_the_first_of_records_that_are_alike_is_looked_into(lie: str, count: int) -> None:
    records = some(count)
    for _ in range(2):  # a form that is new, and one that is known
        assert kafka_checks.has_alike(memoryview(wrapped(records)), 0, count)
    for at in (0, 64) if count > 64 else (0,):
        changed = records.copy()
        changed[at] = LIES[lie](changed[at])
        assert not kafka_checks.has_alike(memoryview(wrapped(changed)), 0, count), at


@pytest.mark.parametrize("lie", LIES)
def test_a_record_alone_is_known_when_such_a_one_came_before(lie: str) -> None:
    data = memoryview(wrapped(some(1)))
    kafka_checks._alike.clear()
    kafka_checks._seen_alone.clear()
    assert [kafka_checks.has_alike(data, 0, 1) for _ in range(3)] == [False, True, True]
    changed = wrapped([LIES[lie](some(1)[0])])
    for _ in range(3):
        assert not kafka_checks.has_alike(memoryview(changed), 0, 1)
    assert kafka_checks.has_alike(data, 0, 1), "what lies takes no form's place"


def test_the_forms_of_records_alone_are_bounded() -> None:
    for size in range(3 * kafka_checks._FORMS_MAX):
        record = written(Record(0, 0, None, b"v" * size))
        for _ in range(2):
            kafka_checks.has_alike(memoryview(wrapped(record)), 0, 1)
    assert len(kafka_checks._seen_alone) <= kafka_checks._FORMS_MAX
    assert len(kafka_checks._alike) <= kafka_checks._FORMS_MAX


@pytest.mark.parametrize("count", [30, 150])
def test_records_that_are_alike_all_lie_in_the_same_way(count: int) -> None:
    for lie in LIES.values():
        data = wrapped([lie(record) for record in some(count)])
        assert not kafka_checks.has_alike(memoryview(data), 0, count)
        assert not passes(data)


@pytest.mark.parametrize("odd", [1, 63, 100, 149])
def test_one_of_another_length_is_seen_in_a_form_that_is_known(odd: int) -> None:
    records = some(150)
    assert kafka_checks.has_alike(memoryview(wrapped(records)), 0, 150)
    longer, shorter = odd, odd - 1
    changed = records.copy()
    changed[longer] = written(Record(longer, 0, b"key", b"v" * 101, HEADERS))[0]
    changed[shorter] = written(Record(shorter, 0, b"key", b"v" * 99, HEADERS))[0]
    assert len(wrapped(changed)) == len(wrapped(records))
    assert not kafka_checks.has_alike(memoryview(wrapped(changed)), 0, 150)
    assert passes(wrapped(changed))


def test_times_of_later_records_are_their_own() -> None:
    for late in range(5):
        records = written(*(Record(at, late if at else 0, None, b"v" * 9) for at in range(150)))
        assert kafka_checks.has_alike(memoryview(wrapped(records)), 0, 150)
    assert len([key for key in kafka_checks._alike if key[2] == 150 and key[0] == 2 * 15]) == 1


def test_forms_of_the_same_size_take_turns() -> None:
    """As long as the others, but with another share of it for the key."""
    one = wrapped(written(*(Record(at, 0, b"k", b"v" * 20) for at in range(9))))
    other = wrapped(written(*(Record(at, 0, b"k" * 9, b"v" * 12) for at in range(9))))
    assert len(one) == len(other)
    for data in (one, other, one, other):
        assert kafka_checks.has_alike(memoryview(data), 0, 9)


@pytest.mark.parametrize("count", [64, 65, 8191, 8192, 8300])
def test_numbers_grow_with_the_batch(count: int) -> None:
    records = written(*(Record(at, at, None, b"v") for at in range(count)))
    assert passes(wrapped(records))
    assert not passes(wrapped(records[:-2] + records[-1:] * 2))


fields = st.none() | st.binary(max_size=3)


@given(
    st.lists(st.tuples(st.integers(-70, 70), fields, fields), min_size=1, max_size=80),
    st.integers(0, 1 << 16),
    st.integers(0, 255),
)
@settings(max_examples=300)
def test_what_passes_can_be_read(
    found: list[tuple[int, bytes | None, bytes | None]], at: int, byte: int
) -> None:
    """A changed byte is refused, or the records can be read and are numbered from 0."""
    records = written(
        *(Record(number, *each, (("h", each[2]),)) for number, each in enumerate(found))
    )
    data = bytearray(wrapped(records))
    assert passes(bytes(data))
    data[61 + at % (len(data) - 61)] = byte
    head = kafka_batches.read_sent(bytes(data))
    try:
        read = kafka_batches.read_records(head, bytes(data), UNPACKED_MAX)
        is_good = [record.offset_delta for record in read] == list(range(len(found)))
    except BadBatch:
        is_good = False
    assert passes(bytes(data)) == is_good


# ------------------------------------------------------------------------------- requests by hand


def test_a_produce_request_has_so_many_items_and_no_more() -> None:
    def body(count: int) -> bytes:
        """Of version 8: partitions that nothing is sent to."""
        parts = struct.pack(">ii", 0, -1) * count
        start = struct.pack(">hhiih", -1, 1, 1000, 1, 1) + b"t"
        return start + struct.pack(">i", count) + parts

    assert len(kafka_fast.read_produce(body(1000), 0, 8).topics[0].parts) == 1000
    with pytest.raises(BadRequest, match="items"):
        kafka_fast.read_produce(body(ITEMS_MAX), 0, 8)  # and the topic


@pytest.mark.parametrize(("asked", "forgotten"), [(ITEMS_MAX, 0), (0, ITEMS_MAX), (9, ITEMS_MAX)])
def test_a_fetch_has_so_many_items_and_no_more(asked: int, forgotten: int) -> None:
    def body(asked: int, forgotten: int) -> bytes:
        """Of version 7."""
        start = struct.pack(">iiiibii", -1, 500, 1, 1000, 0, 0, 0)
        name = struct.pack(">ih", 1, 1) + b"t"
        parts = struct.pack(">iqqi", 0, 0, 0, 1000) * asked
        left_out = struct.pack(">i", 0) * forgotten
        wanted = start + name + struct.pack(">i", asked) + parts
        return wanted + name + struct.pack(">i", forgotten) + left_out

    few = kafka_fast.read_fetch(body(asked // 1000, forgotten // 1000), 0, 7)
    assert len(few.topics[0][1]) == asked // 1000
    assert len(few.forgotten[0][1]) == forgotten // 1000
    with pytest.raises(BadRequest, match="items"):
        kafka_fast.read_fetch(body(asked, forgotten), 0, 7)
