"""This module reads a configuration from where people write it, and says clearly what is wrong.

    flags  >  environment  >  changed while the process ran  >  file  >  default

A file is TOML (`*.toml`, our names, flat or in tables) or Java properties (`*.conf`,
`*.properties`, RocketMQ's names). Every mistake is a ConfigError of one line: place, key, what is
wrong, what is allowed. The environment and the flags are arguments: nothing here looks at the
process by itself.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sluice.config import properties
from sluice.config.kinds import FLAG, LIST, SWITCH, Value
from sluice.config.processes import BrokerConfig, NameserverConfig
from sluice.config.rocketmq import (
    BROKER_INERT,
    COMMIT_LOG_PATH,
    FIXED,
    NAMESERVER_FIXED,
    NAMESERVER_INERT,
    Fixed,
)
from sluice.config.settings import Foreign, Setting, build, flatten, settings_of
from sluice.errors import ConfigError

FILE_BYTES_MAX: Final = 1 << 20

# Variables of these names belong to the test and benchmark harness, and to the command line.
_OTHER_VARIABLES: Final = (
    *("SLUICE_CONFIG", "SLUICE_CLIENT_"),
    *("SLUICE_BENCH_", "SLUICE_PEER", "SLUICE_TEST_"),
)

_FLAG_ORIGIN: Final = "--"
_VARIABLE_ORIGIN: Final = "environment: "

C = TypeVar("C")


class _Process(NamedTuple):
    """What differs between the views of one configuration class and another."""

    variable_prefix: str
    inert: Mapping[str, str]
    fixed: Mapping[str, Fixed]


_PROCESSES: Final[dict[type[Any], _Process]] = {
    BrokerConfig: _Process("SLUICE_", BROKER_INERT, FIXED),
    NameserverConfig: _Process("SLUICE_NAMESERVER_", NAMESERVER_INERT, NAMESERVER_FIXED),
}


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A configuration, where each value that is no default came from, and what to tell the user."""

    config: C
    origins: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def pinned(self) -> frozenset[str]:
        """What was given to this very start: changes made while the process ran do not count."""
        given = (_FLAG_ORIGIN, _VARIABLE_ORIGIN)
        return frozenset(name for name, at in self.origins.items() if at.startswith(given))


class _Gathered:
    """Values by flat name with their origin; a later view overrides an earlier one."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []

    def put(self, setting: Setting, value: Value, origin: str, written: object) -> None:
        complaint = setting.complaint(value)
        if complaint is not None:
            raise _wrong(origin, written, complaint, setting.allowed)
        self.values[setting.name] = value
        self.origins[setting.name] = origin


def load(
    kind: type[C],
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: argparse.Namespace | None = None,
) -> Loaded[C]:
    """The configuration of a process from all that is given."""
    gathered = _Gathered()
    if file is not None:
        _read_file(kind, file, gathered)
    if environ is not None:
        _read_environment(kind, environ, gathered)
    if flags is not None:
        _read_flags(kind, flags, gathered)
    return _finish(kind, gathered)


def loads(kind: type[C], text: str, name: str) -> Loaded[C]:
    """The configuration that a file of this name and content describes."""
    gathered = _Gathered()
    _read_text(kind, text, name, gathered)
    return _finish(kind, gathered)


def update(config: C, changes: Mapping[str, str], origin: str = "update") -> Loaded[C]:
    """`config` with settings changed while it is in use, by our names or by RocketMQ's."""
    kind = type(config)
    known = settings_of(kind)
    gathered = _Gathered()
    ours = {name: text for name, text in changes.items() if name in known}
    for name, text in ours.items():
        _put_text(gathered, known[name], text, f"{origin}: {name}")
    theirs = {name: (text, name) for name, text in changes.items() if name not in known}
    _put_foreign(kind, theirs, origin, gathered)
    for name, where in gathered.origins.items():
        if not known[name].dynamic and gathered.values[name] != flatten(config)[name]:
            raise ConfigError(
                f"{where}: takes effect at start only; set it in the file or by a flag and restart"
            )
    changed = build(kind, {**flatten(config), **gathered.values})
    return Loaded(changed, gathered.origins, tuple(gathered.warnings))


def _finish(kind: type[C], gathered: _Gathered) -> Loaded[C]:
    return Loaded(build(kind, gathered.values), gathered.origins, tuple(gathered.warnings))


# Files ------------------------------------------------------------------------------------------


def _read_file(kind: type[Any], path: str, gathered: _Gathered) -> None:
    try:
        with open(path, "rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {FILE_BYTES_MAX} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text") from error
    _read_text(kind, text, path, gathered)


def _read_text(kind: type[Any], text: str, path: str, gathered: _Gathered) -> None:
    ending = os.path.splitext(path)[1]
    if ending == ".toml":
        _read_toml(kind, text, path, gathered)
    elif ending in {".conf", ".properties"}:
        _read_properties(kind, text, path, gathered)
    else:
        raise ConfigError(
            f"{path}: has no known ending; allowed: .toml, or .conf and .properties (RocketMQ's)"
        )


