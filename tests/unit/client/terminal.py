"""This module runs a command on a terminal of its own and reads what stands on the screen.

The terminal is a VT100, as far as curses uses one: text, places, erasing, scrolling by one line.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

WAIT_SECONDS = 60.0
_SEQUENCE = re.compile(
    rb"\x1b\[(?P<numbers>[?0-9;]*)(?P<what>[A-Za-z])|\x1b[()].|\x1b(?P<single>[=>78MDE])"
)


class Terminal:
    """One screen and the process that draws on it."""

    def __init__(self, command: Sequence[str], rows: int, columns: int) -> None:
        self._master, slave = pty.openpty()
        self._set_size(rows, columns)
        self._cells: list[list[str]] = []
        self._row = self._column = 0
        self._rest = b""
        self._make_screen(rows, columns)
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "vt100", "LINES": "", "COLUMNS": ""},
            start_new_session=True,
        )
        os.close(slave)

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _make_screen(self, rows: int, columns: int) -> None:
        self._cells = [[" "] * columns for _ in range(rows)]

    def resize(self, rows: int, columns: int) -> None:
        """Make the window another size, as its user does."""
        self._make_screen(rows, columns)
        self._set_size(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    def wait_for(self, condition: Callable[[list[str]], object]) -> list[str]:
        """The screen, as soon as the condition holds for it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition(self.lines):
            shown = "\n".join(self.lines)
            assert time.monotonic() < deadline, f"the screen stays like this:\n{shown}"
            assert self.process.poll() is None, f"it has ended; the screen was:\n{shown}"
            self.read(0.1)
        return self.lines

    def read(self, seconds: float = 0.0) -> None:
        """Draw what has come."""
        while select.select([self._master], [], [], seconds)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            self._draw(self._rest + data)
            seconds = 0.0

    def wait(self) -> int:
        """The exit status; what is drawn until then is read, so that nothing blocks."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self.read(0.05)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._master)

    # -------------------------------------------------------------------------------- the screen

    def _draw(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if data[at] != 0x1B:
                self._character(chr(data[at]))
                at += 1
                continue
            found = _SEQUENCE.match(data, at)
            if found is None:
                assert len(data) - at < 32, f"unknown to this terminal: {data[at : at + 32]!r}"
                break  # the rest of it comes later
            self._sequence(found)
            at = found.end()
        self._rest = data[at:]

    def _character(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\t":
            self._column = min(len(self._cells[0]) - 1, (self._column // 8 + 1) * 8)
        elif character >= " ":
            if self._column >= len(self._cells[0]):
                self._column = 0
                self._down()
            if self._row < len(self._cells):
                self._cells[self._row][self._column] = character
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row >= len(self._cells):
            self._row = len(self._cells) - 1
            self._cells.append([" "] * len(self._cells[0]))
            del self._cells[0]

    def _sequence(self, found: re.Match[bytes]) -> None:
        if found["single"] == b"M":
            self._row = max(0, self._row - 1)
            return
        if found["what"] is None or found["numbers"].startswith(b"?"):
            return
        numbers = [int(part or 0) for part in found["numbers"].split(b";")]
        what = found["what"].decode()
        step = max(1, numbers[0])
        if what == "H":
            self._row, self._column = step - 1, max(1, [*numbers, 1][1]) - 1
        elif what in "AB":
            self._row = max(0, self._row + (step if what == "B" else -step))
        elif what in "CD":
            self._column = max(0, self._column + (step if what == "C" else -step))
        elif what in "JK":
            self._erase(what, numbers[0])
        else:
            assert what in "mrhl", f"unknown to this terminal: {found[0]!r}"

    def _erase(self, what: str, kind: int) -> None:
        """The rest of the line or the screen (0), what is before (1), or all of it (2)."""
        here = self._row * len(self._cells[0]) + self._column
        for number, row in enumerate(self._cells):
            if what == "K" and number != self._row:
                continue
            for column in range(len(row)):
                place = number * len(row) + column
                if kind == 2 or (place >= here if kind == 0 else place <= here):
                    row[column] = " "


@contextmanager
def terminal(command: Sequence[str], *, rows: int = 24, columns: int = 100) -> Iterator[Terminal]:
    """A command on a screen; it is killed at the end if it has not ended."""
    screen = Terminal(command, rows, columns)
    try:
        yield screen
    finally:
        screen.close()
