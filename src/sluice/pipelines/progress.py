"""This module makes numbers and words of what Spark says about queries. It is pure.

Spark reports each batch with a number; a report may be read twice, and is counted once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_MOVING_BATCHES: Final = 5  # rows/s is that of the last few batches: of one alone it jumps
_OURS: Final = re.compile(r"^(?:pyspark\S*: )?sluice\.[\w.]+: (.+)$", re.MULTILINE)
_PYTHON: Final = re.compile(r"^(\w[\w.]*(?:Error|Exception|Exit|Interrupt): .+)$", re.MULTILINE)
_WAITED: Final = re.compile(r"Exception thrown in awaitResult:\s*(SQLSTATE.*)?$")
_REASON_CHARS_MAX: Final = 300


@dataclass
class QueryCount:
    """What one query has done since it was started."""

    rows: int = 0
    batches: int = 0
    late_rows: int = 0  # dropped by Spark, as older than the watermark allows
    state_rows: int = 0  # remembered from batch to batch, after the last one
    last_batch: int = -1
    batch_ms: int = 0
    recent: list[tuple[int, int]] = field(default_factory=list)  # (rows, ms) of the last batches

    def add(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Take in what Spark reports; batches that are known already change nothing."""
        for report in reports:
            number = int(report["batchId"])
            if number <= self.last_batch:
                continue
            duration_ms = int((report.get("durationMs") or {}).get("triggerExecution", 0))
            if "addBatch" not in (report.get("durationMs") or {}):
                continue  # nothing was there: Spark looked, and reports that
            self.last_batch = number
            rows = int(report.get("numInputRows") or 0)
            self.rows += rows
            self.batches += 1
            self.batch_ms = duration_ms
            operators = report.get("stateOperators") or ()
            self.late_rows += _sum(operators, "numRowsDroppedByWatermark")
            self.state_rows = _sum(operators, "numRowsTotal")
            self.recent = [*self.recent, (rows, duration_ms)][-_MOVING_BATCHES:]

    @property
    def rows_per_second(self) -> float:
        """Of the last few batches, while they ran."""
        duration_ms = sum(duration for _, duration in self.recent)
        return 1000 * sum(rows for rows, _ in self.recent) / duration_ms if duration_ms else 0.0


def _sum(operators: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(operator.get(name) or 0) for operator in operators)


def line(name: str, counts: Mapping[str, QueryCount], lag: int | None) -> str:
    """How a pipeline does, in one line."""
    rows = sum(count.rows for count in counts.values())
    rate = sum(count.rows_per_second for count in counts.values())
    batches = sum(count.batches for count in counts.values())
    slowest_ms = max((count.batch_ms for count in counts.values()), default=0)
    return (
        f"{name}: {rows:,} rows, {rate:,.0f} rows/s, lag {_number(lag)}, "
        f"batch {batches:,} in {slowest_ms:,} ms"
    )


def summary(
    name: str, counts: Mapping[str, QueryCount], lag: int | None, seconds: float, *, stopped: bool
) -> str:
    """What a pipeline did, in one line."""
    rows = sum(count.rows for count in counts.values())
    batches = sum(count.batches for count in counts.values())
    late = sum(count.late_rows for count in counts.values())
    dropped = f", {late:,} too late" if late else ""
    word = "stopped after" if stopped else "handled"
    return (
        f"{name}: {word} {rows:,} rows in {batches:,} batches{dropped}, {seconds:.1f} s, "
        f"lag {_number(lag)}"
    )


def _number(lag: int | None) -> str:
    return "unknown" if lag is None else f"{lag:,}"


def told(error: BaseException) -> str:
    """What Spark says of a failure; where that is only that it waited, what it waited for."""
    cause: BaseException | None = error
    while cause is not None:
        lines = str(cause).splitlines()
        if not lines or not _WAITED.search(lines[0]):
            return str(cause)
        cause = getattr(cause, "_cause", None)  # PySpark keeps Java's causes there
    return str(error)


def reason(text: str) -> str:
    """Why a query failed, in one line out of the pages that Spark gives."""
    ours = _OURS.findall(text)
    if ours:
        return _shortened(ours[-1])
    python = _PYTHON.findall(text)
    if python and "Traceback" in text:
        return _shortened(python[-1])
    lines = [each.strip() for each in text.splitlines() if each.strip()]
    return _shortened(lines[0] if lines else "no reason is given")


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _REASON_CHARS_MAX else f"{text[: _REASON_CHARS_MAX - 3]}..."
