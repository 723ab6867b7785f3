"""This module keeps keys whose messages leave the log before their windows are over.

Keys are read from the log when a broker starts. Where retention takes the first message of a key
while its window is open (a full disk, a short retention), the key is written into the store's table
`dedup` before the file goes, some thousand keys in a row, and the row goes when its windows are
over. So nothing is written for it as long as the log keeps messages longer than windows last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluice.errors import SluiceError
from sluice.storage.state import DEDUP_TABLE

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

ROW_KEYS_MAX: Final = 2_000
_SEPARATOR: Final = "@"  # no topic's name has one

# Key, position, queue offset, store time, queue id, unique key, handle; bytes as Latin-1.
_Note = list[Any]


class Noted(NamedTuple):
    """A key of a topic, and where its first message is or was."""

    topic: str
    key: bytes
    position: int
    queue_offset: int
    store_ms: int
    queue_id: int
    unique: bytes
    handle: str


class DedupNotes:
    """The keys that one broker has written down."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._noted_to = 0  # keys of messages below this position are written down
        self._asked_to = 0

    @property
    def noted_to(self) -> int:
        """All keys of messages below this position are written down."""
        return max(self._noted_to, self._core.store.log.start)

    def write(self, notes: Iterable[Noted], position: int) -> None:
        """Write keys down: all of them whose messages are below this position."""
        if position <= self._asked_to:
            return
        rows = list(_rows(notes, position))
        left = len(rows)

        def told(error: SluiceError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                self._asked_to = self._noted_to
            elif not left and self._asked_to == position:
                self._noted_to = position

        self._asked_to = position
        try:
            for name, row in rows:
                self._core.store.change([(DEDUP_TABLE, name, row)], told)
        except SluiceError:
            self._asked_to = self._noted_to  # the disk is full, or broken: once more, later
        self._core.ask_turn()

    def read(self) -> Iterator[Noted]:
        """All keys that are written down."""
        for name, row in self._core.store.table(DEDUP_TABLE).items():
            topic = name.partition(_SEPARATOR)[0]
            for key, position, queue_offset, store_ms, queue_id, unique, handle in row:
                yield Noted(
                    *(topic, key.encode("latin-1"), position, queue_offset, store_ms, queue_id),
                    *(unique.encode("latin-1"), handle),
                )

    def forget_old(self, now_ms: int, windows_ms: dict[str, int]) -> None:
        """Rows whose windows are over are not needed any more."""
        table = self._core.store.table(DEDUP_TABLE)
        old = []
        for name, row in table.items():
            window_ms = windows_ms.get(name.partition(_SEPARATOR)[0], 0)
            if not row or now_ms - row[-1][3] >= window_ms:
                old.append((DEDUP_TABLE, name, None))
        if old:
            self._core.store.change(old)
            self._core.ask_turn()


def _rows(notes: Iterable[Noted], position: int) -> Iterator[tuple[str, list[_Note]]]:
    """Rows of the table, each with keys of one topic in the order of their times."""
    by_topic: dict[str, list[_Note]] = {}
    for note in notes:
        by_topic.setdefault(note.topic, []).append(
            [
                *(note.key.decode("latin-1"), *note[2:6]),
                *(note.unique.decode("latin-1"), note.handle),
            ]
        )
    for topic, row in by_topic.items():
        row.sort(key=lambda note: note[3])
        for at in range(0, len(row), ROW_KEYS_MAX):
            yield f"{topic}{_SEPARATOR}{position}.{at}", row[at : at + ROW_KEYS_MAX]
