"""This module declares what a setting is; the classes beside it declare which ones there are.

A setting is written once, as a field of a frozen dataclass:

    retention_hours: int = hours(72, "How long ...", minimum=1, rocketmq="fileReservedTime")

The field carries a `Setting`: its kind, limits, RocketMQ names and sentence. The TOML file,
environment variables, flags, RocketMQ's broker.conf and docs/settings.md are all made from these. A
value out of its limits cannot be held: the classes check themselves whenever one is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from sluice.config.kinds import (
    FLAG,
    LIST,
    NUMBER,
    SIZE,
    SWITCH,
    TEXT,
    WHOLE,
    Kind,
    Value,
    duration,
    parse_flag,
    parse_list,
    parse_switch,
    parse_text,
    parse_whole,
)
from sluice.errors import ConfigError

INT32_MAX: Final = 2**31 - 1
TEXT_MAX: Final = 4096  # characters of any text setting

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Foreign:
    """One of RocketMQ's names for a setting. `read` gives None where the text asks for nothing."""

    name: str
    read: Callable[[str], Value | None]
    write: Callable[[Value], str] | None  # None: we read this name but never write it
    note: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """All there is to know about one setting. `name` and `section` come from its place."""

    kind: Kind
    default: Value
    doc: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()
    syntax: Callable[[str], object] | None = None
    foreign: tuple[Foreign, ...] = ()
    dynamic: bool = False
    name: str = ""
    section: str = ""

    @property
    def allowed(self) -> str:
        """What may be written, for messages and for the documentation."""
        render = self.kind.render
        if self.choices:
            return ", ".join(self.choices)
        if self.minimum is not None and self.maximum is not None:
            return f"{render(self.minimum)} to {render(self.maximum)}"
        return {"flag": "true, false", "list": "a;b;c"}.get(self.kind.name, self.kind.name)

    def complaint(self, value: object) -> str | None:
        """Half a sentence on why the value cannot be had; None if it can."""
        expected = tuple if self.kind is LIST else type(self.default)
        if type(value) is not expected and not (expected is float and type(value) is int):
            return self.kind.mismatch
        if self.choices and value not in self.choices:
            return "is not known"
        if isinstance(value, int | float):
            if isinstance(value, bool) or self.minimum is None or self.maximum is None:
                return None
            # Asked this way round, NaN is outside too.
            return None if self.minimum <= value <= self.maximum else "is out of limits"
        return self._text_complaint(value if isinstance(value, tuple) else (value,))

    def _text_complaint(self, parts: tuple[object, ...]) -> str | None:
        for part in parts:
            if not isinstance(part, str) or len(part) > TEXT_MAX:
                return f"is not text of at most {TEXT_MAX} characters"
            try:
                parse_text(part)
                if self.syntax is not None:
                    self.syntax(part)
            except ValueError as error:
                return str(error)
        return None


# RocketMQ's ways to write a value ---------------------------------------------------------------


def percent(name: str) -> Foreign:
    """RocketMQ counts in whole percent where we have a ratio."""
    return Foreign(
        name,
        lambda text: parse_whole(text) / 100,
        lambda value: str(round(cast(float, value) * 100)),
        "percent",
    )


def multiple(name: str, factor: int, note: str) -> Foreign:
    """RocketMQ's number is ours times a factor (bytes of a queue file, of units of 20 bytes)."""

    def read(text: str) -> int:
        value = parse_whole(text)
        if value % factor:
            raise ValueError(f"is not a multiple of {factor}")
        return value // factor

    return Foreign(name, read, lambda value: str(cast(int, value) * factor), note)


def larger_unit(name: str, factor: int, note: str) -> Foreign:
    """RocketMQ's unit is larger than ours: its number times the factor is ours."""
    return Foreign(name, lambda text: parse_whole(text) * factor, None, note)


def switched(name: str) -> Foreign:
    """RocketMQ's true and false; where ours decides by itself there is no word of RocketMQ's."""
    back = {"on": "true", "off": "false"}
    return Foreign(name, parse_switch, lambda value: back.get(cast(str, value), cast(str, value)))


def words(name: str, table: Mapping[str, Value | None]) -> Foreign:
    """RocketMQ has a word for each choice; None leaves the setting as it is."""
    back = {value: word for word, value in table.items() if value is not None}

    def read(text: str) -> Value | None:
        if text not in table:
            raise ValueError(f"is not known (write {', '.join(table)})")
        return table[text]

    complete = None not in table.values()
    return Foreign(name, read, (lambda value: back[value]) if complete else None)


def unless_empty(name: str) -> Foreign:
    """A text of which RocketMQ's empty one asks for nothing."""
    return Foreign(name, lambda text: parse_text(text) or None, lambda value: cast(str, value))


_PLAIN: Final[dict[str, Callable[[str], Value]]] = {
    "flag": parse_flag,
    "list": parse_list,
    "text": parse_text,
}


def _plain(name: str, kind: Kind) -> Foreign:
    """The same unit and meaning; RocketMQ knows no suffixes, only plain numbers."""

    def write(value: Value) -> str:
        return kind.render(value) if kind.name in _PLAIN else str(value)

    return Foreign(name, _PLAIN.get(kind.name, parse_whole), write)


# The declarations -------------------------------------------------------------------------------

Names = str | Foreign | tuple[str | Foreign, ...]


