"""This module joins the services of one broker, and nothing more: who owns what, and the turn.

All appends of one turn of the event loop are written together: the first one asks for the turn's
end, and there the store writes once. Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol

from sluice.broker.admission import Admission
from sluice.broker.compaction import Compaction
from sluice.broker.dead_letters import DeadLetters
from sluice.broker.dedup import Dedup
from sluice.broker.delays import Delays
from sluice.broker.expiry import Expiry
from sluice.broker.groups import Clients, Groups
from sluice.broker.kafka_groups import KafkaGroups
from sluice.broker.kafka_offsets import KafkaOffsets
from sluice.broker.kafka_partitions import KafkaTopics
from sluice.broker.kafka_transactions import KafkaTransactions
from sluice.broker.kafka_unfolding import Unfolding
from sluice.broker.locks import QueueLocks
from sluice.broker.long_polling import LongPolling
from sluice.broker.memory_queues import MemoryQueues
from sluice.broker.offsets import Offsets
from sluice.broker.ordering import Ordering
from sluice.broker.pops import Pops
from sluice.broker.producer_states import ProducerStates
from sluice.broker.replies import Replies
from sluice.broker.retries import Retries
from sluice.broker.retry_notes import RetryNotes
from sluice.broker.staged_writes import StagedWrites
from sluice.broker.stats import BrokerStats
from sluice.broker.topic_retention import TopicRetention
from sluice.broker.topics import Topics
from sluice.broker.transactions import Transactions
from sluice.config import BrokerConfig
from sluice.errors import SluiceError
from sluice.model import Message, Placed
from sluice.storage.store import Store


class Service(Protocol):
    """Something that goes on by itself: timers that fire, transactions that are asked about."""

    def start(self) -> None:
        """Read what the log says; nobody is served yet, so it may wait for the disk."""

    def tick(self, now_ms: int) -> None:
        """Some ten times a second. Failures are the service's own to report."""


class Timer(Protocol):
    """Something that is called later, unless it is cancelled."""

    def cancel(self) -> None: ...


