"""This module carries out one pop: through the queues of a topic and its retry topic, one after the
other, until there is enough.

What is found in a queue is taken at once, before anybody else can have it, and its check point is
written; the answer goes out when all of them are. What could not be written was never popped.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.broker.attributes import MESSAGE_TYPE, PRIORITY
from sluice.broker.delay_forms import without
from sluice.broker.filters import Subscription
from sluice.broker.pop_log import PopLog, retry_topic
from sluice.broker.pop_revive import ORIGIN_GROUP, POP_TICKET
from sluice.broker.pop_state import (
    ORDER_REVIVE_QUEUE,
    CheckPoint,
    OrderWindow,
    PopQueue,
    PopState,
    QueueName,
)
from sluice.broker.priorities import priority_factor
from sluice.broker.topics import RETRY_PREFIX, REVIVE_QUEUES, TopicSettings
from sluice.errors import MessageIllegal, RecordDamaged, SluiceError
from sluice.model import Buffer, Message
from sluice.protocol import records
from sluice.storage.store import ColdRead, ReadResult, ReadStatus

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

COUNT_MAX: Final = 32
NORMAL: Final = "0"
RETRY: Final = "1"
_RETRY_FIRST_PERCENT: Final = 20
_ROUNDS_MAX: Final = 8  # of a filter that finds nothing: each looks at some hundreds of messages
# A read that found nothing may find something further on.
_GO_ON: Final = (
    ReadStatus.NO_MATCHED_MESSAGE,
    ReadStatus.OFFSET_TOO_SMALL,
    ReadStatus.OFFSET_OVERFLOW_BADLY,
)
_OFFSET: Final = Struct(">q")
_OFFSET_AT: Final = 20
_POSITION_AT: Final = 28

log_lines = logging.getLogger("sluice.pop")


@dataclass(slots=True)
class PopRequest:
    """What a consumer asks for."""

    group: str
    topic: str
    queue_id: int  # -1: any
    count_max: int
    invisible_ms: int
    poll_ms: int
    born_ms: int
    from_end: bool
    order: bool = False
    attempt: str = ""
    expression: str | None = None
    expression_kind: str | None = None


@dataclass(slots=True)
class Part:
    """What was found in one queue."""

    mark: str
    queue_id: int
    start: int
    offsets: list[int]
    messages: list[memoryview]
    next_offset: int
    taken: CheckPoint | OrderWindow | None = None
    before: OrderWindow | None = None  # the window that this one took the place of
    epoch: int = 0
    failed: bool = False

    @property
    def counts(self) -> list[tuple[int, int]]:
        """(offset, how often it was popped before) of those that were; -1 stands for all."""
        window = self.taken
        if not isinstance(window, OrderWindow):
            return []
        known = [(offset, window.counts.get(offset, 0)) for offset in self.offsets]
        return [*(pair for pair in known if pair[1]), (-1, min(count for _, count in known))]


class Popped(NamedTuple):
    """What a pop found; nothing where there are no parts."""

    pop_ms: int
    revive_queue: int
    rest: int
    parts: list[Part]
    pieces: list[Buffer]  # whole entries, for the wire


Gathered = Callable[[Popped | None, SluiceError | None], None]


@dataclass(slots=True)
class Taking:
    """What all pops of a broker share."""

    core: BrokerCore
    state: PopState
    log: PopLog
    turn: int = field(default=0)  # of the revive queues

    def plan(self, request: PopRequest, settings: TopicSettings) -> Iterator[QueueName]:
        """The queues to look at, in order; retries are mostly the last, but not always."""
        group, topic = request.group, request.topic
        retries: list[QueueName] = []
        again = self.core.topics.get(retry_topic(group, topic))
        if again is not None and not request.order and not topic.startswith(RETRY_PREFIX):
            retries = [(group, again.name, queue_id) for queue_id in range(again.read_queues)]
        draw = random.randrange(100)
        is_by_priority = (
            settings.attributes.get(MESSAGE_TYPE) == PRIORITY
            and not request.order
            and draw < self._priority_factor(group)
        )
        # What comes again has no priority any more: it must not come before what has one.
        first = not is_by_priority and draw < _RETRY_FIRST_PERCENT
        if first:
            yield from retries
        if request.queue_id >= 0:
            yield group, topic, request.queue_id
        else:
            count = settings.read_queues
            begin = random.randrange(count) if count else 0
            ids: Iterator[int] = iter([(begin + step) % count for step in range(count)])
            if is_by_priority:
                ids = reversed(range(count))
            yield from ((group, topic, queue_id) for queue_id in ids)
        if not first:
            yield from retries

    def _priority_factor(self, group: str) -> int:
        known = self.core.groups.get(group)
        return priority_factor({} if known is None else known.extra.get("attributes") or {})

    def begin_offset(self, name: QueueName, request: PopRequest, *, peek: bool = False) -> int:
        """Where the next pop of a queue begins. May raise ColdRead."""
        core = self.core
        committed = core.offsets.committed(*name)
        if committed is None:
            committed = self._first_offset(name, request)
            if not peek:
                core.offsets.commit(*name, committed)
        queue = self.state.queues.get(name)
        if queue is None:
            return committed
        if request.order:
            left = self.state.unacknowledged(queue)
            if left:
                return left[0]
        return max(committed, queue.next_offset)

    def _first_offset(self, name: QueueName, request: PopRequest) -> int:
        """Where a group begins that never was here: a young queue is read whole, as by pulls."""
        _, topic, queue_id = name
        store = self.core.store
        low = store.min_offset(topic, queue_id)
        if not request.from_end or low == 0 or topic.startswith(RETRY_PREFIX):
            return low
        return max(low, store.max_offset(topic, queue_id) - 1)  # RocketMQ begins with the last one

    def next_revive_queue(self, request: PopRequest) -> int:
        if request.order:
            return ORDER_REVIVE_QUEUE
        self.turn = (self.turn + 1) % REVIVE_QUEUES
        return self.turn


class Gathering:
    """One pop on its way. `peek`: what is found is not taken."""

    def __init__(
        self,
        shared: Taking,
        request: PopRequest,
        subscription: Subscription,
        plan: Iterator[QueueName],
        done: Gathered,
        *,
        peek: bool = False,
    ) -> None:
        self._shared = shared
        self._core = shared.core
        self._state = shared.state
        self._request = request
        self._subscription = subscription
        self._plan = plan
        self._done = done
        self._peek = peek
        self._pop_ms = shared.core.now_ms()
        self._revive_queue = shared.next_revive_queue(request)
        self._parts: list[Part] = []
        self._count = 0
        self._bytes_left = shared.core.config.pull_bytes_max
        self._rest = 0
        self._unwritten = 0
        self._is_over = False
        self._in_loop = False
        self._error: SluiceError | None = None

    # ---------------------------------------------------------------------------- queue after queue

    def go_on(self) -> None:
        """Look at queues; where one has to be waited for, that one goes on from there."""
        self._in_loop = True
        for name in self._plan:
            if not self._look_at(name):
                self._in_loop = False
                return
        self._in_loop = False
        self._is_over = True
        if not self._unwritten:
            self._finish()

    def _look_at(self, name: QueueName) -> bool:
        """Take what a queue has; False where it has to be waited for."""
        core, request, state = self._core, self._request, self._state
        if not self._peek:
            core.offsets.take_reset(*name)  # the state heard of it when it was made
        try:
            behind = core.store.max_offset(*name[1:]) - self._begin_offset(name)
        except ColdRead:
            behind = 1  # the read waits for the disk
        if behind == 0 or (
            # What waits behind an ordered message is no reason to ask again.
            request.order and state.is_blocked(name, request.attempt, self._pop_ms)
        ):
            return True
        queue = state.queue(name)
        has_enough = self._count >= request.count_max or self._bytes_left <= 0
        # Who only looks takes nothing away from a pop that waits for the disk, and holds none up.
        is_read = queue.reading and not self._peek
        if has_enough or is_read or self._is_full(queue):
            self._rest += max(0, behind)
            return True
        return self._read(name, queue)

    def _begin_offset(self, name: QueueName) -> int:
        return self._shared.begin_offset(name, self._request, peek=self._peek)

    def _is_full(self, queue: PopQueue) -> bool:
        limit = self._core.config.pop_inflight_per_queue_max
        return not self._peek and len(queue.flights) >= limit

    def _read(self, name: QueueName, queue: PopQueue) -> bool:
        """Returns whether the answer is there already."""
        core = self._core
        _, topic, queue_id = name
        wants = None if topic.startswith(RETRY_PREFIX) else self._subscription.accept
        watch = core.expiry.watch(topic)
        begin = -1
        is_answered = False

        def read(offset: int) -> ReadResult:
            return core.unfolding.reader(topic, queue_id)(
                topic,
                queue_id,
                offset,
                count_max=self._request.count_max - self._count,
                bytes_max=self._bytes_left,
                accept=wants if watch is None else watch.test(wants),
            )

        def ask() -> ReadResult:
            nonlocal begin
            begin = offset = self._begin_offset(name)
            result = read(offset)
            for _ in range(_ROUNDS_MAX):
                if result.status not in _GO_ON or result.next_offset == offset:
                    break
                offset = result.next_offset
                result = read(offset)
            return result

        def answered(result: ReadResult | None, error: BaseException | None) -> None:
            nonlocal is_answered
            is_answered = True
            if not self._peek:
                queue.reading = False
            if result is None:
                self._failed(name, error)
            else:
                if watch is not None:
                    watch.done()
                if begin == self._begin_offset(name):
                    self._found(name, queue, begin, result)
                else:  # somebody moved the group while the disk was read
                    self._plan = chain((name,), self._plan)
            if not self._in_loop:
                self.go_on()

        if not self._peek:
            queue.reading = True
        core.store.call(ask, answered)
        return is_answered

    def _failed(self, name: QueueName, error: BaseException | None) -> None:
        """A queue that cannot be read must not keep the others from being popped."""
        log_lines.error("queue %d of %s cannot be popped: %s", name[2], name[1], error)
        if self._error is None and not isinstance(error, RecordDamaged):
            self._error = error if isinstance(error, SluiceError) else SluiceError(str(error))

    # ---------------------------------------------------------------------------------------- found

    def _found(self, name: QueueName, queue: PopQueue, begin: int, result: ReadResult) -> None:
        self._rest += max(0, result.max_offset - result.next_offset)
        part = self._part(name, queue, begin, result) if result.count else None
        if part is None:
            if result.next_offset != begin and not self._peek:
                self._pass_over(name, queue, result.next_offset)
            return
        self._parts.append(part)
        self._count += len(part.offsets)
        self._bytes_left -= sum(map(len, part.messages))
        if not self._peek:
            self._take(name, queue, part)

    def _part(
        self, name: QueueName, queue: PopQueue, begin: int, result: ReadResult
    ) -> Part | None:
        """What of a read is this group's and not done with already."""
        group, topic, queue_id = name
        mark = NORMAL
        found = [(_OFFSET.unpack_from(each, _OFFSET_AT)[0], each) for each in result.messages]
        if topic.startswith(RETRY_PREFIX):
            mark = RETRY
            found = [pair for pair in found if _is_of(group, pair[1])]
        if self._request.order and queue.early:
            found = [pair for pair in found if pair[0] not in queue.early]
        if not found:
            return None
        start = min(begin, found[0][0])
        offsets = [offset for offset, _ in found]
        messages = [message for _, message in found]
        return Part(mark, queue_id, start, offsets, messages, result.next_offset, epoch=queue.epoch)

    def _pass_over(self, name: QueueName, queue: PopQueue, next_offset: int) -> None:
        """Nothing up to here is wanted, or nothing is there: the queue's end was elsewhere."""
        queue.next_offset = next_offset
        self._core.offsets.commit(*name, next_offset)

    def _take(self, name: QueueName, queue: PopQueue, part: Part) -> None:
        request, state, log = self._request, self._state, self._shared.log
        self._unwritten += 1
        invisible_ms, offsets = request.invisible_ms, tuple(part.offsets)

        def told(error: SluiceError | None) -> None:
            self._unwritten -= 1
            if error is None:
                self._written(name, queue, part)
            else:
                part.failed = True
                self._error = error
                if isinstance(part.taken, OrderWindow):
                    state.close_window(part.taken, part.before)
                elif part.taken is not None:
                    state.give_back(part.taken)
            if self._is_over and not self._unwritten:
                self._finish()

        try:
            if request.order:
                part.taken = window = OrderWindow(
                    *(name, part.start, self._pop_ms, invisible_ms),
                    *(part.queue_id % REVIVE_QUEUES, offsets, request.attempt),
                )
                part.before = state.open_window(window)
                log.window(window, told)
            else:
                part.taken = point = CheckPoint(
                    name, part.start, self._pop_ms, invisible_ms, self._revive_queue, offsets
                )
                (point.oldest,) = _OFFSET.unpack_from(part.messages[0], _POSITION_AT)
                state.take(point, part.next_offset)
                log.taken(point, told)
        except SluiceError as error:
            told(error)

    def _written(self, name: QueueName, queue: PopQueue, part: Part) -> None:
        """A check point is safe: so is that the group has come so far."""
        if queue.epoch == part.epoch:
            next_offset = part.offsets[0] if self._request.order else part.next_offset
            self._core.offsets.commit(*name, next_offset)

    def _finish(self) -> None:
        parts = [part for part in self._parts if not part.failed]
        if not parts and self._error is not None:
            self._done(None, self._error)
            return
        pieces: list[Buffer] = []
        for part in parts:
            if part.mark == RETRY and not self._request.topic.startswith(RETRY_PREFIX):
                pieces += [self._with_ticket(part, message) for message in part.messages]
            else:
                pieces += part.messages
        self._done(Popped(self._pop_ms, self._revive_queue, self._rest, parts, pieces), None)

    def _with_ticket(self, part: Part, message: memoryview) -> Buffer:
        """A message of a retry topic as its consumer expects it: of the topic that it asked for,
        and with what acknowledges it, which the client cannot put together itself.
        """
        entry = records.decode(message)
        config, encoder = self._core.config, self._core.store.encoder
        ticket = (
            f"{part.start} {self._pop_ms} {self._request.invisible_ms} {self._revive_queue} "
            f"{part.mark} {config.broker_name} {part.queue_id} {entry.queue_offset}"
        )
        properties = without(entry.properties, (b"__CRC32#", POP_TICKET))
        shown = Message(
            self._request.topic,
            entry.queue_id,
            entry.body,
            properties + POP_TICKET + b"\x01%s\x02" % ticket.encode(),
            entry.flag,
            entry.sys_flag,
            entry.born_ms,
            entry.born_host,
            entry.reconsume_times,
            entry.prepared_offset,
        )
        topic = shown.topic.encode()
        try:
            size = encoder.measure(shown, topic)
        except MessageIllegal:
            return message  # no room for it: the client reads the mark from the retry topic's name
        return encoder.encode(
            shown, topic, size, entry.queue_offset, entry.position, entry.store_ms
        )


def _is_of(group: str, message: memoryview) -> bool:
    """Two pairs of group and topic may have one retry topic: a_b and c, a and b_c."""
    owner = records.property_value(records.decode(message).properties, ORIGIN_GROUP)
    return owner is None or owner == group.encode()
