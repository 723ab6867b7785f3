"""This module brings popped messages back that nobody acknowledged in time.

A copy goes into the retry topic of group and topic, with one more try counted, and from there to
the next consumer that pops; after the group's maximum it is a dead letter. The copy is written
first, then its check point is told: what a crash cuts off between them the next start finds by the
copy's origin. What cannot be written now is tried again a second later; a message that retention
took meanwhile cannot come again, and the log says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from sluice.broker.delay_forms import without
from sluice.broker.pop_log import Done, PopLog, retry_topic
from sluice.broker.pop_state import CheckPoint, PopState
from sluice.broker.retry_forms import Origin, dead_form, origin_of
from sluice.broker.topics import DEAD_PREFIX, RETRY_PREFIX
from sluice.errors import MessageIllegal, RecordDamaged, SluiceError
from sluice.model import Message
from sluice.protocol import records

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

AGAIN_MS: Final = 1_000
FIRST_POP: Final = b"1ST_POP_TIME"
POP_TICKET: Final = b"POP_CK"
ORIGIN_GROUP: Final = b"ORIGIN_GROUP"
_ANEW: Final = frozenset(
    (
        *(b"RETRY_TOPIC", b"ORIGIN_MESSAGE_ID", b"ORIGIN_QUEUE_ID", b"ORIGIN_QUEUE_OFFSET"),
        *(b"__CRC32#", POP_TICKET, FIRST_POP, ORIGIN_GROUP),
    )
)

log_lines = logging.getLogger("sluice.pop")


class Reviving:
    """The messages of one broker that come again."""

    def __init__(self, core: BrokerCore, state: PopState, log: PopLog) -> None:
        self._core = core
        self._state = state
        self._log = log
        self.revived = 0
        self.died = 0
        self.lost = 0  # that were gone when they should have come again

    def begin(self, point: CheckPoint) -> None:
        """The time of a check point is over: what is left of it comes again."""
        offsets = self._state.left(point)
        if point.moving or not offsets:
            return
        point.moving = True
        store = self._core.store
        _, topic, queue_id = point.queue

        def entry_at(offset: int) -> records.Entry | None:
            try:
                read = self._core.unfolding.reader(topic, queue_id)
                found = read(topic, queue_id, offset, count_max=1, bytes_max=1)
            except RecordDamaged as error:
                log_lines.error("a popped message cannot come again: %s", error)
                return None
            if not found.count:
                return None
            entry = records.decode(found.messages[0])
            return entry if entry.queue_offset == offset else None

        def ask() -> list[records.Entry | None]:
            return [entry_at(offset) for offset in offsets]

        def answered(
            entries: list[records.Entry | None] | None, error: BaseException | None
        ) -> None:
            point.moving = False
            if entries is None:
                log_lines.warning("popped messages come again later than they should: %s", error)
                self._later(point)
                return
            held = frozenset(self._state.left(point))  # an acknowledgement may have come meanwhile
            pairs = zip(offsets, entries, strict=True)
            self._move(point, [(offset, entry) for offset, entry in pairs if offset in held])

        store.call(ask, answered)

    def _later(self, point: CheckPoint) -> None:
        self._state.postpone(point, self._core.now_ms() + AGAIN_MS)

    def _move(self, point: CheckPoint, found: list[tuple[int, records.Entry | None]]) -> None:
        """Write the copies, and behind them that they are written."""
        moved: list[int] = []
        topics: set[str] = set()
        try:
            for offset, entry in found:
                if entry is None:
                    self.lost += 1
                    log_lines.error(
                        "message %d of queue %d of %s was popped by %s and is gone: it does not "
                        "come again",
                        *(offset, point.queue[2], point.queue[1], point.queue[0]),
                    )
                else:
                    topics.add(self._copy(point, entry))
                moved.append(offset)
        except SluiceError as error:
            log_lines.warning("popped messages come again later than they should: %s", error)
        self._state.land(point, moved)
        if point.waiting:
            self._later(point)
        if moved:
            self._tell(point, moved, self._told(point, moved, topics))

    def _tell(self, point: CheckPoint, moved: list[int], told: Done) -> None:
        try:
            self._log.acknowledged(point, moved, told)
        except SluiceError as error:
            told(error)

    def _told(self, point: CheckPoint, moved: list[int], topics: set[str]) -> Done:
        def told(error: SluiceError | None) -> None:
            if error is not None:
                self._state.lift(point, moved, self._core.now_ms() + AGAIN_MS)
                return
            for topic in topics:
                self._core.polls.arrived((topic, 0), 0)

        return told

    def _copy(self, point: CheckPoint, entry: records.Entry) -> str:
        """Append the copy of a message; returns the topic that it is in now."""
        core = self._core
        group = point.queue[0]
        settings = core.groups.get(group)
        times = entry.reconsume_times + (not point.suspended)
        if settings is not None and times > max(0, settings.retry_max):
            name = f"{DEAD_PREFIX}{group}"
            core.topics.create_inner(name, 1)
            placed = core.append(dead_form(_of_group(entry, group), group, entry.reconsume_times))
            core.stats.stored(name, 1, placed.size)
            self.died += 1
            log_lines.info("a message of %s is a dead letter of %s", point.queue[1], group)
            return name
        name = retry_topic(group, point.queue[1])
        if core.topics.get(name) is None:
            core.topics.create_inner(name, 1)
            core.offsets.commit(group, name, 0, 0)
        copy = retry_copy(entry, group, name, times, point.pop_ms)
        try:
            placed = core.append(copy)
        except MessageIllegal:
            # No room for what the broker adds: the message itself is what counts.
            copy.properties = without(entry.properties, (b"__CRC32#",))
            placed = core.append(copy)
        core.stats.stored(name, 1, placed.size)
        self.revived += 1
        return name


def retry_copy(entry: records.Entry, group: str, topic: str, times: int, pop_ms: int) -> Message:
    """What a group gets again of a message that it popped."""
    first = records.property_value(entry.properties, FIRST_POP)
    if first is None or not entry.reconsume_times:
        first = b"%d" % pop_ms
    return Message(
        topic,
        0,
        bytes(entry.body),
        without(entry.properties, _ANEW)
        + _origin(entry, group).properties()
        + b"%s\x01%s\x02%s\x01%s\x02" % (FIRST_POP, first, ORIGIN_GROUP, group.encode()),
        entry.flag,
        entry.sys_flag & ~records.SYS_TX_MASK,
        entry.born_ms,
        entry.born_host,
        times,
        entry.position,
    )


def _origin(entry: records.Entry, group: str) -> Origin:
    """Where the message was at first: a copy of ours says it."""
    return origin_of(_of_group(entry, group), group)


def _of_group(entry: records.Entry, group: str) -> records.Entry:
    """An entry of a retry topic for pops, as one of the group's: what it says of itself is ours."""
    if entry.topic.startswith(f"{RETRY_PREFIX}{group}_"):
        return entry._replace(topic=f"{RETRY_PREFIX}{group}")
    return entry