class BrokerCore:
    """The services that the doors share."""

    # Calls something after so many seconds; None where only ticks tell of the time.
    call_later: Callable[[float, Callable[[], None]], Timer] | None = None

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        now_ms: Callable[[], int],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.config = config
        self.store = store
        self.now_ms = now_ms
        self.call_soon = call_soon
        self._turn_asked = False
        self._turn_ns = self._turn_put = 0
        self._peer = self._last_peer = 0  # who is served now, and who last had something stored
        self._ends_early = False
        self.turns_waiting = 0  # whose messages wait for the disk
        self.topics = Topics(
            store,
            cluster_name=config.cluster_name,
            broker_name=config.broker_name,
            trace_topic=config.trace_topic_name if config.trace_topic else "",
        )
        self.groups = Groups(store, auto_create=lambda: self.config.auto_create_groups)
        self.clients = Clients()
        self.offsets = Offsets(store)
        self.locks = QueueLocks(lambda: self.config.queue_lock_ms)
        self.polls = LongPolling(config.held_polls_max, config.held_polls_per_connection_max)
        self.admission = Admission(
            store, bytes_max=config.inflight_bytes_max, requests_max=config.inflight_requests_max
        )
        self.stats = BrokerStats(now_ms)
        self.replies = Replies(self)
        self.started_ms = now_ms()
        self.services: list[Service] = []  # in the order in which they start and tick
        self.delays = Delays(self)
        self.ordering = Ordering(self)
        self.services.append(self.ordering)
        self.retry_notes = RetryNotes(self)
        self.services.append(self.retry_notes)
        self.retries = Retries(self)
        self.dead_letters = DeadLetters(self)
        self.expiry = Expiry(self)
        self.memory_queues = MemoryQueues(self)
        self.transactions = Transactions(self)
        self.services.append(self.transactions)
        self.pops = Pops(self)
        self.services.append(self.pops)
        self.dedup = Dedup(self)  # after the transactions: it asks which are open
        self.kafka_topics = KafkaTopics(self)
        self.producers = ProducerStates(self)
        self.unfolding = Unfolding(self)
        self.services.append(self.producers)
        self.retention = TopicRetention(self)
        self.services.append(self.retention)
        self.compaction = Compaction(self)
        self.services.append(self.compaction)
        self.kafka_groups = KafkaGroups(self)
        self.kafka_offsets = KafkaOffsets(self)
        self.services += [self.kafka_groups, self.kafka_offsets]
        # After the offsets and the producers: it ends what was prepared before a crash.
        self.kafka_transactions = KafkaTransactions(self)
        self.services.append(self.kafka_transactions)
        self.staged = StagedWrites(self)
        self.services.append(self.staged)
        self.address = ""  # host:port that clients are given, once it is known
        # Asks a nameserver how many queues of a topic each broker lets read; None: it cannot tell.
        self.ask_route: Callable[[str, Callable[[dict[str, int] | None], None]], None] = (
            lambda topic, then: then(None)
        )
        self.end_turn()

    def start(self) -> None:
        """Everything is joined: services take up what they were at when the broker stopped."""
        for service in self.services:
            service.start()

    def append(
        self,
        message: Message,
        done: Callable[[SluiceError | None], None] | None = None,
        keys: tuple[bytes, bytes, bytes] | None = None,
    ) -> Placed:
        """Append a message with all others of this turn; `keys` where they are known already."""
        placed = self.store.stage(message, done, keys)
        if not self._turn_asked:
            self.ask_turn()
        return placed

    def ask_turn(self) -> None:
        """Something is staged: it is written at the end of this turn.

        Where the last peer that had something stored is being served again it is taken to be the
        only one: it would gain nothing from waiting for others, so its turn ends with `served`.
        """
        if self._turn_asked:
            self._last_peer = self._peer or self._last_peer
            return
        self._turn_asked = True
        self._turn_ns = perf_counter_ns()
        self._turn_put = self.stats.put
        if self._peer and self._peer == self._last_peer:
            self._ends_early = True
        else:
            self._last_peer = self._peer
            self.call_soon(self.end_turn)

    def serve(self, peer: object) -> None:
        """From now on until `served` the requests of one peer are served."""
        self._peer = id(peer)

    def served(self) -> None:
        self._peer = 0
        if self._ends_early:
            self._ends_early = False
            self.end_turn()

    def end_turn(self) -> None:
        self._turn_asked = False
        store, stats = self.store, self.stats
        count = stats.put - self._turn_put
        self._turn_put = stats.put
        store.write_staged()
        self.admission.end_turn()
        # How long the messages of a turn took is noted once for all of them, when they are safe.
        if count and store.confirmed >= store.log.written:
            stats.send_times.add(perf_counter_ns() - self._turn_ns, count)
        elif count:
            self._note_later(self._turn_ns, count)

    def _note_later(self, start_ns: int, count: int) -> None:
        flusher = self.store.flusher

        def confirmed(error: SluiceError | None) -> None:
            self.turns_waiting -= 1
            if error is None:
                self.stats.send_times.add(perf_counter_ns() - start_ns, count)

        if flusher.failure is None:
            self.turns_waiting += 1
            flusher.wait(self.store.log.written, confirmed)

    def reconfigure(self, config: BrokerConfig) -> None:
        """Settings were changed that may change while the broker runs."""
        before, self.config = self.config, config
        self.store.reconfigure(config.store)
        if before.log_level != config.log_level:
            logging.getLogger("sluice").setLevel(config.log_level.upper())
        self.topics.set_default_queues(config.default_queue_count)
        if before.permission != config.permission:
            self.topics.bump()  # routes depend on it

    def tick(self) -> None:
        """Some ten times a second."""
        now_ms = self.now_ms()
        self.store.tick()
        self.polls.tick(now_ms)
        self.stats.tick(now_ms)
        for service in self.services:
            service.tick(now_ms)
