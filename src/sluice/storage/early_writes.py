"""This module lets another thread write what is staged for the log while its owner stages more.

Where megabytes are staged in one turn, half of the turn is the system's time: finding memory for
new pages of the file, and a copy. That needs no interpreter, so it can run beside the owner, which
makes the next piece meanwhile.

    owner    make 1 | begin 1, make 2 | begin 2, make 3 | ... | finish: all are written
    thread          | write 1         | write 2         | ...

Where memory is there already (`old_pages.py`) the system's time is a copy, and best copied is what
was just made. Then the owner writes it itself, and no thread asks for the interpreter.

Pieces are written one after the other, in their order, by the thread or by the owner that finishes:
whoever comes first. So `finish` never waits for a thread that has not begun, and what a killed
process leaves in the file is a beginning of what was staged, as with one write. After a failure
nothing more is written. `begin`, `do`, `finish` and `drop` belong to the owner's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import thread_time_ns
from typing import Final, NamedTuple

from sluice.storage.background import Background

_LANE: Final = "early"


class Wrote(NamedTuple):
    """How much was written early, and the processor time that it took."""

    byte_count: int
    took_ns: int


class _Piece:
    """Something that is written once."""

    __slots__ = ("byte_count", "is_over", "lock", "took_ns", "write")

    def __init__(self, write: Callable[[], int]) -> None:
        self.write = write
        self.lock = Lock()  # held by who writes it
        self.is_over = False
        self.byte_count = self.took_ns = 0


class EarlyWrites:
    """What is being written of one log's turn. True while there is anything."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._pieces: list[_Piece] = []
        self._failure: BaseException | None = None  # of this turn

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def begin(self, write: Callable[[], int]) -> None:
        """Have `write` called soon, which writes something that must not change any more, and says
        how many bytes it had.
        """
        piece = _Piece(write)
        self._pieces.append(piece)
        self._background.submit(_LANE, lambda: self._write(piece), lambda _, error: None)

    def do(self, write: Callable[[], int]) -> None:
        """Have `write` called now, where it has nothing to wait for. What goes wrong is met by
        `finish`, too.
        """
        self._pieces.append(_Piece(write))
        for piece in self._pieces:
            self._write(piece)

    def finish(self) -> Wrote:
        """See to it that all of it is written. Raises what went wrong first; then nothing of it
        is under way any more either.
        """
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._write(piece)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return Wrote(
            sum(piece.byte_count for piece in pieces), sum(piece.took_ns for piece in pieces)
        )

    def drop(self) -> None:
        """Write no more of it; what is under way is waited for."""
        for piece in self._pieces:
            with piece.lock:
                piece.is_over = True
        self._pieces = []
        self._failure = None

    def _write(self, piece: _Piece) -> None:
        with piece.lock:
            if piece.is_over:
                return
            piece.is_over = True
            if self._failure is None:
                since_ns = thread_time_ns()
                try:
                    piece.byte_count = piece.write()
                    piece.took_ns = thread_time_ns() - since_ns
                except BaseException as error:  # met by `finish`, whoever wrote
                    self._failure = error
