"""This module is the desk for dead letters: they are listed page by page, and sent once more.

A dead letter goes back to the group that failed with it, which begins to count its tries anew; or,
where that is asked for, to the topic that it came from, for all groups that read it. It stays where
it is, but is sent only once: what was sent is noted (`retry_notes.py`) and found again after a
crash, because the copy names the dead letter it was made from. Every letter has an outcome of its
own.

It knows neither a wire nor a socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluice.broker import retry_forms as forms
from sluice.broker.topics import CLOSED_TOPICS, DEAD_PREFIX, RETRY_PREFIX, SYSTEM_PREFIX
from sluice.errors import NoPermission, ParameterInvalid, RecordDamaged, SluiceError, TopicMissing
from sluice.model import Message, message_id
from sluice.protocol import records
from sluice.storage.store import ReadStatus

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

PAGE_MAX: Final = 1_000
RESEND_MAX: Final = 256
_PAGE_BYTES: Final = 8 << 20
RESENT: Final = "resent"
ALREADY: Final = "already resent"
MISSING: Final = "missing"
FAILED: Final = "failed"


class Filter(NamedTuple):
    """Which letters are wanted."""

    begin_ms: int = 0
    end_ms: int = 1 << 62
    key: str | None = None
    origin_topic: str | None = None


class Letter(NamedTuple):
    """A dead letter, without its body."""

    entry: records.Entry
    group: str
    resent: bool

    def to_json(self) -> dict[str, Any]:
        entry = self.entry
        properties = records.parse_properties(entry.properties)
        origin = forms.origin_of(entry, self.group)
        return {
            "offset": entry.queue_offset,
            "queueId": entry.queue_id,
            "msgId": message_id(entry.store_host, entry.position),
            "uniqKey": properties.get("UNIQ_KEY"),
            "keys": properties.get("KEYS"),
            "tags": properties.get("TAGS"),
            "originTopic": origin.topic.decode("utf-8", "replace"),
            "originMsgId": origin.message_id.decode("utf-8", "replace"),
            "originQueueId": _number(origin.queue_id),
            "originOffset": _number(origin.queue_offset),
            "bornTimestamp": entry.born_ms,
            "deadTimestamp": entry.store_ms,
            "reconsumeTimes": entry.reconsume_times,
            "bodyBytes": len(entry.body),
            "resent": self.resent,
        }


class Outcome(NamedTuple):
    """What became of one letter."""

    offset: int
    outcome: str
    remark: str = ""
    message_id: str = ""  # of the copy


PageDone = Callable[[list[Letter] | None, int, int, SluiceError | None], None]
ResendDone = Callable[[list[Outcome] | None, SluiceError | None], None]


class DeadLetters:
    """The dead letters of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        # Who waits for a letter that is on its way, by group, queue and offset.
        self._waiting: dict[tuple[str, int, int], list[Callable[[Outcome], None]]] = {}
        self.resent_count = 0

    # -------------------------------------------------------------------------------------- looking

    def page(
        self, group: str, queue_id: int, offset: int, count: int, wanted: Filter, done: PageDone
    ) -> None:
        """Letters from an offset on, the offset to go on from, and the end of the queue.

        A page ends early where it gets long: its letters may be fewer than were asked for.
        """
        self._require(group, queue_id)
        if not 1 <= count <= PAGE_MAX:
            raise ParameterInvalid(f"maxNum {count}: from 1 to {PAGE_MAX}")
        store, topic = self._core.store, f"{DEAD_PREFIX}{group}"

        def ask() -> tuple[list[Letter], int, int]:
            begin = max(offset, store.min_offset(topic, queue_id))
            if wanted.begin_ms > 0:
                begin = max(begin, store.offset_for_time(topic, queue_id, wanted.begin_ms))
            result = store.read(topic, queue_id, begin, count_max=count, bytes_max=_PAGE_BYTES)
            if result.status is not ReadStatus.FOUND:
                return [], max(begin, result.max_offset), result.max_offset
            entries = [records.decode(view) for view in result.messages]
            letters = [self._letter(group, entry) for entry in entries if _fits(entry, wanted)]
            over = entries[-1].store_ms > wanted.end_ms  # none of the later ones can fit
            return letters, result.max_offset if over else result.next_offset, result.max_offset

        def answered(
            result: tuple[list[Letter], int, int] | None, error: BaseException | None
        ) -> None:
            if result is None:
                done(None, 0, 0, _as_error(error))
            else:
                done(*result, None)

        store.call(ask, answered)

    def _letter(self, group: str, entry: records.Entry) -> Letter:
        notes = self._core.retry_notes
        return Letter(entry, group, notes.is_resent(group, entry.queue_id, entry.queue_offset))

    def _require(self, group: str, queue_id: int) -> None:
        settings = self._core.topics.get(f"{DEAD_PREFIX}{group}")
        if settings is None:
            raise TopicMissing(f"group {group} has no dead letters here")
        if not 0 <= queue_id < settings.read_queues:
            raise ParameterInvalid(f"queueId[{queue_id}]: {settings.read_queues} queues are there")

    # -------------------------------------------------------------------------------------- sending

    def resend(
        self, group: str, queue_id: int, offsets: list[int], *, to_topic: bool, done: ResendDone
    ) -> None:
        """Send letters once more; `done` gets an outcome for each, in their order."""
        self._require(group, queue_id)
        if not 1 <= len(offsets) <= RESEND_MAX:
            raise ParameterInvalid(f"{len(offsets)} dead letters at a time: from 1 to {RESEND_MAX}")
        if self._core.config.permission == "r":
            raise NoPermission(f"the broker[{self._core.config.broker_name}] sending is forbidden")
        store, topic = self._core.store, f"{DEAD_PREFIX}{group}"

        def ask() -> list[records.Entry | None]:
            return [self._entry(topic, queue_id, offset) for offset in offsets]

        def found(entries: list[records.Entry | None] | None, error: BaseException | None) -> None:
            if entries is None:
                done(None, _as_error(error))
            else:
                _Resending(self, group, queue_id, to_topic, done).run(offsets, entries)

        store.call(ask, found)

    def _entry(self, topic: str, queue_id: int, offset: int) -> records.Entry | None:
        store = self._core.store
        if not store.min_offset(topic, queue_id) <= offset < store.max_offset(topic, queue_id):
            return None
        try:
            result = store.read(topic, queue_id, offset, count_max=1)
        except RecordDamaged:
            return None
        entry = records.decode(result.messages[0]) if result.count else None
        return entry if entry is not None and entry.queue_offset == offset else None

    def send_one(
        self,
        group: str,
        entry: records.Entry,
        to_topic: bool,
        told: Callable[[Outcome], None],
    ) -> None:
        """Send one letter; `told` hears what became of it, now or when it is safe."""
        core, notes = self._core, self._core.retry_notes
        queue_id, offset = entry.queue_id, entry.queue_offset
        key = (group, queue_id, offset)
        if notes.is_resent(*key):
            waiting = self._waiting.get(key)
            if waiting is None:
                told(Outcome(offset, ALREADY))
            else:
                waiting.append(told)
            return

        def stored(error: SluiceError | None) -> None:
            waiting = self._waiting.pop(key)
            if error is not None:
                notes.undo_resent(*key)
                for each in (told, *waiting):
                    each(Outcome(offset, FAILED, str(error)))
                return
            self.resent_count += 1
            tag = records.property_value(message.properties, b"TAGS")
            code = records.java_hash(tag) if tag else 0
            core.polls.arrived((message.topic, message.queue_id), code)
            copy = message_id(core.store.encoder.store_host, placed.position)
            told(Outcome(offset, RESENT, "", copy))
            for each in waiting:
                each(Outcome(offset, ALREADY))

        try:
            message = self._copy(group, entry, to_topic)
            if core.store.log.end > core.admission.free_end:
                core.admission.admit(message.born_host, len(message.body))
            notes.note_resent(*key)
            try:
                placed = core.append(message, stored)
            except SluiceError:
                notes.undo_resent(*key)
                raise
        except SluiceError as error:
            told(Outcome(offset, FAILED, str(error)))
            return
        self._waiting[key] = []
        core.stats.stored(message.topic, 1, placed.size)

    def _copy(self, group: str, entry: records.Entry, to_topic: bool) -> Message:
        core = self._core
        if not to_topic:
            settings = core.groups.require(group)
            name = f"{RETRY_PREFIX}{group}"
            retry = core.topics.create_inner(name, max(1, settings.retry_queues))
            return forms.retry_form(entry, group, random.randrange(retry.write_queues), 0)
        origin = forms.origin_of(entry, group)
        name = origin.topic.decode("utf-8", "replace")
        target = core.topics.get(name)
        if target is None or name.startswith((DEAD_PREFIX, RETRY_PREFIX)):
            raise TopicMissing(f"topic[{name}] not exist: send it to the group instead")
        # A letter says itself where it came from, and who wrote it may have said anything.
        if name in CLOSED_TOPICS or name.startswith(SYSTEM_PREFIX):
            raise NoPermission(
                f"Sending message to topic[{name}] is forbidden: send it to the group instead"
            )
        if not target.writable:
            raise NoPermission(f"Sending message to topic[{name}] is forbidden.")
        queue_id = _number(origin.queue_id)
        if queue_id is None or queue_id >= target.write_queues:
            queue_id = random.randrange(target.write_queues)
        return forms.topic_form(entry, name, queue_id)


