"""This module finds the place that a sender is told: of what is stored for a message, or of the
message with the same key that was there before.

It stands between the translators of sends and the two services that it joins, sending and
`dedup.py`. It takes plain values and knows no wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sluice.broker.dedup import First, key_of, window_ms
from sluice.broker.delay_forms import handle_of
from sluice.broker.topics import HALF_TOPIC
from sluice.errors import SluiceError
from sluice.model import Message
from sluice.protocol.record_runs import Run

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.sending import Keys, Sending, Sent
    from sluice.broker.topics import TopicSettings

Again = Callable[[], None]


class RunPlace(NamedTuple):
    """Where the messages of a batch are; queue, offset and unique key are the first one's."""

    positions: list[int]
    queue_id: int
    queue_offset: int
    unique: bytes


class Placing:
    """The places of one broker's messages."""

    def __init__(self, core: BrokerCore, sending: Sending) -> None:
        self._core = core
        self._sending = sending

    def place(
        self, message: Message, settings: TopicSettings, keys: Keys, sent: Sent, again: Again
    ) -> First | None:
        """Store a message, or know the first one with its key; `sent` is told when it is safe.

        None: the first one is not safe yet. Then `again` is called when it is, or has failed.
        """
        stored = self._sending.stored_form(message, settings)
        key = key_of(message.properties, keys[1]) if window_ms(settings) else b""
        if not key:
            return self._first(message, stored, keys, sent)
        dedup = self._core.dedup
        first, waits = dedup.first(settings, key, keys[0], again)
        if waits:
            return None
        if first is not None:
            dedup.suppressed[settings.name] += 1
            self._core.call_soon(lambda: sent(None))
            return first

        def told(error: SluiceError | None) -> None:
            settled(error)
            sent(error)

        first = self._first(message, stored, keys, told)
        is_half = stored.topic == HALF_TOPIC
        settled = dedup.enter(settings, key, first, is_half=is_half)
        return first

    def _first(self, message: Message, stored: Message, keys: Keys, sent: Sent) -> First:
        """Store a message; its place as its sender is told: the queue is the one it asked for."""
        position, _, queue_offset, store_ms = self._sending.send(stored, keys, sent)
        first = First(position, queue_offset, store_ms, message.queue_id, keys[0])
        if stored is message:
            return first
        name = self._core.config.broker_name
        handle = handle_of(stored, name, keys[0].decode("utf-8", "replace"))
        return first._replace(handle=handle, waits=stored.topic != message.topic)

    def place_run(
        self, run: Run, settings: TopicSettings, keys: list[Keys], sent: Sent, again: Again
    ) -> RunPlace | None:
        """The same for a batch: each of its messages is stored, or is there already."""
        if not window_ms(settings) or not run.parts:
            placed = self._sending.send_run(run, settings, keys, sent)
            return RunPlace(placed.positions, run.queue_id, placed.queue_offset, keys[0][0])
        business_keys = [
            key_of(properties, known[1])
            for (_, _, properties), known in zip(run.parts, keys, strict=True)
        ]
        firsts: dict[int, First] = {}  # of the messages that are there already
        heads: dict[bytes, int] = {}  # key -> the message of this batch that has it first
        for index, key in enumerate(business_keys):
            if not key or heads.setdefault(key, index) != index:
                continue
            first, waits = self._core.dedup.first(settings, key, keys[index][0], again)
            if waits:
                return None  # nothing is stored yet: all of it is looked at again
            if first is not None:
                firsts[index] = first
        new = [
            index
            for index, key in enumerate(business_keys)
            if index not in firsts and heads.get(key, index) == index
        ]
        self._store_some(run, settings, keys, sent, new, business_keys, firsts)
        self._core.dedup.suppressed[settings.name] += len(run.parts) - len(new)
        places = [firsts[heads.get(key, index)] for index, key in enumerate(business_keys)]
        positions = [place.position for place in places]
        return RunPlace(positions, places[0].queue_id, places[0].queue_offset, places[0].unique)

    def _store_some(
        self,
        run: Run,
        settings: TopicSettings,
        keys: list[Keys],
        sent: Sent,
        new: list[int],
        business_keys: list[bytes],
        firsts: dict[int, First],
    ) -> None:
        """Store the new ones of a batch; their places are added to `firsts`."""
        if not new:
            self._core.call_soon(lambda: sent(None))
            return
        settled: list[Sent] = []

        def told(error: SluiceError | None) -> None:
            for tell in settled:
                tell(error)
            sent(error)

        some = replace(run, parts=[run.parts[index] for index in new])
        placed = self._sending.send_run(some, settings, [keys[index] for index in new], told)
        store_ms = max(self._core.now_ms(), self._core.store.last_ms)
        for number, (index, position) in enumerate(zip(new, placed.positions, strict=True)):
            first = First(
                position, placed.queue_offset + number, store_ms, run.queue_id, keys[index][0]
            )
            firsts[index] = first
            if business_keys[index]:
                settled.append(self._core.dedup.enter(settings, business_keys[index], first))
