"""This module keeps one peer from filling the log: so many lines about it in a minute, no more.

What is left out is counted, and the count is told when the minute is over and it goes on. It knows
neither peers nor connections: whoever has something to limit holds a `LogShare`.
"""

from __future__ import annotations

import logging
import time
from typing import Final

LINES_MAX: Final = 20
WINDOW_SECONDS: Final = 60.0


class LogShare:
    """The lines about one thing."""

    __slots__ = ("_count", "_since")

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._count = 0

    def line(self, logger: logging.Logger, level: int, text: str, *values: object) -> None:
        """Log a line, if this minute has room for it."""
        now = time.monotonic()
        if now - self._since > WINDOW_SECONDS:
            if self._count > LINES_MAX:
                logger.log(level, "%d lines before this one were left out", self._count - LINES_MAX)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= LINES_MAX:
            logger.log(level, text, *values)
        if self._count == LINES_MAX:
            logger.log(level, "more lines like this one are left out for a minute")
