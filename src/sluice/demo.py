"""This module makes a small store, to show what the package does: `sluice demo-store DIR`.

It appends orders to four queues, reads one queue back, looks one order up by its key, remembers how
far a group has read, and closes the store. It uses the store as any program can; it is not used by
any part of the package.
"""

from __future__ import annotations

import argparse
import os

from sluice.config import StoreConfig
from sluice.errors import ConfigError
from sluice.model import Message
from sluice.protocol import records
from sluice.storage.blocking import BlockingStore

TOPIC = "orders"
GROUP = "billing"
QUEUE_COUNT = 4
MESSAGE_COUNT = 1000


def order(number: int) -> Message:
    """An order; those of one customer go to one queue and so keep their order."""
    properties = records.format_properties({"KEYS": f"order-{number}", "TAGS": "new"})
    body = f'{{"order": {number}, "customer": {number % 7}}}'.encode()
    return Message(TOPIC, number % 7 % QUEUE_COUNT, body, properties)


def fill(directory: str, message_count: int) -> None:
    """Make the store; what is printed was true when it was printed."""
    with BlockingStore.open(StoreConfig(directory=directory)) as store:
        placed = store.put_batch([order(number) for number in range(message_count)])
        print(f"appended {len(placed)} messages, durable up to position {placed[-1].end}")

        read = store.read(TOPIC, 2, 0, count_max=3)
        for entry in map(records.decode, read.messages):
            print(f"read     {TOPIC}/2 offset {entry.queue_offset}: {bytes(entry.body).decode()}")

        key = f"order-{message_count // 2}"
        for entry in map(records.decode, store.query_key(TOPIC, key)):
            place = f"{TOPIC}/{entry.queue_id} offset {entry.queue_offset}"
            print(f"found    {key} by its key: {place}")

        store.commit_offset(GROUP, TOPIC, 2, read.next_offset)
        print(f"noted    group {GROUP} has read {TOPIC}/2 up to offset {read.next_offset}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sluice demo-store", description="Make a small store in a new or empty directory."
    )
    parser.add_argument("directory", metavar="DIR")
    directory = parser.parse_args(argv).directory
    if os.path.exists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
        raise ConfigError(f"{directory}: is not empty; name a new directory")
    fill(directory, MESSAGE_COUNT)
    return 0
