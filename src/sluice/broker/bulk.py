"""This module is the service behind bulk reads: who may read what, and through which filters.

It is for whoever reads a topic from end to end, Spark for instance. A bulk read is never held and
belongs to no group: it asks for a range of offsets and gets some megabytes of it. It knows neither
a wire nor a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from sluice.broker import filters
from sluice.broker.kafka_list_offsets import KafkaListOffsets
from sluice.errors import NoPermission, ParameterInvalid, SluiceError, TopicMissing
from sluice.storage.bulk_reads import Stretch, read_stretch, stretch_bytes

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.expiry import Accept

BYTES_MAX: Final = 16 * 1024 * 1024
MESSAGES_MAX: Final = 16_384  # of those that a filter has chosen from batches
SLICES_MAX: Final = 64  # more are joined: the socket takes few long ones better
READER: Final = "%BULK%"  # the group under which reads that name none are counted


class BulkRead(NamedTuple):
    """What is asked for: offsets [offset, to_offset) of a queue, and which messages of them."""

    topic: str
    queue_id: int
    offset: int
    to_offset: int
    bytes_max: int
    group: str = ""
    tags: str | None = None
    keys: str | None = None
    sql: str | None = None


class AtTime(NamedTuple):
    """Where a time is in a queue; `is_ordered`: no message further on is older."""

    offset: int
    is_ordered: bool


StretchDone = Callable[[Stretch | None, BaseException | None], None]


class Bulk:
    """Bulk reads of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def read(self, wanted: BulkRead, done: StretchDone) -> None:
        """Answer through `done`, now or when the disk has answered; raises what is wrong with
        the request.
        """
        core = self._core
        self._check(wanted.topic, wanted.queue_id)
        if not 0 <= wanted.offset < wanted.to_offset:
            raise ParameterInvalid(f"offsets from {wanted.offset} to {wanted.to_offset}: no range")
        if not 1 <= wanted.bytes_max <= BYTES_MAX:
            raise ParameterInvalid(f"maxBytes {wanted.bytes_max}: from 1 to {BYTES_MAX}")
        accept = self._accept(wanted)
        watch = core.expiry.watch(wanted.topic)

        def ask() -> Stretch:
            if self._has_batches(wanted.topic, wanted.queue_id):
                return self._batches(wanted, accept if watch is None else watch.test(accept))
            return read_stretch(
                core.store,
                wanted.topic,
                wanted.queue_id,
                wanted.offset,
                to_offset=wanted.to_offset,
                bytes_max=wanted.bytes_max,
                accept=accept if watch is None else watch.test(accept),
            )

        def answered(found: Stretch | None, error: BaseException | None) -> None:
            if found is not None:
                if watch is not None:
                    watch.done()
                result = found.result
                if result.count:
                    group = wanted.group or READER
                    core.stats.handed_out(wanted.topic, group, result.count, result.byte_count)
            done(found, error)

        core.store.call(ask, answered)

    def _has_batches(self, topic: str, queue_id: int) -> bool:
        """Whether a queue may hold batches of Kafka's producers."""
        queue = self._core.store.queues.get((topic, queue_id))
        return queue is not None and queue.kind == "b"

    def _batches(self, wanted: BulkRead, accept: Accept | None) -> Stretch:
        """Batches are given whole; where a filter looks at each record, as single messages."""
        unfolding, place = self._core.unfolding, (wanted.topic, wanted.queue_id, wanted.offset)
        if accept is None:
            result, sizes = unfolding.read_whole(*place, bytes_max=wanted.bytes_max)
        else:
            result = unfolding.read(
                *place, count_max=MESSAGES_MAX, bytes_max=wanted.bytes_max, accept=accept
            )
            sizes = [len(each) for each in result.slices]
        if len(result.slices) > SLICES_MAX:
            result.slices = [memoryview(b"".join(result.slices))]
        return Stretch(result, np.array(sizes, np.int64))

    def offset_at(
        self,
        topic: str,
        queue_id: int,
        when_ms: int,
        done: Callable[[AtTime | None, BaseException | None], None],
    ) -> None:
        """The first offset that has a time, as the rows of a reader say it."""
        self._check(topic, queue_id)
        core = self._core
        name = core.kafka_topics.kafka_name(topic)
        found = None if name is None else core.kafka_topics.find(name)

        def ask() -> AtTime:
            if found is None or not self._has_batches(topic, queue_id):
                return AtTime(core.store.offset_for_time(topic, queue_id, when_ms), True)
            return AtTime(KafkaListOffsets(core).first_shown(found, queue_id, when_ms), False)

        core.store.call(ask, done)

    def topic_id(self, topic: str, queue_id: int) -> str:
        """What the ids of a topic's records begin with; empty where it has no batches."""
        if not self._has_batches(topic, queue_id):
            return ""
        return self._core.unfolding.topic_id(topic)

    def range_bytes(
        self,
        topic: str,
        queue_id: int,
        ranges: list[tuple[int, int]],
        done: Callable[[list[int] | None, BaseException | None], None],
    ) -> None:
        """How many bytes ranges of a queue have, about: for whoever divides them."""
        self._check(topic, queue_id)
        store = self._core.store

        def ask() -> list[int]:
            return [stretch_bytes(store, topic, queue_id, start, stop) for start, stop in ranges]

        store.call(ask, done)

    def _check(self, topic: str, queue_id: int) -> None:
        """In the order and the words in which a pull is refused."""
        core = self._core
        if core.config.permission == "w":
            raise NoPermission(
                f"the broker[{core.config.broker_name}] pulling message is forbidden"
            )
        settings = core.topics.get(topic)
        if settings is None:
            raise TopicMissing(f"topic[{topic}] not exist, apply first please!")
        if not settings.readable:
            raise NoPermission(f"the topic[{topic}] pulling message is forbidden")
        if not 0 <= queue_id < settings.read_queues:
            raise ParameterInvalid(
                f"queueId[{queue_id}] is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{settings.read_queues}]"
            )

    def _accept(self, wanted: BulkRead) -> Accept | None:
        if wanted.sql and not self._core.config.sql_filter:
            raise SluiceError(
                "The broker does not support consumer to filter message by SQL92 "
                "(sql_filter is off)"
            )
        return filters.accept_all(wanted.topic, wanted.tags, wanted.keys, wanted.sql)
