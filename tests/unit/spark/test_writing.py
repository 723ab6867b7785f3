"""What a task sends: small portions are joined, none is lost, and each queue keeps its order."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")

from sluice.spark import writing
from sluice.spark.encode import Portion
from sluice.spark.writing import _Gathering

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
