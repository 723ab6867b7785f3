"""This module knows where compaction keeps what it has kept of a queue.

Compaction appends the records that stay to the log once more, as entries of a topic of the broker's
own, at the same offsets. One row of the table `compacted` says from then on that a queue's offsets
below `upto` are read there. So there are two states only, before the row and after it; recovery
finds those entries as it finds all others, and the log's old files may go.

    rmq_sys_compacted_<topic's id>_<queue>_<0 or 1>     of the two names, the row has one; the other
                                                        is the next one's

Readers see entries of the topic itself: `under_topic` gives them its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.model import Buffer, Message
from sluice.protocol import records
from sluice.storage.queue_index import BatchQueueIndex, Older
from sluice.storage.state import COMPACTED_PREFIX, COMPACTED_TABLE

if TYPE_CHECKING:
    from sluice.storage.store import Store


def hidden_topic(topic_id: str, queue_id: int, number: int) -> str:
    """The topic of what is kept of a queue; `number` is 0 or 1."""
    return f"{COMPACTED_PREFIX}{topic_id}_{queue_id}_{number}"


def message_of(entry: records.Entry, topic: str) -> Message:
    """An entry as a message of another topic."""
    return Message(
        topic,
        entry.queue_id,
        entry.body,
        records.without_checksum(entry.properties),
        entry.flag,
        entry.sys_flag,
        entry.born_ms,
        entry.born_host,
        entry.reconsume_times,
        entry.prepared_offset,
        records.offset_count(entry.sys_flag, entry.properties),
    )


def under_topic(view: Buffer, topic: bytes) -> bytes:
    """An entry as if it were of another topic; without a checksum, which was compared before."""
    entry = records.decode(view)
    encoder = records.Encoder(
        entry.store_host, with_crc=False, body_bytes_max=1 << 30, entry_bytes_max=1 << 30
    )
    message = message_of(entry, topic.decode())
    size = encoder.measure(message, topic)
    return encoder.encode(message, topic, size, entry.queue_offset, entry.position, entry.store_ms)


def attach_all(store: Store) -> None:
    """At a start: queues are read as the table says."""
    for key, row in store.table(COMPACTED_TABLE).items():
        topic, _, queue_id = key.rpartition("@")
        attach(store, topic, int(queue_id), row)


def attach(store: Store, topic: str, queue_id: int, row: dict[str, Any]) -> None:
    """From now on a queue's beginning is read where a row of the table says."""
    queue = store.queue(topic, queue_id)
    if queue.kind != BatchQueueIndex.kind:
        return
    start = int(row["start"])
    if queue.older is not None:
        start = max(start, queue.older.start)
        store.reader.real_topics.pop(queue.older.queue.topic_bytes, None)
    kept = store.queue(row["topic"], queue_id)
    queue.older = Older(kept, int(row["upto"]), int(row["clean"]), start)
    store.reader.real_topics[kept.topic_bytes] = queue.topic_bytes
