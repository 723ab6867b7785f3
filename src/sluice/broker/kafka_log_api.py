"""This module answers Kafka's administrators about what partitions hold: how many bytes, and from
where on. Records below an offset can be deleted: nobody sees them from then on, and the log drops
them with its oldest files, as all others.

Where partitions begin is kept by `topic_retention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request, code_of
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.queue_units import Part, columns, parts_of, sizes
from sluice.protocol import kafka_codes
from sluice.storage.bulk_reads import stretch_bytes

_TO_THE_END: Final = -1
_UNKNOWN: Final = -1
_UNITS_MAX: Final = 10_000


class KafkaLogs:
    """What the partitions of one broker hold."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def register(self, api: KafkaApi) -> None:
        api.register(kafka_codes.DELETE_RECORDS, 0, 2, self.delete_records)
        api.register(kafka_codes.DESCRIBE_LOG_DIRS, 1, 5, self.log_dirs)

    # -------------------------------------------------------------------------------------- records

    def delete_records(self, request: Request, answer: Answer) -> None:
        asked = [(topic.name, part) for topic in request.body.topics for part in topic.partitions]
        results: list[dict[str, Any]] = [{} for _ in asked]
        left = len(asked) + 1

        def finish(at: int, code: int, low: int = -1) -> None:
            nonlocal left
            if at >= 0:
                results[at] = {
                    "partition_index": asked[at][1].partition_index,
                    "low_watermark": low,
                    "error_code": code,
                }
            left -= 1
            if left:
                return
            rest = iter(results)
            answer(
                {
                    "topics": [
                        {"name": topic.name, "partitions": [next(rest) for _ in topic.partitions]}
                        for topic in request.body.topics
                    ]
                }
            )

        for at, (name, part) in enumerate(asked):
            topic = self._core.kafka_topics.find(name)
            if topic is None or not 0 <= part.partition_index < topic.partitions:
                finish(at, kafka_codes.UNKNOWN_TOPIC_OR_PARTITION)
            elif topic.dead_group:
                finish(at, kafka_codes.TOPIC_AUTHORIZATION_FAILED)
            elif not topic.deletes:
                finish(at, kafka_codes.POLICY_VIOLATION)
            else:
                self._delete(topic, part.partition_index, int(part.offset), at, finish)
        finish(-1, 0)

    def _delete(
        self,
        topic: KafkaTopic,
        partition: int,
        offset: int,
        at: int,
        finish: Callable[..., None],
    ) -> None:
        store, stored = self._core.store, topic.stored

        def known(high: int | None, error: BaseException | None) -> None:
            if high is None:
                finish(at, kafka_codes.KAFKA_STORAGE_ERROR)
                return
            wanted = high if offset == _TO_THE_END else offset
            if not 0 <= wanted <= high:
                finish(at, kafka_codes.OFFSET_OUT_OF_RANGE)
                return
            low = store.min_offset(stored, partition)
            if wanted <= low or (stored, partition) not in store.queues:
                finish(at, 0, low)
                return
            self._core.retention.begin(
                [((stored, partition), wanted)],
                lambda error: finish(at, 0 if error is None else code_of(error), wanted),
            )

        store.call(lambda: store.max_offset(stored, partition), known)

    # ------------------------------------------------------------------------------------ log files

    def log_dirs(self, request: Request, answer: Answer) -> None:
        topics = self._core.kafka_topics
        asked = request.body.topics
        wanted: list[tuple[KafkaTopic, list[int]]] = []
        if asked is None:
            wanted = [(topic, list(range(topic.partitions))) for topic in topics.all()]
        else:
            for each in asked:
                topic = topics.find(each.topic)
                if topic is not None:
                    known = [part for part in each.partitions if 0 <= part < topic.partitions]
                    wanted.append((topic, known))
        sizes: list[int] = []
        places = [(topic.stored, part) for topic, parts in wanted for part in parts]

        def ask() -> bool:
            for stored, part in places[len(sizes) :]:
                sizes.append(self._bytes(stored, part))
            return True

        def done(_: bool | None, error: BaseException | None) -> None:
            rest = iter(sizes)
            failed = error is not None
            total_bytes, usable_bytes = self._disk()
            shown = [
                {
                    "name": topic.name,
                    "partitions": [
                        {"partition_index": part, "partition_size": next(rest)} for part in parts
                    ],
                }
                for topic, parts in (() if failed else wanted)
            ]
            result = {
                "error_code": kafka_codes.KAFKA_STORAGE_ERROR if failed else 0,
                "log_dir": self._core.config.store.directory,
                "topics": shown,
                "total_bytes": total_bytes,
                "usable_bytes": usable_bytes,
            }
            answer({"results": [result]})

        self._core.store.call(ask, done)

    def _disk(self) -> tuple[int, int]:
        """Size of the disk, and what is free of it; -1 where nobody knows."""
        store = self._core.store
        try:
            usage = store.files.usage(store.root)
        except OSError:
            return _UNKNOWN, _UNKNOWN
        return usage.total_bytes, usage.free_bytes

    def _bytes(self, stored: str, partition: int) -> int:
        store = self._core.store
        queue = store.queues.get((stored, partition))
        if queue is None:
            return 0
        if queue.kind == "b":
            return sum(self._part_bytes(part) for part in parts_of(store, queue))
        low, high = store.min_offset(stored, partition), store.max_offset(stored, partition)
        return stretch_bytes(store, stored, partition, low, high) if low < high else 0

    def _part_bytes(self, part: Part) -> int:
        """The newest units stand for all of a long queue."""
        count = part.stop - part.first
        newest = part._replace(first=max(part.first, part.stop - _UNITS_MAX))
        seen = [sizes(units) for _, units in columns(self._core.store, newest)]
        total = sum(int(each.sum()) for each in seen)
        return total * count // max(1, newest.stop - newest.first)