def _read_toml(kind: type[Any], text: str, path: str, gathered: _Gathered) -> None:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        line = re.search(r"\(at line ([0-9]+)", reason)
        place = f"{path}:{line[1]}" if line else path
        raise ConfigError(f"{place}: is not TOML: {reason}") from error
    known = settings_of(kind)
    sections = {setting.section for setting in known.values()} - {""}
    for key, value in document.items():
        if key in sections and isinstance(value, dict):
            for inner, inner_value in value.items():
                place = f"{path}:{_toml_line(text, inner, key)}: {inner}"
                allowed = {n: s for n, s in known.items() if s.section == key}
                _put_toml(gathered, allowed, known, inner, inner_value, place)
        else:
            place = f"{path}:{_toml_line(text, key, '')}: {key}"
            _put_toml(gathered, known, known, key, value, place)


def _put_toml(
    gathered: _Gathered,
    allowed: Mapping[str, Setting],
    known: Mapping[str, Setting],
    key: str,
    value: object,
    place: str,
) -> None:
    setting = allowed.get(key)
    if setting is None:
        raise _unknown(place, key, allowed, known)
    if key in gathered.values:
        raise ConfigError(f"{place}: is set twice, in its table and at the top of the file")
    if isinstance(value, str):
        _put_text(gathered, setting, value, place)
    elif type(value) in setting.kind.native:
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(setting.default, float) and isinstance(value, int):
            value = float(value)
        elif setting.kind is SWITCH:
            value = setting.kind.parse(str(value))
        gathered.put(setting, value, place, value)  # type: ignore[arg-type]  # put() checks it
    else:
        raise _wrong(place, value, setting.kind.mismatch, setting.allowed)


def _toml_line(text: str, key: str, table: str) -> int:
    """The line of a key. tomllib does not say; a key in an unusual spelling is put at its table."""
    spelled = rf"[\"']?{re.escape(key)}[\"']?"
    current, best = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*[\"']?([^\"'\]]*?)[\"']?\s*\]", line)
        if header:
            current = header[1]
            best = number if current in {table, key} else best
            continue
        own = current == table and re.match(rf"\s*{spelled}\s*[.=]", line)
        dotted = table and re.match(
            rf"\s*[\"']?{table}[\"']?\s*(\.\s*{spelled}\s*=|=.*{spelled})", line
        )
        if own or dotted:
            return number
    return best


def _put_text(gathered: _Gathered, setting: Setting, text: str, place: str) -> None:
    try:
        value = setting.kind.parse(text.strip())
    except ValueError as error:
        raise _wrong(place, text, str(error), setting.allowed) from error
    gathered.put(setting, value, place, text)


# RocketMQ's names -------------------------------------------------------------------------------


def _read_properties(kind: type[Any], text: str, path: str, gathered: _Gathered) -> None:
    try:
        entries = properties.parse(text)
    except ValueError as error:
        raise ConfigError(f"{path}:{error}") from error
    named = {k: (entry.value, f"{path}:{entry.line}: {k}") for k, entry in entries.items()}
    _put_foreign(kind, named, path, gathered)


def _put_foreign(
    kind: type[Any], entries: Mapping[str, tuple[str, str]], origin: str, gathered: _Gathered
) -> None:
    """Take over (text, place) by RocketMQ's names."""
    inert, fixed = _PROCESSES[kind].inert, _PROCESSES[kind].fixed
    foreign = foreign_names(kind)
    ignored: dict[str, list[str]] = {}
    for name, (text, place) in entries.items():
        if name in foreign:
            _put_one_foreign(gathered, *foreign[name], text.strip(), place)
        elif name in fixed:
            if text.strip() not in fixed[name].values:
                allowed = ", ".join(value or "nothing" for value in fixed[name].values)
                raise _wrong(place, text, f"is refused: {fixed[name].reason}", allowed)
        elif name in inert:
            ignored.setdefault(inert[name], []).append(name)
        elif not (name == COMMIT_LOG_PATH and kind is BrokerConfig):
            raise _unknown(place, name, [*foreign, *fixed, *inert], {})
    for reason, names in ignored.items():
        gathered.warnings.append(f"{origin}: no effect here: {', '.join(names)} ({reason})")
    if COMMIT_LOG_PATH in entries and kind is BrokerConfig:
        _check_commit_log_path(*entries[COMMIT_LOG_PATH], gathered)


def _put_one_foreign(
    gathered: _Gathered, setting: Setting, name: Foreign, text: str, place: str
) -> None:
    try:
        value = name.read(text)
    except ValueError as error:
        raise _wrong(place, text, str(error), setting.allowed) from error
    if value is None:
        return
    before = gathered.values.get(setting.name, value)
    if before != value:
        first = gathered.origins[setting.name]
        raise ConfigError(f"{place}: says otherwise than {first}; both mean {setting.name}")
    gathered.put(setting, value, place, text)


