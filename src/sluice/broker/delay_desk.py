"""This module takes timed messages back, and lists what waits.

A producer takes a message back with the handle that came with the answer to its send. What says so
is an entry of the log, behind the one that waits and with its position as origin, in the form that
Apache's broker reads too; so a message that was taken back stays so after a crash. The waiting one
is found by its unique key.

This module knows no wire format.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.broker import delay_forms
from sluice.broker.browsing import ask_each
from sluice.broker.delays import Waiting
from sluice.broker.timer_index import OFFSET_MASK, key_of
from sluice.broker.topics import TIMER_TOPIC
from sluice.errors import (
    Busy,
    IllegalOperation,
    NoPermission,
    RecordDamaged,
    SluiceError,
    Stopping,
    TopicMissing,
)
from sluice.protocol import records

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.delays import Delays

Recalled = Callable[[SluiceError | None], None]

SCANNED_MAX: Final = 256  # entries read for one page of the list


class Delayed(NamedTuple):
    """A message that waits."""

    item: Waiting
    topic: str
    queue_id: int
    keys: str
    unique_key: str
    position: int
    body_bytes: int
    store_ms: int


class DelayedPage(NamedTuple):
    """Some of what waits, in order of time; `after` is where the next page begins, if any."""

    found: list[Delayed]
    after: Waiting | None


class DelayDesk:
    """What people ask about waiting messages of one broker."""

    def __init__(self, core: BrokerCore, delays: Delays) -> None:
        self._core = core
        self._delays = delays

    # --------------------------------------------------------------------------------- taking back

    def recall(self, handle: delay_forms.Handle, producer_group: str, done: Recalled) -> None:
        """Take a timed message back."""
        store = self._core.store

        def found(views: list[memoryview] | None, error: BaseException | None) -> None:
            if views is None:
                done(error if isinstance(error, SluiceError) else SluiceError(str(error)))
                return
            entries = [records.decode(view) for view in views]
            store.call(self._delays.take_new, lambda _, error: take(entries, error))

        def take(entries: list[records.Entry], error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                self._take(entries, handle, producer_group, done)
            except SluiceError as refusal:
                done(refusal)

        indexing = store.indexing
        if not indexing.live and not indexing.failure:
            raise Busy("the key index is made anew after the start; try again in a moment")
        store.query_key(TIMER_TOPIC, handle.unique_key, found)

    def handle(self, topic: str, text: str) -> delay_forms.Handle:
        """A handle with which a message can be taken back; raises why not, in Apache's words."""
        core = self._core
        if not core.config.recall_messages:
            raise NoPermission("recall failed, operation is forbidden")
        if core.config.permission == "r":
            raise Stopping("recall failed, broker service not available")
        if core.topics.get(topic) is None:
            raise TopicMissing(f"recall failed, the topic[{topic}] not exist")
        handle = delay_forms.read_handle(text)
        if handle.topic != topic:
            raise IllegalOperation("recall failed, topic not match")
        if handle.broker_name != core.config.broker_name:
            raise IllegalOperation("recall failed, broker service not available")
        left_ms = handle.due_ms + 1 - core.now_ms()
        if not 0 < left_ms <= core.config.timer_max_delay_ms + 1:
            raise IllegalOperation("recall failed, timestamp invalid")
        if not core.store.config.key_index:
            raise IllegalOperation("recall failed, messages are not found by key (key_index)")
        return handle

    def _take(
        self,
        entries: list[records.Entry],
        handle: delay_forms.Handle,
        producer_group: str,
        done: Recalled,
    ) -> None:
        """Of the timers with this key, take those that wait. One that was sent twice is two."""
        delays, core = self._delays, self._core
        mine = [entry for entry in entries if _is_meant(entry, handle)]
        gone = {e.prepared_offset for e in mine if _says_so(e)}
        waiting = [
            (Waiting(handle.due_ms, 0, entry.queue_offset, entry.position), entry)
            for entry in mine
            if not _says_so(entry)
        ]
        waiting = [each for each in waiting if delays.index.has(each[0].due_ms, each[0].offset)]
        if not waiting:
            if gone:
                done(None)  # it was taken back before, and once more is once
                return
            raise IllegalOperation("no message of this handle waits here")
        for number, (item, entry) in enumerate(waiting, 1):
            is_last = number == len(waiting)

            def told(
                error: SluiceError | None, item: Waiting = item, is_last: bool = is_last
            ) -> None:
                if error is None:
                    delays.recalled += 1
                else:
                    delays.wait_again([item])
                if is_last:
                    done(error)

            form = delay_forms.recall_form(entry, handle, producer_group, core.now_ms())
            core.append(form, told)
            delays.leave(item)

    # -------------------------------------------------------------------------------------- listing

    def page(
        self,
        after: Waiting | None,
        topic: str | None,
        done: Callable[[DelayedPage | None, BaseException | None], None],
    ) -> None:
        """Messages that wait, after a given one, in order of time; perhaps of one topic only."""
        begin = after if after is not None else Waiting(0, 0, 0)

        def scanned(items: list[Waiting] | None, error: BaseException | None) -> None:
            if items is None:
                done(None, error)
                return
            asks = [partial(self._row, item) for item in items]
            last = items[-1] if len(items) == SCANNED_MAX else None
            ask_each(self._core, asks, lambda rows, error: read(rows, last, error))

        def read(
            rows: list[Delayed | None] | None, last: Waiting | None, error: BaseException | None
        ) -> None:
            if rows is None:
                done(None, error)
                return
            found = [row for row in rows if row is not None and topic in (None, row.topic)]
            done(DelayedPage(found, last), None)

        self._core.store.call(lambda: self._after(begin), scanned)

    def _after(self, begin: Waiting) -> list[Waiting]:
        """The next that wait. May raise ColdRead."""
        delays = self._delays
        delays.take_new()
        last = OFFSET_MASK if begin.level else begin.offset
        timers = delays.index.after(key_of(begin.due_ms, last), SCANNED_MAX)
        found = [Waiting(due_ms, 0, offset, at) for due_ms, offset, at in timers]
        for level in delays.levels:
            found += delays.level_after(level, begin, SCANNED_MAX)
        return sorted(found)[:SCANNED_MAX]

    def _row(self, item: Waiting) -> Delayed | None:
        try:
            entry = self._delays.entry_of(item)
        except RecordDamaged:
            return None
        if entry is None:
            return None
        texts = records.parse_properties(entry.properties)
        queue_id = texts.get("REAL_QID", "")
        return Delayed(
            item,
            texts.get("REAL_TOPIC", ""),
            int(queue_id) if queue_id.isascii() and queue_id.isdigit() else -1,
            texts.get("KEYS", ""),
            texts.get("UNIQ_KEY", ""),
            entry.position,
            len(entry.body),
            entry.store_ms,
        )


def _is_meant(entry: records.Entry, handle: delay_forms.Handle) -> bool:
    """Whether an entry is the one that a handle names, or says that it was taken back."""
    due = records.property_value(entry.properties, b"TIMER_OUT_MS")
    topic = records.property_value(entry.properties, b"REAL_TOPIC")
    return due == b"%d" % handle.due_ms and topic == handle.topic.encode()


def _says_so(entry: records.Entry) -> bool:
    return records.property_value(entry.properties, b"TIMER_DEL_UNIQKEY") is not None
