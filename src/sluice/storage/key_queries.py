"""This module finds entries by a key: the index names places, and the entries there are looked at.

The index may name too many places, for it knows a key's hash only, and places of a topic that was
deleted. It may be on the disk: the answer comes when it is found. This module keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sluice.storage.indexing import entries_with_key
from sluice.storage.state import DELETED_TABLE

if TYPE_CHECKING:
    from sluice.storage.store import Store

QueryDone = Callable[[list[memoryview] | None, BaseException | None], None]


def query_key(
    store: Store,
    topic: str,
    key: str,
    done: QueryDone,
    count_max: int,
    span_ms: tuple[int, int],
) -> None:
    """Entries with a key (or unique key) that were stored in a span of time, newest first."""
    topic_bytes, key_bytes = topic.encode(), key.encode()

    # What compaction has kept of the topic is in the index under names of the broker's own.
    kept = [name for name, real in store.reader.real_topics.items() if real == topic_bytes]
    places: list[int] = []

    def look(names: list[bytes]) -> None:
        def found(positions: list[int] | None, error: BaseException | None) -> None:
            if positions is None:
                done(None, error)
                return
            # Entries of a topic that was deleted are not those of a new one of its name.
            floor = store.table(DELETED_TABLE).get(names[0].decode(), 0)
            places.extend(position for position in positions if position >= floor)
            if len(names) > 1:
                look(names[1:])
                return
            newest = sorted(places, reverse=True) if kept else places
            store.call(lambda: _once(newest), done)

        refusal = store.cold_reads.refusal
        if refusal is not None:
            done(None, refusal)
            return
        counted = store.cold_reads.counted(found)
        store.indexing.query(names[0], key_bytes, *span_ms, count_max, counted)

    def _once(newest: list[int]) -> list[memoryview]:
        entries = entries_with_key(newest, store.entry_at, topic_bytes, key_bytes)
        if not kept:
            return entries
        # An entry and its copy are one message: queue and offset are the same.
        once = {bytes(entry[12:16]) + bytes(entry[20:28]): entry for entry in reversed(entries)}
        return list(reversed(once.values()))[:count_max]

    look([topic_bytes, *kept])
