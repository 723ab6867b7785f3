"""Partitions of keys: those that Kafka's own producers choose."""

from __future__ import annotations

import pyarrow as pa
import pytest
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.partitioner import murmur2 as murmur2_of_kafka
from hypothesis import given
from hypothesis import strategies as st

from sluice.spark.encode import portions
from sluice.spark.key_hash import key_partitions, murmur2
from sluice.spark.layout import Column


def column(keys: list[bytes]) -> Column:
    return Column.of(pa.array(keys, pa.binary()))


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_hashes_that_kafka_tells_in_its_own_tests(key: bytes, signed: int) -> None:
    assert murmur2(column([key])).view("int32").tolist() == [signed]


@given(st.lists(st.binary(max_size=70), max_size=20))
def test_many_keys_at_once_hash_as_one_by_one(keys: list[bytes]) -> None:
    assert murmur2(column(keys)).tolist() == [murmur2_of_kafka(key) for key in keys]


def test_partitions_are_those_of_a_producer() -> None:
    keys = [b"user-%d" % number for number in range(500)] + [b"", b"\xff" * 9]
    chosen = [DefaultPartitioner()(key, list(range(12)), list(range(12))) for key in keys]
    assert key_partitions(column(keys), 12).tolist() == chosen
    sliced = Column.of(pa.array([b"other", *keys, b"more"], pa.binary()).slice(1, len(keys)))
    assert key_partitions(sliced, 12).tolist() == chosen


def test_the_sink_sends_a_row_where_a_producer_sends_it() -> None:
    keys = [f"k{number}" for number in range(64)] + ["Grüße"]
    values = [key.encode() for key in keys]
    batch = pa.record_batch({"value": pa.array(values), "key": pa.array(keys)})
    chosen = DefaultPartitioner()
    wanted: dict[int, int] = {}
    for key in values:
        partition = chosen(key, list(range(8)), list(range(8)))
        wanted[partition] = wanted.get(partition, 0) + 1
    found = {each.partition: len(each.sizes) for each in portions(batch, "t", lambda _: 8, 10**6)}
    assert found == wanted
