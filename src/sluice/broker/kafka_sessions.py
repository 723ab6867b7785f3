"""This module keeps the fetch sessions of Kafka's consumers: what each one reads, so that it need
not say it again with every fetch, and is told only what has changed.

    epoch 0     all partitions are named, and a session is wanted
    epoch -1    all partitions are named, and none is wanted; an old one ends
    epoch n     what is different since the last fetch, which was n - 1

Sessions are a matter of convenience: one that is gone is made anew by its consumer, and one that
names no partition any more ends. Their number is bounded. Room is made by one that has been idle
for long, or else by the smallest one that is not new, if it is smaller than the one to come. Where
there is no room, a consumer names all its partitions each time, and nobody else suffers from it.
It knows neither wire nor store.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

NO_SESSION: Final = 0
FIRST_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_NUMBER_MAX: Final = 0x7FFFFFFF
PARTITIONS_MAX: Final = 100_000  # of one session
IDLE_MS: Final = 120_000  # after which a session may make room for any other

Place = tuple[str | bytes, int]  # topic, by its name or its id, and partition


class Asked(NamedTuple):
    """What a consumer asks of one partition."""

    place: Place
    offset: int
    bytes_max: int
    leader_epoch: int


class Session:
    """One consumer's partitions, in the order in which they are read."""

    __slots__ = ("born_ms", "epoch", "id", "parts", "told", "used_ms", "uses_ids")

    def __init__(self, session_id: int, uses_ids: bool, now_ms: int) -> None:
        self.id = session_id
        self.uses_ids = uses_ids
        self.born_ms = self.used_ms = now_ms
        self.epoch = 1  # that the next fetch must have
        self.parts: OrderedDict[Place, Asked] = OrderedDict()
        self.told: dict[Place, tuple[int, int]] = {}  # the bounds that the consumer knows

    def change(self, asked: Iterable[Asked], forgotten: Iterable[Place]) -> None:
        for each in asked:
            self.parts[each.place] = each
        for place in forgotten:  # one that is named in both lists, too
            self.parts.pop(place, None)
            self.told.pop(place, None)

    def is_news(self, place: Place, bounds: tuple[int, int]) -> bool:
        """Whether a partition's bounds are others than the consumer knows; it knows them now."""
        if self.told.get(place) == bounds:
            return False
        self.told[place] = bounds
        return True

    def had_records(self, place: Place) -> None:
        """Others come first next time."""
        if place in self.parts:
            self.parts.move_to_end(place)


def next_epoch(epoch: int) -> int:
    """The epoch of the fetch after this one."""
    return 1 if epoch == _NUMBER_MAX else epoch + 1


class FetchSessions:
    """The sessions of one broker."""

    def __init__(self, count_max: Callable[[], int], now_ms: Callable[[], int]) -> None:
        self._count_max = count_max
        self._now_ms = now_ms
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # the one used last is the last

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, uses_ids: bool, asked: list[Asked]) -> Session | None:
        """A new session; None where there is no room for it."""
        if len(asked) > PARTITIONS_MAX or not self._make_room(len(asked)):
            return None
        number = random.randint(1, _NUMBER_MAX)
        while number in self._sessions:
            number = random.randint(1, _NUMBER_MAX)
        session = self._sessions[number] = Session(number, uses_ids, self._now_ms())
        session.change(asked, ())
        return session

    def find(self, session_id: int) -> Session | None:
        return self._sessions.get(session_id)

    def use(self, session: Session) -> None:
        """It was asked for something."""
        session.used_ms = self._now_ms()
        self._sessions.move_to_end(session.id)

    def end(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)

    def _make_room(self, size: int) -> bool:
        """Whether there is room for a session of so many partitions."""
        count_max = self._count_max()
        while self._sessions and len(self._sessions) > count_max:
            self._sessions.popitem(last=False)  # fewer are allowed than before
        if len(self._sessions) < count_max:
            return True
        if not self._sessions:
            return False
        limit_ms = self._now_ms() - IDLE_MS
        oldest = next(iter(self._sessions.values()))
        if oldest.used_ms >= limit_ms:
            known = [each for each in self._sessions.values() if each.born_ms < limit_ms]
            if not known:
                return False
            oldest = min(known, key=lambda each: len(each.parts))
            if len(oldest.parts) >= size:
                return False
        del self._sessions[oldest.id]
        return True
