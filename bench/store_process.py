"""This module measures what needs a process of its own: memory, and recovery after kill -9.

Run as a program it is that process: `python -m bench.store_process DIRECTORY QUEUES MESSAGES BYTES`
opens the store, says "serving" after a read and a confirmed append, appends until so many messages
and bytes of log are there, says "full" with its private memory, and goes on appending until it is
killed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.driver import Driver, Load
from bench.harness import ROOT, Figure, Run
from bench.limits import private_bytes

GIB = 1 << 30
BODY_BYTES = 1024
CHUNK_COUNT = 20_000
READ_BYTES = 1 << 20


class Child:
    """The process and the lines it prints."""

    def __init__(
        self, directory: Path, *, queues: int, messages: int = 0, log_bytes: int = 0
    ) -> None:
        words = [str(directory), str(queues), str(messages), str(log_bytes)]
        self._begin = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.store_process", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next line must be this event; `after_s` is the time since the process was started."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        after_s = time.perf_counter() - self._begin
        if not line:
            raise RuntimeError(f"the store's process ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        assert found["event"] == event, found
        return {**found, "after_s": after_s}

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def child(directory: Path, **load: int) -> Iterator[Child]:
    process = Child(directory, **load)
    try:
        yield process
    finally:
        process.kill()


def measure_memory(run: Run) -> list[Figure]:
    """Private memory after many appends: the store's own, without the files it has mapped."""
    run.progress("memory_8q, memory_10000q")
    messages = 100_000 if run.quick else 2_000_000
    figures = []
    for queues in (8, 10_000):
        directory = run.directory / f"store-memory-{queues}"
        with child(directory, queues=queues, messages=messages) as process:
            process.wait_for("serving")
            private = process.wait_for("full")["private_bytes"]
        shutil.rmtree(directory)
        figures.append(Figure(f"memory_{queues}q", "MB", private / 1e6))
    return figures


def measure_recovery(run: Run) -> list[Figure]:
    """From starting the process again after kill -9 to the first read and confirmed append.

    Each round kills it while it appends. The peer is a plain sequential read of the whole log: the
    least that a recovery which looks at everything would take. The cold round starts with nothing
    of the store in memory, as after a reboot.
    """
    gib = 1 if run.quick else 10
    name = f"recover_{gib}g"
    run.progress(f"{name}_s: filling {gib} GiB")
    directory = run.directory / "store-recover"
    with child(directory, queues=8, log_bytes=gib * GIB) as process:
        process.wait_for("serving")
        process.wait_for("full")
        time.sleep(0.2)
    run.progress(f"{name}_s: recovering")
    warm, reads = [], []
    for _ in range(2 if run.quick else 5):
        reads.append(read_all(directory / "commitlog"))
        warm.append(_recover_and_kill(directory))
    forget(directory)
    cold = _recover_and_kill(directory)
    forget(directory)
    cold_read = read_all(directory / "commitlog")
    shutil.rmtree(directory)
    peer_name = "reading the whole log"
    return [
        Figure(f"{name}_s", "s", statistics.median(warm), statistics.median(reads), peer_name),
        Figure(f"{name}_cold_s", "s", cold, cold_read, f"{peer_name}, cold"),
    ]


def _recover_and_kill(directory: Path) -> float:
    with child(directory, queues=8, log_bytes=1) as process:
        after_s: float = process.wait_for("serving")["after_s"]
        # It appends until the kill, and long enough that there is something to recover again.
        process.wait_for("full")
        time.sleep(1.0)
    return after_s


def read_all(directory: Path) -> float:
    """Seconds for reading all files of a directory from end to end."""
    buffer = bytearray(READ_BYTES)
    begin = time.perf_counter()
    for path in sorted(directory.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def forget(directory: Path) -> None:
    """Have the system drop a store's files from memory."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def say(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def main(words: list[str]) -> None:
    """The process that is measured."""
    directory, queues, messages, log_bytes = words
    driver = Driver(Path(directory), "async")
    load = Load(BODY_BYTES, int(queues))
    store = driver.store
    topic, queue_id = load.queues()[0]
    if (end := store.max_offset(topic, queue_id)) > 0:
        assert driver.read(topic, queue_id, end - 1, 1).count == 1
    driver.append(Load(BODY_BYTES, 1, producers=1), count=1)
    say("serving")
    while store.append_count < int(messages) or store.log.written < int(log_bytes):
        driver.append(load, count=CHUNK_COUNT)
    say("full", private_bytes=private_bytes())
    while True:
        driver.append(load, count=CHUNK_COUNT)


if __name__ == "__main__":
    main(sys.argv[1:])
