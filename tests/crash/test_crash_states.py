"""This module crashes the store in 100,000 states and compares each with the model.

Random workloads come in chunks, by policy; scripted ones are crashed at every byte. Everything is
seeded: a failure names its chunk, and the chunk alone repeats it. The soak test does 1,000,000.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest

from sluice.model import QueueKey
from sluice.storage.state import GROUP_TABLE
from tests.crash.crash_points import POLICIES, CrashPoints, every_prefix
from tests.property.store_driver import BATCH_TOPIC, QUEUES, Driver, small_config

STATES_MIN = 100_000
SOAK_STATES_MIN = 1_000_000
CHUNK_STATES = 4_000
# How many chunks each policy gets: prefixes and mixtures have the most different states.
CHUNK_COUNTS = {"nothing": 2, "everything": 2, "prefixes": 7, "mixtures": 6}
CHUNKS = [(policy, chunk) for policy, count in CHUNK_COUNTS.items() for chunk in range(count)]

counted: Counter[object] = Counter()


def crash_randomly(policy: str, seed: int, states: int) -> int:
    """Crash random workloads until there were so many states; returns how many there were."""
    random = Random(f"{policy} {seed}")
    count = 0
    while count < states:
        config = small_config(
            message_crc=random.random() < 0.8,
            flush="sync" if random.random() < 0.8 else "async",
            key_index=random.random() < 0.25,
            segment_bytes=random.choice((4096, 8192)),
        )
        points = CrashPoints(Driver(config), random, POLICIES[policy])
        points.run_random(random.randrange(20, 60))
        count += points.state_count
    return count


@pytest.mark.parametrize(("policy", "chunk"), CHUNKS)
def test_random_workload(policy: str, chunk: int) -> None:
    counted[policy, chunk] = crash_randomly(policy, chunk, CHUNK_STATES)


# ----------------------------------------------------------------------------- scripted workloads


def entries(driver: Driver, random: Random) -> Iterator[None]:
    """One by one, each waiting for the disk; then several that share one flush."""
    yield
    driver.put(QUEUES[0], random, 5)
    driver.settle()
    driver.put(QUEUES[3], random, 20)
    driver.write()
    driver.put(QUEUES[0], random, 0)
    driver.settle()


def batches(driver: Driver, random: Random) -> Iterator[None]:
    """Entries that count many offsets, and a batch of entries of several queues."""
    yield
    driver.put(QueueKey(BATCH_TOPIC, 0), random, 10)
    driver.put_batch([QUEUES[1], QueueKey(BATCH_TOPIC, 0), QUEUES[1]], random, 3)
    driver.settle()


def roll(driver: Driver, random: Random) -> Iterator[None]:
    """The end of a file: its mark and the first entry of the next one go out together."""
    for _ in range(3):
        driver.put(QUEUES[0], random, 900)
        driver.settle()
    yield
    driver.put(QUEUES[0], random, 700)
    driver.put(QUEUES[1], random, 100)
    driver.settle()


def checkpoint(driver: Driver, random: Random) -> Iterator[None]:
    """Queue files, tables and snapshot, twice: into new files and on in the same ones."""
    yield
    for _ in range(2):
        driver.put(QUEUES[0], random, 1)
        driver.put(QUEUES[2], random, 1)
        driver.settle()
        driver.checkpoint()
        driver.settle()


def settings(driver: Driver, random: Random) -> Iterator[None]:
    """Tables and positions, with a checkpoint between them."""
    yield
    driver.change(GROUP_TABLE, "g", {"n": 1})
    driver.settle()
    driver.commit("g", QUEUES[0], 7)
    driver.tick(2_000)
    driver.settle()
    driver.checkpoint()
    driver.change(GROUP_TABLE, "g", {"n": 2})
    driver.settle()


def retention(driver: Driver, random: Random) -> Iterator[None]:
    """Two files go at once; one of the queues loses all that it has."""
    driver.put(QUEUES[2], random, 10)
    for _ in range(9):
        driver.put(QUEUES[0], random, 850)
        driver.settle()
    yield
    driver.delete_some(1.0)
    driver.settle()


def deletion(driver: Driver, random: Random) -> Iterator[None]:
    """A topic with entries in files, in memory and on their way; then another one of its name."""
    driver.put(QUEUES[0], random, 30)
    driver.put(QUEUES[1], random, 30)
    driver.settle()
    driver.checkpoint()
    driver.commit("g", QUEUES[0], 1)
    driver.put(QUEUES[0], random, 10)
    driver.settle()
    yield
    driver.put(QUEUES[0], random, 5)
    driver.delete_topic(QUEUES[0].topic)
    driver.put(QUEUES[0], random, 7)
    driver.settle()
    driver.checkpoint()
    driver.settle()
    driver.put(QUEUES[0], random, 3)
    driver.settle()


Script = Callable[[Driver, Random], Iterator[None]]
SCRIPTS: tuple[Script, ...] = (
    entries, batches, roll, checkpoint, settings, retention, deletion,
)  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_prefix(script: Script) -> None:
    random = Random(script.__name__)
    driver = Driver(small_config(key_index=False))
    steps = script(driver, random)
    next(steps)  # up to its `yield` a script prepares
    points = CrashPoints(driver, random, every_prefix)
    assert next(steps, None) is None
    points.visit()
    driver.check()
    assert points.state_count > 100
    counted[script] = points.state_count


def test_number_of_states() -> None:
    if not counted.keys() >= {*CHUNKS, *SCRIPTS}:
        pytest.skip("only a part of the crash tests ran, there is nothing to count")
    assert sum(counted.values()) >= STATES_MIN


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(100))
def test_soak(chunk: int) -> None:
    policy = list(POLICIES)[chunk % len(POLICIES)]
    states = crash_randomly(policy, 1_000 + chunk, SOAK_STATES_MIN // 100)
    assert states >= SOAK_STATES_MIN // 100
