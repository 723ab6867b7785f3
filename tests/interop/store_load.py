"""This module is what the store tests write with Sluice: settings, messages, file sizes."""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sluice.config import StoreConfig
from sluice.model import Buffer, Message
from sluice.protocol import records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.storage.blocking import BlockingStore

SEGMENT_BYTES = 4 * 1024 * 1024
INDEX_SLOTS = 5_000
# Small, so that a few thousand messages fill more than one index file.
INDEX_ENTRIES = 20_000
# Sizes are part of the format: both brokers must be told the same.
APACHE_SIZES = {
    "mappedFileSizeCommitLog": SEGMENT_BYTES,
    "maxHashSlotNum": INDEX_SLOTS,
    "maxIndexNum": INDEX_ENTRIES,
}

GROUP = "readers"
RETRY_TOPIC = f"%RETRY%{GROUP}"
QUEUES = {"Orders": 4, "Payments": 2, RETRY_TOPIC: 1}
BORN_MS = 1_700_000_000_000
BORN_HOST = bytes([10, 1, 2, 3]) + (4321).to_bytes(4, "big")
SHARED_KEYS = 500


class Seen(NamedTuple):
    """What must come out as it went in, whoever wrote it and whoever reads it."""

    body_sha256: str
    properties: dict[str, str]
    flag: int


Stored = dict[tuple[str, int, int], Seen]


def sha256(body: Buffer) -> str:
    return hashlib.sha256(body).hexdigest()


def open_sluice(directory: Path, port: int) -> BlockingStore:
    """Sluice on a store directory; message ids name the port that Apache's broker will have."""
    config = StoreConfig(
        directory=str(directory),
        segment_bytes=SEGMENT_BYTES,
        key_index_slots=INDEX_SLOTS,
        key_index_entries=INDEX_ENTRIES,
        flush="sync",
        disk_clean_ratio=0.95,
        disk_force_ratio=0.97,
        disk_refuse_ratio=0.98,
    )
    return BlockingStore.open(config, store_host=("127.0.0.1", port))


def topic_settings(topic: str, queues: int) -> dict[str, Any]:
    return {
        "attributes": {},
        "order": False,
        "perm": 6,
        "readQueueNums": queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": 0,
        "writeQueueNums": queues,
    }


def group_settings(group: str) -> dict[str, Any]:
    return {
        "attributes": {},
        "brokerId": 0,
        "consumeBroadcastEnable": True,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeMessageOrderly": False,
        "consumeTimeoutMinute": 15,
        "groupName": group,
        "groupRetryPolicy": {"type": "CUSTOMIZED"},
        "groupSysFlag": 0,
        "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": 3,
        "retryQueueNums": 1,
        "whichBrokerWhenConsumeSlowly": 1,
    }


def make_topics(store: BlockingStore) -> None:
    store.change([("topic", topic, topic_settings(topic, n)) for topic, n in QUEUES.items()])


def make_message(number: int, source: random.Random) -> Message:
    """Message `number`: any topic and queue, 1 byte to 20 KiB of noise, with and without tags."""
    topic = source.choice(list(QUEUES))
    properties = {
        "KEYS": f"key-{number} shared-{number % SHARED_KEYS}",
        "UNIQ_KEY": f"7F000001{number:024X}",
        "WAIT": "true",
        "color": source.choice(["red", "grün", "青"]),
    }
    if number % 3:
        properties["TAGS"] = "TagA" if number % 3 == 1 else "TagB"
    if number % 5 == 0:  # its queue unit says more than Apache's would
        properties[EXPIRES_NAME.decode()] = str(BORN_MS + number)
    if topic == RETRY_TOPIC:
        properties["RETRY_TOPIC"] = "Orders"
    return Message(
        topic=topic,
        queue_id=source.randrange(QUEUES[topic]),
        body=source.randbytes(source.choice([1, 100, 1_000, 1_000, 4_000, 20_000])),
        properties=records.format_properties(properties),
        flag=number,
        born_ms=BORN_MS + number,
        born_host=BORN_HOST,
        reconsume_times=2 if topic == RETRY_TOPIC else 0,
    )


def put_messages(
    store: BlockingStore, numbers: Sequence[int], source: random.Random
) -> tuple[Stored, list[str]]:
    """Append messages; where each one went, and their message ids in order."""
    stored: Stored = {}
    ids: list[str] = []
    for number in numbers:
        message = make_message(number, source)
        placed = store.put(message)
        ids.append(store.message_id(placed))
        stored[message.topic, message.queue_id, placed.queue_offset] = Seen(
            sha256(message.body), records.parse_properties(message.properties), message.flag
        )
    return stored, ids
