"""This module prints what a command found: aligned tables for people, JSON for scripts.

A command says both at once, so that they cannot drift apart. What comes from messages or clients
may hold anything: characters that a terminal would act on are replaced.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple, TextIO

import orjson

_GAP: Final = "  "
_PROGRESS_SECONDS: Final = 0.1


class Table(NamedTuple):
    """Rows under column names; a column of numbers is aligned to the right."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]

    def lines(self) -> list[str]:
        texts = [[cell_text(cell) for cell in row] for row in self.rows]
        widths = [
            max(_width(name), *(_width(row[at]) for row in texts), 0)
            for at, name in enumerate(self.columns)
        ]
        numeric = [
            any(_is_number(row[at]) for row in self.rows)
            and all(_is_number(row[at]) or row[at] in (None, "") for row in self.rows)
            for at in range(len(self.columns))
        ]
        return [
            _GAP.join(
                _padded(text, width, right=right)
                for text, width, right in zip(row, widths, numeric, strict=True)
            ).rstrip()
            for row in [list(self.columns), *texts]
        ]


class Printer:
    """Where a command's answer goes. `show` for a whole answer, `item` for one of very many."""

    def __init__(self, out: TextIO, *, as_json: bool) -> None:
        self._out = out
        self.as_json = as_json
        self._item_count = -1  # not in a list

    def show(self, document: object, *blocks: Table | str) -> None:
        """The document for scripts; for people the blocks, with an empty line between tables."""
        if self.as_json:
            self._write(orjson.dumps(document).decode() + "\n")
        else:
            self._show_blocks(blocks)
        self._out.flush()  # a command may go on for long before it shows more

    def _show_blocks(self, blocks: Sequence[Table | str]) -> None:
        for at, block in enumerate(blocks):
            if isinstance(block, str):
                self._write(safe(block) + "\n")
                continue
            if at:
                self._write("\n")
            self._write("".join(f"{line}\n" for line in block.lines()))

    def begin_list(self, name: str) -> None:
        """Items follow, one by one; for scripts they are a member of one object."""
        self._item_count = 0
        if self.as_json:
            self._write(f'{{"{name}":[')

    def item(self, value: object, line: str) -> None:
        """One of many: an element of the list for scripts, a line for people."""
        assert self._item_count >= 0, "begin_list() comes first"
        if self.as_json:
            self._write((",\n" if self._item_count else "") + orjson.dumps(value).decode())
        else:
            self._write(safe(line) + "\n")
        self._item_count += 1

    def end_list(self, rest: Mapping[str, object] | None = None, *blocks: Table | str) -> None:
        """The list is whole, or as much of it as there will be; `rest` are other members."""
        if self._item_count < 0:
            return
        self._item_count = -1
        if self.as_json:
            members = "".join(f',"{n}":{orjson.dumps(v).decode()}' for n, v in (rest or {}).items())
            self._write(f"]{members}}}\n")
        else:
            self.show(None, *blocks)

    def _write(self, text: str) -> None:
        self._out.write(text)


class Progress:
    """A line on a terminal that says how far a long command is; silent elsewhere."""

    def __init__(
        self, out: TextIO, what: str, total: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._what = what
        self._total = total
        self._now = now
        self._is_shown = out.isatty()
        self._next_at = 0.0

    def at(self, done: int) -> None:
        if self._is_shown and self._now() >= self._next_at:
            self._next_at = self._now() + _PROGRESS_SECONDS
            self._out.write(f"\r{self._what}: {done} of {self._total}\x1b[K")
            self._out.flush()

    def end(self) -> None:
        """Leave no trace."""
        if self._is_shown:
            self._out.write("\r\x1b[K")
            self._out.flush()


def cell_text(cell: object) -> str:
    """What stands in a cell."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return f"{cell:.2f}"
    return safe(str(cell)).replace("\n", " ")


def safe(text: str) -> str:
    """The text without what a terminal would act on; line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def time_text(when_ms: int) -> str:
    """A time for people, local; empty for none."""
    if when_ms <= 0:
        return ""
    try:
        when = datetime.fromtimestamp(when_ms / 1000)
    except (ValueError, OverflowError, OSError):
        return str(when_ms)
    return when.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def _padded(text: str, width: int, *, right: bool) -> str:
    blanks = " " * (width - _width(text))
    return blanks + text if right else text + blanks
