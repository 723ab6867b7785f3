"""What a task sends: small portions are joined, none is lost, and each queue keeps its order."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

from sluice.errors import ConfigError
from sluice.spark import writing
from sluice.spark.encode import Portion
from sluice.spark.options import WriteOptions, write_options
from sluice.spark.writing import BatchWriter, StreamWriter, Written, _Gathering, sink_name

BYTES_MAX = 1000


def portion(partition: int, text: bytes, topic: str = "t") -> Portion:
    return Portion(topic, partition, (text,), np.array([len(text)], np.int64))


def text_of(portions: list[Portion]) -> dict[tuple[str, int], bytes]:
    found: dict[tuple[str, int], bytes] = defaultdict(bytes)
    for each in portions:
        found[each.topic, each.partition] += b"".join(each.parts)
        assert each.sizes.sum() == sum(map(len, each.parts))
    return found


def test_small_portions_are_joined_and_large_ones_go_at_once() -> None:
    gathering = _Gathering(BYTES_MAX)
    assert gathering.add(portion(0, b"a" * 100)) == []
    assert gathering.add(portion(1, b"b" * 100)) == []
    (large,) = gathering.add(portion(2, b"c" * 600))
    assert large.parts == (b"c" * 600,)
    (joined,) = gathering.add(portion(0, b"d" * 500))
    assert joined.parts == (b"a" * 100, b"d" * 500)
    assert joined.sizes.tolist() == [100, 500]
    assert gathering.add(portion(1, b"e" * 300)) == []
    assert gathering.add(portion(0, b"f" * 400)) == []
    first, second = gathering.add(portion(0, b"g" * 700))
    assert (first.parts, second.parts) == ((b"f" * 400,), (b"g" * 700,)), "no room for both"
    assert text_of(gathering.rest()) == {("t", 1): b"b" * 100 + b"e" * 300}
    assert gathering.rest() == []


@pytest.mark.parametrize("held_bytes_max", [0, 500, 1 << 20])
def test_nothing_is_lost_and_queues_keep_their_order(
    held_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_HELD_BYTES_MAX", held_bytes_max)
    gathering = _Gathering(BYTES_MAX)
    wanted: dict[tuple[str, int], bytes] = defaultdict(bytes)
    sent: list[Portion] = []
    for number in range(500):
        topic, partition = f"t{number % 2}", number % 7 - 1
        text = b"%d," % number * (number * 37 % 90 + 1)
        wanted[topic, partition] += text
        sent += gathering.add(portion(partition, text, topic))
        held = sum(each.byte_count for each in gathering._held.values())
        assert held == gathering._held_bytes <= held_bytes_max
    assert all(each.byte_count <= BYTES_MAX for each in sent)
    assert text_of(sent + gathering.rest()) == wanted


def test_a_worker_settles_once() -> None:
    """In a process of its own: what is settled stays so."""
    program = (
        "import gc\n"
        "from sluice.spark.workers import settle\n"
        "settle()\n"
        "first = gc.get_freeze_count()\n"
        "kept = [[] for _ in range(1000)]\n"
        "settle()\n"
        "print(first > 0, gc.get_freeze_count() <= first)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout == "True True\n"


# -------------------------------------------------------------------------------------------- sinks


def options(**more: str) -> WriteOptions:
    return write_options({"sluice.bootstrap.servers": "a:1", **more})


class FakeCluster:
    """Publishes every batch of a sink once."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []

    def publish(
        self, broker: str, topic: str, sink: str, batch: int, handles: list[str], *, once: bool
    ) -> bool:
        if (sink, batch) in self.published:
            return False
        self.published.append((sink, batch))
        return True


def test_a_named_batch_write_needs_its_number() -> None:
    """Without one every write would be taken for the first, and all but that one be lost."""
    with pytest.raises(ConfigError, match="option txnAppId needs option txnVersion"):
        BatchWriter(options(topic="t", txnAppId="job"))
    BatchWriter(options(topic="t", txnAppId="job", txnVersion="0"))
    BatchWriter(options(topic="t"))
    StreamWriter(options(topic="t", txnAppId="job"))


def test_one_version_is_written_once_to_each_topic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    monkeypatch.setattr(writing, "cluster_for", lambda *_: cluster)

    def write(topic: str) -> None:
        writer = BatchWriter(options(topic=topic, txnAppId="job", txnVersion="7"))
        writer.commit([Written(writer._sink, writer._batch, "broker-a", topic, ("handle",))])

    with caplog.at_level(logging.WARNING, "sluice.spark"):
        write("t")
        write("u")
        assert not caplog.records
        write("t")
    assert cluster.published == [("job/t", 7), ("job/u", 7)]
    assert "batch 7 of sink job/t, or a later one, was published before" in caplog.text


def test_a_sinks_name_is_one_that_brokers_take() -> None:
    assert sink_name(options(txnAppId="job")) == "job"
    assert sink_name(options(topic="t")) == ""
    long = [sink_name(options(topic=c * 249, txnAppId="x" * 200)) for c in "tu"]
    assert long[0] != long[1]
    assert all(len(name) <= 255 and name.startswith("x" * 200 + "/") for name in long)
