"""This module remembers for a moment which stretches of a large file are in memory.

Whoever reads a file from its beginning to its end asks again and again about what lies next to what
it asked about before. The second question about a stretch of a file is put for all of it, and the
answer is good for some milliseconds: what is in memory and read by somebody does not go away as
quickly, and where it does, one read waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Final

STRETCH_BYTES: Final = 4 << 20
_REMEMBERED_NS: Final = 50_000_000
_KEPT_MAX: Final = 64


class Stretches:
    """The stretches of one file."""

    __slots__ = ("_now_ns", "_seen")

    def __init__(self, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._now_ns = now_ns
        # Until when it is known, and whether it is in memory; None: it was asked about once.
        self._seen: dict[int, tuple[int, bool | None]] = {}

    def hold(self, start: int, stop: int, is_cached_at: Callable[[int, int], bool]) -> bool:
        """Whether a range lies in stretches that are in memory; False where that is not known.

        `is_cached_at` tells whether a range of the file is in memory.
        """
        now_ns = self._now_ns()
        for number in range(start // STRETCH_BYTES, (stop - 1) // STRETCH_BYTES + 1):
            until_ns, is_cached = self._seen.get(number, (0, None))
            if now_ns >= until_ns:
                self._note(number, now_ns, None)
                return False
            if is_cached is None:
                at = number * STRETCH_BYTES
                is_cached = is_cached_at(at, at + STRETCH_BYTES)
                self._note(number, now_ns, is_cached)
            if not is_cached:
                return False
        return True

    def _note(self, number: int, now_ns: int, is_cached: bool | None) -> None:
        if len(self._seen) >= _KEPT_MAX and number not in self._seen:
            self._seen.clear()
        self._seen[number] = (now_ns + _REMEMBERED_NS, is_cached)
