"""This module holds the two ways of writing entries together: one by one, and as a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import MessageIllegal
from sluice.protocol import records
from sluice.protocol.record_runs import Run, encode_run, measure_run

V4 = b"\x7f\0\0\1\0\0\x2a\x9f"
V6 = b"\0" * 15 + b"\x01\0\0\x2a\x9f"
BODIES_MAX = 4096


def encoder(
    *, with_crc: bool = True, host: bytes = V4, entry_bytes_max: int = 1 << 20
) -> records.Encoder:
    return records.Encoder(
        host, with_crc=with_crc, body_bytes_max=BODIES_MAX, entry_bytes_max=entry_bytes_max
    )


def run_of(parts: list[tuple[int, bytes, bytes]], *, host: bytes = V4, topic: str = "T") -> Run:
    return Run(topic, 3, 0, 1_700_000_000_000, host, 2, parts)


properties = st.dictionaries(
    st.text("abcKEYS", min_size=1, max_size=8), st.text("xyz ", min_size=1, max_size=20), max_size=4
).map(lambda pairs: b"".join(f"{k}\x01{v}\x02".encode() for k, v in pairs.items()))
parts = st.lists(
    st.tuples(
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.binary(max_size=60),
        st.builds(lambda p, cut: p[:-1] if cut else p, properties, st.booleans()),
    ),
    min_size=1,
    max_size=6,
)


@given(
    parts=parts,
    with_crc=st.booleans(),
    store=st.sampled_from([V4, V6]),
    born=st.sampled_from([V4, V6]),
    topic=st.sampled_from(["T", "long" * 40]),
)
def test_a_run_is_the_same_bytes_as_its_messages_one_by_one(
    parts: list[tuple[int, bytes, bytes]], with_crc: bool, store: bytes, born: bytes, topic: str
) -> None:
    writer = encoder(with_crc=with_crc, host=store)
    run = run_of(parts, host=born, topic=topic)
    name = topic.encode()
    expected = []
    position = 1000
    for index in range(len(parts)):
        message = run.message(index)
        size = writer.measure(message, name)
        expected.append(writer.encode(message, name, size, 7 + index, position, 99))
        position += size
    sizes = measure_run(writer, run, name)
    assert sizes == [len(entry) for entry in expected]
    assert encode_run(writer, run, name, sizes, 7, 1000, 99) == expected


@pytest.mark.parametrize(
    "part",
    [
        (0, b"x" * (BODIES_MAX + 1), b""),
        (0, b"", b"k\x01" + b"v" * 32767 + b"\x02"),
    ],
)
def test_one_message_that_is_too_long_refuses_the_run(part: tuple[int, bytes, bytes]) -> None:
    run = run_of([(0, b"short", b""), part])
    with pytest.raises(MessageIllegal, match="over the limit"):
        measure_run(encoder(), run, b"T")


def test_a_run_whose_longest_entry_fits_into_no_file_is_refused() -> None:
    run = run_of([(0, b"short", b""), (0, b"x" * 3000, b"")])
    with pytest.raises(MessageIllegal, match="does not fit into a log file"):
        measure_run(encoder(entry_bytes_max=2000), run, b"T")
