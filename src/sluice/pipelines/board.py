"""This module keeps the boards of the pipeline `gifts` and draws them. It is pure.

`Board` takes lines as the pipeline publishes them and ranks the latest of each. `Tally` counts
gifts itself, in plain Python: what shows the boards where there is no Spark, and what a test or the
end of the story compares them with.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

SECOND_MS: Final = 1000
MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000
_WINDOW_MS: Final = {"second": SECOND_MS, "minute": MINUTE_MS, "day": DAY_MS, "share": DAY_MS}
_WINDOWS_KEPT: Final = 3  # of each board; older ones are over
_KNOWN_MAX: Final = 100_000  # gifts that are remembered, to count none of them twice
_COLUMN: Final = 26


class Line(NamedTuple):
    """One line of a board."""

    name: str
    coins: int


class Board:
    """The latest lines of the newest windows, ranked."""

    def __init__(self, *, kept: int = _WINDOWS_KEPT) -> None:
        self._kept = kept
        self._boards: dict[str, dict[int, dict[str, int]]] = {name: {} for name in _WINDOW_MS}

    def add(self, board: str, start_ms: int, name: str, coins: int) -> None:
        """A line as it is now; one that was overtaken by a newer one changes nothing."""
        windows = self._boards[board]
        lines = windows.setdefault(start_ms, {})
        lines[name] = max(coins, lines.get(name, 0))  # coins only grow
        while len(windows) > self._kept:
            del windows[min(windows)]

    def take(self, message: Mapping[str, Any]) -> None:
        """A message of the pipeline's output."""
        if message.get("board") in self._boards:
            self.add(message["board"], message["start"], message["name"], message["coins"])

    def copy(self) -> Board:
        """The same boards, for another thread."""
        made = Board(kept=self._kept)
        for board, windows in self._boards.items():
            made._boards[board] = {start: dict(lines) for start, lines in windows.items()}
        return made

    def newest(self, board: str) -> int | None:
        """When the newest window of a board begins."""
        return max(self._boards[board], default=None)

    def top(self, board: str, start_ms: int, count: int) -> list[Line]:
        """The first lines of a window."""
        lines = self._boards[board].get(start_ms, {})
        ranked = sorted(lines.items(), key=lambda line: (-line[1], line[0]))
        return [Line(name, coins) for name, coins in ranked[:count]]

    def tops(self, board: str, count: int) -> dict[int, list[Line]]:
        """The first lines of all windows that are kept."""
        return {start: self.top(board, start, count) for start in sorted(self._boards[board])}


class Tally:
    """The boards of gifts, counted one by one; each gift counts once."""

    def __init__(self, share_percent: int, *, kept: int = _WINDOWS_KEPT) -> None:
        self._share_percent = share_percent
        self._kept = kept
        self._known: dict[str, None] = {}  # in the order in which they came
        self._sums: dict[str, dict[int, dict[str, int]]] = {name: {} for name in _WINDOW_MS}
        self.gifts = 0

    def take(self, gift: Mapping[str, Any]) -> None:
        """Count a gift, unless it was counted before."""
        if gift["id"] in self._known:
            return
        self._known[gift["id"]] = None
        if len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self.gifts += 1
        for board, length_ms in _WINDOW_MS.items():
            start_ms = gift["at"] // length_ms * length_ms
            is_share = board == "share"
            name = gift["host"] if is_share else gift["viewer"]
            coins = gift["coins"] * self._share_percent if is_share else gift["coins"]
            windows = self._sums[board]
            sums = windows.setdefault(start_ms, {})
            sums[name] = sums.get(name, 0) + coins
            while len(windows) > self._kept:
                del windows[min(windows)]

    def board(self) -> Board:
        """The boards as they are now."""
        made = Board(kept=self._kept)
        for board, windows in self._sums.items():
            for start_ms, sums in windows.items():
                for name, coins in sums.items():
                    made.add(board, start_ms, name, coins)
        return made


def agree(shown: Board, counted: Board, count: int) -> bool:
    """Whether two boards show the same in their newest windows."""
    return all(
        shown.tops(board, count) == counted.tops(board, count) for board in ("day", "share")
    ) and all(_same_newest(shown, counted, board, count) for board in ("second", "minute"))


def _same_newest(shown: Board, counted: Board, board: str, count: int) -> bool:
    newest = counted.newest(board)
    return newest is None or shown.top(board, newest, count) == counted.top(board, newest, count)


def draw(board: Board, count: int) -> list[str]:
    """The boards beside each other, and the newest second above them."""
    second = board.newest("second")
    lines = []
    if second is not None:
        best = ", ".join(f"{name} {coins:,}" for name, coins in board.top("second", second, 3))
        lines.append(f"second {_clock(second, '%H:%M:%S')}: {best}")
    columns = []
    for name, title, form in (
        ("minute", "minute", "%H:%M"),
        ("day", "day", "%Y-%m-%d"),
        ("share", "hosts' share", "%Y-%m-%d"),
    ):
        start = board.newest(name)
        if start is None:
            continue
        texts = [f"{title} {_clock(start, form)}"]
        for rank, line in enumerate(board.top(name, start, count), 1):
            amount = f"{line.coins / 100:,.2f}" if name == "share" else f"{line.coins:,}"
            texts.append(f"{rank:>2}. {line.name:<11}{amount:>9}")
        columns.append(texts)
    for number in range(max((len(column) for column in columns), default=0)):
        cells = [column[number] if number < len(column) else "" for column in columns]
        lines.append("  ".join(f"{cell:<{_COLUMN}}" for cell in cells).rstrip())
    return lines


def brief(board: Board, count: int) -> str:
    """The day's first viewers, in half a line."""
    day = board.newest("day")
    if day is None:
        return "no board yet"
    return "day: " + ", ".join(f"{name} {coins:,}" for name, coins in board.top("day", day, count))


def _clock(start_ms: int, form: str) -> str:
    return datetime.fromtimestamp(start_ms / 1000, UTC).strftime(form)
