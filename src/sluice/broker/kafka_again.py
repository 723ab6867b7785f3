"""This module serves requests that say what an earlier one of the same connection said.

A producer that sends record after record to one partition, and a consumer that reads one, wait for
each answer: what a request takes is what they wait for. All but the newest is known from the
request before: who asks, in which version, which topic, which partition, and that it may be written
or read. So it is looked up once and kept for the connection, as long as nothing of it changes.

    producer    batches to one partition that `quick_produce.py` takes, with acks
    consumer    a fetch session of one partition that no transaction is in

Whatever is different takes the long way (`kafka_produce.py`, `kafka_fetch.py`), which does the
same: neither leaves anything behind that the other would not.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, AnswerPlace, Peer, Request, code_of
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.kafka_sessions import Asked, FetchSessions, Session, next_epoch
from sluice.broker.kafka_slices import SliceReader, Slices
from sluice.broker.producer_states import LEADER_EPOCH
from sluice.broker.quick_produce import QuickProduce
from sluice.config import BrokerConfig
from sluice.errors import SluiceError
from sluice.model import Buffer
from sluice.protocol.kafka_codes import FETCH, PRODUCE
from sluice.protocol.kafka_fast import (
    NO_EPOCH,
    FetchRequest,
    ProducedPart,
    ProduceRequest,
    TopicKey,
    write_produced,
)
from sluice.protocol.kafka_prepared import (
    FetchedAnswer,
    FetchForm,
    SentForm,
    StoredAnswer,
    fetch_form,
    sent_form,
)
from sluice.storage.queue_index import QueueIndex
from sluice.storage.store import ColdRead

LINES_MAX: Final = 256  # partitions of one producer's connection; above, they are learnt anew
_EPOCHS: Final = (NO_EPOCH, LEADER_EPOCH)
_COMMITTED: Final = 1
_OFFSET: Final = Struct(">q")
_new_tuple = tuple.__new__  # half the time of a named tuple's own


# --------------------------------------------------------------------------------------- producers


class _Line(NamedTuple):
    """The way of one connection's batches to one partition, under these settings."""

    quick: QuickProduce
    topic: KafkaTopic
    partition: int
    config: BrokerConfig
    key: TopicKey
    answer: StoredAnswer


class _Stored:
    """Hears what became of one batch, and answers."""

    __slots__ = ("_again", "_line", "answer", "correlation_id", "offset", "start_offset")

    def __init__(self, again: ProduceAgain, line: _Line) -> None:
        self._again = again
        self._line = line
        self.answer: AnswerPlace | None = None
        self.correlation_id = self.offset = self.start_offset = 0

    def __call__(self, error: SluiceError | None) -> None:
        answer, line = self.answer, self._line
        assert answer is not None, "a batch is written after it was given its place"
        if error is not None:
            self._again.failed(line, answer, error)
            return
        polls = self._again.core.polls
        if polls.is_awaited:
            polls.wake((line.topic.stored, line.partition))
        told = line.answer.of(self.correlation_id, self.offset, self.start_offset)
        answer.framed([told])


class ProduceAgain:
    """The batches of one connection that go where earlier ones went."""

    __slots__ = ("_lines", "_version", "core", "form")

    def __init__(self, core: BrokerCore, form: SentForm, version: int) -> None:
        self.core = core
        self.form = form
        self._version = version
        self._lines: dict[bytes, _Line] = {}

    def serve(self, frame: bytes | memoryview, peer: Peer) -> bool:
        """Store the batch of a request; False where that is left to the long way."""
        sent = self.form.read(frame)
        line = None if sent is None else self._lines.get(sent.said)
        if sent is None or line is None:
            return False
        core, quick = self.core, line.quick
        if line.config is not core.config or not _is_same(core, line.topic):
            del self._lines[sent.said]
            return False
        stored = _Stored(self, line)
        produced = quick.store(line.partition, sent.records, stored)
        if produced is None:
            return False
        quick.count_stored()
        stored.correlation_id = sent.correlation_id
        stored.offset, stored.start_offset = produced.base_offset, produced.start_offset
        stored.answer = peer.place(PRODUCE, self._version, sent.correlation_id)
        core.ask_turn()
        return True

    def knows(self, said: bytes) -> bool:
        return said in self._lines

    def learn(self, said: bytes, line: _Line) -> None:
        if len(self._lines) >= LINES_MAX:
            self._lines.clear()
        self._lines[said] = line

    def failed(self, line: _Line, answer: Answer, error: SluiceError) -> None:
        """A batch could not be written."""
        self.core.producers.lost(line.topic.stored, line.partition)
        part = ProducedPart(line.partition, code_of(error), reason=str(error))
        answer([write_produced(self._version, [(line.key, [part])])])


def learn_sent(core: BrokerCore, request: Request, sent: ProduceRequest, topic: KafkaTopic) -> None:
    """A request with one batch was served the long way: the next one like it need not be."""
    ((key, ((partition, records),)),) = sent.topics
    if not sent.acks or sent.transactional_id is not None or records is None:
        return
    peer = request.peer
    again = peer.again
    if not isinstance(again, ProduceAgain):
        form = sent_form(request.frame, request.version, records)
        if form is None:
            return
        again = ProduceAgain(core, form, request.version)
    read = again.form.read(request.frame)
    if read is None or again.knows(read.said):
        return
    quick = QuickProduce.of(core, topic, peer.born_host)
    if quick is None:
        return
    answer = StoredAnswer(request.version, key, partition)
    again.learn(read.said, _Line(quick, topic, partition, core.config, key, answer))
    peer.again = again


