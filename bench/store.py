"""This module measures the store: appends, reads, memory, recovery, beside what the disk can do.

Names of append figures: append_<flush>_<body>_<queues>q, with _b32 where a producer sends 32
messages at once. 64 producers have one message in flight each, or 4 producers one batch each. The
disk's limit is the same number of the same bytes per turn, through plain `pwritev` (async) or
`pwritev` and `fdatasync` (sync), with nothing else around it.
"""

import gc
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from bench.driver import Driver, Load
from bench.harness import Figure, Run, rounds
from bench.limits import PlainFile, copy_rate, slice_copy_rate
from bench.store_process import measure_memory, measure_recovery

QUEUE_COUNTS = (1, 8, 10_000)
BODIES = {"1k": 1024, "100b": 100}
BATCH = 32
READ_COUNT = 32
PLAIN_DISK = {"async": "plain pwritev", "sync": "plain pwritev + fdatasync"}

Flush = Literal["sync", "async"]


class Group(NamedTuple):
    """Append figures that are measured in turns: all queue counts and the limit of one kind."""

    flush: Flush
    body: str
    batch: int

    @property
    def names(self) -> dict[int, str]:
        """Figure name by queue count."""
        suffix = f"_b{self.batch}" if self.batch > 1 else ""
        return {
            count: f"append_{self.flush}_{self.body}_{count}q{suffix}" for count in QUEUE_COUNTS
        }

    def load(self, queue_count: int) -> Load:
        producers = 64 if self.batch == 1 else 4
        return Load(BODIES[self.body], queue_count, self.batch, producers)

    @property
    def is_headline(self) -> bool:
        """The figures that promises are made about."""
        return self.body == "1k" and self.batch == 1

    def seconds(self, *, quick: bool) -> float:
        """How long one measurement takes; the headline ones must be long enough for checkpoints."""
        if quick:
            return 1.5 if self.is_headline else 0.25
        return 8.0 if self.is_headline else 2.0


def measure(run: Run) -> list[Figure]:
    """All figures of the store."""
    figures = measure_appends(run, "async") + measure_appends(run, "sync")
    for count in QUEUE_COUNTS:
        shutil.rmtree(append_directory(run, count))
    figures.append(_many_against_few(figures))
    figures += measure_reads(run)
    figures += measure_memory(run)
    figures += measure_recovery(run)
    return figures


def measure_appends(run: Run, flush: Flush) -> list[Figure]:
    """All append figures of one flush mode, on three stores: with 1, 8 and 10,000 queues.

    The second mode goes on with the stores of the first: making 10,000 queues takes its time.
    """
    run.progress(f"append_{flush}: opening the stores")
    drivers = {}
    for count in QUEUE_COUNTS:
        drivers[count] = Driver(append_directory(run, count), flush)
        # Every queue is made, and has its file, before the clock runs.
        drivers[count].append(Load(BODIES["1k"], count), count=count)
        drivers[count].settle()
    # As a broker does when it is up: what lives as long as the process is not looked at again.
    gc.collect()
    gc.freeze()
    figures: list[Figure] = []
    for body in BODIES:
        for batch in (1, BATCH):
            figures += measure_group(run, Group(flush, body, batch), drivers)
    for driver in drivers.values():
        driver.close()
    return figures


def append_directory(run: Run, queue_count: int) -> Path:
    return run.directory / f"store-{queue_count}"


def measure_group(run: Run, group: Group, drivers: dict[int, Driver]) -> list[Figure]:
    """Appends to 1, 8 and 10,000 queues, in turns with the disk's limit and a memory copy."""
    run.progress(", ".join(group.names.values()))
    seconds = group.seconds(quick=run.quick)
    turn = written_turn(drivers[8], group.load(8))
    plain = PlainFile(run.directory / "plain")
    contestants: dict[str, Callable[[], float]] = {
        group.names[count]: partial(append_rate, drivers[count], group.load(count), seconds)
        for count in QUEUE_COUNTS
    }
    contestants["disk"] = partial(
        plain.write_rate, turn, sync=group.flush == "sync", seconds=seconds
    )
    contestants["copy"] = partial(copy_rate, turn, seconds=min(seconds, 0.5))
    medians = rounds(contestants, 2 if run.quick and not group.is_headline else 3)
    plain.close()
    figures = [
        Figure(name, "msg/s", medians[name], medians["disk"], PLAIN_DISK[group.flush])
        for name in group.names.values()
    ]
    if group.flush == "async":
        name = group.names[8]
        figures.append(
            Figure(f"{name}_vs_copy", "msg/s", medians[name], medians["copy"], "memory copy")
        )
    return figures


def append_rate(driver: Driver, load: Load, seconds: float) -> float:
    """Confirmed appends per second; what is left to do in the background is done off the clock."""
    rate = driver.append(load, seconds=seconds)
    driver.settle()
    return rate


def written_turn(driver: Driver, load: Load) -> list[bytes]:
    """What the store writes in one turn of this load: entries of the same size, out of its log."""
    driver.append(load, count=1)
    topic, queue_id = load.queues()[0]
    end = driver.store.max_offset(topic, queue_id)
    entry = b"".join(driver.read(topic, queue_id, end - 1, 1).slices)
    return [entry] * (load.producers * load.batch)


def _many_against_few(figures: list[Figure]) -> Figure:
    rates = {figure.name: figure.ours for figure in figures}
    ratio = rates["append_async_1k_10000q"] / rates["append_async_1k_8q"]
    return Figure("append_10000q_vs_8q", "x", ratio)


def measure_reads(run: Run) -> list[Figure]:
    """Messages per second in reads of 32, through 8 queues in turn, to the end and again."""
    run.progress("read_1k, read_1k_reopened")
    load = Load(BODIES["1k"], 8)
    directory = run.directory / "store-read"
    message_count = 100_000 if run.quick else 1_000_000
    seconds = 0.7 if run.quick else 4.0
    driver = Driver(directory, "async")
    driver.append(load, count=message_count)
    driver.settle()
    turn = written_turn(driver, load)
    area = memoryview(b"".join(turn * 512))
    copy = partial(slice_copy_rate, area, len(turn[0]), READ_COUNT, seconds=seconds)
    written = rounds({"ours": lambda: read_rate(driver, load, seconds), "copy": copy}, 3)
    driver.close()
    driver = Driver(directory, "async")
    reopened = rounds({"ours": lambda: read_rate(driver, load, seconds), "copy": copy}, 3)
    driver.close()
    shutil.rmtree(directory)
    return [
        Figure("read_1k", "msg/s", written["ours"], written["copy"], "memory copy"),
        # Entries of an earlier run are read with their checksums.
        Figure("read_1k_reopened", "msg/s", reopened["ours"], reopened["copy"], "memory copy"),
    ]


def read_rate(driver: Driver, load: Load, seconds: float) -> float:
    """Read every queue from its first message, 32 at a time, round and round."""
    store = driver.store
    offsets = {queue: store.min_offset(*queue) for queue in load.queues()}
    ends = {queue: store.max_offset(*queue) for queue in load.queues()}
    count = 0
    begin = time.perf_counter()
    deadline = begin + seconds
    while True:
        for queue, offset in offsets.items():
            result = driver.read(*queue, offset, READ_COUNT)
            assert result.count > 0, (queue, offset, result.status)
            count += result.count
            at_end = result.next_offset >= ends[queue]
            offsets[queue] = store.min_offset(*queue) if at_end else result.next_offset
        if (now := time.perf_counter()) >= deadline:
            return count / (now - begin)
