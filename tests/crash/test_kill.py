"""This module kills a real process with SIGKILL while it appends, and looks for what is lost.

Whatever the process reported as acknowledged before it died must be there after the next start,
with its bytes, unless retention had been asked to delete. One directory lives through all kills, so
that each recovery starts from what the one before it left.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from sluice.protocol import records
from sluice.storage.blocking import BlockingStore
from tests.crash.appender import config

APPENDER = Path(__file__).with_name("appender.py")
Acknowledged = dict[tuple[str, int], dict[int, str]]


def run_and_kill(directory: Path, run: int, random: Random, deleting: bool) -> list[bytes]:
    """Start the appender, kill it at a random moment; returns the lines that it reported."""
    with subprocess.Popen(
        [sys.executable, str(APPENDER), str(directory), str(run), "deleting" if deleting else "-"],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    ) as process:
        assert process.stdout is not None
        lines = []
        try:
            # Not the time decides how much is reported, so that a slow machine kills as well.
            for _ in range(random.randrange(2, 150)):
                lines.append(process.stdout.readline())
                assert lines[-1], "the appender ended by itself"
            time.sleep(random.random() * 0.03)
        finally:
            process.kill()
        rest = process.stdout.read()
    # The pipe holds what was reported and not yet read: that was acknowledged too.
    return b"".join([*lines, rest]).splitlines(keepends=True)


def note(lines: list[bytes], acknowledged: Acknowledged) -> tuple[int, bool]:
    """Take over what was reported; returns how much it was, and whether something was deleted."""
    count, deleted = 0, False
    for line in lines:
        fields = line.decode().split()
        if line.endswith(b"\n") and len(fields) == 4:
            topic, queue_id, offset, digest = fields
            acknowledged.setdefault((topic, int(queue_id)), {})[int(offset)] = digest
            count += 1
        deleted = deleted or fields[:1] == ["deleting"]
    return count, deleted


def compare(store: BlockingStore, acknowledged: Acknowledged, deleted: bool) -> None:
    for (topic, queue_id), expected in acknowledged.items():
        low, high = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        found: dict[int, str] = {}
        offset = low
        while offset < high:
            result = store.read(topic, queue_id, offset, count_max=200)
            for message in result.messages:
                entry = records.decode(message)
                assert entry.topic == topic
                assert entry.queue_offset == low + len(found), "a hole in the queue"
                found[entry.queue_offset] = hashlib.sha256(entry.body).hexdigest()
            offset = result.next_offset
        assert deleted or low == 0
        for queue_offset, digest in expected.items():
            if queue_offset < low:
                continue
            assert found.get(queue_offset) == digest, f"{topic}/{queue_id}: {queue_offset} is lost"
        assert high > max(expected), "an offset that was acknowledged would be used again"


def kill_many(directory: Path, kill_count: int, *, deleting: bool, seed: int) -> int:
    random = Random(seed)
    acknowledged: Acknowledged = {}
    total, deleted_ever = 0, False
    for run in range(kill_count):
        lines = run_and_kill(directory, run, random, deleting)
        count, deleted = note(lines, acknowledged)
        total += count
        deleted_ever = deleted_ever or deleted
        if run % 2 == 0 and run + 1 < kill_count:
            continue  # the next process recovers, and is killed as well
        with BlockingStore.open(config(str(directory))) as store:
            compare(store, acknowledged, deleted_ever)
            offset = store.committed_offset("g", "A", 0)
            assert offset is None or offset < store.max_offset("A", 0)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("deleting", [False, True], ids=["keeping", "deleting"])
def test_kill(tmp_path: Path, deleting: bool) -> None:
    kill_count = 2 if deleting else 3
    assert kill_many(tmp_path / "store", kill_count, deleting=deleting, seed=kill_count) > 0


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(10))
def test_kill_soak(tmp_path: Path, chunk: int) -> None:
    """200 kills in all."""
    assert kill_many(tmp_path / "store", 20, deleting=chunk % 2 == 1, seed=100 + chunk) > 0
