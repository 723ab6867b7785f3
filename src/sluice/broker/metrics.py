"""This module says what a broker measures, and reads it off the services when a page is asked for.

Counting is the services' part: they add to integers of their own. Here nothing runs between two
pages, and a page never stops the event loop: the queues of all groups are looked at some hundreds
in a turn, and what would wait for the disk is read on a thread.

All names begin with `sluice_`; units are seconds and bytes. Where Apache's exporter has the same
number, the metric says its name there. Names of topics and groups are bounded in number: those
above `metrics_names_max` share one line, with the name `(other)`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sluice.broker import (
    delay_metrics,
    kafka_metrics,
    pop_metrics,
    retry_metrics,
    topic_metrics,
    transaction_metrics,
)
from sluice.broker.browsing import ask_each
from sluice.errors import SluiceError
from sluice.telemetry import OTHER, Fold, Metric, Page

if TYPE_CHECKING:
    from sluice.broker.server import Broker

log_lines = logging.getLogger("sluice.metrics")

_PAIRS_A_TURN: Final = 200
_TOPIC: Final = ("topic",)
_GROUP: Final = ("group",)
_TOPIC_GROUP: Final = ("topic", "group")

# What goes in and out ---------------------------------------------------------------------------
APPENDED: Final = Metric(
    "sluice_appended_messages_total",
    "counter",
    "Messages that were stored.",
    _TOPIC,
    "rocketmq_messages_in_total",
)
APPENDED_BYTES: Final = Metric(
    "sluice_appended_bytes_total",
    "counter",
    "Bytes of these messages in the log.",
    _TOPIC,
    "rocketmq_throughput_in_total",
)
PULLED: Final = Metric(
    "sluice_pulled_messages_total",
    "counter",
    "Messages that were handed out.",
    _TOPIC_GROUP,
    "rocketmq_messages_out_total",
)
PULLED_BYTES: Final = Metric(
    "sluice_pulled_bytes_total",
    "counter",
    "Bytes of these messages.",
    _TOPIC_GROUP,
    "rocketmq_throughput_out_total",
)
PULLS: Final = Metric(
    "sluice_pulls_total", "counter", "Pulls that were answered, found or empty.", ("result",)
)
SEND_TIME: Final = Metric(
    "sluice_send_seconds",
    "histogram",
    "From the frame of a message to its answer; with flush=sync the disk is in it.",
    (),
    "rocketmq_rpc_latency",
)
PULL_TIME: Final = Metric(
    "sluice_pull_seconds",
    "histogram",
    "From the frame of a pull to its answer, of pulls that did not wait for messages.",
    (),
    "rocketmq_rpc_latency",
)
HELD_TIME: Final = Metric(
    "sluice_held_pull_seconds",
    "histogram",
    "From the frame of a pull to its answer, of pulls that waited for messages.",
)
HELD: Final = Metric("sluice_held_pulls", "gauge", "Pulls that wait for messages now.")
HELD_MAX: Final = Metric("sluice_held_pulls_max", "gauge", "How many may wait.")
REFUSED: Final = Metric(
    "sluice_requests_refused_total",
    "counter",
    "Requests that were answered with an error, by RocketMQ's code of it.",
    ("code",),
)

# Requests and replies ---------------------------------------------------------------------------
REPLIES: Final = Metric(
    "sluice_replies_total",
    "counter",
    "Replies that were handed to the client that asked, or could not be.",
    ("result",),
)

# Groups -----------------------------------------------------------------------------------------
LAG: Final = Metric(
    "sluice_group_lag_messages",
    "gauge",
    "Messages of a topic that a group has not committed yet.",
    _TOPIC_GROUP,
    "rocketmq_consumer_lag_messages",
)
CONSUMERS: Final = Metric(
    "sluice_group_consumers",
    "gauge",
    "Consumers of a group that are connected.",
    _GROUP,
    "rocketmq_consumer_connections",
)
UNEQUAL: Final = Metric(
    "sluice_group_subscriptions_unequal",
    "gauge",
    "1 for a group whose members subscribe differently: messages are missed.",
    _GROUP,
)
PRODUCERS: Final = Metric(
    "sluice_producers",
    "gauge",
    "Producers that are connected.",
    (),
    "rocketmq_producer_connections",
)
TOPICS: Final = Metric("sluice_topics", "gauge", "Topics.")
GROUPS: Final = Metric("sluice_groups", "gauge", "Groups.")
QUEUES: Final = Metric("sluice_queues", "gauge", "Queues that messages were stored in.")

# Connections ------------------------------------------------------------------------------------
CONNECTIONS: Final = Metric("sluice_connections", "gauge", "Connections to the broker now.")
CONNECTIONS_REFUSED: Final = Metric(
    "sluice_connections_refused_total",
    "counter",
    "Connections that were closed at once, by the limit that they met.",
    ("cause",),
)
CONNECTIONS_OVERDUE: Final = Metric(
    "sluice_connections_overdue_total",
    "counter",
    "Connections that were closed because a time was over: silent, slow, or not reading.",
)
UNSENT: Final = Metric(
    "sluice_unsent_bytes", "gauge", "Bytes of answers that clients have not taken yet."
)
NAMESERVERS: Final = Metric(
    "sluice_nameservers",
    "gauge",
    "Nameservers, by whether they took the last registration.",
    ("state",),
)

# The store --------------------------------------------------------------------------------------
FLUSH_TIME: Final = Metric(
    "sluice_flush_seconds", "histogram", "How long a flush of the log to the disk took."
)
WAITING: Final = Metric(
    "sluice_waiting_appends", "gauge", "Appends that wait for the disk to have them."
)
INFLIGHT: Final = Metric(
    "sluice_inflight_bytes", "gauge", "Bytes of messages that are not confirmed to senders yet."
)
INFLIGHT_MAX: Final = Metric(
    "sluice_inflight_bytes_max", "gauge", "Above so many, sends are refused (inflight_bytes_max)."
)
SENDS_BUSY: Final = Metric(
    "sluice_sends_busy_total", "counter", "Sends that were refused because too much was in flight."
)
UNFLUSHED: Final = Metric(
    "sluice_unflushed_bytes",
    "gauge",
    "Bytes of the log that are written but not yet on the disk.",
    (),
    "rocketmq_storage_flush_behind_bytes",
)
COLD_READS: Final = Metric(
    "sluice_cold_reads", "gauge", "Reads that wait for the disk on a thread now."
)
LOG_START: Final = Metric("sluice_log_start_position", "gauge", "The first byte of the log.")
LOG_END: Final = Metric("sluice_log_end_position", "gauge", "The byte after the last one written.")
LOG_CONFIRMED: Final = Metric(
    "sluice_log_confirmed_position", "gauge", "Everything below it can be read."
)
LOG_BYTES: Final = Metric(
    "sluice_log_bytes",
    "gauge",
    "Bytes from the log's start to its end.",
    (),
    "rocketmq_storage_size",
)
LOG_FILES: Final = Metric("sluice_log_files", "gauge", "Files of the log.")
DISK_BYTES: Final = Metric("sluice_disk_bytes", "gauge", "Size of the disk that the store is on.")
DISK_FREE: Final = Metric("sluice_disk_free_bytes", "gauge", "What is free of it.")
CHECKPOINTS: Final = Metric("sluice_checkpoints_total", "counter", "Checkpoints since the start.")
DELETED: Final = Metric(
    "sluice_retention_deleted_files_total", "counter", "Log files that retention has deleted."
)
READ_ONLY: Final = Metric(
    "sluice_store_read_only",
    "gauge",
    "1 after a failed write or flush: no appends until the broker is started again.",
)
REFUSING: Final = Metric(
    "sluice_store_refusing",
    "gauge",
    "1 while appends are refused for any reason, a full disk for instance.",
)

METRICS: Final = (
    *(APPENDED, APPENDED_BYTES, PULLED, PULLED_BYTES, PULLS, SEND_TIME, PULL_TIME, HELD_TIME),
    *(HELD, HELD_MAX, REFUSED, LAG, CONSUMERS, UNEQUAL, PRODUCERS, TOPICS, GROUPS, QUEUES),
    *(CONNECTIONS, CONNECTIONS_REFUSED, CONNECTIONS_OVERDUE, UNSENT, NAMESERVERS),
    *(FLUSH_TIME, WAITING, INFLIGHT, INFLIGHT_MAX, SENDS_BUSY, UNFLUSHED, COLD_READS),
    *(LOG_START, LOG_END, LOG_CONFIRMED, LOG_BYTES, LOG_FILES, DISK_BYTES, DISK_FREE),
    *(CHECKPOINTS, DELETED, READ_ONLY, REFUSING, REPLIES),
    *topic_metrics.METRICS,
    *delay_metrics.METRICS,
    *retry_metrics.METRICS,
    *pop_metrics.METRICS,
    *transaction_metrics.METRICS,
    *kafka_metrics.METRICS,
)

Pair = tuple[str, str]  # (topic, group)


class BrokerMetrics:
    """The numbers of one broker that runs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._core = broker.core
        names_max = broker.config.metrics_names_max
        self._appended: Fold[str] = Fold(names_max)
        self._pulled: Fold[Pair] = Fold(names_max)
        self._lag: Fold[Pair] = Fold(names_max)
        self._consumers: Fold[str] = Fold(names_max)
        self._unequal: Fold[str] = Fold(names_max)
        self._topics = topic_metrics.TopicMetrics(self._core, names_max)
        self._pops = pop_metrics.PopMetrics(self._core, names_max)
        self._kafka = kafka_metrics.KafkaMetrics(self._core, names_max)

    def complaint(self) -> str:
        """Why this broker is not well; empty where it is."""
        return str(self._core.store.refusal or "")

    async def collect(self, page: Page) -> None:
        parts = (
            *(self._add_traffic, self._add_clients, self._add_store),
            *(self._topics.add, self._pops.add, self._kafka.add),
        )
        for add in parts:
            add(page)
            await asyncio.sleep(0)  # messages that came meanwhile go first
        try:
            lags = await self._lags()
            committed = self._kafka.committed()
            places = sorted({(topic, partition) for topic, _, partition, _ in committed})
            highs = dict(zip(places, await self._max_offsets(places), strict=True))
        except (OSError, SluiceError) as error:
            # A broker that has too much to do is to be seen all the more.
            log_lines.warning("a page of metrics has no lag: %s", error)
            return
        for pair, behind in self._lag.gauges(lags).items():
            page.add(LAG, behind, *(pair or (OTHER, OTHER)))
        self._kafka.add_lags(page, committed, highs)

    def _add_traffic(self, page: Page) -> None:
        core, stats = self._core, self._core.stats
        for topic, (count, size, _) in self._appended.counters(stats.puts()).items():
            page.add(APPENDED, count, topic or OTHER)
            page.add(APPENDED_BYTES, size, topic or OTHER)
        for pair, (count, size, _) in self._pulled.counters(stats.gets()).items():
            page.add(PULLED, count, *(pair or (OTHER, OTHER)))
            page.add(PULLED_BYTES, size, *(pair or (OTHER, OTHER)))
        delay_metrics.add(core, page)
        retry_metrics.add(core, page)
        transaction_metrics.add(core, page)
        page.add(PULLS, stats.get_found, "found")
        page.add(PULLS, stats.get_miss, "empty")
        page.add_durations(SEND_TIME, stats.send_times)
        page.add_durations(PULL_TIME, stats.pull_times)
        page.add_durations(HELD_TIME, stats.held_times)
        page.add(REPLIES, core.replies.delivered, "delivered")
        page.add(REPLIES, core.replies.undelivered, "undelivered")
        page.add(HELD, core.polls.held_count)
        page.add(HELD_MAX, core.polls.held_max)
        for code, count in sorted(stats.refused.items()):
            page.add(REFUSED, count, str(code))

    def _add_clients(self, page: Page) -> None:
        core, listener = self._core, self._broker.listener
        members = {name: len(group.members) for name, group in core.clients.consumers.items()}
        for group, count in self._consumers.gauges(members).items():
            page.add(CONSUMERS, count, group or OTHER)
        unequal = dict.fromkeys(core.clients.disagreements(), 1)
        for group, count in self._unequal.gauges(unequal).items():
            page.add(UNEQUAL, count, group or OTHER)
        page.add(PRODUCERS, sum(len(group) for group in core.clients.producers.values()))
        page.add(TOPICS, len(core.topics))
        page.add(GROUPS, len(core.groups.all()))
        page.add(CONNECTIONS, len(listener.connections))
        for cause, count in sorted(listener.refused.items()):
            page.add(CONNECTIONS_REFUSED, count, cause)
        page.add(CONNECTIONS_OVERDUE, listener.overdue_count)
        page.add(UNSENT, sum(connection.unsent_bytes for connection in listener.connections))
        registrar = self._broker.registrar
        page.add(NAMESERVERS, registrar.registered_count, "registered")
        page.add(NAMESERVERS, registrar.failed_count, "failed")

    def _add_store(self, page: Page) -> None:
        store = self._core.store
        log, flusher, housekeeping = store.log, store.flusher, store.housekeeping
        page.add(QUEUES, len(store.queues))
        page.add_durations(FLUSH_TIME, flusher.times)
        page.add(WAITING, flusher.waiting_count - self._core.turns_waiting)
        admission = self._core.admission
        page.add(INFLIGHT, admission.waiting_bytes)
        page.add(INFLIGHT_MAX, self._core.config.inflight_bytes_max)
        page.add(SENDS_BUSY, admission.refused_count)
        page.add(UNFLUSHED, max(0, log.written - flusher.flushed))
        page.add(COLD_READS, store.cold_reads.count)
        page.add(LOG_START, log.start)
        page.add(LOG_END, log.written)
        page.add(LOG_CONFIRMED, store.confirmed)
        page.add(LOG_BYTES, log.written - log.start)
        page.add(LOG_FILES, len(log.segments))
        try:
            usage = store.files.usage(store.root)
        except OSError:
            pass  # the log has it: housekeeping looks at the disk too
        else:
            page.add(DISK_BYTES, usage.total_bytes)
            page.add(DISK_FREE, usage.free_bytes)
        page.add(CHECKPOINTS, housekeeping.checkpoint_count)
        page.add(DELETED, housekeeping.deleted_count)
        page.add(READ_ONLY, int(flusher.failure is not None))
        page.add(REFUSING, int(store.refusal is not None))

    async def _lags(self) -> dict[Pair, int]:
        """How far each group is behind on each topic that it reads."""
        core = self._core
        rows: list[tuple[str, str, int, dict[int, int]]] = []
        topics: dict[str, int] = {}
        for topic, group, offsets in core.offsets.by_pair():
            settings = core.topics.get(topic)
            if settings is not None and core.clients.reads(group, topic):
                rows.append((topic, group, settings.read_queues, offsets))
                topics[topic] = settings.read_queues
        # One question for each queue, however many groups read it.
        queues = [(topic, queue_id) for topic, count in topics.items() for queue_id in range(count)]
        await asyncio.sleep(0)
        highs = dict(zip(queues, await self._max_offsets(queues), strict=True))
        lags: dict[Pair, int] = {}
        for number, (topic, group, queue_count, offsets) in enumerate(rows, 1):
            behind = (
                highs[topic, queue_id] - offsets.get(queue_id, 0) for queue_id in range(queue_count)
            )
            lags[topic, group] = sum(max(0, count) for count in behind)
            if number % _PAIRS_A_TURN == 0:
                await asyncio.sleep(0)
        return lags

    async def _max_offsets(self, queues: list[tuple[str, int]]) -> list[int]:
        core = self._core
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def ask(topic: str, queue_id: int) -> Callable[[], int]:
            return lambda: core.store.max_offset(topic, queue_id)

        def answered(answers: list[int] | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if answers is None:
                assert error is not None, "questions have answers or an error"
                done.set_exception(error)
            else:
                done.set_result(answers)

        ask_each(core, (ask(*queue) for queue in queues), answered)
        return await done
