"""This module is `sluice collect`: its flags, its signals, what it says while it works.

Log lines and progress go to standard error, results to standard output: a sentence at the end, or
with --json an object each second and one at the end. Exit codes: 0 everything was sent; 1 some
lines were refused by the broker, or --once was stopped before its end; 2 it could not be done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import orjson
import uvloop

from sluice.client.aio.requests import Producer
from sluice.client.simple import add_tls_flags, nameserver_address, tls_of
from sluice.collector.collecting import Collector, Options, Progress, Stopped, Timing
from sluice.collector.finding import PACKED, Finder
from sluice.collector.lines import Rules
from sluice.collector.places import PlaceBook
from sluice.collector.sending import ProducerSender, Shape
from sluice.errors import ConfigError

_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
_GIVE_UP_ONCE_SECONDS: Final = 60.0
_PROGRESS_SECONDS: Final = 1.0
# A message of RocketMQ is 4 MiB at most, with its properties; brokers may allow less.
_LINE_BYTES_MAX: Final = 3 * 1024 * 1024


def main(argv: list[str]) -> int:
    """`sluice collect PATH...`."""
    arguments = _parser().parse_args(argv)
    options = _options(arguments)
    logging.basicConfig(stream=sys.stderr, format=_LOG_FORMAT)
    if arguments.verbose:
        logging.getLogger("sluice.collector").setLevel("INFO")
    state = os.path.abspath(arguments.state or _default_state())
    finder = Finder(
        arguments.paths,
        excluded=arguments.exclude or PACKED,
        follow_links=arguments.follow_links,
        state_directory=state,
    )
    book = PlaceBook.open(state)
    try:
        finder.check({place.path for place in book}, once=arguments.once)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_collect(arguments, finder, book, options))
    finally:
        book.release()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice collect",
        description="Follows files and sends their lines: a message each, at least once.",
        allow_abbrev=False,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a pattern in quotes")
    parser.add_argument(
        "-n", "--nameserver", help="host:port, several with ;. Default: $NAMESRV_ADDR, then local."
    )
    parser.add_argument(
        *("-t", "--topic"),
        default="logs",
        help="{name}, {directory}, {host} stand for those of the file. Default: logs.",
    )
    parser.add_argument("--tag", default="", help="tag of every message")
    parser.add_argument(
        *("-p", "--property"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="property of every message; may repeat",
    )
    parser.add_argument(
        "--key-field", default="", metavar="NAME", help="lines of JSON: this field is the key"
    )
    parser.add_argument(
        "--once", action="store_true", help="read what is there now, wait for its answers, end"
    )
    parser.add_argument("--state", metavar="DIR", help=f"places. Default: {_default_state()}.")
    parser.add_argument("--json", action="store_true", help="progress and result as JSON lines")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens to files")
    _add_file_flags(parser)
    _add_sending_flags(parser)
    add_tls_flags(parser)
    return parser


def _add_file_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    start = group.add_mutually_exclusive_group()
    start.add_argument(
        "--from-start", action="store_true", help="files seen first: all of them. The default."
    )
    start.add_argument(
        "--from-end",
        action="store_true",
        help="files that are there when a path is collected first: only what is added",
    )
    group.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help=f"names to leave out; may repeat. Default: {' '.join(PACKED)}.",
    )
    group.add_argument("--follow-links", action="store_true", help="links that a pattern finds too")
    group.add_argument(
        "--multiline-start",
        metavar="REGEX",
        help="a message begins with a line that begins so, and has all lines up to the next one",
    )
    group.add_argument(
        "--multiline-lines", type=int, default=500, metavar="N", help="at most. Default: 500."
    )
    group.add_argument(
        "--max-line-bytes",
        type=int,
        default=1024 * 1024,
        metavar="N",
        help="a longer one is sent in parts. Default: 1048576.",
    )
    group.add_argument(
        "--poll-ms", type=int, default=250, metavar="N", help="between two looks. Default: 250."
    )
    group.add_argument(
        "--rotated-seconds",
        type=int,
        default=30,
        metavar="N",
        help="a file that was rotated away is closed after so long without a change. Default: 30.",
    )


def _add_sending_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sending")
    group.add_argument(
        "--batch-bytes", type=int, default=256 * 1024, metavar="N", help="Default: 262144."
    )
    group.add_argument("--batch-lines", type=int, default=1000, metavar="N", help="Default: 1000.")
    group.add_argument(
        "--linger-ms",
        type=int,
        default=200,
        metavar="N",
        help="what is less than a batch waits so long for more. Default: 200.",
    )
    group.add_argument(
        "--give-up-seconds",
        type=float,
        metavar="N",
        help="end with an error when no broker takes anything for so long; 0: never. "
        "Default: 60 with --once, else 0.",
    )


def _default_state() -> str:
    base = os.environ.get("XDG_STATE_HOME") or os.path.join("~", ".local", "state")
    return os.path.join(os.path.expanduser(base), "sluice", "collect")


def _options(arguments: argparse.Namespace) -> Options:
    properties = []
    for item in arguments.property:
        name, mark, value = item.partition("=")
        if not mark or not name:
            raise ConfigError(f"-p {item}: write NAME=VALUE")
        properties.append((name, value))
    shape = Shape(
        arguments.topic,
        socket.gethostname(),
        arguments.tag,
        arguments.key_field,
        tuple(properties),
    )
    shape.check()
    for flag, low, high in (
        ("multiline_lines", 1, 100_000),
        ("max_line_bytes", 16, _LINE_BYTES_MAX),
        ("poll_ms", 10, 3_600_000),
        ("rotated_seconds", 0, 86_400),
        ("batch_bytes", 1, _LINE_BYTES_MAX),
        ("batch_lines", 1, 10_000),
        ("linger_ms", 0, 3_600_000),
    ):
        value = getattr(arguments, flag)
        if not low <= value <= high:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} {value}: allowed are {low} to {high}")
    give_up = arguments.give_up_seconds
    if give_up is None:
        give_up = _GIVE_UP_ONCE_SECONDS if arguments.once else 0.0
    return Options(
        shape,
        Rules(
            arguments.max_line_bytes, _start(arguments.multiline_start), arguments.multiline_lines
        ),
        Timing(
            poll=arguments.poll_ms / 1000,
            linger=arguments.linger_ms / 1000,
            rotated_wait=arguments.rotated_seconds,
            give_up=give_up,
        ),
        arguments.batch_bytes,
        arguments.batch_lines,
        arguments.from_end,
    )


def _start(expression: str | None) -> re.Pattern[bytes] | None:
    if expression is None:
        return None
    try:
        return re.compile(expression.encode(), re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"--multiline-start {expression}: {error}") from error


async def _collect(
    arguments: argparse.Namespace, finder: Finder, book: PlaceBook, options: Options
) -> int:
    nameservers = nameserver_address(arguments.nameserver)
    async with Producer(nameservers, group="sluice-collect", tls=tls_of(arguments)) as producer:
        collector = Collector(finder, book, ProducerSender(producer), options)
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            loop.add_signal_handler(number, collector.stop)
        started = time.monotonic()
        is_whole = True
        with _shown(collector.progress, arguments.json):
            try:
                await (collector.run_once() if arguments.once else collector.run())
            except Stopped:
                is_whole = False
    _result(collector.progress, arguments.json, time.monotonic() - started)
    return 0 if is_whole and not collector.progress.refused else 1


@contextlib.contextmanager
def _shown(progress: Progress, as_json: bool) -> Iterator[None]:
    """Say each second how it goes: as JSON, or in one line where a person looks."""
    is_terminal = sys.stderr.isatty()
    task = None
    if as_json or is_terminal:
        task = asyncio.get_running_loop().create_task(_show(progress, as_json))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            if not as_json:
                sys.stderr.write("\r\x1b[K")


async def _show(progress: Progress, as_json: bool) -> None:
    before = 0
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        if as_json:
            _line(orjson.dumps(asdict(progress)).decode())
            continue
        rate = (progress.lines - before) / _PROGRESS_SECONDS
        before = progress.lines
        sys.stderr.write(
            f"\r\x1b[K{progress.files} files, {progress.lines:,} lines sent, {rate:,.0f}/s, "
            f"{progress.behind_bytes:,} bytes to go"
        )
        sys.stderr.flush()


def _result(progress: Progress, as_json: bool, seconds: float) -> None:
    if as_json:
        _line(orjson.dumps({**asdict(progress), "seconds": round(seconds, 3)}).decode())
        return
    refused = f", {progress.refused:,} refused" if progress.refused else ""
    _line(
        f"sent {progress.lines:,} lines ({progress.sent_bytes:,} bytes) of {progress.files} "
        f"files{refused}"
    )


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
