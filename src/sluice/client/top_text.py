"""This module lays out what `sluice top` shows: lines of text for a screen of any size, or JSON.

It knows no terminal. Names come from other machines, so whatever could move a cursor is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import orjson

from sluice.client.top_data import BrokerRow, GroupRow, TopicRow, View

Style = Literal["plain", "title", "head", "warning"]
Key = Callable[[Any], tuple[Any, ...]]

HELP: Final = "q quit   s next order"


class Line(NamedTuple):
    text: str
    style: Style = "plain"


# What is on top. A tie is broken by name, so that rows do not jump.
TOPIC_ORDERS: Final[dict[str, Key]] = {
    "rate": lambda row: (-row.in_rate, row.name),
    "lag": lambda row: (-row.in_rate, row.name),
    "messages": lambda row: (-row.messages, row.name),
    "name": lambda row: (row.name,),
}
GROUP_ORDERS: Final[dict[str, Key]] = {
    "rate": lambda row: (-row.out_rate, row.group, row.topic),
    "lag": lambda row: (-row.lag, row.group, row.topic),
    "messages": lambda row: (-row.lag, row.group, row.topic),
    "name": lambda row: (row.group, row.topic),
}
ORDERS: Final = tuple(TOPIC_ORDERS)


def next_order(order: str) -> str:
    return ORDERS[(ORDERS.index(order) + 1) % len(ORDERS)]


def layout(
    view: View, *, title: str, order: str, width: int = 1000, height: int | None = None
) -> list[Line]:
    """The lines of a screen; without a height, all there are."""
    when = datetime.fromtimestamp(view.taken_ms / 1000).strftime("%H:%M:%S")
    lines = [Line(f"sluice top   {title}   {when}   order: {order}", "title")]
    lines += [Line(problem, "warning") for problem in view.problems]
    lines += [Line(f"{b.name}: {b.warning}", "warning") for b in view.brokers if b.warning]
    if view.brokers:
        lines += [Line(""), *_table(_BROKER_HEAD, [_broker(row) for row in view.brokers])]
        topics = [_topic(row) for row in sorted(view.topics, key=TOPIC_ORDERS[order])]
        groups = [_group(row) for row in sorted(view.groups, key=GROUP_ORDERS[order])]
        for_topics, for_groups = len(topics), len(groups)
        if height is not None:
            # Two blank lines, two heads, and the last line of the screen.
            room = max(2, height - len(lines) - 5)
            for_topics, for_groups = _shares(room, for_topics, for_groups)
        lines += [Line(""), *_table(_TOPIC_HEAD, topics, for_topics)]
        lines += [Line(""), *_table(_GROUP_HEAD, groups, for_groups)]
    if height is not None:
        lines = lines[: max(1, height - 1)]
    return [Line(_shown(line.text)[:width], line.style) for line in lines]


def to_json(view: View) -> str:
    """The view for scripts, as one line."""
    return orjson.dumps(
        {
            "taken_ms": view.taken_ms,
            "brokers": [row._asdict() for row in view.brokers],
            "topics": [row._asdict() for row in view.topics],
            "groups": [row._asdict() for row in view.groups],
            "problems": view.problems,
        }
    ).decode()


# Tables -----------------------------------------------------------------------------------------

# Names are to the left, figures to the right.
_BROKER_HEAD: Final = ("BROKER", "ADDRESS", ">IN/s", ">OUT/s", ">DISK", ">HELD", "VERSION")
_TOPIC_HEAD: Final = ("TOPIC", ">QUEUES", ">MESSAGES", ">IN/s")
_GROUP_HEAD: Final = ("GROUP", "TOPIC", ">LAG", ">OUT/s")


def _broker(row: BrokerRow) -> tuple[str, ...]:
    return (
        row.name,
        row.address,
        _rate(row.in_rate),
        _rate(row.out_rate),
        "-" if row.disk_ratio is None else f"{row.disk_ratio:.0%}",
        "-" if row.held_pulls is None else f"{row.held_pulls:,}",
        row.version or "-",
    )


def _topic(row: TopicRow) -> tuple[str, ...]:
    return row.name, str(row.queues), f"{row.messages:,}", _rate(row.in_rate)


def _group(row: GroupRow) -> tuple[str, ...]:
    return row.group, row.topic, f"{row.lag:,}", _rate(row.out_rate)


def _table(
    head: Sequence[str], rows: Sequence[tuple[str, ...]], shown: int | None = None
) -> list[Line]:
    kept = rows if shown is None else rows[:shown]
    names = [name.removeprefix(">") for name in head]
    widths = [max(len(name), *(len(row[i]) for row in kept), 0) for i, name in enumerate(names)]

    def joined(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name.startswith(">") else cell.ljust(width)
            for cell, width, name in zip(cells, widths, head, strict=True)
        )
        return "  ".join(padded).rstrip()

    left = len(rows) - len(kept)
    more = f"   and {left} more" if left else ""
    return [Line(joined(names) + more, "head"), *(Line(joined(row)) for row in kept)]


def _shares(room: int, first: int, second: int) -> tuple[int, int]:
    """How two tables share the lines there are: half each, and what one leaves is the other's."""
    half = room // 2
    if first <= half:
        return first, min(second, room - first)
    if second <= half:
        return min(first, room - second), second
    return room - half, half


def _rate(value: float) -> str:
    """1,234 or 0.4: a rate below ten has a digit more."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
