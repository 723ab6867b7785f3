"""This module remembers which brokers answer slowly or not at all, and keeps sends away from them.

The longer a broker took, the longer it is left alone; the steps are RocketMQ's. Where all are to be
left alone, the one whose time is over first is taken: a message is never held back for this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Took at least so long: left alone for so long.
_STEPS_MS: Final = (
    (15_000, 30_000),
    (5_000, 10_000),
    (3_000, 6_000),
    (1_800, 5_000),
    (550, 2_000),
)
# A broker that gave no answer counts as one that took this long.
FAILED_MS: Final = 10_000
QUICK_MS: Final = _STEPS_MS[-1][0]
_BROKERS_MAX: Final = 4096


class FaultTable:
    """Until when each broker is better left alone."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def answered(self, broker: str, took_ms: float, now_ms: float) -> None:
        """A send to a broker took so long."""
        for least_ms, rest_ms in _STEPS_MS:
            if took_ms >= least_ms:
                if len(self._until) >= _BROKERS_MAX:
                    self._until.clear()
                self._until[broker] = now_ms + rest_ms
                return
        self._until.pop(broker, None)

    def failed(self, broker: str, now_ms: float) -> None:
        """A send to a broker got no answer."""
        self.answered(broker, FAILED_MS, now_ms)

    @property
    def is_empty(self) -> bool:
        return not self._until

    def is_available(self, broker: str, now_ms: float) -> bool:
        until = self._until.get(broker)
        return until is None or until <= now_ms

    def least_bad(self, brokers: Iterable[str]) -> str:
        """Of brokers that are all to be left alone, the one that comes back first."""
        return min(brokers, key=lambda broker: self._until.get(broker, 0.0))
