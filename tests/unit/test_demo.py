"""This module tests the demonstration: it fills a new directory and touches no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice import cli
from sluice.config import StoreConfig
from sluice.demo import GROUP, MESSAGE_COUNT, QUEUE_COUNT, TOPIC, order
from sluice.storage.blocking import BlockingStore


def test_the_demonstration_leaves_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "new"
    assert cli.main(["demo-store", str(directory)]) == 0
    assert f"appended {MESSAGE_COUNT} messages" in capsys.readouterr().out
    with BlockingStore.open(StoreConfig(directory=str(directory))) as store:
        counts = [store.max_offset(TOPIC, queue) for queue in range(QUEUE_COUNT)]
        assert sum(counts) == MESSAGE_COUNT
        assert store.committed_offset(GROUP, TOPIC, 2) == 3


def test_orders_of_a_customer_share_a_queue() -> None:
    assert {order(number).queue_id for number in range(3, 700, 7)} == {3}


@pytest.mark.parametrize("kind", ["file", "full directory"])
def test_what_is_there_is_not_touched(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    target = kept if kind == "file" else tmp_path
    assert cli.main(["demo-store", str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "mine"
