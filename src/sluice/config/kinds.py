"""This module knows how each kind of setting is written: text -> value -> text, with units.

A kind's `parse` raises ValueError with half a sentence ("is not a size") that the caller completes
with the place and the key. `render` is its inverse: parse(render(value)) == value for every legal
value. Nothing here knows a particular setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Value = bool | int | float | str | tuple[str, ...]

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Longest unit first: rendering takes the first that divides the value.
_SIZE_UNITS: Final = {"TiB": 1024 * GIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
_TIME_UNITS_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_NEVER_RENDERED: Final = ("d", "B")  # people say 72h, and bytes need no unit
_WORDS: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
# Twenty digits hold every int64; a longer number is a mistake, and int() of it would be slow.
_WHOLE: Final = re.compile(r"[+-]?[0-9][0-9_]{0,19}")
_QUANTITY: Final = re.compile(r"([0-9][0-9_]{0,19})\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of value is written in files, variables and flags."""

    name: str
    metavar: str
    parse: Callable[[str], Value]
    render: Callable[[Value], str]
    native: tuple[type, ...]  # types that a TOML file may use instead of text

    @property
    def mismatch(self) -> str:
        return "is not text" if self.name == "text" else f"is not a {self.name}"


def parse_whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError("is not a whole number")
    return int(text)


def parse_flag(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError("is neither true nor false")
    return _WORDS[text.lower()]


def parse_switch(text: str) -> str:
    """`auto`, or what a flag may say, as `on` or `off`."""
    if text.lower() == "auto":
        return "auto"
    if text.lower() not in _WORDS:
        raise ValueError("is none of auto, on and off")
    return "on" if _WORDS[text.lower()] else "off"


def parse_number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,10}(\.[0-9]{1,20})?", text):
        raise ValueError("is not a decimal number")
    return float(text)


def parse_text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds a character that cannot be printed")
    return text


def parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in parse_text(text).split(";") if part.strip())


def parse_size(text: str) -> int:
    """Bytes, from `65536`, `64KiB`, `1 GiB`. KB and MB are refused: they mean two things."""
    match = _QUANTITY.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _SIZE_UNITS.items()}
    if not match or (match[2] and match[2].lower() not in units):
        raise ValueError("is not a size (write 65536, 64KiB, 16MiB, 1GiB)")
    return int(match[1]) * units[match[2].lower() or "b"]


def _parse_time(text: str, unit_ms: int) -> int:
    match = _QUANTITY.fullmatch(text)
    if not match or (match[2] and match[2].lower() not in _TIME_UNITS_MS):
        raise ValueError("is not a time (write 500ms, 10s, 5m, 72h, 3d)")
    total_ms = int(match[1]) * (_TIME_UNITS_MS[match[2].lower()] if match[2] else unit_ms)
    if total_ms % unit_ms:
        raise ValueError(f"is not a whole number of {_render_unit(unit_ms)}")
    return total_ms // unit_ms


def _render_unit(unit_ms: int) -> str:
    return next(unit for unit, factor in _TIME_UNITS_MS.items() if factor == unit_ms)


def _render_quantity(value: int, units: dict[str, int]) -> str:
    for unit, factor in units.items():
        if value and value % factor == 0 and unit not in _NEVER_RENDERED:
            return f"{value // factor}{unit}"
    return str(value)


def _render_size(value: Value) -> str:
    assert isinstance(value, int)
    return _render_quantity(value, _SIZE_UNITS)


def _render_flag(value: Value) -> str:
    return "true" if value else "false"


def _render_list(value: Value) -> str:
    assert isinstance(value, tuple)
    return ";".join(value)


def duration(unit: str) -> Kind:
    """A time that is held as a whole number of `unit` ("ms", "s", "h")."""
    unit_ms = _TIME_UNITS_MS[unit]

    def parse(text: str) -> int:
        return _parse_time(text, unit_ms)

    def render(value: Value) -> str:
        assert isinstance(value, int)
        return _render_quantity(value * unit_ms, _TIME_UNITS_MS)

    return Kind("duration", "TIME", parse, render, (int,))


WHOLE: Final = Kind("whole number", "N", parse_whole, str, (int,))
NUMBER: Final = Kind("decimal number", "X", parse_number, repr, (int, float))
FLAG: Final = Kind("flag", "BOOL", parse_flag, _render_flag, (bool,))
SWITCH: Final = Kind("switch", "auto|on|off", parse_switch, str, (bool,))
TEXT: Final = Kind("text", "TEXT", parse_text, str, ())
LIST: Final = Kind("list", "A;B", parse_list, _render_list, (list,))
SIZE: Final = Kind("size", "SIZE", parse_size, _render_size, (int,))


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """RocketMQ's `1s 5s 1m 2h`: the delays in ms, level 1 first. Level 0 means no delay."""
    levels = []
    for part in text.split():
        if not re.fullmatch(r"[1-9][0-9]{0,9}[smhd]", part):
            raise ValueError(f"{part!r} is not a delay (write 30s, 5m, 2h, 1d)")
        levels.append(_parse_time(part, 1))
    if not levels:
        raise ValueError("names no level")
    return tuple(levels)


def parse_hours_of_day(text: str) -> tuple[int, ...]:
    """RocketMQ's `04` or `04;16`: hours of the day, local time."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts or not all(re.fullmatch(r"[0-9]{1,2}", part) and int(part) < 24 for part in parts):
        raise ValueError("is not a list of hours of the day (write 04 or 04;16)")
    return tuple(sorted({int(part) for part in parts}))
