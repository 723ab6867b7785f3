"""This module is the service behind pop consumption: pop, acknowledge, change how long a message is
invisible, and bring back what nobody acknowledged.

Whatever changes is an entry of the revive topic before it is answered (`pop_log.py`), so that it
holds after a crash: what was acknowledged is not handed out again, what was not comes again. It
takes plain values and answers through callbacks, at once or later. It knows neither a wire nor a
socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.broker.filters import Subscription, check_usable, parse
from sluice.broker.pop_log import PopLog, retry_topic
from sluice.broker.pop_revive import Reviving
from sluice.broker.pop_state import (
    ORDER_REVIVE_QUEUE,
    CheckPoint,
    OrderWindow,
    PopQueue,
    PopState,
    QueueName,
)
from sluice.broker.pop_taking import COUNT_MAX, Gathering, Popped, PopRequest, Taking
from sluice.broker.pop_waiting import Holding, PopDone, Waiting
from sluice.broker.topics import RETRY_PREFIX, TopicSettings
from sluice.errors import (
    GroupMissing,
    MessageIllegal,
    NoPermission,
    NotInFlight,
    ParameterInvalid,
    RequestLate,
    SluiceError,
    TopicMissing,
)
from sluice.protocol import records
from sluice.storage.store import ColdRead, ReadResult

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

LATE_MS: Final = (
    500  # a request that is older than its wait by more than this is answered by nobody
)
POLL_MS_MAX: Final = 3_600_000
INVISIBLE_MS_MAX: Final = 24 * 3_600_000
DUE_A_TICK: Final = 1_000  # check points: more wait for the next tick

log_lines = logging.getLogger("sluice.pop")

Done = Callable[[SluiceError | None], None]


class Ticket(NamedTuple):
    """What a consumer was told with a message: it shows it to acknowledge the message."""

    start: int
    pop_ms: int
    revive_queue: int


class Changed(NamedTuple):
    """The new ticket of a message whose time was changed."""

    pop_ms: int
    invisible_ms: int
    revive_queue: int


class Pops:
    """Pop consumption on one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self.state = PopState()
        self.log = PopLog(core, self.state)
        self.reviving = Reviving(core, self.state, self.log)
        self._taking = Taking(core, self.state, self.log)
        self._acks: dict[CheckPoint, list[tuple[int, Done]]] = {}  # of this turn
        self._holding = Holding(core)
        self.popped = 0
        self.acknowledged = 0
        self.changed = 0
        core.offsets.on_reset.append(self._reset)

    def start(self) -> None:
        self.log.rebuild()
        self._core.store.housekeeping.rescuers.append(self._leave)

    def tick(self, now_ms: int) -> None:
        for item in self.state.due(now_ms, DUE_A_TICK):
            if isinstance(item, CheckPoint):
                self.reviving.begin(item)
            else:
                self._holding.stir(item.queue[1:])  # its next message is free
        self._write_acks()  # a note must not come before what it leaves out
        self.log.tick(now_ms)

    def _leave(self, position: int) -> bool:
        """Whether nothing below a position of the log is needed; what is comes again now."""
        points = [i for kept in self.state.kept for i in kept if isinstance(i, CheckPoint)]
        old = [point for point in points if point.oldest < position]
        for point in old[:DUE_A_TICK]:
            if point.oldest < 0:
                self._find_oldest(point)
            else:
                self.reviving.begin(point)
        return self.log.move_above(position) and not old

    def _find_oldest(self, point: CheckPoint) -> None:
        """Where the messages of a check point begin that was read from the log."""
        left = self.state.left(point)
        _, topic, queue_id = point.queue

        def found(result: ReadResult | None, error: BaseException | None) -> None:
            # What cannot be found is gone: it is noticed when it shall come again.
            messages = [] if result is None else result.messages
            point.oldest = records.decode(messages[0]).position if messages else 0

        store = self._core.store
        store.call(lambda: store.read(topic, queue_id, left[0], count_max=1, bytes_max=1), found)

    # -------------------------------------------------------------------------------------- popping

    def pop(self, request: PopRequest, owner: object, done: PopDone) -> None:
        """Answer through `done`, now or later; raises what is wrong with the request."""
        core = self._core
        now_ms = core.now_ms()
        if not request.born_ms:
            request.born_ms = now_ms
        late_ms = now_ms - request.born_ms - request.poll_ms
        if late_ms > LATE_MS:
            raise RequestLate(
                f"the broker[{core.config.broker_name}] pop message is timeout too much: by "
                f"{late_ms} ms; it was asked long ago, or the clocks differ"
            )
        if not 1 <= request.count_max <= COUNT_MAX:
            raise ParameterInvalid(
                f"the broker[{core.config.broker_name}] pop message's num is {request.count_max}; "
                f"allowed: 1 to {COUNT_MAX}"
            )
        if not 1 <= request.invisible_ms <= INVISIBLE_MS_MAX:
            raise ParameterInvalid(
                f"an invisible time of {request.invisible_ms} ms; allowed: 1 to {INVISIBLE_MS_MAX}"
            )
        settings = self._checked(request)
        subscription = parse(request.topic, request.expression or "*", request.expression_kind)
        check_usable(subscription, sql_filter=core.config.sql_filter)
        waiting = Waiting(request, subscription, owner, self._until(request, now_ms), done)
        self._gather(waiting, settings)

    @staticmethod
    def _until(request: PopRequest, now_ms: int) -> int:
        """How long a request may wait: its own time, by its own clock where that is earlier."""
        wait_ms = min(request.poll_ms, POLL_MS_MAX)
        return min(request.born_ms, now_ms) + wait_ms if wait_ms > 0 else 0

    def _checked(self, request: PopRequest, *, again: bool = False) -> TopicSettings:
        """The checks in RocketMQ's order; a group is made where that is allowed, but not again."""
        core = self._core
        topic, group = request.topic, request.group
        if core.config.permission == "w":
            raise NoPermission(f"the broker[{core.config.broker_name}] pop message is forbidden")
        settings = core.topics.get(topic)
        if settings is None:
            raise TopicMissing(f"topic[{topic}] not exist, apply first please!")
        if not settings.readable:
            raise NoPermission(f"the topic[{topic}] peeking message is forbidden")
        if not -1 <= request.queue_id < settings.read_queues:
            raise ParameterInvalid(
                f"queueId[{request.queue_id}] is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{settings.read_queues}]"
            )
        if core.store.state.counts_batches(topic):
            raise ParameterInvalid(
                f"topic {topic} stores whole batches (queue.type=BatchCQ): one message of them "
                "cannot be acknowledged; pull it"
            )
        known = core.groups.get(group) if again else core.groups.require(group)
        if known is None:
            raise GroupMissing(f"subscription group [{group}] does not exist, apply first please!")
        if not known.consume_enabled:
            raise NoPermission(f"subscription group no permission, {group}")
        if not core.groups.may_read(group, topic):
            raise NoPermission(f"the consumer group[{group}] is forbidden for topic[{topic}]")
        return settings

    def _try_again(self, waiting: Waiting) -> None:
        """Much may have changed while a request waited."""
        try:
            settings = self._checked(waiting.request, again=True)
        except SluiceError as error:
            waiting.done(None, "", error)
        else:
            self._gather(waiting, settings)

    def _gather(self, waiting: Waiting, settings: TopicSettings) -> None:
        """Look for messages; where there are none, wait for them as long as the request says."""
        core, request, done = self._core, waiting.request, waiting.done
        if self.state.in_flight >= core.config.pop_inflight_max:
            full = (
                f"{self.state.in_flight} popped messages are not acknowledged, the limit is "
                f"{core.config.pop_inflight_max} (pop_inflight_max)"
            )
            done(None, full, None)
            return

        def gathered(popped: Popped | None, error: SluiceError | None) -> None:
            if popped is None:
                done(None, "", error)
                return
            if not popped.parts:
                core.stats.get_miss += 1
                self._holding.hold(waiting, self._try_again)
                return
            count = sum(len(part.offsets) for part in popped.parts)
            self.popped += count
            byte_count = sum(map(len, popped.pieces))
            core.stats.handed_out(request.topic, request.group, count, byte_count)
            done(popped, "", None)
            if popped.rest:
                self._holding.stir((request.topic, request.queue_id))

        plan = self._taking.plan(request, settings)
        Gathering(self._taking, request, waiting.subscription, plan, gathered).go_on()

    # -------------------------------------------------------------------------------------- waiting

    def waiting_count(self, group: str, topic: str, queue_id: int) -> int:
        """How many pops of a queue wait for messages."""
        return self._holding.count(group, topic, queue_id)

    def notify(
        self, request: PopRequest, owner: object, done: Callable[[bool, bool], None]
    ) -> None:
        """Say when there is something to pop: `done(whether there is, too many wait already)`."""
        now_ms = self._core.now_ms()
        if not request.born_ms:
            request.born_ms = now_ms
        self._checked(request)
        subscription = parse(request.topic, request.expression or "*", request.expression_kind)
        check_usable(subscription, sql_filter=self._core.config.sql_filter)

        def answered(popped: Popped | None, full: str, error: SluiceError | None) -> None:
            done(popped is not None, bool(full))

        until_ms = self._until(request, now_ms)
        self._look(Waiting(request, subscription, owner, until_ms, answered))

    def _look(self, waiting: Waiting) -> None:
        request, subscription = waiting.request, waiting.subscription

        def looked(has_messages: bool) -> None:
            if has_messages:
                waiting.done(Popped(0, 0, 0, [], []), "", None)
            else:
                self._holding.hold(waiting, self._look, for_notice=True)

        def gathered(popped: Popped | None, error: SluiceError | None) -> None:
            # A pop finds out what is wrong, and whether there is more behind what was looked at.
            looked(popped is None or bool(popped.parts or popped.rest))

        settings = self._core.topics.get(request.topic)
        has_messages = self._has_messages(request)
        if settings is None or not has_messages or subscription.accept is None:
            looked(has_messages)
            return
        request.count_max = 1
        plan = self._taking.plan(request, settings)
        Gathering(self._taking, request, subscription, plan, gathered, peek=True).go_on()

    def _has_messages(self, request: PopRequest) -> bool:
        core = self._core
        settings = core.topics.get(request.topic)
        if settings is None:
            return False
        for name in self._taking.plan(request, settings):
            if request.order and self.state.is_blocked(name, request.attempt, core.now_ms()):
                continue
            try:
                begin = self._taking.begin_offset(name, request, peek=True)
                if core.store.max_offset(*name[1:]) > begin:
                    return True
            except ColdRead:
                return True  # a pop finds out
        return False

    def peek(
        self, request: PopRequest, done: Callable[[Popped | None, SluiceError | None], None]
    ) -> None:
        """What the next pop would find, and it finds it still."""
        settings = self._checked(request)
        plan = self._taking.plan(request, settings)
        everything = Subscription(request.topic)
        Gathering(self._taking, request, everything, plan, done, peek=True).go_on()

    # ------------------------------------------------------------------------------- acknowledging

    def acknowledge(self, name: QueueName, offset: int, ticket: Ticket, done: Done) -> None:
        """A message is done with; `done(None)` when that is safe. Raises why it is refused."""
        if ticket.revive_queue == ORDER_REVIVE_QUEUE:
            self._acknowledge_ordered(name, offset, ticket, done)
            return
        point = self._holder(name, offset, ticket)
        self.state.land(point, (offset,))
        # Those of a turn are written together.
        if not self._acks:
            self._core.call_soon(self._write_acks)
        self._acks.setdefault(point, []).append((offset, done))

    def _write_acks(self) -> None:
        acks, self._acks = self._acks, {}
        for point, some in acks.items():
            self._write_some(point, some)

    def _write_some(self, point: CheckPoint, some: list[tuple[int, Done]]) -> None:
        offsets = [offset for offset, _ in some]

        def told(error: SluiceError | None) -> None:
            if error is not None:
                self.state.lift(point, offsets, point.due_ms)
            else:
                self.acknowledged += len(offsets)
                self._room(point.queue, len(offsets))
            for _, done in some:
                done(error)

        try:
            self.log.acknowledged(point, offsets, told)
        except SluiceError as error:
            told(error)

    def _room(self, name: QueueName, count: int) -> None:
        """Pops that found a queue full of messages in flight find something again."""
        queue = self.state.queues.get(name)
        limit = self._core.config.pop_inflight_per_queue_max
        if queue is not None and len(queue.flights) < limit <= len(queue.flights) + count:
            self._holding.stir(name[1:])

    def _acknowledge_ordered(
        self, name: QueueName, offset: int, ticket: Ticket, done: Done
    ) -> None:
        state = self.state
        queue, window = self._window(name, offset, ticket)
        epoch = queue.epoch
        following = state.acknowledge(window, offset)

        def told(error: SluiceError | None) -> None:
            if error is not None:
                state.unacknowledge(window, offset)
            else:
                self.acknowledged += 1
                if queue.epoch == epoch:
                    self._core.offsets.commit(*name, following)
                if not state.is_blocked(name, "", self._core.now_ms()):
                    self._holding.stir(name[1:])
            done(error)

        try:
            self.log.acknowledged(window, (offset,), told)
        except SluiceError as error:
            told(error)

    def change(
        self,
        name: QueueName,
        offset: int,
        ticket: Ticket,
        invisible_ms: int,
        done: Callable[[Changed | None, SluiceError | None], None],
        *,
        suspend: bool = False,
    ) -> None:
        """A message stays invisible from now on for so long; its consumer gets a new ticket.

        `suspend`: it was put off, not tried, so that it comes again without one more try counted.
        """
        if not 0 <= invisible_ms <= INVISIBLE_MS_MAX:
            raise ParameterInvalid(
                f"an invisible time of {invisible_ms} ms; allowed: 0 to {INVISIBLE_MS_MAX}"
            )
        if ticket.revive_queue == ORDER_REVIVE_QUEUE:
            self._change_ordered(name, offset, ticket, invisible_ms, done, suspend=suspend)
            return
        state = self.state
        point = self._holder(name, offset, ticket)
        now_ms = self._core.now_ms()
        new = CheckPoint(name, offset, now_ms, invisible_ms, point.revive_queue, (offset,))
        new.oldest, new.suspended = point.oldest, suspend
        state.take(new, offset + 1)

        def told(error: SluiceError | None) -> None:
            if error is not None:
                state.take_over(new, point)
                done(None, error)
                return
            self.changed += 1
            done(Changed(now_ms, invisible_ms, point.revive_queue), None)

        try:
            self.log.taken(new, told)
        except SluiceError as error:
            told(error)

    def _change_ordered(
        self,
        name: QueueName,
        offset: int,
        ticket: Ticket,
        invisible_ms: int,
        done: Callable[[Changed | None, SluiceError | None], None],
        *,
        suspend: bool,
    ) -> None:
        _, window = self._window(name, offset, ticket)
        visible_ms = self._core.now_ms() + invisible_ms

        def told(error: SluiceError | None) -> None:
            if error is not None:
                done(None, error)
                return
            self.state.change_window(window, offset, visible_ms, suspend=suspend)
            self.changed += 1
            span_ms = visible_ms - window.pop_ms
            done(Changed(window.pop_ms, span_ms, ORDER_REVIVE_QUEUE), None)

        try:
            self.log.changed(window, offset, visible_ms, told, suspend=suspend)
        except SluiceError as error:
            told(error)

    # --------------------------------------------------------------------------- what is refused

    def check_offset(self, name: QueueName, offset: int) -> None:
        """Refuse an acknowledgement of a message that is not there."""
        _, topic, queue_id = name
        core = self._core
        settings = core.topics.get(topic)
        if settings is None:
            raise TopicMissing(f"topic[{topic}] not exist, apply first please!")
        if not 0 <= queue_id < settings.read_queues:
            raise MessageIllegal(
                f"queueId[{queue_id}] is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{settings.read_queues}]"
            )
        low = core.store.min_offset(topic, queue_id)
        try:
            high = core.store.max_offset(topic, queue_id)
        except ColdRead:
            high = offset + 1  # the disk knows; whether it was popped is known without it
        if not low <= offset < high:
            raise NotInFlight(
                f"offset is illegal, key:{topic}@{queue_id}, commit:{offset}, store:{low}~{high}"
            )

    def _holder(self, name: QueueName, offset: int, ticket: Ticket) -> CheckPoint:
        """The check point that a ticket is of."""
        point = self.state.holder(name, offset)
        group, topic, queue_id = name
        if point is None:
            self.check_offset(name, offset)
            raise NotInFlight(
                f"offset {offset} of queue {queue_id} of {topic} is not in flight for group "
                f"{group}: it was never popped, is acknowledged already, or its time was over"
            )
        if (point.start, point.pop_ms) != (ticket.start, ticket.pop_ms):
            raise NotInFlight(
                f"offset {offset} of queue {queue_id} of {topic} is in flight for group {group} "
                f"by another pop, of {point.pop_ms}; this one's time is over, or it was changed"
            )
        return point

    def _window(self, name: QueueName, offset: int, ticket: Ticket) -> tuple[PopQueue, OrderWindow]:
        """The window that a ticket is of."""
        group, topic, queue_id = name
        queue = self.state.queues.get(name)
        window = None if queue is None else queue.window
        what = f"offset {offset} of queue {queue_id} of {topic}"
        if queue is None or window is None or window.pop_ms != ticket.pop_ms:
            self.check_offset(name, offset)
            raise NotInFlight(
                f"{what} is not in flight in order for group {group} by a pop of {ticket.pop_ms}: "
                "it is acknowledged already, or was popped again"
            )
        if offset not in window.offsets:
            raise MessageIllegal(f"{what} is illegal: the pop of {window.pop_ms} did not have it")
        if offset in queue.early:
            raise NotInFlight(f"{what} is acknowledged already")
        return queue, window

    # --------------------------------------------------------------------- what others do to queues

    def _reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """An administrator moves a group."""
        name = (group, topic, queue_id)
        if name in self.state.queues:
            self.state.reset(name, offset)
            self.log.reset(name, offset)

    def forget_group(self, group: str) -> None:
        """A group is gone: so is what it popped."""
        for name in [name for name in self.state.queues if name[0] == group]:
            self.state.take_out(name)
            try:
                self.log.cleared(name)
            except SluiceError as error:
                log_lines.warning("group %s is gone, a restart may not know it: %s", group, error)

    def take_topic(self, topic: str) -> dict[QueueName, PopQueue]:
        """A topic is being deleted: what was popped of it is nobody's. The store knows it."""
        taken: dict[QueueName, PopQueue] = {}
        for name in [name for name in self.state.queues if name[1] == topic]:
            queue = self.state.take_out(name)
            if queue is not None:
                taken[name] = queue
        return taken

    def give_back(self, taken: dict[QueueName, PopQueue]) -> None:
        """It could not be deleted."""
        for name, queue in taken.items():
            self.state.put_back(name, queue)

    def retry_topics(self, topic: str) -> list[str]:
        """The retry topics that go with a topic: those that hold its messages only."""
        core = self._core
        groups = [settings.name for settings in core.groups.all()]
        names = [retry_topic(group, topic) for group in groups]
        return [
            name
            for name in names
            if name != topic
            and core.topics.get(name) is not None
            and not any(
                name == retry_topic(group, other.name)
                for group in groups
                if name.startswith(f"{RETRY_PREFIX}{group}_")
                for other in core.topics.all()
                if other.name not in (topic, name)
            )
        ]

    def in_flight(self, group: str, topic: str, queue_id: int) -> int:
        """How many messages of a queue a group's consumers have and did not acknowledge."""
        return self.state.count((group, topic, queue_id), self._core.now_ms())

    def in_flight_by_pair(self) -> dict[tuple[str, str], int]:
        """The same by topic and group, of those that have any."""
        counts: dict[tuple[str, str], int] = {}
        now_ms = self._core.now_ms()
        for name in self.state.queues:
            count = self.state.count(name, now_ms)
            if count:
                key = (name[1], name[0])
                counts[key] = counts.get(key, 0) + count
        return counts
