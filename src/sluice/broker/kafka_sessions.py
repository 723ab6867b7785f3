"""This module keeps the fetch sessions of Kafka's consumers: what each one reads, so that it need
not say it again with every fetch, and is told only what has changed.

    epoch 0     all partitions are named, and a session is wanted
    epoch -1    all partitions are named, and none is wanted; an old one ends
    epoch n     what is different since the last fetch, which was n - 1

Sessions are a matter of convenience: one that is gone is made anew by its consumer. Their number is
bounded, and the one that was used least recently makes room. It knows neither wire nor store.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from uuid import UUID

NO_SESSION: Final = 0
FIRST_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_NUMBER_MAX: Final = 0x7FFFFFFF
PARTITIONS_MAX: Final = 100_000  # of one session

Place = tuple[str | UUID, int]  # topic and partition


class Asked(NamedTuple):
    """What a consumer asks of one partition."""

    place: Place
    offset: int
    bytes_max: int
    leader_epoch: int


class Session:
    """One consumer's partitions, in the order in which they are read."""

    __slots__ = ("epoch", "id", "parts", "told", "uses_ids")

    def __init__(self, session_id: int, uses_ids: bool) -> None:
        self.id = session_id
        self.uses_ids = uses_ids
        self.epoch = 1  # that the next fetch must have
        self.parts: OrderedDict[Place, Asked] = OrderedDict()
        self.told: dict[Place, tuple[int, int]] = {}  # the bounds that the consumer knows

    def change(self, asked: Iterable[Asked], forgotten: Iterable[Place]) -> None:
        for place in forgotten:
            self.parts.pop(place, None)
            self.told.pop(place, None)
        for each in asked:
            self.parts[each.place] = each

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


class FetchSessions:
    """The sessions of one broker."""

    def __init__(self, count_max: Callable[[], int]) -> None:
        self._count_max = count_max
        self._sessions: OrderedDict[int, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, uses_ids: bool, asked: list[Asked]) -> Session | None:
        """A new session; None where there is no room for any."""
        count_max = self._count_max()
        if count_max <= 0 or len(asked) > PARTITIONS_MAX:
            return None
        while len(self._sessions) >= count_max:
            self._sessions.popitem(last=False)
        number = random.randint(1, _NUMBER_MAX)
        while number in self._sessions:
            number = random.randint(1, _NUMBER_MAX)
        session = self._sessions[number] = Session(number, uses_ids)
        session.change(asked, ())
        return session

    def find(self, session_id: int) -> Session | None:
        session = self._sessions.get(session_id)
        if session is not None:
            self._sessions.move_to_end(session_id)
        return session

    def end(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)
