"""This module brings back pages that the system took from a part of the log that is in memory.

A system that saves memory takes pages that look unused, here and there: of megabytes that were
written seconds ago some pages are missing then. Who reads them waits for the disk again and again,
and each time for little. So where few pieces of a part are missing they are read on a thread, all
at once. Where much is missing it is left to who reads it: that part is old, and most of it may be
somebody else's.

The methods belong to the owner's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from sluice.storage.files import OpenFile

if TYPE_CHECKING:
    from sluice.storage.store import Store

PIECE_BYTES: Final = 64 << 10
_MISSING_PART: Final = 4  # of a part's pieces at most one of so many may be missing
_AGAIN_NS: Final = 1_000_000_000  # for so long a part is not looked at again
_KNOWN_MAX: Final = 1024
_LANE: Final = "mend"


class Mends:
    """Parts of one store's log that are being mended, or were a moment ago."""

    def __init__(self, store: Store, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._store = store
        self._now_ns = now_ns
        self._until_ns: dict[int, int] = {}  # by their beginning: when they may be looked at again
        self.count = 0  # that are being mended

    def begin(self, start: int, stop: int, then: Callable[[], None]) -> None:
        """Mend a part of one file of the log, soon, if it can be; `then` is called when that is
        over. Nothing happens where it was tried a moment ago.
        """
        store, now_ns = self._store, self._now_ns()
        if store.closed or self._until_ns.get(start, 0) > now_ns:
            return
        segment = store.log.segments.get(start - start % store.log.segment_bytes)
        if segment is None or start >= stop:
            return
        if len(self._until_ns) >= _KNOWN_MAX:
            self._until_ns.clear()
        self._until_ns[start] = now_ns + _AGAIN_NS
        self.count += 1
        file, base = segment.file, segment.base

        def done(_: None, error: BaseException | None) -> None:
            self.count -= 1  # an error is met by who reads there
            then()

        store.background.submit(_LANE, lambda: _mend(file, start - base, stop - base), done)


def _mend(file: OpenFile, start: int, stop: int) -> None:
    """Bring few missing pieces into memory; nothing where there are many."""
    pieces = [(at, min(at + PIECE_BYTES, stop)) for at in range(start, stop, PIECE_BYTES)]
    missing: list[tuple[int, int]] = []
    for piece in pieces:
        if not file.cached(*piece):
            missing.append(piece)
            if len(missing) * _MISSING_PART > len(pieces):
                return
    for piece in missing:
        file.warm(*piece)
