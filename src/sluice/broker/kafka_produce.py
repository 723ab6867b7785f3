"""This module answers Kafka's producers: batches are checked, put in order and stored.

Every partition of a request stands for itself: what is refused says why, the others are stored.
The answer goes out when all of them are confirmed. With acks=0 there is no answer; what is refused
then closes the connection, as Kafka does it.

A batch of a topic that RocketMQ's clients made is taken apart: such a topic holds single messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from sluice.broker import kafka_delays
from sluice.broker.core import BrokerCore
from sluice.broker.kafka_again import learn_sent
from sluice.broker.kafka_api import Answer, KafkaApi, Peer, Request, TransactionDesk, code_of
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.producer_states import Done
from sluice.broker.quick_produce import QuickProduce
from sluice.errors import MessageIllegal, SluiceError
from sluice.model import Buffer, Message
from sluice.protocol import kafka_batches, kafka_checks, kafka_codes, kafka_views
from sluice.protocol.kafka_batches import BadBatch, BatchHead, Record
from sluice.protocol.kafka_fast import (
    Faults,
    ProducedPart,
    ProducePart,
    TopicKey,
    read_produce,
    write_produced,
)
from sluice.storage.lanes import tell

ZSTD_FROM: Final = 7
ABORTABLE_FROM: Final = 11  # clients that know the word for what ends with a roll back
_ACKS: Final = (-1, 0, 1)
_REASON_MAX: Final = 500
_UNKNOWN: Final = ProducedPart(-1, kafka_codes.UNKNOWN_SERVER_ERROR)


class _Refused(Exception):
    """A batch that is not stored, and why."""

    def __init__(self, code: int, reason: str = "", wrong: Sequence[int] = ()) -> None:
        """`wrong`: the records that it is refused for, where it is for some of them."""
        super().__init__(reason)
        self.code = code
        self.wrong = wrong

    def told(self, partition: int) -> ProducedPart:
        reason = str(self)[:_REASON_MAX]
        if self.wrong:
            return ProducedPart(partition, self.code, reason=Faults(reason, self.wrong))
        return ProducedPart(partition, self.code, reason=reason or None)


class _Sent(NamedTuple):
    """One batch of a request: what is the same for all of them, and itself."""

    peer: Peer
    version: int
    transactional_id: str | None


# A batch that has its place and is not confirmed yet: the list that its result is in, where in it,
# topic, partition. A plain tuple, because there is one per batch.
_Placed = tuple[list[ProducedPart], int, str, int]


class _Waiting:
    """A request whose batches are being stored."""

    __slots__ = ("_answer", "_core", "_left", "_peer", "_results", "_version", "acks", "placed")

    def __init__(self, core: BrokerCore, request: Request, acks: int, answer: Answer) -> None:
        self._core = core
        self._version = request.version
        self._peer = request.peer
        self._answer = answer
        self._left = 1  # the request itself, until all of it was looked at
        self._results: list[tuple[TopicKey, list[ProducedPart]]] = []
        self.acks = acks
        self.placed: list[_Placed] = []  # written together, so they are told of together

    def topic(self, topic: TopicKey, count: int) -> list[ProducedPart]:
        """Room for what becomes of a topic's batches."""
        self._left += count
        parts = [_UNKNOWN] * count
        self._results.append((topic, parts))
        return parts

    def staged(self) -> None:
        """Nothing more of it is staged: what was is written at the end of the turn."""
        if self.placed:
            tell(self._core.store, self.when_confirmed(self.placed))
            self._core.ask_turn()

    def when_confirmed(self, places: list[_Placed]) -> Done:
        """Takes back what was noted of batches where it did not come true."""

        def told(error: SluiceError | None) -> None:
            core = self._core
            if error is not None:
                code, reason = code_of(error), str(error)
                for results, at, stored, partition in places:
                    core.producers.lost(stored, partition)
                    results[at] = ProducedPart(partition, code, reason=reason)
            elif core.polls.is_awaited:
                for _, _, stored, partition in places:
                    core.polls.wake((stored, partition))
            self.done(len(places))

        return told

    def done(self, count: int = 1) -> None:
        """So many batches were stored or refused."""
        self._left -= count
        if self._left:
            return
        if self.acks:
            self._answer([write_produced(self._version, self._results)])
            return
        bad = [part for _, parts in self._results for part in parts if part.code]
        if bad:
            self._peer.drop(f"acks=0 and error {bad[0].code}: {bad[0].reason or ''}")