def _declare(setting: Setting, rocketmq: Names) -> Any:
    names = rocketmq if isinstance(rocketmq, tuple) else (rocketmq,)
    foreign = tuple(_plain(n, setting.kind) if isinstance(n, str) else n for n in names if n)
    declared = dataclasses.replace(setting, foreign=foreign)
    return field(default=declared.default, metadata={"setting": declared})


def size(
    default: int,
    doc: str,
    minimum: int,
    maximum: int,
    *,
    rocketmq: Names = (),
    dynamic: bool = False,
) -> int:
    setting = Setting(SIZE, default, doc, minimum, maximum, dynamic=dynamic)
    return cast(int, _declare(setting, rocketmq))


def count(
    default: int,
    doc: str,
    minimum: int,
    maximum: int,
    *,
    rocketmq: Names = (),
    dynamic: bool = False,
) -> int:
    setting = Setting(WHOLE, default, doc, minimum, maximum, dynamic=dynamic)
    return cast(int, _declare(setting, rocketmq))


def millis(
    default: int,
    doc: str,
    minimum: int,
    maximum: int,
    *,
    rocketmq: Names = (),
    dynamic: bool = False,
) -> int:
    setting = Setting(duration("ms"), default, doc, minimum, maximum, dynamic=dynamic)
    return cast(int, _declare(setting, rocketmq))


def hours(
    default: int,
    doc: str,
    minimum: int,
    maximum: int,
    *,
    rocketmq: Names = (),
    dynamic: bool = False,
) -> int:
    setting = Setting(duration("h"), default, doc, minimum, maximum, dynamic=dynamic)
    return cast(int, _declare(setting, rocketmq))


def ratio(
    default: float,
    doc: str,
    minimum: float,
    maximum: float,
    *,
    rocketmq: Names = (),
    dynamic: bool = False,
) -> float:
    setting = Setting(NUMBER, default, doc, minimum, maximum, dynamic=dynamic)
    return cast(float, _declare(setting, rocketmq))


def flag(default: bool, doc: str, *, rocketmq: Names = (), dynamic: bool = False) -> bool:
    return cast(bool, _declare(Setting(FLAG, default, doc, dynamic=dynamic), rocketmq))


def text(
    default: str,
    doc: str,
    *,
    syntax: Callable[[str], object] | None = None,
    rocketmq: Names = (),
    dynamic: bool = False,
) -> str:
    setting = Setting(TEXT, default, doc, syntax=syntax, dynamic=dynamic)
    return cast(str, _declare(setting, rocketmq))


def choice(
    choices: tuple[str, ...], doc: str, *, rocketmq: Names = (), dynamic: bool = False
) -> Any:
    """One of a few words; the first is the default."""
    setting = Setting(TEXT, choices[0], doc, choices=choices, dynamic=dynamic)
    return _declare(setting, rocketmq)


def switch(doc: str, *, rocketmq: str = "", dynamic: bool = False) -> Any:
    """On, off, or (the default) auto: then it depends on what the sentence says."""
    setting = Setting(SWITCH, "auto", doc, choices=("auto", "on", "off"), dynamic=dynamic)
    return _declare(setting, switched(rocketmq) if rocketmq else ())


def addresses(
    doc: str, *, syntax: Callable[[str], object] | None = None, rocketmq: Names = ()
) -> tuple[str, ...]:
    setting = Setting(LIST, (), doc, syntax=syntax)
    return cast("tuple[str, ...]", _declare(setting, rocketmq))


# The collection ---------------------------------------------------------------------------------


_collected: Final[dict[type[Any], Mapping[str, Setting]]] = {}


def settings_of(kind: type[Any]) -> Mapping[str, Setting]:
    """Every setting of a configuration class by its flat name, those of nested classes included."""
    if kind not in _collected:
        _collected[kind] = _collect(kind)
    return _collected[kind]


def _collect(kind: type[Any]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    own = kind.__annotations__  # what a class adds comes first, what it inherits after it
    for declared in sorted(dataclasses.fields(kind), key=lambda each: each.name not in own):
        setting = declared.metadata.get("setting")
        if setting is not None:
            found[declared.name] = dataclasses.replace(setting, name=declared.name)
            continue
        nested = cast("type[Any]", declared.default_factory)
        for name, inner in settings_of(nested).items():
            assert name not in found, f"two settings are called {name}"
            found[name] = dataclasses.replace(inner, section=declared.name)
    return found


def check(config: Any) -> None:
    """Raise ConfigError for the first own setting that is out of its limits."""
    for declared in dataclasses.fields(config):
        setting = declared.metadata.get("setting")
        if setting is None:
            continue
        value = getattr(config, declared.name)
        complaint = setting.complaint(value)
        if complaint is not None:
            raise ConfigError(f"{declared.name}: {value!r} {complaint}; allowed: {setting.allowed}")


def build(kind: type[C], values: Mapping[str, Value]) -> C:
    """A configuration object from flat values; what is not named has its default."""
    arguments: dict[str, object] = {}
    for declared in dataclasses.fields(cast("type[Any]", kind)):
        if "setting" in declared.metadata:
            if declared.name in values:
                arguments[declared.name] = values[declared.name]
        else:
            arguments[declared.name] = build(cast("type[Any]", declared.default_factory), values)
    return kind(**arguments)


def flatten(config: Any) -> dict[str, Value]:
    """The inverse of `build`: every value by its flat name."""
    values: dict[str, Value] = {}
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        if "setting" in declared.metadata:
            values[declared.name] = value
        else:
            values.update(flatten(value))
    return values
