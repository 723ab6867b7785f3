"""This module decides how many messages a handler gets before others have their turn.

A quick handler gets many, because handing over costs more than its work. A slow one gets them one
by one, so that messages wait for a free worker and never behind each other.
"""

from __future__ import annotations

from typing import Final

# A portion shall take about this long.
_PORTION_SECONDS: Final = 0.002
_COUNT_MAX: Final = 512
_WEIGHT: Final = 0.2  # of the newest measurement
# Of a handler that takes less than this for a message, no worker gets less than so many, however
# many others are free: handing over would cost more than they could save.
_QUICK_SECONDS: Final = 0.000_060
_QUICK_COUNT: Final = 32  # what a pull brings
_WORTH_SECONDS: Final = 0.000_5  # and never less than what takes so long


class PortionSize:
    """How long a handler takes, and how many messages it gets at once."""

    __slots__ = ("_count_max", "_least", "_seconds", "count")

    def __init__(self, count_max: int = _COUNT_MAX) -> None:
        """`count_max`: 1 where somebody wants to see each message by itself."""
        self._count_max = count_max
        self._seconds = 0.0  # for one message; 0 before anything is known
        self._least = 1  # how many a worker gets, however many others are free
        self.count = 1

    def share(self, waiting: int, free: int) -> int:
        """What one worker gets of so many that wait, while so many others are free."""
        share = max(-(-waiting // (1 + free)), self._least)
        return min(self.count, share)

    def took(self, seconds: float, messages: int) -> None:
        """A portion took so long; 0 where nobody measured it: that does not make it quick."""
        if seconds <= 0:
            return
        each = seconds / max(1, messages)
        if not self._seconds:
            self._seconds = each
        elif each > 10 * self._seconds:
            self._seconds = each  # it became slow: believed at once
        else:
            self._seconds += _WEIGHT * (each - self._seconds)
        seconds = max(self._seconds, 1e-9)
        self.count = max(1, min(self._count_max, int(_PORTION_SECONDS / seconds)))
        is_quick = seconds < _QUICK_SECONDS
        self._least = max(_QUICK_COUNT, int(_WORTH_SECONDS / seconds)) if is_quick else 1
