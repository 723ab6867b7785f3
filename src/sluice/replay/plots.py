"""This module draws curves over time as SVG: some lines, axes with round numbers, a legend.

Only what a replay's report needs: numbers in, text out, nothing that a browser has to fetch or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

_WIDTH: Final = 860
_HEIGHT: Final = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 34, 34
_TICKS: Final = 5


class Line(NamedTuple):
    """One curve."""

    name: str
    color: str
    values: Sequence[float]
    is_dashed: bool = False


def chart(title: str, unit: str, seconds: Sequence[float], lines: Sequence[Line]) -> str:
    """A drawing of curves over the same seconds."""
    top = max((max(line.values, default=0.0) for line in lines), default=0.0)
    step = _round_step(top)
    height = max(step, math.ceil(top / step - 1e-9) * step)
    width = max(seconds[-1], 1.0) if seconds else 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        *_grid(width, height, step, unit),
        *_legend(lines),
    ]
    for line in lines:
        points = " ".join(
            f"{_x(second, width):.1f},{_y(value, height):.1f}"
            for second, value in zip(seconds, line.values, strict=True)
        )
        dashes = ' stroke-dasharray="6 4"' if line.is_dashed else ""
        parts.append(
            f'<polyline fill="none" stroke="{line.color}" stroke-width="1.6"{dashes} '
            f'points="{points}"/>'
        )
    return "".join([*parts, "</svg>"])


def _x(second: float, width: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * second / width


def _y(value: float, height: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / height


def _round_step(top: float) -> float:
    """1, 2 or 5 times a power of ten, so that a handful of them reaches the top."""
    if top <= 0:
        return 1.0
    raw = top / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999))


def _grid(width: float, height: float, step: float, unit: str) -> Iterator[str]:
    for number in range(round(height / step) + 1):
        value = number * step
        y = _y(value, height)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
        text = f"{value:,.10g}" + (f" {escape(unit)}" if number else "")
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    every = _round_step(width)
    for number in range(math.floor(width / every + 1e-9) + 1):
        x = _x(number * every, width)
        yield f'<path d="M{x:.1f} {_HEIGHT - _BOTTOM}v5" stroke="#888"/>'
        label = f"{number * every:g} s"
        yield f'<text x="{x:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{label}</text>'


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    x = _WIDTH - _RIGHT
    for line in reversed(lines):
        x -= 8 * len(line.name) + 34
        yield f'<path d="M{x} 16h20" stroke="{line.color}" stroke-width="3"/>'
        yield f'<text x="{x + 25}" y="20">{escape(line.name)}</text>'
