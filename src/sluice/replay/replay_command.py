"""This module is `sluice replay`: its flags, its signals, what it says while it works.

Progress goes to standard error, the result to standard output: a sentence, or with --json an object
each second and one at the end. Exit codes: 0 everything was sent; 1 some sends failed, or it ended
before all was sent (a signal, too many errors, too late); 2 it could not be done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any, Final

import orjson
import uvloop

from sluice.client.administration.admin import Admin
from sluice.client.aio.requests import Producer
from sluice.client.core.messages import Message
from sluice.client.simple import add_tls_flags, nameserver_address, tls_of
from sluice.errors import ConfigError
from sluice.protocol.json_members import MessageQueue
from sluice.replay.blocks import Recording, Window, open_recording
from sluice.replay.lanes import Shape, key_template, lane_topics
from sluice.replay.pacing import Schedule
from sluice.replay.places import open_place
from sluice.replay.report import report_of, require_place, write_report
from sluice.replay.sending import Limits, Replayer
from sluice.replay.texts import (
    Pace,
    read_curve,
    read_rate,
    read_share,
    read_span,
    read_speed,
    time_text,
)
from sluice.replay.topics import prepare, routes_of

_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
_SEND_MS: Final = 10_000
_PROGRESS_SECONDS: Final = 1.0
_WAITING_MAX: Final = 1_000_000
_BAR_WIDTH: Final = 20
_REPORT: Final = "replay-report"


def main(argv: list[str]) -> int:
    """`sluice replay DIR --speed 5x --to LANE`."""
    arguments = _parser().parse_args(argv)
    pace, limits = _pace(arguments), _limits(arguments)
    template = key_template(arguments.rewrite_key, arguments.copies)
    shape = Shape(template, _properties(arguments.property))
    recording = open_recording(open_place("DIR", arguments.place), arguments.topic)
    targets = lane_topics(arguments.to, recording.topics, into_original=arguments.into_original)
    first_ms, last_ms = recording.span_ms(arguments.by)
    schedule = Schedule(pace, first_ms, arguments.copies)
    length = schedule.length(recording.rows, last_ms)
    about = {
        "recording": arguments.place,
        "topics": targets,
        "pace": pace.text,
        "by": arguments.by,
        "copies": arguments.copies,
        "recorded_from": time_text(first_ms),
        "recorded_until": time_text(last_ms),
    }
    if arguments.dry_run:
        _plan(arguments, recording, about, length)
        return 0
    if not arguments.no_report:
        require_place(arguments.report)
    with _seldom_collected(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replayer = runner.run(
            _replay(arguments, recording, targets, schedule, shape, limits, length)
        )
    _result(arguments, report_of(replayer, about))
    return 0 if not replayer.why and not replayer.progress.failed else 1


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Windows of messages have no cycles; to look through them again and again takes a fifth of
    the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice replay",
        description="Sends a recording again, with its own spacing or another, to topics beside "
        "the real ones.",
        allow_abbrev=False,
    )
    parser.add_argument("place", metavar="DIR", help="what `sluice record --to` wrote, or s3://")
    parser.add_argument(
        "--to",
        metavar="LANE",
        help="shadow sends what was in orders to orders-shadow; stage-{topic} to stage-orders. "
        "Default: replay. Topics that are missing are made as the originals are.",
    )
    parser.add_argument(
        "--into-original", action="store_true", help="send to the recorded topics themselves"
    )
    parser.add_argument(
        "-n", "--nameserver", help="host:port, several with ;. Default: $NAMESRV_ADDR, then local."
    )
    parser.add_argument("--topic", action="append", default=[], help="only this; may repeat")
    _add_pace_flags(parser)
    _add_message_flags(parser)
    _add_stop_flags(parser)
    reports = parser.add_mutually_exclusive_group()
    reports.add_argument(
        "--report",
        default=_REPORT,
        metavar="PATH",
        help=f"writes PATH.json and PATH.html. Default: {_REPORT}.",
    )
    reports.add_argument("--no-report", action="store_true", help="write no report")
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent, and end")
    parser.add_argument("--json", action="store_true", help="progress and result as JSON lines")
    add_tls_flags(parser)
    return parser


def _add_pace_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how fast")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--speed", default="1x", metavar="N", help="5x, 0.5x, or max. Default: 1x.")
    pace.add_argument(
        "--curve",
        metavar="POINTS",
        help="0s:1x,60s:5x,120s:20x: straight between the points; or rates: 0s:100/s,60s:5000/s",
    )
    pace.add_argument("--rate", metavar="N", help="5000/s, whatever the spacing was")
    group.add_argument("--ramp", metavar="SPAN", help="the rate is reached after so long")
    group.add_argument(
        "--by",
        choices=("born", "store"),
        default="born",
        help="the spacing is that of producers (born) or of the broker (store). Default: born.",
    )
    group.add_argument(
        "--in-flight",
        type=int,
        default=20_000,
        metavar="N",
        help="messages without an answer, at most. Default: 20000.",
    )


def _add_message_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("messages")
    group.add_argument(
        "--rewrite-key",
        metavar="TEMPLATE",
        help="load:{key}; there are {key}, {copy}, {topic} and {offset}",
    )
    group.add_argument(
        "--copies", type=int, default=1, metavar="N", help="each so often, with keys of their own"
    )
    group.add_argument(
        *("-p", "--property"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="property of every message; may repeat",
    )


def _add_stop_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when it is enough")
    group.add_argument(
        "--stop-errors",
        default="10%",
        metavar="SHARE",
        help="end when more of the sends fail, or never. Default: 10%%.",
    )
    group.add_argument(
        "--stop-window", default="10s", metavar="SPAN", help="of the last so long. Default: 10s."
    )
    group.add_argument(
        "--stop-lag", metavar="SPAN", help="end when messages go out so much behind their time"
    )


def _pace(arguments: argparse.Namespace) -> Pace:
    if arguments.ramp and not arguments.rate:
        raise ConfigError("--ramp belongs to --rate; for speeds write --curve 0s:1x,60s:5x")
    if arguments.curve:
        return read_curve("--curve", arguments.curve)
    if arguments.rate:
        ramp = read_span("--ramp", arguments.ramp) if arguments.ramp else 0.0
        return read_rate("--rate", arguments.rate, ramp)
    return read_speed("--speed", arguments.speed)


def _limits(arguments: argparse.Namespace) -> Limits:
    if not 1 <= arguments.in_flight <= _WAITING_MAX:
        raise ConfigError(f"--in-flight {arguments.in_flight}: allowed are 1 to {_WAITING_MAX}")
    window = read_span("--stop-window", arguments.stop_window)
    if window <= 0:
        raise ConfigError(f"--stop-window {arguments.stop_window}: above 0")
    return Limits(
        waiting_max=arguments.in_flight,
        stop_errors=read_share("--stop-errors", arguments.stop_errors),
        stop_window_seconds=window,
        stop_late_seconds=read_span("--stop-lag", arguments.stop_lag)
        if arguments.stop_lag
        else None,
    )


def _properties(items: list[str]) -> dict[str, str]:
    properties = {}
    for item in items:
        name, mark, value = item.partition("=")
        if not mark or not name:
            raise ConfigError(f"-p {item}: write NAME=VALUE")
        properties[name] = value
    return properties


# ------------------------------------------------------------------------------------------ sending


class ProducerTarget:
    """Batches go out through a producer."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def send(self, queue: MessageQueue, messages: list[Message]) -> None:
        await self._producer.send_batch(messages, queue=queue)