def _check_commit_log_path(text: str, place: str, gathered: _Gathered) -> None:
    root = gathered.values.get("directory")
    if root is None:
        raise ConfigError(f"{place}: needs storePathRootDir beside it; the log lies under that")
    wanted = os.path.join(str(root), "commitlog")
    if os.path.normpath(text.strip()) != os.path.normpath(wanted):
        raise _wrong(place, text, "is refused: the log lies under storePathRootDir", wanted)


def foreign_names(kind: type[Any]) -> dict[str, tuple[Setting, Foreign]]:
    """RocketMQ's names that have a setting here."""
    return {n.name: (s, n) for s in settings_of(kind).values() for n in s.foreign}


# Environment and flags --------------------------------------------------------------------------


def variable_name(kind: type[Any], name: str) -> str:
    return _PROCESSES[kind].variable_prefix + name.upper()


def _read_environment(kind: type[Any], environ: Mapping[str, str], gathered: _Gathered) -> None:
    known = {variable_name(kind, name): setting for name, setting in settings_of(kind).items()}
    elsewhere = {variable_name(k, name) for k in _PROCESSES for name in settings_of(k)}
    prefix = _PROCESSES[kind].variable_prefix
    for variable, text in environ.items():
        if variable in known:
            _put_text(gathered, known[variable], text, f"{_VARIABLE_ORIGIN}{variable}")
            continue
        other = variable in elsewhere or variable.startswith(_OTHER_VARIABLES)
        if variable.startswith(prefix) and not other:
            raise _unknown(f"environment: {variable}", variable, known, {})


def add_flags(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """One flag for each setting. Texts are kept as they are; `load` checks them with the rest."""
    for name, setting in settings_of(kind).items():
        default = setting.kind.render(setting.default) or "none"
        help_text = f"{setting.doc} Default: {default}.".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if setting.kind is FLAG:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, dest=name, action=action, default=None, help=help_text)
        elif setting.kind is SWITCH:
            metavar, off = setting.kind.metavar, "--no-" + flag.removeprefix("--")
            parser.add_argument(
                flag,
                dest=name,
                metavar=metavar,
                nargs="?",
                const="on",
                default=None,
                help=help_text,
            )
            parser.add_argument(off, dest=name, action="store_const", const="off", default=None)
        else:
            metavar = setting.kind.metavar
            parser.add_argument(flag, dest=name, metavar=metavar, default=None, help=help_text)


def _read_flags(kind: type[Any], flags: argparse.Namespace, gathered: _Gathered) -> None:
    for name, setting in settings_of(kind).items():
        given = getattr(flags, name, None)
        place = _FLAG_ORIGIN + name.replace("_", "-")
        if isinstance(given, bool):
            gathered.put(setting, given, place, given)
        elif given is not None:
            _put_text(gathered, setting, given, place)


# Writing ----------------------------------------------------------------------------------------


def to_toml(config: Any) -> str:
    """The whole configuration as a TOML file; reading it gives an equal object."""
    known, values = settings_of(type(config)), flatten(config)
    lines, section = [], ""
    for name in sorted(known, key=lambda n: known[n].section):
        setting, value = known[name], values[name]
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"]
        lines.append(f"{name} = {_toml_value(setting, value)}")
    return "\n".join(lines) + "\n"


def _toml_value(setting: Setting, value: Value) -> str:
    if setting.kind is LIST:
        assert isinstance(value, tuple)
        return "[" + ", ".join(json.dumps(part, ensure_ascii=False) for part in value) + "]"
    text = setting.kind.render(value)
    bare = isinstance(value, bool | float) or text == str(value)
    return text if bare and not isinstance(value, str) else json.dumps(text, ensure_ascii=False)


def to_properties(config: Any) -> str:
    """What RocketMQ has names for, in RocketMQ's form and units: the first name of each setting."""
    values = flatten(config)
    named = {}
    for name, setting in settings_of(type(config)).items():
        for foreign in setting.foreign[:1]:
            if foreign.write is not None:
                named[foreign.name] = foreign.write(values[name])
    return properties.render(named)


# Mistakes ---------------------------------------------------------------------------------------


def _wrong(place: str, written: object, complaint: str, allowed: str) -> ConfigError:
    shown = repr(written)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ConfigError(f"{place}: {shown} {complaint}; allowed: {allowed}")


def _unknown(
    place: str, key: str, candidates: Iterable[str], known: Mapping[str, Setting]
) -> ConfigError:
    for setting in known.values():
        if any(key == foreign.name for foreign in setting.foreign):
            return ConfigError(f"{place}: is RocketMQ's name; here it is called {setting.name}")
        if key == setting.name:
            where = f"in the table [{setting.section}]" if setting.section else "above all tables"
            return ConfigError(f"{place}: belongs {where}")
    by_lower = {name.lower(): name for name in candidates}
    nearest = difflib.get_close_matches(key.lower()[:200], by_lower, n=1, cutoff=0.0)
    return ConfigError(f"{place}: is not known; did you mean {by_lower[nearest[0]]}?")