class KafkaProduce:
    """Produce requests of one broker."""

    def __init__(self, core: BrokerCore, transactions: TransactionDesk | None = None) -> None:
        """`transactions`: who keeps them; None: what asks for one is refused."""
        self._core = core
        self._transactions = transactions

    def register(self, api: KafkaApi) -> None:
        api.register(kafka_codes.PRODUCE, 3, 13, self.produce, is_raw=True)

    def produce(self, request: Request, answer: Answer) -> None:
        sent = read_produce(request.frame, request.body_at, request.version)
        waiting = _Waiting(self._core, request, sent.acks, answer)
        if sent.acks == 0:
            answer(None)
        about = _Sent(request.peer, request.version, sent.transactional_id)
        try:
            for key, parts in sent.topics:
                self._take(about, key, parts, waiting)
        finally:
            waiting.staged()
        waiting.done()
        if len(waiting.placed) == 1 == len(sent.topics) == len(sent.topics[0].parts):
            topic = self._find(sent.topics[0].topic)
            if topic is not None:
                learn_sent(self._core, request, sent, topic)

    def _take(
        self, about: _Sent, key: TopicKey, parts: list[ProducePart], waiting: _Waiting
    ) -> None:
        """Store what was sent to one topic, or say why not."""
        core = self._core
        topic = self._find(key)
        results = waiting.topic(key, len(parts))
        quick: QuickProduce | None = None
        if topic is not None and waiting.acks in _ACKS and about.version >= ZSTD_FROM:
            quick = QuickProduce.of(core, topic, about.peer.born_host)
        at = 0
        while at < len(parts):
            if quick is not None:
                begin, at = at, quick.store(parts, at, results)
                for number in range(begin, at):
                    waiting.placed.append((results, number, quick.stored, parts[number].partition))
                if at > begin:
                    continue
            self._take_one(about, key, topic, parts[at], results, at, waiting)
            at += 1
        if quick is not None:
            quick.count_stored()

    def _take_one(
        self,
        about: _Sent,
        key: TopicKey,
        topic: KafkaTopic | None,
        part: ProducePart,
        results: list[ProducedPart],
        at: int,
        waiting: _Waiting,
    ) -> None:
        """Store one batch, or say why not."""
        try:
            if topic is None:
                raise _Refused(_missing(key))
            self._store(about, topic, part, results, at, waiting)
        except _Refused as refused:
            results[at] = refused.told(part.partition)
            waiting.done()

    def _find(self, key: TopicKey) -> KafkaTopic | None:
        topics = self._core.kafka_topics
        return topics.by_id_bytes(key) if isinstance(key, bytes) else topics.find(key)

    def _store(
        self,
        about: _Sent,
        topic: KafkaTopic,
        part: ProducePart,
        results: list[ProducedPart],
        at: int,
        waiting: _Waiting,
    ) -> None:
        """Store one batch; its result is written down when it is known."""
        core, partition = self._core, part.partition
        if not 0 <= partition < topic.partitions:
            raise _Refused(kafka_codes.UNKNOWN_TOPIC_OR_PARTITION)
        if not topic.settings.writable or core.config.permission == "r" or topic.dead_group:
            raise _Refused(kafka_codes.TOPIC_AUTHORIZATION_FAILED)
        if part.records is None:
            raise _Refused(kafka_codes.INVALID_RECORD, "exactly one record batch is expected")
        try:
            data = kafka_batches.one_sent(part.records)
            if waiting.acks not in _ACKS:
                raise _Refused(kafka_codes.INVALID_REQUIRED_ACKS)
            head = self._checked(about, topic, data)
        except BadBatch as bad:
            raise _Refused(bad.code, str(bad), bad.wrong) from bad
        append_ms = -1
        batch: Buffer = data
        if topic.compression and topic.batches:
            head, batch = self._repacked(topic, head, data)
        if topic.append_time:
            append_ms = core.now_ms()
            head, batch = kafka_batches.with_append_time(head, batch, append_ms)
        elif head.attributes & kafka_batches.APPEND_TIME:
            head, batch = kafka_batches.with_create_time(head, batch)
        later: list[Message] = []
        if topic.delays and topic.batches:
            head, batch, later = self._parted(about, topic, partition, head, batch)
        place: _Placed = (results, at, topic.stored, partition)
        try:
            if core.store.log.end > core.admission.free_end:
                core.admission.admit(about.peer.born_host, len(data))
            if not topic.batches:
                told = waiting.when_confirmed([place])
                offset = self._explode(about, topic, partition, head, batch, told)
                self._promise(place, offset, append_ms)
                return
            states = core.producers.partition(topic.stored, partition)
            if head.producer_id >= 0:
                code, offset = core.producers.check(states, head)
                if code:
                    raise _Refused(code)
                if offset >= 0:  # it came before
                    self._promise(place, offset, append_ms)
                    told = waiting.when_confirmed([place])
                    core.call_soon(partial(self._when_confirmed, told))
                    return
            if head.attributes & kafka_batches.TRANSACTIONAL:
                self._check_transaction(about, topic, partition, head)
            for message in later:  # in the log they are before it, so they are safe when it is
                core.append(message)
            host = about.peer.born_host
            placed = core.producers.append_to(states, place[2:], head, batch, host)
        except SluiceError as error:
            raise _Refused(code_of(error), str(error)) from error
        core.stats.stored(topic.stored, head.record_count, placed.size)
        self._promise(place, placed.queue_offset, append_ms)
        waiting.placed.append(place)

    def _promise(self, place: _Placed, offset: int, append_ms: int) -> None:
        """What is answered for a batch that has its place, if it is confirmed."""
        results, at, stored, partition = place
        start = self._core.store.min_offset(stored, partition)
        results[at] = ProducedPart(partition, 0, offset, append_ms, start)

    def _repacked(
        self, topic: KafkaTopic, head: BatchHead, data: Buffer
    ) -> tuple[BatchHead, Buffer]:
        """A batch as its topic wants it to be compressed."""
        codec = kafka_batches.COMPRESSIONS.get(topic.compression)
        if codec is None or codec == head.codec:
            return head, data
        unpacked_max = self._core.config.kafka_unpacked_bytes_max
        try:
            head, batch = kafka_batches.with_codec(head, data, codec, unpacked_max)
        except BadBatch as bad:
            raise _Refused(bad.code, str(bad)) from bad
        if len(batch) > self._bytes_max(topic):
            raise _Refused(
                kafka_codes.MESSAGE_TOO_LARGE, f"a batch of {len(batch)} bytes, compressed anew"
            )
        return head, batch

    def _bytes_max(self, topic: KafkaTopic) -> int:
        """How large a batch may be."""
        own = topic.batch_bytes_max
        return self._core.config.kafka_batch_bytes_max if own is None else own

    def _parted(
        self, about: _Sent, topic: KafkaTopic, partition: int, head: BatchHead, batch: Buffer
    ) -> kafka_delays.Split:
        """What of a batch is stored now, and what waits for its time."""
        place = (topic.stored, partition)
        try:
            return kafka_delays.split(self._core, *place, head, batch, about.peer.born_host)
        except BadBatch as bad:
            raise _Refused(bad.code, str(bad)) from bad
        except MessageIllegal as illegal:
            raise _Refused(kafka_codes.INVALID_RECORD, str(illegal)) from illegal

    def _checked(self, about: _Sent, topic: KafkaTopic, data: memoryview) -> BatchHead:
        """The head of a batch that may be stored; raises what is wrong with it."""
        core = self._core
        config = core.config
        bytes_max = self._bytes_max(topic)
        if len(data) <= bytes_max and about.version >= ZSTD_FROM:
            head = kafka_batches.read_new(data)
        else:
            head = kafka_batches.read_sent(data)
            if head.codec == kafka_batches.CODEC_ZSTD and about.version < ZSTD_FROM:
                raise BadBatch(
                    kafka_codes.UNSUPPORTED_COMPRESSION_TYPE, "zstd needs a newer produce request"
                )
            if len(data) > bytes_max:
                raise BadBatch(kafka_codes.MESSAGE_TOO_LARGE, f"a batch of {len(data)} bytes")
            kafka_batches.check_sent(head, data)
        if head.attributes & kafka_batches.TRANSACTIONAL and about.transactional_id is None:
            raise BadBatch(
                kafka_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "a transaction without its id"
            )
        if config.kafka_check_records:
            kafka_checks.check_records(head, data, config.kafka_unpacked_bytes_max)
        if topic.compacts:
            found = kafka_batches.read_records(head, data, config.kafka_unpacked_bytes_max)
            bare = [at for at, record in enumerate(found) if record.key is None]
            if bare:
                reason = "a compacted topic takes no record without a key"
                raise BadBatch(kafka_codes.INVALID_RECORD, reason, bare)
        self._check_times(topic, head, data)
        return head

    def _check_times(self, topic: KafkaTopic, head: BatchHead, data: memoryview) -> None:
        """Refuse times that a topic does not take; where it gives its own it takes any."""
        core = self._core
        is_stamped = head.attributes & kafka_batches.APPEND_TIME != 0
        if is_stamped and (topic.append_time or head.max_ms == kafka_batches.NO_TIME):
            raise BadBatch(kafka_codes.INVALID_TIMESTAMP, "only a broker sets the append's time")
        if topic.append_time:
            return
        ahead_ms = core.config.kafka_timestamp_ahead_ms_max
        if topic.after_ms_max is not None:
            ahead_ms = topic.after_ms_max
        # The newest entry's time is there already, and never after now.
        if head.max_ms > core.store.last_ms + ahead_ms and head.max_ms > core.now_ms() + ahead_ms:
            last_ms = core.now_ms() + ahead_ms
            wrong = [at for at, ms in enumerate(self._times(head, data)) if ms > last_ms]
            reason = f"timestamp {head.max_ms} is too far ahead"
            raise BadBatch(kafka_codes.INVALID_TIMESTAMP, reason, wrong)
        if topic.before_ms_max is None:
            return
        first_ms = core.now_ms() - topic.before_ms_max
        times = self._times(head, data)
        old = [at for at, ms in enumerate(times) if ms != kafka_batches.NO_TIME and ms < first_ms]
        if old:
            reason = f"timestamp {times[old[0]]} is too old"
            raise BadBatch(kafka_codes.INVALID_TIMESTAMP, reason, old)

    def _times(self, head: BatchHead, data: memoryview) -> list[int]:
        """The times of a batch's records: its head has no word for the oldest."""
        if head.attributes & kafka_batches.APPEND_TIME:
            return [head.max_ms] * head.record_count
        bytes_max = self._core.config.kafka_unpacked_bytes_max
        found = kafka_batches.read_records(head, data, bytes_max)
        return [head.base_ms + record.time_delta for record in found]

    def _check_transaction(
        self, about: _Sent, topic: KafkaTopic, partition: int, head: BatchHead
    ) -> None:
        """Refuse a batch that says it is of a transaction, and is of none that is open."""
        if self._transactions is None:
            raise _Refused(kafka_codes.INVALID_TXN_STATE, "transactions are not served")
        code = self._transactions.check_append(
            about.transactional_id,
            head.producer_id,
            head.producer_epoch,
            topic.stored,
            partition,
            implicit=about.version >= 12,
        )
        if code == kafka_codes.INVALID_TXN_STATE and about.version >= ABORTABLE_FROM:
            code = kafka_codes.TRANSACTION_ABORTABLE
        if code:
            raise _Refused(code)

    def _when_confirmed(self, confirmed: Done) -> None:
        """All that was written up to now: a batch that came twice is among it."""
        store = self._core.store
        if store.confirmed >= store.log.written:
            confirmed(None)
        elif store.flusher.failure is not None:
            confirmed(store.flusher.failure)
        else:
            store.flusher.wait(store.log.written, confirmed)

    def _explode(
        self,
        about: _Sent,
        topic: KafkaTopic,
        partition: int,
        head: BatchHead,
        data: Buffer,
        confirmed: Done,
    ) -> int:
        """Store the records of a batch one by one; the offset of the first."""
        core = self._core
        if head.is_transactional:
            raise _Refused(kafka_codes.INVALID_TXN_STATE, "the topic takes no transactions")
        try:
            found = kafka_batches.read_records(head, data, core.config.kafka_unpacked_bytes_max)
        except BadBatch as bad:
            raise _Refused(bad.code, str(bad)) from bad
        host = about.peer.born_host
        messages = [
            kafka_views.message_of(topic.stored, partition, head, record, host) for record in found
        ]
        if topic.delays:
            messages = self._some_later(messages, found)
        placed = core.store.stage_batch(messages, confirmed)
        core.stats.stored(topic.stored, len(placed), sum(place.size for place in placed))
        core.ask_turn()
        offsets = [
            place.queue_offset
            for place, message in zip(placed, messages, strict=True)
            if message.topic == topic.stored
        ]
        return offsets[0] if offsets else -1

    def _some_later(self, messages: list[Message], found: list[Record]) -> list[Message]:
        """Messages of records, or what waits in the place of some."""
        try:
            return [
                kafka_delays.waiting_form(self._core, message, record) or message
                for message, record in zip(messages, found, strict=True)
            ]
        except BadBatch as bad:
            raise _Refused(bad.code, str(bad)) from bad
        except MessageIllegal as illegal:
            raise _Refused(kafka_codes.INVALID_RECORD, str(illegal)) from illegal


def _missing(key: TopicKey) -> int:
    if isinstance(key, bytes):
        return kafka_codes.UNKNOWN_TOPIC_ID
    return kafka_codes.UNKNOWN_TOPIC_OR_PARTITION