async def _replay(
    arguments: argparse.Namespace,
    recording: Recording,
    targets: dict[str, str],
    schedule: Schedule,
    shape: Shape,
    limits: Limits,
    length: float,
) -> Replayer:
    options: dict[str, Any] = {
        "tls": tls_of(arguments),
        "access_key": os.environ.get("SLUICE_CLIENT_ACCESS_KEY", ""),
        "secret_key": os.environ.get("SLUICE_CLIENT_SECRET_KEY", ""),
    }
    nameservers = nameserver_address(arguments.nameserver)
    async with Admin(nameservers, **options) as admin:
        await prepare(admin, recording.manifest, targets)
    async with Producer(
        nameservers, group="sluice-replay", send_ms=_SEND_MS, **options
    ) as producer:
        loop = asyncio.get_running_loop()
        replayer = Replayer(
            ProducerTarget(producer),
            schedule,
            await routes_of(producer, recording.manifest, targets),
            shape,
            limits,
            copies=arguments.copies,
            now=time.monotonic,  # that of uvloop counts milliseconds
        )
        replayer.progress.total = recording.rows * arguments.copies
        for number in _STOPPING:
            loop.add_signal_handler(number, replayer.stop, "interrupted")
        with _shown(replayer, arguments.json, length):
            await replayer.run(_ahead(recording.windows(arguments.by)))
    return replayer