# --------------------------------------------------------------------------------------- consumers


class Desk(NamedTuple):
    """Who answers fetches: the broker, its sessions, and where its reads ended."""

    core: BrokerCore
    sessions: FetchSessions
    reader: SliceReader


class FetchAgain:
    """The fetches of a session with one partition, of one connection."""

    __slots__ = (
        *("_answer", "_bytes_max", "_config", "_desk", "_form", "_known", "_min_bytes", "_place"),
        *("_queue", "_topic", "_version", "_waits", "session"),
    )

    def __init__(
        self,
        desk: Desk,
        request: Request,
        asked: FetchRequest,
        form: FetchForm,
        session: Session,
        topic: KafkaTopic,
    ) -> None:
        (self._place,) = session.parts
        key, partition = self._place
        config = desk.core.config
        self.session = session
        self._desk = desk
        self._config = config
        self._form = form
        self._known: set[bool] = set()  # the shapes of requests: do they name the partition?
        self._version = request.version
        self._topic = topic
        self._queue = (topic.stored, partition)
        self._bytes_max = min(max(0, asked.bytes_max), config.kafka_fetch_bytes_max)
        self._min_bytes = min(asked.min_bytes, self._bytes_max)
        self._waits = asked.wait_ms > 0
        self._answer = FetchedAnswer(
            *(request.version, session.id, key, partition),
            tells_aborted=asked.isolation == _COMMITTED,
        )

    def knows(self, *, names_partition: bool) -> bool:
        return names_partition in self._known

    def learn(self, frame: bytes | memoryview, *, names_partition: bool) -> None:
        self._known.add(names_partition)
        self._form.learn(frame, names_partition=names_partition)

    def serve(self, frame: bytes | memoryview, peer: Peer) -> bool:
        """Answer a fetch; False where that is left to the long way."""
        core, sessions, reader = self._desk
        place, session = self._place, self.session
        read = self._form.read(frame, place[1])
        if (
            read is None
            or read.epoch != session.epoch
            or sessions.find(session.id) is not session
            or core.config is not self._config
            or not _is_same(core, self._topic)
        ):
            return False
        before, store = session.parts.get(place), core.store
        if before is None or len(session.parts) != 1:
            return False
        correlation_id, epoch, changed = read
        leader_epoch, offset, bytes_max = changed or (before[3], before[1], before[2])
        states, queue = core.producers.known(*self._queue), store.queues.get(self._queue)
        if (
            leader_epoch not in _EPOCHS
            or states is None
            or queue is None
            or not states.stable.is_trivial
        ):
            return False
        high, low = store.reader.max_offset(queue, store.confirmed), queue.start_offset
        if not low <= offset <= high:
            return False
        slices: list[Buffer] = []
        byte_count = 0
        if offset < high:
            newest = states.newest
            if newest is not None and newest[0] == offset and newest[1] == high:
                _, _, front, rest = newest
                slices = [_OFFSET.pack(offset), front, rest]
                byte_count = _OFFSET.size + len(front) + len(rest)
            else:
                room = max(1, min(bytes_max, self._bytes_max))
                found = _read(reader, queue, offset, high, room)
                if found is None:
                    return False
                slices, byte_count, _ = found
        if self._waits and byte_count < self._min_bytes:
            return False
        if changed is not None:
            session.parts[place] = _new_tuple(Asked, (place, offset, bytes_max, leader_epoch))
        session.epoch = next_epoch(epoch)
        sessions.use(session)
        answer = peer.place(FETCH, self._version, correlation_id)
        if session.is_news(place, (high, low)) or byte_count:
            answer.framed(self._answer.of(correlation_id, high, low, slices, byte_count))
        else:
            answer.framed([self._answer.nothing(correlation_id)])
        return True


def learn_fetch(
    desk: Desk, request: Request, asked: FetchRequest, session: Session, topic: KafkaTopic
) -> None:
    """A fetch of a session was served the long way: the next one like it need not be."""
    names_partition = bool(asked.topics)
    again = request.peer.again
    if not isinstance(again, FetchAgain) or again.session is not session:
        core = desk.core
        form = fetch_form(request.frame, request.body_at, request.version)
        if (
            form is None
            or not topic.batches
            or not topic.settings.readable
            or core.config.permission == "w"
            or not 0 <= next(iter(session.parts))[1] < topic.partitions
        ):
            return
        again = FetchAgain(desk, request, asked, form, session, topic)
    elif again.knows(names_partition=names_partition):
        return
    again.learn(request.frame, names_partition=names_partition)
    request.peer.again = again


def _read(
    reader: SliceReader, queue: QueueIndex, offset: int, stop: int, bytes_max: int
) -> Slices | None:
    try:
        return reader.read(queue, offset, stop, bytes_max, set())
    except ColdRead:
        return None


def _is_same(core: BrokerCore, topic: KafkaTopic) -> bool:
    """Whether a topic is there, and as it was."""
    return core.topics.get(topic.stored) is topic.settings
