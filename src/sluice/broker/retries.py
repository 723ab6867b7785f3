"""This module is the service behind messages that a consumer could not handle: they come again
later, or become dead letters.

A client says it in two ways. It names an entry that it was given (CONSUMER_SEND_MSG_BACK); or, when
that failed and when an ordered consumer gives up, it sends the message itself to the group's retry
topic. The second way is led back to the first: the entry is found by its unique key. So both store
the same copy, made from the entry and not from what a client says it held, and what was stored for
an entry once is not stored again (`retry_notes.py`).

It knows neither a wire nor a socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from sluice.broker import retry_forms as forms
from sluice.broker import retry_policy
from sluice.broker.groups import GroupSettings
from sluice.broker.topics import CLOSED_TOPICS, DEAD_PREFIX, RETRY_PREFIX, SYSTEM_PREFIX
from sluice.errors import (
    Busy,
    NoPermission,
    ParameterInvalid,
    SluiceError,
    SubscriptionMissing,
    TopicMissing,
)
from sluice.model import Message, Placed
from sluice.protocol import records

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

Stored = Callable[[Placed | None, SluiceError | None], None]


class SendBack(NamedTuple):
    """A consumer could not handle an entry."""

    group: str
    position: int
    delay_level: int  # 0: the broker decides; below: no further try
    origin_topic: str | None = None
    times_max: int | None = None
    unique: str = ""  # its own id: entries of one batch have the same position


class _Try(NamedTuple):
    """What becomes of an entry: how often it was tried with this, and when it comes again."""

    times: int
    delay_level: int
    dead: bool


class Retries:
    """Retries of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        # Who waits for a copy that is not confirmed yet, by group, position and offset of the
        # entry.
        self._waiting: dict[tuple[str, int, int], list[Stored]] = {}
        self.sent_back_count = 0
        self.dead_count = 0
        self.suppressed_count = 0

    # ------------------------------------------------------------------------------------ sent back

    def send_back(self, asked: SendBack, done: Stored) -> None:
        """Store what the group gets again; raises at once what is wrong with the request itself.

        `done` gets the place of the copy, or of the entry where there is a copy already.
        """
        core = self._core
        settings = self._group(asked.group, asked.times_max)

        def found(view: memoryview | None, error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error if isinstance(error, SluiceError) else SluiceError(str(error))
                if view is None:
                    raise SluiceError(f"look message by offset failed, {asked.position}")
                view = core.unfolding.one_of(view, asked.unique)
                entry = records.decode(view, 0, asked.position)
                self._check(asked.group, entry, asked.origin_topic)
                if settings.retry_queues <= 0:
                    done(None, None)  # the group wants no retries, as in RocketMQ
                    return
                limit = retry_policy.times_max(settings, asked.times_max)
                dead = asked.delay_level < 0 or entry.reconsume_times >= limit
                attempt = _Try(entry.reconsume_times + 1, max(0, asked.delay_level), dead)
                self._store(settings, entry, attempt, done)
            except SluiceError as refusal:
                done(None, refusal)

        position = asked.position if asked.position >= 0 else 1 << 62
        core.store.call(lambda: core.store.entry_at(position), found)

    def _group(self, name: str, times_max: int | None) -> GroupSettings:
        core = self._core
        settings = core.groups.require(name)  # it may be another one than the reader's own
        if core.config.permission == "r":
            raise NoPermission(f"the broker[{core.config.broker_name}] sending is forbidden")
        if times_max is not None and times_max < 0:
            raise ParameterInvalid(
                f"maxReconsumeTimes {times_max}: 0 or more; 0 makes a dead letter of it at once"
            )
        return settings

    def _check(self, group: str, entry: records.Entry, origin_topic: str | None) -> None:
        """Refuse to send back what the group was never given."""
        core = self._core
        topic, own = entry.topic, f"{RETRY_PREFIX}{group}"
        if topic in CLOSED_TOPICS or (topic.startswith(RETRY_PREFIX) and topic != own):
            raise ParameterInvalid(
                f"the entry at {entry.position} is of topic {topic}, which group {group} "
                "does not read"
            )
        if core.topics.get(topic) is None:
            raise TopicMissing(f"topic[{topic}] not exist: its entries cannot be sent back")
        names = {topic}
        if topic == own:
            said = records.property_value(entry.properties, b"RETRY_TOPIC") or b""
            names.add(said.decode("utf-8", "replace"))
        if origin_topic and origin_topic not in names:
            raise ParameterInvalid(
                f"the entry at {entry.position} is of topic {topic}, not of {origin_topic}"
            )
        members = core.clients.consumers.get(group)
        if members is not None and members.subscriptions:
            wanted = any(topic in said for said in members.wanted.values())
            if not wanted and topic != own:
                raise SubscriptionMissing(
                    f"the consumer's subscription not exist: group {group} does not read {topic}"
                )
        reached = core.offsets.handed_out(group, topic, entry.queue_id)
        if reached is not None and entry.queue_offset >= reached:
            raise ParameterInvalid(
                f"offset {entry.queue_offset} of {topic}/{entry.queue_id} was not given to group "
                f"{group}, which has read up to {reached}"
            )

    # ------------------------------------------------------------------------ sent to a retry topic

    def send(self, message: Message, times_max: int | None, done: Stored) -> None:
        """A client sends a message to a retry topic itself; `message` is what it would store."""
        core = self._core
        group = message.topic.removeprefix(RETRY_PREFIX)
        settings = self._group(group, times_max)
        times = message.reconsume_times
        if times < 0:
            raise ParameterInvalid(f"reconsumeTimes {times}: 0 or more")
        # A group that holds locks reads in order; what it gives up must not come again later.
        dead = times > retry_policy.times_max(settings, times_max)
        dead = dead or core.locks.is_locked(group, core.now_ms())
        text = records.property_value(message.properties, b"DELAY") or b"0"
        level = int(text) if text.isdigit() and len(text) < 10 else 0
        if level == retry_policy.FIRST_LEVEL + times - 1:
            level = 0  # what every client says that leaves it to the broker
        attempt = _Try(times, level, dead)

        def found(entries: list[records.Entry] | None, error: SluiceError | None) -> None:
            try:
                if error is not None:
                    raise error
                entry = self._tried(group, entries or [])
                if entry is None:
                    self._store_stray(message, group, dead, done)
                else:
                    self._store(settings, entry, attempt, done)
            except SluiceError as refusal:
                done(None, refusal)

        unique = records.property_value(message.properties, b"UNIQ_KEY")
        origin = records.property_value(message.properties, b"RETRY_TOPIC")
        if times == 0 or not unique or not origin:
            found([], None)  # nobody was given it before
            return
        topics = [message.topic]
        name = origin.decode("utf-8", "replace")
        if not name.startswith(SYSTEM_PREFIX):
            topics.append(name)
        self._find(group, topics, unique.decode("utf-8", "replace"), times, found)

    def _find(
        self,
        group: str,
        topics: list[str],
        unique: str,
        times: int,
        done: Callable[[list[records.Entry] | None, SluiceError | None], None],
    ) -> None:
        """The entries that a group may hold now and that were tried less often than `times`."""
        core = self._core
        indexing = core.store.indexing
        if not indexing.live and not indexing.failure:
            raise Busy("the key index is made anew after the start; try again in a moment")
        found: list[records.Entry] = []

        def ask() -> None:
            core.store.query_key(topics.pop(), unique, answered)

        def answered(views: list[memoryview] | None, error: BaseException | None) -> None:
            if error is not None:
                done(None, error if isinstance(error, SluiceError) else SluiceError(str(error)))
                return
            for view in views or []:
                entry = records.decode(view)
                committed = core.offsets.committed(group, entry.topic, entry.queue_id) or 0
                if entry.queue_offset < committed or entry.reconsume_times >= times:
                    continue
                # Topic and key are a client's word: what the group was never given stays unread,
                # a half message or one that waits for its time above all.
                with suppress(SluiceError):
                    self._check(group, entry, None)
                    found.append(entry)
            if topics:
                ask()
            else:
                done(found, None)

        ask()

    def _tried(self, group: str, entries: list[records.Entry]) -> records.Entry | None:
        """The entry that a client holds: tried most often, and not sent back yet if possible."""
        if not entries:
            return None
        most = max(entry.reconsume_times for entry in entries)
        tried = [entry for entry in entries if entry.reconsume_times == most]
        notes = self._core.retry_notes
        return next((e for e in tried if not notes.is_sent_back(group, e)), tried[0])

    def _store_stray(self, message: Message, group: str, dead: bool, done: Stored) -> None:
        """Its entry is not here: of another broker, or gone. What the client sent is stored."""
        core = self._core
        form = forms.stray_form(message, group, dead=dead)
        if dead:
            core.topics.create_inner(form.topic, 1)
        else:
            form = core.delays.waiting_form(form)

        def stored(error: SluiceError | None) -> None:
            if error is None:
                self.dead_count += dead
                self._arrived(form)
            done(placed, error)

        placed = self._append(form, stored)

    # -------------------------------------------------------------------------------------- storing

    def _store(
        self, settings: GroupSettings, entry: records.Entry, attempt: _Try, done: Stored
    ) -> None:
        core, group = self._core, settings.name
        notes, key = core.retry_notes, (group, entry.position, entry.queue_offset)
        if notes.is_sent_back(group, entry):
            self.suppressed_count += 1
            waiting = self._waiting.get(key)
            if waiting is None:
                done(Placed(entry.position, entry.size, entry.queue_offset, entry.store_ms), None)
            else:
                waiting.append(done)
            return
        notes.require_room(group, entry)
        message = self._copy(settings, entry, attempt)

        def stored(error: SluiceError | None) -> None:
            for each in self._waiting.pop(key):
                each(placed, error)
            if error is not None:
                notes.undo(group, entry)
                return
            self.sent_back_count += 1
            self.dead_count += attempt.dead
            self._arrived(message)

        placed = self._append(message, stored)
        self._waiting[key] = [done]
        notes.note(group, entry)

    def _copy(self, settings: GroupSettings, entry: records.Entry, attempt: _Try) -> Message:
        """What is stored for an entry, waiting for its time where it has one."""
        core, group, times = self._core, settings.name, attempt.times
        if attempt.dead:
            core.topics.create_inner(f"{DEAD_PREFIX}{group}", 1)
            return forms.dead_form(entry, group, times)
        retry = core.topics.create_inner(f"{RETRY_PREFIX}{group}", max(1, settings.retry_queues))
        if not retry.writable:
            raise NoPermission(f"the topic[{retry.name}] sending message is forbidden")
        wait = forms.Wait(attempt.delay_level)
        if not wait.level:
            delay_ms = retry_policy.delay_ms(settings, times - 1)
            if delay_ms is None:
                wait = forms.Wait(retry_policy.FIRST_LEVEL + times - 1)
            else:
                delay_ms = min(delay_ms, core.config.timer_max_delay_ms)
                wait = forms.Wait(until_ms=core.now_ms() + delay_ms)
        queue_id = random.randrange(max(1, min(settings.retry_queues, retry.write_queues)))
        return core.delays.waiting_form(forms.retry_form(entry, group, queue_id, times, wait))

    def _append(self, message: Message, done: Callable[[SluiceError | None], None]) -> Placed:
        core = self._core
        if core.store.log.end > core.admission.free_end:
            core.admission.admit(message.born_host, len(message.body))
        placed = core.append(message, done)
        core.stats.stored(message.topic, 1, placed.size)
        return placed

    def _arrived(self, message: Message) -> None:
        """A message can be read now: whoever waits for it is asked again."""
        tag = records.property_value(message.properties, b"TAGS")
        code = records.java_hash(tag) if tag else 0
        self._core.polls.arrived((message.topic, message.queue_id), code)
