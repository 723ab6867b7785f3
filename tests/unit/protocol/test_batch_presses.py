"""This module holds two ways of encoding a batch together: message by message, and pressed."""

from __future__ import annotations

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol import batch_presses, records
from sluice.protocol.batch_presses import Alike, Presses, Sent, together_max
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
    return press_all(presses, [(data, queue_id, shape.middle(1234, HOST, 5678), offset)], shape)


def press_all(presses: Presses, sent: list[Sent], shape: BatchShape) -> Alike | None:
    """Press batches together, and compare with what becomes of each by itself."""
    alike = presses.press(shape, sent, 9_000)
    if alike is None:
        return None
    entries, uniques = b"", b""
    positions: list[int] = []
    for data, queue_id, middle, offset in sent:
        own = shape._replace(queue_id=queue_id)
        expected = encode_batch(own, middle, bytes(data), offset, 9_000 + len(entries))
        assert expected is not None
        assert len(expected.sizes) == alike.press.message_count
        assert {keys[1:] for keys in expected.keys} == {(alike.press.keys, alike.press.tag)}
        for size in expected.sizes:
            positions.append(9_000 + size * len(positions))
        entries += expected.entries
        uniques += b"".join(key for key, _, _ in expected.keys)
    assert alike.entries == entries
    assert alike.positions == pack(f">{len(positions)}q", *positions)
    code = records.java_hash(alike.press.tag)
    units = [SIMPLE_UNIT.pack(at, alike.press.size, code) for at in positions]
    assert alike.units == b"".join(units)
    assert alike.uniques == uniques
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


@given(
    forms,
    st.lists(
        st.lists(
            st.tuples(*(st.integers(0, 999), st.integers(0, 7)), st.integers(0, 1 << 40)),
            min_size=1,
            max_size=4,
        ),
        max_size=5,
    ),
)
def test_batches_together_have_the_entries_of_each_by_itself(
    form: tuple[int, int, bytes], groups: list[list[tuple[int, int, int]]]
) -> None:
    presses, shape = Presses(), shape_of()
    count, body_bytes, tag = form
    for group in groups:
        sent: list[Sent] = [
            (
                batch(count, body_bytes=body_bytes, tag=tag, seed=seed),
                *(queue_id, shape.middle(seed, HOST, 5678, queue_id), offset),
            )
            for seed, queue_id, offset in group
        ]
        assert press_all(presses, sent, shape) is not None


@pytest.mark.parametrize("odd_one", range(3))
def test_together_with_one_that_is_not_alike_none_is_pressed(odd_one: int) -> None:
    presses, shape = Presses(), shape_of()
    datas = [batch(8, seed=seed) for seed in range(3)]
    for spoiled in (
        datas[odd_one].replace(b"WAIT", b"FAIT"),
        datas[odd_one].replace(b"0000000", b"000\x02000"),
        datas[odd_one].replace(b"TagA", b"TagB"),
        batch(8, seed=odd_one, flag=1),
        bytes(len(datas[0])),
    ):
        odd = [spoiled if number == odd_one else data for number, data in enumerate(datas)]
        assert len({len(data) for data in odd}) == 1
        middle = shape.middle(1, HOST, 2)
        assert press_all(presses, [(data, 1, middle, 5) for data in odd], shape) is None
        assert press_all(presses, [(data, 1, middle, 5) for data in datas], shape) is not None


def test_how_many_are_pressed_together() -> None:
    assert [together_max(size) for size in (0, 1, 36_000, 100_000, 1 << 18, 1 << 25)] == [
        *(4, 4, 4, 2, 1, 1)
    ]


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
