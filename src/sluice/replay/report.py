"""This module tells what a replay did: an object for programs, a page with curves for people.

The page is one file: no script, nothing to fetch. Both are written beside their place and renamed,
so that a report is there whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

import orjson

from sluice.errors import StoreError
from sluice.replay.measuring import Interval
from sluice.replay.plots import Line, chart
from sluice.replay.sending import Replayer

_STYLE: Final = (
    "body{font-family:sans-serif;max-width:900px;margin:2em auto;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border:1px solid #ccc;text-align:left}"
    "svg{width:100%;height:auto;margin:1em 0}"
)
_BLUE, _ORANGE, _RED, _GRAY = "#1f77b4", "#ff7f0e", "#d62728", "#888888"


def report_of(replayer: Replayer, about: Mapping[str, Any]) -> dict[str, Any]:
    """All of it, as JSON has it; `about` says what was replayed and how."""
    progress, series = replayer.progress, replayer.series
    total = series.total()
    seconds = max(progress.seconds, 1e-9)
    return {
        **about,
        "outcome": replayer.why or "complete",
        "is_complete": not replayer.why,
        "seconds": round(progress.seconds, 3),
        "messages": {
            "total": progress.total,
            "sent": progress.sent,
            "failed": progress.failed,
            "empty": progress.empty,
            "not_sent": progress.total - progress.sent - progress.failed,
        },
        "sent_bytes": progress.sent_bytes,
        "rate": round(progress.sent / seconds, 1),
        "latency_ms": _percentiles(total),
        "late_ms_max": round(total.late_ms, 1),
        "errors": dict(replayer.reasons.most_common()),
        "interval_seconds": series.seconds,
        "intervals": [
            {
                "second": index * series.seconds,
                "wanted": interval.wanted,
                "sent": interval.sent,
                "failed": interval.failed,
                "late_ms": round(interval.late_ms, 1),
                "latency_ms": _percentiles(interval),
            }
            for index, interval in enumerate(series.intervals)
        ],
    }


def _percentiles(interval: Interval) -> dict[str, float]:
    answers = interval.answers
    return {
        "p50": round(answers.percentile(0.5), 3),
        "p95": round(answers.percentile(0.95), 3),
        "p99": round(answers.percentile(0.99), 3),
        "max": round(answers.highest_ms, 3),
    }


def require_place(path: str) -> None:
    """Refuse now what could not be written when the replay is over."""
    for name in _names(path):
        hidden = _hidden(name)
        try:
            with open(hidden, "wb"):
                pass
            os.remove(hidden)
        except OSError as error:
            raise _no_report(name, error) from error


def write_report(path: str, report: Mapping[str, Any]) -> tuple[str, str]:
    """Write PATH.json and PATH.html; their names."""
    names = _names(path)
    _write(names[0], orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    _write(names[1], page_of(report).encode())
    return names


def _names(path: str) -> tuple[str, str]:
    base = path.removesuffix(".json").removesuffix(".html")
    return f"{base}.json", f"{base}.html"


def _hidden(path: str) -> str:
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.new")


def _no_report(path: str, error: OSError) -> StoreError:
    return StoreError(f"--report: {path} cannot be written: {error.strerror}")


def _write(path: str, data: bytes) -> None:
    hidden = _hidden(path)
    try:
        with open(hidden, "wb") as file:
            file.write(data)
        os.replace(hidden, path)
    except OSError as error:
        raise _no_report(path, error) from error


# --------------------------------------------------------------------------------------------- page


def page_of(report: Mapping[str, Any]) -> str:
    """The page."""
    counts, times = report["messages"], report["latency_ms"]
    rows = {
        "recording": report["recording"],
        "topics": ", ".join(f"{a} → {b}" for a, b in report["topics"].items()),
        "pace": report["pace"],
        "outcome": report["outcome"],
        "time": f"{report['seconds']:,.1f} s",
        "sent": f"{counts['sent']:,} of {counts['total']:,} ({report['rate']:,.0f}/s)",
        "failed": f"{counts['failed']:,}",
        "answers": f"p50 {times['p50']} ms, p95 {times['p95']} ms, p99 {times['p99']} ms, "
        f"max {times['max']} ms",
        "latest": f"{report['late_ms_max']:,.0f} ms behind its time",
    }
    table = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    errors = "".join(
        f"<tr><td>{count:,}</td><td>{escape(text)}</td></tr>"
        for text, count in report["errors"].items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Replay</title>'
        f"<style>{_STYLE}</style></head><body><h1>Replay</h1><table>{table}</table>"
        f"{''.join(_charts(report))}"
        f"{f'<h2>Errors</h2><table>{errors}</table>' if errors else ''}</body></html>\n"
    )


def _charts(report: Mapping[str, Any]) -> list[str]:
    """Curves that are flat within an interval; the last one may be shorter than the others."""
    width = report["interval_seconds"]
    intervals = report["intervals"]
    lengths = [float(width)] * len(intervals)
    if intervals:
        left = report["seconds"] - intervals[-1]["second"]
        lengths[-1] = min(max(left, width / 4), width)
    begins = [float(each["second"]) for each in intervals]
    seconds = [
        edge
        for begin, length in zip(begins, lengths, strict=True)
        for edge in (begin, begin + length)
    ]

    def flat(values: Iterable[float]) -> list[float]:
        return [value for value in values for _ in range(2)]

    def rates(name: str) -> list[float]:
        pairs = zip(intervals, lengths, strict=True)
        return flat(each[name] / length for each, length in pairs)

    def times(name: str) -> list[float]:
        return flat(each["latency_ms"][name] for each in intervals)

    return [
        chart(
            "Messages a second: wanted and reached",
            "/s",
            seconds,
            [
                Line("reached", _BLUE, rates("sent")),
                Line("wanted", _ORANGE, rates("wanted"), is_dashed=True),
            ],
        ),
        chart(
            "Time from a send to its answer",
            "ms",
            seconds,
            [
                Line("p50", _BLUE, times("p50")),
                Line("p95", _ORANGE, times("p95")),
                Line("p99", _RED, times("p99")),
            ],
        ),
        chart(
            "How late messages went out",
            "ms",
            seconds,
            [Line("latest", _GRAY, flat(each["late_ms"] for each in intervals))],
        ),
        chart("Errors a second", "/s", seconds, [Line("failed", _RED, rates("failed"))]),
    ]
