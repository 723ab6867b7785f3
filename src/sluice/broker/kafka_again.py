"""This module stores batches of requests that say what an earlier one of the same connection said.

A producer that sends record after record to one partition waits for each answer: what a request
takes is what it waits for. All but the batch is known from the request before: who sends, in which
version, which topic, which partition, and that it may be written. So it is looked up once and kept
for the connection, as long as nothing of it changes. `kafka_fetch_again.py` does it for consumers.

Whatever is different, and what `quick_produce.py` does not take, goes the long way
(`kafka_produce.py`), which does the same: neither leaves anything behind that the other would not.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, AnswerPlace, Peer, Request, code_of
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.quick_produce import QuickProduce
from sluice.config import BrokerConfig
from sluice.errors import SluiceError
from sluice.protocol.kafka_codes import PRODUCE
from sluice.protocol.kafka_fast import (
    ProducedPart,
    ProducePart,
    ProduceRequest,
    TopicKey,
    write_produced,
)
from sluice.protocol.kafka_prepared import SentForm, StoredAnswer, sent_form

_NOTHING_YET: Final = ProducedPart(-1, 0)
_new_tuple = tuple.__new__  # half the time of a named tuple's own
LINES_MAX: Final = 256  # partitions of one producer's connection; above, they are learnt anew


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
        told = line.answer.of(self.correlation_id, self.offset, self.start_offset)
        answer.framed([told])
        polls = self._again.core.polls
        if polls.is_awaited:
            polls.wake((line.topic.stored, line.partition))


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
        if line.config is not core.config or not is_same(core, line.topic):
            del self._lines[sent.said]
            return False
        stored = _Stored(self, line)
        results = [_NOTHING_YET]
        part = _new_tuple(ProducePart, (line.partition, sent.records))
        if not quick.store([part], 0, results, stored):
            return False
        (produced,) = results
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


def is_same(core: BrokerCore, topic: KafkaTopic) -> bool:
    """Whether a topic is there, and as it was."""
    return core.topics.get(topic.stored) is topic.settings
