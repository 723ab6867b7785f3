"""This module is the process that test_kill_deleting.py kills: it makes a topic and deletes it.

Each generation of the topic has messages that say which one they are of. What is acknowledged is
reported on standard output, one line each:

    put GENERATION OFFSET        deleted GENERATION
"""

from __future__ import annotations

import os
import sys

from sluice.model import Message
from sluice.storage.blocking import BlockingStore
from tests.crash.appender import config

TOPIC = "again"


def report(*words: object) -> None:
    os.write(sys.stdout.fileno(), (" ".join(map(str, words)) + "\n").encode())


def main(directory: str, generation: int) -> None:
    store = BlockingStore.open(config(directory))
    report("open")
    while True:
        for number in range(1 + generation % 30):
            placed = store.put(Message(TOPIC, 0, f"{generation} {number}".encode()))
            report("put", generation, placed.queue_offset)
            store.put(Message("other", 0, b"x" * 400))
        store.commit_offset("g", TOPIC, 0, 1)
        store.delete_topic(TOPIC)
        report("deleted", generation)
        generation += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
