"""This module answers Kafka's consumers: it reads their partitions, and waits where there is
nothing.

Partitions are read in the order of the request until one has a batch for which the answer has no
room; the first batch that is found is answered whatever its size, so that a consumer always comes
on. What readers of committed records may see ends where the first undecided transaction begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from sluice.broker.core import BrokerCore
from sluice.broker.kafka_ahead import AheadReader
from sluice.broker.kafka_api import Answer, KafkaApi, Peer, Request
from sluice.broker.kafka_fetch_again import (
    COMMITTED,
    EPOCHS,
    WAIT_MS_MAX,
    Desk,
    FetchAgain,
    learn_fetch,
)
from sluice.broker.kafka_partitions import KafkaTopic
from sluice.broker.kafka_reading import read_batches
from sluice.broker.kafka_sessions import (
    FINAL_EPOCH,
    FIRST_EPOCH,
    NO_SESSION,
    PARTITIONS_MAX,
    Asked,
    FetchSessions,
    Place,
    Session,
    next_epoch,
)
from sluice.broker.kafka_waiting import KafkaWaiting, Waiter
from sluice.broker.producer_states import LEADER_EPOCH
from sluice.errors import RecordDamaged, SluiceError
from sluice.protocol import kafka_codes
from sluice.protocol.kafka_fast import (
    FETCH_IDS,
    FetchedPart,
    FetchRequest,
    TopicKey,
    read_fetch,
    write_fetched,
)
from sluice.storage.store import ColdRead

# So often it is asked whether an answer has been sent: megabytes take some milliseconds.
_SENDING_SECONDS: Final = 0.002


class Wanted(NamedTuple):
    """What a consumer asks of one partition, and the topic where there is one."""

    asked: Asked
    topic: KafkaTopic | None


class _Fetch:
    """One fetch that is being answered."""

    __slots__ = (
        *("answer", "bytes_max", "is_full", "is_last", "isolation", "min_bytes", "request"),
        *("next_epoch", "results", "session", "total_bytes", "until_ms", "waiter", "wanted"),
    )

    def __init__(
        self, request: Request, answer: Answer, asked: FetchRequest, wanted: list[Wanted]
    ) -> None:
        self.request = request
        self.answer = answer
        self.wanted = wanted
        self.isolation = asked.isolation
        self.bytes_max = asked.bytes_max
        self.min_bytes = asked.min_bytes
        self.until_ms = 0
        self.is_last = False  # its time is over: it is answered as it is
        self.results: list[FetchedPart] = []
        self.total_bytes = 0
        self.is_full = False  # what comes next has no room; smaller batches behind it wait, too
        self.waiter: Waiter | None = None
        self.session: Session | None = None
        self.next_epoch = 0  # of the session; 0: all is answered, not only what is new


class KafkaFetch:
    """Fetches of one broker."""

    def __init__(self, core: BrokerCore, waiting: KafkaWaiting) -> None:
        self._core = core
        self._waiting = waiting
        self._reader = AheadReader(core.store, self._call_later, core.call_soon)
        core.services.append(self._reader)
        self._held: dict[object, set[_Fetch]] = {}  # by connection
        self._sessions = FetchSessions(lambda: core.config.kafka_fetch_sessions_max, core.now_ms)
        self._desk = Desk(core, self._sessions, waiting, self._reader)

    def _call_later(self, work: Callable[[], None]) -> None:
        core = self._core
        if core.call_later is None:
            core.call_soon(work)
        else:
            core.call_later(_SENDING_SECONDS, work)

    def register(self, api: KafkaApi) -> None:
        api.register(kafka_codes.FETCH, 4, 18, self.fetch, is_raw=True)
        api.when_closed(self._closed)

    def fetch(self, request: Request, answer: Answer) -> None:
        asked = read_fetch(request.frame, request.body_at, request.version)
        code, session, places = self._take_session(request.version >= FETCH_IDS, asked)
        if code:
            answer(write_fetched(request.version, code, 0, []))
            return
        fetch = _Fetch(request, answer, asked, self._wanted(places))
        fetch.session = session
        if session is not None and asked.session_epoch > FIRST_EPOCH:
            fetch.next_epoch = session.epoch
            if len(fetch.wanted) == 1 and not asked.forgotten:
                learn_fetch(self._desk, request, asked, session, fetch.wanted[0].topic)
        limit = self._core.config.kafka_fetch_bytes_max
        fetch.bytes_max = min(max(0, asked.bytes_max), limit)
        fetch.min_bytes = min(asked.min_bytes, fetch.bytes_max)  # more would never come
        if asked.wait_ms > 0:
            fetch.until_ms = self._core.now_ms() + min(asked.wait_ms, WAIT_MS_MAX)
        self._look(fetch)

    def _take_session(
        self, uses_ids: bool, request: FetchRequest
    ) -> tuple[int, Session | None, Collection[Asked]]:
        """Error code, session, and the partitions that are to be read."""
        sessions = self._sessions
        session_id, epoch = request.session_id, request.session_epoch
        asked = _asked(request)
        if epoch in (FIRST_EPOCH, FINAL_EPOCH):
            sessions.end(session_id)
            session = sessions.begin(uses_ids, asked) if epoch == FIRST_EPOCH else None
            return 0, session, asked
        session = sessions.find(session_id)
        if session is None:
            return kafka_codes.FETCH_SESSION_ID_NOT_FOUND, None, []
        if session.epoch != epoch:
            return kafka_codes.INVALID_FETCH_SESSION_EPOCH, None, []
        if session.uses_ids != uses_ids:
            return kafka_codes.FETCH_SESSION_TOPIC_ID_ERROR, None, []
        if len(session.parts) + len(asked) > PARTITIONS_MAX:
            return kafka_codes.INVALID_REQUEST, None, []
        session.change(asked, _forgotten(request))
        if not session.parts:  # it is of no use any more
            sessions.end(session.id)
            return 0, None, asked
        sessions.use(session)
        session.epoch = next_epoch(epoch)
        return 0, session, session.parts.values()

    def _wanted(self, asked: Collection[Asked]) -> list[Wanted]:
        """What is asked for with its topics; of one topic it may be a thousand partitions."""
        topics = self._core.kafka_topics
        key: TopicKey | None = None
        topic: KafkaTopic | None = None
        wanted: list[Wanted] = []
        for each in asked:
            if each.place[0] is not key:
                key = each.place[0]
                topic = topics.by_id_bytes(key) if isinstance(key, bytes) else topics.find(key)
            wanted.append(Wanted(each, topic))
        return wanted

    # -------------------------------------------------------------------------------------- reading

    def _look(self, fetch: _Fetch) -> None:
        """Read, then answer or wait."""
        fetch.results = []
        fetch.total_bytes = 0
        fetch.is_full = False
        self._reader.asked_by = fetch.request.peer

        def ask() -> bool:
            # What was read before a part had to come from the disk is not read again.
            for wanted in fetch.wanted[len(fetch.results) :]:
                part = self._read(fetch, wanted)
                fetch.total_bytes += part.byte_count
                fetch.results.append(part)
            return True

        def done(result: bool | None, error: BaseException | None) -> None:
            if error is not None:
                fetch.request.peer.drop(f"a fetch failed: {error}")
                return
            self._judge(fetch)

        try:
            ask()
        except ColdRead:
            self._core.store.call(ask, done)
            return
        self._judge(fetch)

    def _judge(self, fetch: _Fetch) -> None:
        is_enough = (
            fetch.is_last
            or not fetch.until_ms
            or not fetch.wanted  # nothing would ever end the wait
            or fetch.total_bytes >= fetch.min_bytes
            or any(part.code for part in fetch.results)
        )
        if is_enough or not self._hold(fetch):
            self._answer(fetch)

    def _read(self, fetch: _Fetch, wanted: Wanted) -> FetchedPart:
        topic, (key, partition) = wanted.topic, wanted.asked.place
        if topic is None:
            code = kafka_codes.UNKNOWN_TOPIC_OR_PARTITION
            if isinstance(key, bytes):
                code = kafka_codes.UNKNOWN_TOPIC_ID
            return FetchedPart(partition, code)
        if not 0 <= partition < topic.partitions:
            return FetchedPart(partition, kafka_codes.UNKNOWN_TOPIC_OR_PARTITION)
        code = epoch_code(wanted.asked.leader_epoch)
        if not code and (not topic.settings.readable or self._core.config.permission == "w"):
            code = kafka_codes.TOPIC_AUTHORIZATION_FAILED
        if code:
            return FetchedPart(partition, code)
        try:
            return self._read_found(fetch, wanted.asked, topic)
        except RecordDamaged:
            return FetchedPart(partition, kafka_codes.KAFKA_STORAGE_ERROR)
        except SluiceError:
            return FetchedPart(partition, kafka_codes.UNKNOWN_SERVER_ERROR)

    def _read_found(self, fetch: _Fetch, asked: Asked, topic: KafkaTopic) -> FetchedPart:
        core, partition, offset = self._core, asked.place[1], asked.offset
        store, stored = core.store, topic.stored
        queue = store.queues.get((stored, partition))
        if queue is None:
            high, low = store.max_offset(stored, partition), store.min_offset(stored, partition)
        else:
            high, low = store.reader.max_offset(queue, store.confirmed), queue.start_offset
        if not low <= offset <= high:
            return FetchedPart(partition, kafka_codes.OFFSET_OUT_OF_RANGE)
        stable = high
        aborted: list[tuple[int, int]] | None = None
        if topic.batches:
            offsets = core.producers.stable_offsets(stored, partition)
            stable = max(low, offsets.stable(high))
        else:
            offsets = None
        all_room = fetch.bytes_max - fetch.total_bytes
        room = min(asked.bytes_max, all_room)
        stop = stable if fetch.isolation == COMMITTED else high
        # Most partitions of most fetches have nothing new.
        if offset >= stop or fetch.is_full or (room <= 0 and fetch.total_bytes):
            aborted = [] if fetch.isolation == COMMITTED else None
            return FetchedPart(partition, 0, high, stable, low, aborted)
        where = (topic, partition, offset, stop, max(1, room))
        slices, byte_count, next_offset, is_outside = read_batches(core, *where, self._reader)
        if is_outside:
            return FetchedPart(partition, kafka_codes.OFFSET_OUT_OF_RANGE)
        if byte_count > room and fetch.total_bytes:
            # After the first batch the limits hold. Of a thousand partitions most are behind the
            # last one that has room: each would be read for nothing.
            fetch.is_full = byte_count > all_room
            slices, byte_count = [], 0
        if fetch.isolation == COMMITTED:
            # Of what compaction has looked through, nothing that was rolled back is left.
            first = max(offset, core.compaction.clean_end(stored, partition))
            aborted = [] if offsets is None else offsets.aborted(first, next_offset)
        return FetchedPart(partition, 0, high, stable, low, aborted, slices, byte_count)

    # -------------------------------------------------------------------------------------- waiting

    def _hold(self, fetch: _Fetch) -> bool:
        def look(timed_out: bool) -> None:
            self._release(fetch)
            fetch.is_last = timed_out
            find = self._core.kafka_topics.find
            if any(find(topic.name) is not topic for topic in topics.values()):
                # It has changed, or is gone: that it is empty now does not matter any more.
                fetch.wanted = self._wanted([wanted.asked for wanted in fetch.wanted])
            self._look(fetch)

        queues: dict[tuple[str, int], None] = {}
        topics: dict[str, KafkaTopic] = {}
        for wanted in fetch.wanted:
            topic = wanted.topic
            if topic is not None:
                queues[topic.stored, wanted.asked.place[1]] = None
                topics[topic.stored] = topic
        waiter = Waiter(queues, fetch.until_ms, look)
        fetch.waiter = waiter
        fetch.results = []  # nothing of the log is held while it waits
        if not self._waiting.wait(waiter):
            fetch.is_last = True
            self._look(fetch)
            return True
        self._held.setdefault(fetch.request.peer, set()).add(fetch)
        return True

    def _release(self, fetch: _Fetch) -> None:
        held = self._held.get(fetch.request.peer)
        if held is not None:
            held.discard(fetch)
            if not held:
                del self._held[fetch.request.peer]

    def _closed(self, peer: Peer) -> None:
        if isinstance(peer.again, FetchAgain):
            peer.again.drop()
        for fetch in self._held.pop(peer, ()):
            if fetch.waiter is not None:
                self._waiting.drop(fetch.waiter)

    def _answer(self, fetch: _Fetch) -> None:
        topics: list[tuple[TopicKey, list[FetchedPart]]] = []
        session = fetch.session
        if session is not None and fetch.next_epoch and session.epoch != fetch.next_epoch:
            # While it waited, the next one came over another way.
            code = kafka_codes.INVALID_FETCH_SESSION_EPOCH
            fetch.answer(write_fetched(fetch.request.version, code, session.id, []))
            return
        for wanted, part in zip(fetch.wanted, fetch.results, strict=True):
            place = wanted.asked.place
            if session is not None:
                is_news = session.is_news(place, (part.high, part.start))
                if not fetch.next_epoch:
                    pass  # all of it is answered, in the order in which it was asked for
                elif part.byte_count:
                    session.had_records(place)
                elif not is_news and not part.code:
                    continue
            if not topics or topics[-1][0] != place[0]:
                topics.append((place[0], []))
            topics[-1][1].append(part)
        session_id = NO_SESSION if session is None else session.id
        fetch.answer(write_fetched(fetch.request.version, 0, session_id, topics))


def _asked(request: FetchRequest) -> list[Asked]:
    """What a request says of partitions."""
    return [
        Asked((topic, partition), offset, bytes_max, leader_epoch)
        for topic, parts in request.topics
        for partition, leader_epoch, offset, bytes_max in parts
    ]


def _forgotten(request: FetchRequest) -> list[Place]:
    """The partitions that a session is to leave out from now on."""
    return [(topic, partition) for topic, numbers in request.forgotten for partition in numbers]


def epoch_code(leader_epoch: int) -> int:
    """Whether a client knows another leader than this one."""
    if leader_epoch in EPOCHS:
        return 0
    if leader_epoch < LEADER_EPOCH:
        return kafka_codes.FENCED_LEADER_EPOCH
    return kafka_codes.UNKNOWN_LEADER_EPOCH
