"""This module kills a real process while it deletes a topic and makes it again, over and over.

After each kill the topic holds messages of one generation only, from offset 0 on without a hole,
and it is not one that was deleted; also when everything but the log is lost.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from sluice.protocol import records
from sluice.storage.blocking import BlockingStore
from tests.crash.appender import config
from tests.crash.topic_deleter import TOPIC

DELETER = Path(__file__).with_name("topic_deleter.py")
DERIVED = ("consumequeue", "index", "config", "sluice", "checkpoint")


def run_and_kill(directory: Path, generation: int, random: Random) -> list[list[str]]:
    """Start the process, kill it after so many reports; all complete lines that it gave."""
    with subprocess.Popen(
        [sys.executable, str(DELETER), str(directory), str(generation)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    ) as process:
        assert process.stdout is not None
        lines = []
        try:
            for _ in range(random.randrange(2, 200)):
                lines.append(process.stdout.readline())
                assert lines[-1], "the process ended by itself"
        finally:
            process.kill()
        lines += process.stdout.read().splitlines(keepends=True)
    return [line.decode().split() for line in lines if line.endswith(b"\n")]


def generations(store: BlockingStore) -> list[int]:
    """Which generation each message of the topic is of, from the first one on."""
    found: list[int] = []
    while len(found) < store.max_offset(TOPIC, 0):
        for message in store.read(TOPIC, 0, len(found), count_max=100).messages:
            entry = records.decode(message)
            generation, number = bytes(entry.body).split()
            assert int(number) == entry.queue_offset == len(found)
            found.append(int(generation))
    return found


def check(directory: Path, put: dict[int, int], deleted: int) -> int:
    """Compare with what was acknowledged; returns the newest generation that is there."""
    with BlockingStore.open(config(str(directory))) as store:
        found = generations(store)
        assert len(set(found)) <= 1, "messages of a deleted topic came back"
        if not found:
            return deleted  # the newest one was deleted too, which nobody was told yet
        assert found[0] > deleted, "a deleted topic came back"
        assert found[0] >= max(put, default=0)
        assert len(found) >= put.get(found[0], 0), "acknowledged and lost"
        return found[0]


@pytest.mark.slow
def test_kill_while_deleting(tmp_path: Path) -> None:
    random = Random(7)
    directory = tmp_path / "store"
    generation, deleted = 1, 0
    for run in range(4):
        lines = run_and_kill(directory, generation, random)
        put = {int(line[1]): int(line[2]) + 1 for line in lines if line[0] == "put"}
        deleted = max([deleted, *(int(line[1]) for line in lines if line[0] == "deleted")])
        if run % 2:
            for name in DERIVED:
                path = directory / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        newest = check(directory, put, deleted)
        assert check(directory, put, deleted) == newest, "a second start comes to another end"
        # The next process goes on in the topic as it is: its first messages would not be numbered
        # from 0, so the topic is deleted here.
        with BlockingStore.open(config(str(directory))) as store:
            store.delete_topic(TOPIC)
        deleted = max([newest, deleted, *put])
        generation = deleted + 1
    assert generation > 10