async def _ahead(windows: Iterator[Window]) -> AsyncIterator[Window]:
    """The next window is read while this one is sent."""
    reading = asyncio.create_task(asyncio.to_thread(next, windows, None))
    try:
        while (window := await reading) is not None:
            reading = asyncio.create_task(asyncio.to_thread(next, windows, None))
            yield window
    finally:
        await asyncio.gather(reading, return_exceptions=True)


# ------------------------------------------------------------------------------------------- saying


@contextlib.contextmanager
def _shown(replayer: Replayer, as_json: bool, length: float) -> Iterator[None]:
    """Say each second how it goes: as JSON, or in one line where a person looks."""
    is_terminal = sys.stderr.isatty()
    task = None
    if as_json or is_terminal:
        task = asyncio.get_running_loop().create_task(_show(replayer, as_json, length))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            if not as_json:
                sys.stderr.write("\r\x1b[K")


async def _show(replayer: Replayer, as_json: bool, length: float) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        if as_json:
            _line(orjson.dumps(asdict(replayer.progress)).decode())
        else:
            sys.stderr.write(f"\r\x1b[K{bar(replayer, length)}")
            sys.stderr.flush()


def bar(replayer: Replayer, length: float) -> str:
    """One line: how much is done, wanted and reached rate of the last second, what is left."""
    progress, series = replayer.progress, replayer.series
    answered = progress.sent + progress.failed
    share = answered / max(1, progress.total)
    full = round(share * _BAR_WIDTH)
    last = series.at(max(0.0, progress.seconds - series.seconds))
    left = max(0.0, length - progress.seconds)
    if answered and (left == 0 or progress.late_seconds > 1):
        # It does not keep up with the plan: what is left, at the rate so far.
        left = max(left, (progress.total - answered) * progress.seconds / answered)
    return (
        f"[{'=' * full}{' ' * (_BAR_WIDTH - full)}] {share:4.0%} {answered:,} of "
        f"{progress.total:,}, wanted {last.wanted / series.seconds:,.0f}/s, reached "
        f"{last.sent / series.seconds:,.0f}/s, {progress.failed:,} errors, "
        f"{progress.late_seconds:.1f} s behind, {left:,.0f} s to go"
    )


def _plan(
    arguments: argparse.Namespace, recording: Recording, about: dict[str, Any], length: float
) -> None:
    total = recording.rows * arguments.copies
    if arguments.json:
        plan = {**about, "messages": total, "seconds": round(length, 3)}
        _line(orjson.dumps(plan).decode())
        return
    _line(f"would send {total:,} messages in {length:,.1f} s ({about['pace']})")
    for topic, target in about["topics"].items():
        _line(f"  {topic} -> {target}")


def _result(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    names: tuple[str, ...] = ()
    if not arguments.no_report:
        names = write_report(arguments.report, report)
    if arguments.json:
        short = {name: value for name, value in report.items() if name != "intervals"}
        _line(orjson.dumps(short).decode())
        return
    counts = report["messages"]
    words = f"sent {counts['sent']:,} of {counts['total']:,} messages in {report['seconds']:,.1f} s"
    words += f" ({report['rate']:,.0f}/s)"
    if counts["failed"]:
        reason = next(iter(report["errors"]))
        words += f"; {counts['failed']:,} failed ({reason})"
    if not report["is_complete"]:
        words += f"; stopped: {report['outcome']}"
    _line(words + (f"; {names[1]}" if names else ""))


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
