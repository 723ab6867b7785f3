"""This module holds two ways of encoding a batch together: message by message, and pressed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol import batch_presses, records
from sluice.protocol.batch_presses import Alike, Presses
from sluice.protocol.message_batches import join_batch
from sluice.protocol.record_runs import BatchShape, encode_batch
from sluice.storage.queue_index import SIMPLE_UNIT

HOST = b"\x0a\0\0\1\0\0\x30\x39"
STORE = b"\x7f\0\0\1\0\0\x2a\x9f"
Part = tuple[int, bytes, bytes]


def shape_of(topic: bytes = b"t", limits: dict[str, int] | None = None) -> BatchShape:
    field = bytes([len(topic)]) + topic
    rest_bytes = 91 + len(topic) + 20
    bounds = {"body_bytes_max": 1 << 20, "properties_bytes_max": 32000, "entry_bytes_max": 1 << 21}
    return BatchShape(
        magic=0xDAA320A7,
        topic_field=field,
        sys_flag=0,
        queue_id=0,
        rest_bytes=rest_bytes,
        store_host=STORE,
        **(bounds | (limits or {})),
    )


def batch(
    count: int, *, body_bytes: int = 40, tag: bytes = b"TagA", seed: int = 0, flag: int = 0
) -> bytes:
    parts: list[Part] = [
        (
            flag,
            bytes((seed + number * 7 + at) % 256 for at in range(body_bytes)),
            b"WAIT\x01true\x02UNIQ_KEY\x01%08d\x02TAGS\x01%b\x02" % (seed + number, tag),
        )
        for number in range(count)
    ]
    return join_batch(parts)


def press(
    presses: Presses, data: bytes, shape: BatchShape, queue_id: int = 3, offset: int = 5
) -> Alike | None:
    middle = shape.middle(1234, HOST, 5678)
    alike = presses.press(shape, queue_id, middle, data, offset, 9_000)
    expected = encode_batch(shape._replace(queue_id=queue_id), middle, data, offset, 9_000)
    if alike is not None:
        assert expected is not None
        assert alike.entries == expected.entries
        assert alike.press.size * alike.press.message_count == len(alike.entries)
        first, *_ = expected.keys
        positions = range(9_000, 9_000 + len(alike.entries), alike.press.size)
        code = records.java_hash(alike.press.tag)
        units = [SIMPLE_UNIT.pack(at, alike.press.size, code) for at in positions]
        assert alike.units == b"".join(units)
        assert (alike.press.keys, alike.press.tag) == first[1:]
        assert alike.uniques == b"".join(key for key, _, _ in expected.keys)
    return alike


forms = st.tuples(
    st.integers(8, 12), st.integers(1, 30), st.sampled_from([b"TagA", b"TagB", b"Longer"])
)


@given(st.lists(st.tuples(forms, st.integers(0, 999), st.integers(0, 7)), max_size=12))
def test_batches_of_changing_forms_have_the_same_entries_both_ways(
    sent: list[tuple[tuple[int, int, bytes], int, int]],
) -> None:
    presses = Presses()
    for (count, body_bytes, tag), seed, queue_id in sent:
        data = batch(count, body_bytes=body_bytes, tag=tag, seed=seed, flag=seed % 3)
        assert press(presses, data, shape_of(), queue_id, seed) is not None


def test_a_form_is_found_again_and_what_was_made_stays_as_it_was() -> None:
    presses = Presses()
    first = press(presses, batch(8, seed=1), shape_of())
    assert first is not None
    kept = bytes(first.entries)
    other_tag = press(presses, batch(8, seed=2, tag=b"TagB"), shape_of())
    again = press(presses, batch(8, seed=3), shape_of())
    assert other_tag is not None
    assert again is not None
    assert again.press is first.press
    assert other_tag.press is not first.press
    assert first.entries == kept


def test_topics_have_presses_of_their_own() -> None:
    presses = Presses()
    for topic in (b"t", b"u", b"longer", b"t"):
        assert press(presses, batch(9), shape_of(topic)) is not None


def test_a_bounded_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(batch_presses.Press):
        def __init__(self, *parts: object) -> None:
            made.append(parts)
            super().__init__(*parts)  # type: ignore[arg-type]

    monkeypatch.setattr(batch_presses, "Press", Counted)
    presses = Presses()
    for body_bytes in (*range(1, 41), 1):
        assert press(presses, batch(8, body_bytes=body_bytes), shape_of()) is not None
    assert len(made) == 41  # the first one was given up
    assert press(presses, batch(8, body_bytes=1, seed=9), shape_of()) is not None
    assert len(made) == 41
    large = batch(8, body_bytes=70_000)
    for _ in range(2):
        assert press(presses, large, shape_of()) is not None
    assert len(made) == 43  # such a one is not kept at all


@pytest.mark.parametrize(
    ("data", "limits"),
    [
        (batch(7), {}),
        (batch(8) + batch(8, body_bytes=41), {}),
        (batch(8) + batch(8, flag=1), {}),
        (batch(8) + batch(8, tag=b"TagB"), {}),
        (batch(8)[:-1], {}),
        (batch(8, body_bytes=0), {}),
        (batch(8), {"body_bytes_max": 39}),
        (batch(8), {"properties_bytes_max": 20}),
        (batch(8), {"entry_bytes_max": 100}),
        (join_batch([(0, b"x", b"TAGS\x01a\x02")] * 8), {}),
        (batch(8).replace(b"00000003", b"0000\x02003"), {}),
        (b"", {}),
        (bytes(400), {}),
    ],
)
def test_what_is_not_alike_is_left_to_the_other_way(data: bytes, limits: dict[str, int]) -> None:
    presses = Presses()
    assert press(presses, data, shape_of(limits=limits)) is None
    assert press(presses, batch(8), shape_of()) is not None
    assert press(presses, data, shape_of(limits=limits)) is None
