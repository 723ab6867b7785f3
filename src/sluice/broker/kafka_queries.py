"""This module shows records of Kafka's producers to those who ask for messages by key or by id, as
RocketMQ's clients do: of a batch, the records that have the key.

What a transaction has not decided, or has rolled back, is not found. An id that was made for a
record tells where it is; the index is not needed for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from uuid import UUID

from sluice.errors import SluiceError
from sluice.protocol import kafka_batches, kafka_entries, kafka_views, records
from sluice.protocol.kafka_batches import BadBatch
from sluice.storage.store import ReadStatus

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

Done = Callable[[list[memoryview] | None, BaseException | None], None]
_PROPERTIES_MAX: Final = records.PROPERTIES_BYTES_MAX - records.CRC_PROPERTY_BYTES - 1
# Topic's id, partition and offset, as `kafka_views.entries_of` puts them together.
_ID: Final = re.compile(r"([0-9A-F]{32})([0-9A-F]{8})([0-9A-F]{16})")


def with_key(core: BrokerCore, entries: list[memoryview], key: str) -> list[memoryview]:
    """Entries that the index has found: of batches, the messages that have the key."""
    result: list[memoryview] = []
    for view in entries:
        entry = records.decode(view)
        if not kafka_entries.is_kafka(entry.sys_flag):
            result.append(view)
            continue
        for shown in reversed(_messages(core, entry)):
            unique, keys, _ = records.message_keys(records.decode(shown).properties)
            if key.encode() in (unique, *keys.split(b" ")):
                result.append(shown)
    return result


def _messages(core: BrokerCore, entry: records.Entry) -> list[memoryview]:
    """The messages of a batch, where they may be seen."""
    head = kafka_batches.read_head(entry.body)
    if head is None or head.is_control:
        return []
    if head.is_transactional:
        at = entry.queue_offset
        stable = core.producers.stable_offsets(entry.topic, entry.queue_id)
        if stable.stable(at + 1) <= at:
            return []
        if any(name == head.producer_id for name, _ in stable.aborted(at, at + 1)):
            return []
    name = core.kafka_topics.kafka_name(entry.topic)
    topic = None if name is None else core.kafka_topics.find(name)
    topic_id = "" if topic is None else topic.id.hex.upper()
    unpacked_max = core.config.kafka_unpacked_bytes_max
    try:
        shown = kafka_views.entries_of(
            entry, topic_id, unpacked_max, properties_max=_PROPERTIES_MAX
        )
    except BadBatch:
        return []
    return [memoryview(each) for _, each in shown]


def by_id(core: BrokerCore, topic: str, unique: str, done: Done) -> bool:
    """Answer with the record that has an id of ours; False where it is no such id."""
    match = _ID.fullmatch(unique)
    if match is None:
        return False
    found = core.kafka_topics.by_id(UUID(match[1]))
    if found is None or found.stored != topic:
        return False
    queue_id, offset = int(match[2], 16), int(match[3], 16)

    def ask() -> list[memoryview]:
        result = core.store.read(topic, queue_id, offset, count_max=1)
        if result.status is not ReadStatus.FOUND:
            return []
        return with_key(core, result.messages, unique)

    try:
        core.store.call(ask, done)
    except SluiceError as error:
        done(None, error)
    return True
