"""This module is what all admin commands share: their flags, how they are read, how they are told.

Flags are mqadmin's, with the same letters and long names. A value may begin with a dash, and a long
name may stand behind one dash, as mqadmin has it. What is wrong with a command line is one line
that names the flag, and the nearest one for a misspelt one.
"""

from __future__ import annotations

import argparse
import codecs
import difflib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, TypeVar

from sluice.client.administration.admin import Admin
from sluice.client.administration.everywhere import settled
from sluice.client.printing import Printer
from sluice.client.simple import add_tls_flags
from sluice.clock import wall_ms
from sluice.errors import ConfigError, PartlyDone

Options = argparse.Namespace
Result = TypeVar("Result")
Run = Callable[[Admin, Options, Printer], Awaitable[int]]

DONE: Final = 0
REFUSED: Final = 1  # done, but the answer is no
_INT64_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a command; without a `kind` it takes no value."""

    short: str
    long: str
    about: str
    kind: Callable[[str], Any] | None
    required: bool = False
    default: Any = None

    @property
    def names(self) -> list[str]:
        return [f"-{self.short}", f"--{self.long}"] if self.short else [f"--{self.long}"]

    @property
    def shown(self) -> str:
        return "/".join(self.names)


@dataclass(frozen=True, slots=True)
class Command:
    """One admin command. Of the flags in `one_of` exactly one has to be given."""

    name: str
    about: str
    flags: tuple[Flag, ...]
    run: Run
    example: str
    one_of: tuple[str, ...] = ()


NAMESERVER: Final = Flag(
    "n", "namesrvAddr", "Nameservers, host:port;host:port. Default: $NAMESRV_ADDR, then local.", str
)
COMMON: Final = (
    NAMESERVER,
    Flag("", "json", "Print one JSON document.", None, default=False),
)


# ----------------------------------------------------------------------------------------- values


def text(value: str) -> str:
    value = value.strip()
    if not value:
        raise argparse.ArgumentTypeError("may not be empty")
    return value


def whole(value: str) -> int:
    try:
        number = int(value.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number") from None
    if not -_INT64_MAX <= number <= _INT64_MAX:
        raise argparse.ArgumentTypeError(f"{value} does not fit into 64 bits")
    return number


def at_least(least: int, most: int = _INT64_MAX) -> Callable[[str], int]:
    """A whole number in these limits."""

    def read(value: str) -> int:
        number = whole(value)
        if not least <= number <= most:
            limit = f"at least {least}" if most == _INT64_MAX else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{number}: allowed is {limit}")
        return number

    return read


def yes_no(value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{value!r} is neither true nor false")
    return value.strip().lower() == "true"


def charset(value: str) -> str:
    """A charset that any body can be shown in; Python also calls base64 and the like codecs."""
    name = value.strip()
    try:
        if "escape" in name.lower():
            raise LookupError
        bytes(range(256)).decode(name, "replace")
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise argparse.ArgumentTypeError(f"{value!r} is no known charset") from None


def when_ms(value: str) -> int:
    """now, milliseconds since 1970, or a local time as mqadmin writes it."""
    value = value.strip()
    if value == "now":
        return wall_ms()
    if value.lstrip("-").isdecimal():
        return whole(value)
    try:
        # Python reads up to six digits of a second, RocketMQ means thousandths.
        seconds, _, thousandths = value.rpartition(":")
        when = datetime.strptime(seconds, "%Y-%m-%d#%H:%M:%S")
        if len(thousandths) != 3:
            raise ValueError
        return int(when.timestamp() * 1000) + int(thousandths)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{value!r} is no time; write now, milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS"
        ) from None


# ------------------------------------------------------------------------------- common flags


def topic_flag(about: str = "Name of the topic.") -> Flag:
    return Flag("t", "topic", about, text, required=True)


BROKER_FLAGS: Final = (
    Flag("b", "brokerAddr", "This broker, host:port.", text),
    Flag("c", "clusterName", "All masters of this cluster.", text),
)
BROKER_OR_CLUSTER: Final = ("brokerAddr", "clusterName")
ROUTE_FLAG: Final = Flag(
    "c", "cluster", "Cluster; for queues without a route of their own, the topic that has it.", text
)


# ---------------------------------------------------------------------------------------- reading


_METAVARS: Final[dict[Callable[[str], Any], str]] = {
    str: "TEXT",
    text: "TEXT",
    yes_no: "true|false",
    charset: "CHARSET",
    when_ms: "TIME",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("sluice ")
        raise ConfigError(f"{name}: {message}; `{self.prog} --help` shows its flags")


def parser_of(command: Command) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"sluice admin {command.name}",
        description=command.about,
        epilog=f"example:\n  sluice admin {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in (*command.flags, *COMMON):
        about = flag.about
        if flag.required:
            about += " Needed."
        elif flag.long in command.one_of:
            about += " One of these is needed."
        keywords: dict[str, Any] = {"dest": flag.long, "default": flag.default, "help": about}
        if flag.kind is None:
            keywords["action"] = "store_true"
        else:
            keywords |= {"type": flag.kind, "metavar": _METAVARS.get(flag.kind, "N")}
        parser.add_argument(*flag.names, **keywords)
    add_tls_flags(parser)
    return parser


def read_options(command: Command, argv: list[str]) -> Options:
    """The values of a command line; raises ConfigError with one line for whatever is wrong."""
    parser = parser_of(command)
    flags = (*command.flags, *COMMON)
    options, unknown = parser.parse_known_args(_joined(argv, flags))
    if unknown:
        known = [name for flag in flags for name in flag.names]
        parser.error(f"{unknown[0]}: no such flag{nearest(unknown[0], known)}")
    for flag in flags:
        if flag.required and getattr(options, flag.long) is None:
            parser.error(f"{flag.shown} is needed")
    given = [name for name in command.one_of if getattr(options, name) is not None]
    if command.one_of and len(given) != 1:
        names = " and ".join(f.shown for f in flags if f.long in command.one_of)
        parser.error(f"{'only ' if given else ''}one of {names} is needed")
    return options


def _joined(argv: list[str], flags: Iterable[Flag]) -> list[str]:
    """Each value tied to its flag, so that it may begin with a dash: -a -name is a value here."""
    by_name = {name: flag for flag in flags for name in (*flag.names, f"-{flag.long}")}
    result = []
    words = iter(argv)
    for word in words:
        flag = by_name.get(word)
        if flag is None:
            result.append(word)
            continue
        value = next(words, None) if flag.kind is not None else None
        if value in by_name:
            result += [flag.names[-1], str(value)]  # the value was forgotten: the parser says so
        elif value is not None:
            result.append(f"{flag.names[-1]}={value}")
        else:
            result.append(flag.names[-1])
    return result


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that suggest the nearest of these names, if one is near."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[found[0]]}?)" if found else ""


# --------------------------------------------------------------------------------- many at a time


async def tried(work: Awaitable[Result]) -> Result:
    """What was done, also where some of several did not do it: `settle` says so afterwards."""
    try:
        return await work
    except PartlyDone as failure:
        result: Result = failure.result
        return result


def result_rows(outcomes: Mapping[str, str], name: str = "brokerAddr") -> list[dict[str, str]]:
    """Outcomes for scripts."""
    return [{name: address, "result": error or "SUCCESS"} for address, error in outcomes.items()]


def result_text(error: str) -> str:
    """An outcome for people."""
    return f"failed: {error}" if error else "done"


def settle(*outcomes: Mapping[str, str]) -> int:
    """After the outcomes were shown: raise what was not done."""
    return settled(DONE, *outcomes)
