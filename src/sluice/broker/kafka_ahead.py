"""This module looks for the batches that a Kafka consumer will ask for next, while it works.

A consumer that is behind asks for some megabytes, works on them, and asks for what follows: where
its read was ended by its limit the next one is known, but for the moment at which it comes. Until
then the broker has nothing to do for it, and when it comes nobody else works. So what it will find
is looked for in turns of the event loop between the two: some partitions together in each, or one
where it is not plain, so that sockets have their turn in between. And not at once: while the answer
is being sent its consumer waits for the rest of it, and what is looked for meanwhile delays that by
as much as it saves, or by more: the rest then has to wait for a consumer that fell asleep.

    a read ends because of its limit     the next one of that queue is wished for
    when its answer has been sent        it is looked for, and kept if it ends because of its limit,
                                         too: what comes behind it changes nothing of it then
    the next read                        takes it, if it is the same that it would find itself

What is kept is bounded in number and in time, because its slices hold files of the log. Consumers
at the end of a queue cost nothing. Where some pages of what was written lately are missing in
memory they are brought back meanwhile (`storage/mends.py`), then it is looked for again; what else
has to come from the disk is left to who asks for it. Nothing but time is lost when something is
forgotten here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from sluice.broker.kafka_slices import STRETCH_BYTES, Slices
from sluice.broker.kafka_together import TOGETHER_MAX, Place, TogetherReader
from sluice.storage.mends import Mends
from sluice.storage.queue_index import QueueIndex
from sluice.storage.store import ColdRead

if TYPE_CHECKING:
    from sluice.storage.store import Store

KEPT_NS: Final = 1_000_000_000
_SLICES_MAX: Final = 16_384  # kept together, some 200 bytes each
_WISHES_MAX: Final = 1024
_NO_STOP: Final = 1 << 62
log_lines = logging.getLogger("sluice.kafka")

CallLater = Callable[[Callable[[], None]], object]


class Sent(Protocol):
    """Who is sent answers."""

    @property
    def unsent_bytes(self) -> int: ...


class _Ahead(NamedTuple):
    """What a read with this limit will find."""

    bytes_max: int
    found: Slices
    until_ns: int


class AheadReader(TogetherReader):
    """Reads batches of one store, some of them before they are asked for."""

    def __init__(
        self,
        store: Store,
        call_later: CallLater,
        call_soon: CallLater,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        """`call_later` calls when an answer may have been sent, `call_soon` in the next turn."""
        super().__init__(store, now_ns)
        self._call_later = call_later
        self._call_soon = call_soon
        self._wishes: dict[Place, int] = {}  # with their limits
        self._alone: dict[Place, int] = {}  # those of them that were not found with others
        self._ahead: dict[Place, _Ahead] = {}  # the oldest are the first
        self._slice_count = 0  # of all that is kept
        self._is_asked = False  # a turn will come
        self._mends = Mends(store, now_ns)
        self._put_off: dict[Place, int] = {}  # wishes that wait for what is being mended
        self.asked_by: Sent | None = None  # who gets what is read now
        self.taken_count = 0  # reads that found what was looked for before

    @property
    def kept_count(self) -> int:
        """Reads that are known and were not asked for yet."""
        return len(self._ahead)

    def read(self, queue: QueueIndex, offset: int, stop: int, bytes_max: int) -> Slices | None:
        """The same as ever; `stop` is not beyond what is confirmed."""
        place = (queue, offset)
        found = self._take(place, stop, bytes_max) if place in self._ahead else None
        if found is None:
            for wishes in (self._wishes, self._alone, self._put_off):
                wishes.pop(place, None)
            found = super().read(queue, offset, stop, bytes_max)
        if found is not None and found.has_more and found.next_offset < stop:
            self._wish((queue, found.next_offset), bytes_max)
        return found

    def _take(self, place: Place, stop: int, bytes_max: int) -> Slices | None:
        ahead = self._drop(place)
        found = ahead.found
        if (
            ahead.bytes_max != bytes_max
            or found.next_offset > stop
            or ahead.until_ns <= self._now_ns()
            or not self.is_still_so(*place, found)
        ):
            return None
        self.taken_count += 1
        return found

    def _wish(self, place: Place, bytes_max: int) -> None:
        if place in self._ahead or len(self._wishes) + len(self._alone) >= _WISHES_MAX:
            return
        self._wishes[place] = bytes_max
        self._ask_turn(self._call_later)

    def _look(self) -> None:
        """Look for some of the reads that are wished for."""
        self._is_asked = False
        if self.asked_by is not None and self.asked_by.unsent_bytes:
            self._ask_turn(self._call_later)
            return
        self._forget_old()
        if self._slice_count >= _SLICES_MAX:
            self._wishes.clear()
            self._alone.clear()
        if self._wishes:
            self._look_together()
        elif self._alone:
            place = next(iter(self._alone))
            self._look_alone(place, self._alone.pop(place))
        self._ask_turn(self._call_soon)

    def _ask_turn(self, call: CallLater) -> None:
        if (self._wishes or self._alone) and not self._is_asked:
            self._is_asked = True
            call(self._look)

    def _look_together(self) -> None:
        places = dict(islice(self._wishes.items(), TOGETHER_MAX))
        for place in places:
            del self._wishes[place]
        places = {
            (queue, offset): bytes_max
            for (queue, offset), bytes_max in places.items()
            if self._store.queues.get(queue.key) is queue
        }
        try:
            shares = self.read_together(places)
        except Exception as error:  # found out, too, by who looks for one after the other
            log_lines.debug("%d reads were not made ahead together: %s", len(places), error)
            shares = {}
        for place, bytes_max in places.items():
            if place in shares:
                self._keep(place, bytes_max, shares[place])
            else:
                self._alone[place] = bytes_max

    def _look_alone(self, place: Place, bytes_max: int) -> None:
        queue, offset = place
        if self._store.queues.get(queue.key) is not queue:
            return
        try:
            found = super().read(queue, offset, _NO_STOP, bytes_max)
        except ColdRead:
            return
        except Exception as error:  # who asks for it finds out, and is told
            log_lines.debug("%s from %d on was not read ahead: %s", queue.key, offset, error)
            return
        if found is None and self._mends.count and len(self._put_off) < _WISHES_MAX:
            self._put_off[place] = bytes_max
        elif found is not None and found.has_more:
            self._keep(place, bytes_max, found)

    def _keep(self, place: Place, bytes_max: int, found: Slices) -> None:
        self._ahead[place] = _Ahead(bytes_max, found, self._now_ns() + KEPT_NS)
        self._slice_count += len(found.slices)

    def _holds(self, number: int, now_ns: int) -> bool:
        is_held = super()._holds(number, now_ns)
        if not is_held:
            start, written = number * STRETCH_BYTES, self._store.log.written
            self._mends.begin(start, min(start + STRETCH_BYTES, written), self._mended)
        return is_held

    def _mended(self) -> None:
        """Look again for what could not be read."""
        if self._mends.count:
            return
        self._wishes.update(self._put_off)
        self._put_off.clear()
        self._ask_turn(self._call_soon)

    def _drop(self, place: Place) -> _Ahead:
        ahead = self._ahead.pop(place)
        self._slice_count -= len(ahead.found.slices)
        return ahead

    def _forget_old(self) -> None:
        now_ns = self._now_ns()
        while self._ahead:
            place, ahead = next(iter(self._ahead.items()))
            if ahead.until_ns > now_ns:
                return
            self._drop(place)

    # ----------------------------------------------------------------------------- as a service

    def start(self) -> None:
        """Nothing is known ahead at a start."""

    def tick(self, now_ms: int) -> None:
        """What nobody came for holds files no longer."""
        self._forget_old()
