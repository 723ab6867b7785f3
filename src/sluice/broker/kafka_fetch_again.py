"""This module answers fetches that say what an earlier one of the same connection said.

A consumer that reads one partition, record after record, waits for each answer. Its fetches are
those of a session, and name at most the place of the one partition: all else is known from the
fetch before. So it is looked up once and kept for the connection, as long as nothing of it changes;
what was just sent to the partition is in memory still.

    fetch --> there is enough            answered
          --> it waits                   held until there is, or its time is over
          --> it would not wait          the same, for a moment (`kafka_fetch_pause_ms`): who asks
                                         again and again, without waiting, has what comes in that
                                         moment with this answer, and not with the one after it

Transactions, and whatever else is different, go the long way (`kafka_fetch.py`), which does the
same: neither leaves anything behind that the other would not.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from sluice.broker.core import BrokerCore, Timer
from sluice.broker.kafka_again import is_same
from sluice.broker.kafka_ahead import AheadReader
from sluice.broker.kafka_api import AnswerPlace, Peer, Request
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.kafka_sessions import Asked, FetchSessions, Session, next_epoch
from sluice.broker.kafka_waiting import KafkaWaiting, Waiter
from sluice.broker.producer_states import LEADER_EPOCH
from sluice.model import Buffer
from sluice.protocol.kafka_codes import FETCH, INVALID_FETCH_SESSION_EPOCH
from sluice.protocol.kafka_fast import NO_EPOCH, FetchRequest, write_fetched
from sluice.protocol.kafka_prepared import FetchedAnswer, FetchForm, fetch_form
from sluice.storage.store import ColdRead

WAIT_MS_MAX: Final = 5 * 60_000
COMMITTED: Final = 1  # the isolation of readers that see no transaction before its end
EPOCHS: Final = (NO_EPOCH, LEADER_EPOCH)  # of a leader: none, or the one there is
_OFFSET: Final = Struct(">q")
_new_tuple = tuple.__new__  # half the time of a named tuple's own


class Desk(NamedTuple):
    """Who answers fetches: the broker, its sessions, who lets them wait, where reads ended."""

    core: BrokerCore
    sessions: FetchSessions
    waiting: KafkaWaiting
    reader: AheadReader


class _Found(NamedTuple):
    """What there is from a place on. All up to `high` is decided."""

    high: int
    low: int
    slices: list[Buffer]
    byte_count: int


class _Held(NamedTuple):
    """A fetch that waits. `epoch`: of its session, until the next one comes; `until_ms`: 0 where it
    waits for a moment only.
    """

    answer: AnswerPlace
    correlation_id: int
    offset: int
    bytes_max: int
    epoch: int
    until_ms: int


class FetchAgain:
    """The fetches of a session with one partition, of one connection."""

    __slots__ = (
        *("_answer", "_bytes_max", "_config", "_desk", "_form", "_held", "_is_at_end", "_known"),
        *("_min_bytes", "_place", "_queue", "_timer", "_topic", "_version", "_wait_ms", "_waiter"),
        "session",
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
        self._held: _Held | None = None
        self._is_at_end = False  # it hears at once of what comes; else the waiter does
        self._waiter: Waiter | None = None  # keeps the time of what is held
        self._timer: Timer | None = None  # or this, that of a moment
        self._version = request.version
        self._topic = topic
        self._queue = (topic.stored, partition)
        self._bytes_max = min(max(0, asked.bytes_max), config.kafka_fetch_bytes_max)
        self._min_bytes = min(asked.min_bytes, self._bytes_max)
        self._wait_ms = min(max(0, asked.wait_ms), WAIT_MS_MAX)
        self._answer = FetchedAnswer(
            *(request.version, session.id, key, partition),
            tells_aborted=asked.isolation == COMMITTED,
        )

    def is_for(self, session: Session, topic: KafkaTopic | None) -> bool:
        """Whether it still answers the fetches of this session: nothing has changed."""
        is_same_topic, is_same_config = self._topic is topic, self._config is self._desk.core.config
        return self.session is session and is_same_topic and is_same_config

    def knows(self, *, names_partition: bool) -> bool:
        return names_partition in self._known

    def learn(self, frame: bytes | memoryview, *, names_partition: bool) -> None:
        self._known.add(names_partition)
        self._form.learn(frame, names_partition=names_partition)

    # -------------------------------------------------------------------------------------- serving

    def serve(self, frame: bytes | memoryview, peer: Peer) -> bool:
        """Answer a fetch, or hold it; False where that is left to the long way."""
        if self._held is not None:
            return False
        _, sessions, _, reader = self._desk
        place, session = self._place, self.session
        read = self._form.read(frame, place[1])
        if (
            read is None
            or read.epoch != session.epoch
            or sessions.find(session.id) is not session
            or len(session.parts) != 1
        ):
            return False
        before = session.parts.get(place)
        if before is None:
            return False
        correlation_id, epoch, changed = read
        leader_epoch, offset, bytes_max = changed or (before[3], before[1], before[2])
        if leader_epoch not in EPOCHS:
            return False
        reader.asked_by = peer
        found = self._find(offset, bytes_max)
        if found is None:
            return False
        if changed is not None:
            session.parts[place] = _new_tuple(Asked, (place, offset, bytes_max, leader_epoch))
        session.epoch = next_epoch(epoch)
        sessions.use(session)
        answer = peer.place(FETCH, self._version, correlation_id)
        if found.byte_count >= self._min_bytes or not self._hold(
            answer, correlation_id, offset, bytes_max
        ):
            self._tell(answer, correlation_id, found)
        return True

    def _find(self, offset: int, bytes_max: int) -> _Found | None:
        """What there is; None where the long way has to look, and to say what is wrong."""
        core, _, _, reader = self._desk
        store = core.store
        if core.config is not self._config or not is_same(core, self._topic):
            return None
        states, queue = core.producers.known(*self._queue), store.queues.get(self._queue)
        if states is None or queue is None or not states.stable.is_trivial:
            return None
        high, low = store.reader.max_offset(queue, store.confirmed), queue.start_offset
        if offset == high:
            return _Found(high, low, [], 0)
        if not low <= offset < high:
            return None
        newest = states.newest
        if newest is not None and newest[0] == offset and newest[1] == high:
            _, _, front, rest = newest
            slices: list[Buffer] = [_OFFSET.pack(offset), front, rest]
            return _Found(high, low, slices, _OFFSET.size + len(front) + len(rest))
        try:
            room = max(1, min(bytes_max, self._bytes_max))
            read = reader.read(queue, offset, high, room)
        except ColdRead:
            return None
        return None if read is None else _Found(high, low, read.slices, read.byte_count)

    def _tell(self, answer: AnswerPlace, correlation_id: int, found: _Found | None) -> None:
        """Answer: with what was found, or where it has to be looked for otherwise with nothing, and
        the next fetch goes the long way.
        """
        if found is not None:
            high, low, slices, byte_count = found
            if self.session.is_news(self._place, (high, low)) or byte_count:
                answer.framed(self._answer.of(correlation_id, high, low, slices, byte_count))
                return
        answer.framed([self._answer.nothing(correlation_id)])

    # -------------------------------------------------------------------------------------- waiting

    def _hold(self, answer: AnswerPlace, correlation_id: int, offset: int, bytes_max: int) -> bool:
        """Let a fetch wait until there is more; False where it may not."""
        core, wait_ms = self._desk.core, self._wait_ms
        until_ms = core.now_ms() + wait_ms if wait_ms else 0
        about = (answer, correlation_id, offset, bytes_max, self.session.epoch, until_ms)
        held = _new_tuple(_Held, about)
        return self._wait(held) if wait_ms else self._pause(held)

    def _wait(self, held: _Held) -> bool:
        core, _, waiting, _ = self._desk
        self._is_at_end = core.polls.stand(self._queue, self._look)
        waiter = Waiter(() if self._is_at_end else (self._queue,), held.until_ms, self._look)
        if not waiting.wait(waiter):
            return False
        self._held, self._waiter = held, waiter
        return True

    def _pause(self, held: _Held) -> bool:
        """Let a fetch wait for a moment that would not wait."""
        core, pause_ms = self._desk.core, self._config.kafka_fetch_pause_ms
        if not pause_ms or core.call_later is None:
            return False
        if not core.polls.stand(self._queue, self._look):
            return False
        self._is_at_end = True
        self._timer = core.call_later(pause_ms / 1000, self._end_pause)
        self._held = held
        return True

    def _end_pause(self) -> None:
        self._look(timed_out=True)

    def _look(self, timed_out: bool) -> None:
        """There is something new, or the time is over."""
        held = self._release()
        assert held is not None, "only what is held is looked at again"
        answer, correlation_id, offset, bytes_max, epoch, until_ms = held
        if self.session.epoch != epoch:  # the next one came over another way meanwhile
            code = INVALID_FETCH_SESSION_EPOCH
            answer(write_fetched(self._version, code, self.session.id, []))
            return
        found = self._find(offset, bytes_max)
        is_short = found is not None and found.byte_count < self._min_bytes
        if timed_out or not is_short or not until_ms or not self._wait(held):
            self._tell(answer, correlation_id, found)

    def _release(self) -> _Held | None:
        """What is held, which is not any longer: neither time nor queue call for it."""
        held, self._held = self._held, None
        if self._is_at_end:
            self._is_at_end = False
            self._desk.core.polls.leave(self._queue)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None:
            self._desk.waiting.drop(self._waiter)
            self._waiter = None
        return held

    def drop(self) -> None:
        """The connection is gone: nobody waits any more."""
        self._release()


def learn_fetch(
    desk: Desk, request: Request, asked: FetchRequest, session: Session, topic: KafkaTopic | None
) -> None:
    """A fetch of a session was served the long way: the next one like it need not be."""
    names_partition = bool(asked.topics)
    again = request.peer.again
    if not isinstance(again, FetchAgain) or not again.is_for(session, topic):
        core = desk.core
        form = fetch_form(request.frame, request.body_at, request.version)
        if (
            form is None
            or topic is None
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
