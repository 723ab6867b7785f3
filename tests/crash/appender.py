"""This module is the process that test_kill.py kills: it appends from several threads till it dies.

Each acknowledged entry is reported on standard output, one line, after `put` has returned:

    topic queue_id queue_offset sha256-of-the-body

It is told to stop by nothing but SIGKILL. Small files and short intervals bring checkpoints, new
log files and deletions as close together as possible.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading

from sluice.config import StoreConfig
from sluice.model import Message
from sluice.storage.blocking import BlockingStore

THREADS = 4
TOPICS = ("A", "B", "C" * 130)


def config(directory: str) -> StoreConfig:
    return StoreConfig(
        directory=directory,
        segment_bytes=64 * 1024,
        queue_file_units=64,
        key_index_slots=64,
        key_index_entries=1024,
        key_index_interval_ms=10,
        checkpoint_interval_ms=1,
        state_batch_ms=1,
        retention_hours=24 * 36_500,
        disk_clean_ratio=1.0,
        disk_force_ratio=1.0,
        disk_refuse_ratio=1.0,
    )


def append(store: BlockingStore, thread: int, run: str) -> None:
    number = 0
    while True:
        number += 1
        topic = TOPICS[(number + thread) % len(TOPICS)]
        body = f"{run} {thread} {number} ".encode() * (1 + number % 40)
        properties = f"UNIQ_KEY\x01{run}-{thread}-{number}\x02".encode()
        placed = store.put(Message(topic, thread % 2, body, properties))
        digest = hashlib.sha256(body).hexdigest()
        line = f"{topic} {thread % 2} {placed.queue_offset} {digest}\n".encode()
        os.write(sys.stdout.fileno(), line)  # one call, so that lines of threads do not mix
        if number % 10 == 0:
            store.commit_offset("g", topic, thread % 2, placed.queue_offset)


def delete_old_files(store: BlockingStore, stop: threading.Event) -> None:
    """Keep the newest four files; the position goes to the parent as a line of its own."""
    while not stop.wait(0.02):
        with store._lock:
            bases = list(store.store.log.segments)
            if len(bases) > 4 and not store.store.housekeeping._deleting:
                os.write(sys.stdout.fileno(), b"deleting\n")
                store.store.housekeeping.delete_before(bases[-4])


def main(directory: str, run: str, deleting: bool) -> None:
    store = BlockingStore.open(config(directory))
    os.write(sys.stdout.fileno(), b"open\n")
    for thread in range(THREADS):
        threading.Thread(target=append, args=(store, thread, run), daemon=True).start()
    stop = threading.Event()
    if deleting:
        delete_old_files(store, stop)
    stop.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "deleting")