class _Resending:
    """Letters that are sent together, and what became of each so far."""

    def __init__(
        self, desk: DeadLetters, group: str, queue_id: int, to_topic: bool, done: ResendDone
    ) -> None:
        self._desk = desk
        self._group, self._queue_id, self._to_topic = group, queue_id, to_topic
        self._done = done
        self._outcomes: list[Outcome | None] = []
        self._left = 0

    def run(self, offsets: list[int], entries: list[records.Entry | None]) -> None:
        self._outcomes = [None] * len(offsets)
        self._left = len(offsets)
        for at, (offset, entry) in enumerate(zip(offsets, entries, strict=True)):
            if entry is None:
                self._told(at, Outcome(offset, MISSING, "there is no such dead letter"))
            else:
                self._desk.send_one(self._group, entry, self._to_topic, partial(self._told, at))

    def _told(self, at: int, outcome: Outcome) -> None:
        self._outcomes[at] = outcome
        self._left -= 1
        if not self._left:
            self._done([each for each in self._outcomes if each is not None], None)


def _fits(entry: records.Entry, wanted: Filter) -> bool:
    if not wanted.begin_ms <= entry.store_ms <= wanted.end_ms:
        return False
    if wanted.key is not None:
        key = wanted.key.encode()
        unique, keys, _ = records.message_keys(entry.properties)
        if key != unique and key not in keys.split(b" "):
            return False
    if wanted.origin_topic is not None:
        said = records.property_value(entry.properties, b"RETRY_TOPIC") or b""
        return said == wanted.origin_topic.encode()
    return True


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 19 else None


def _as_error(error: BaseException | None) -> SluiceError:
    return error if isinstance(error, SluiceError) else SluiceError(str(error))
