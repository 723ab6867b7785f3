"""This module is `sluice pipeline`: its flags, its signals, what it says while it works.

Progress goes to standard error: a line that is drawn anew on a terminal, a line from time to time
elsewhere. The result goes to standard output. Exit codes: 0 everything is handled, or it was told
to stop and did; 2 it could not be done.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from sluice.client.simple import add_tls_flags, nameserver_address, tls_of
from sluice.client.sync.producers import Producer
from sluice.errors import ConfigError, PipelineFailed
from sluice.pipelines import files, generating, needs, progress, session, starter
from sluice.pipelines.lag import require_cluster
from sluice.pipelines.progress import QueryCount
from sluice.pipelines.running import Outcome, Way, run
from sluice.pipelines.settings import Settings, read_values

_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
_TERMINAL_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 5.0
_TLS_OPTIONS: Final = {
    "tls_ca": "sluice.tls.ca.file",
    "tls_certificate": "sluice.tls.certificate.file",
    "tls_key": "sluice.tls.key.file",
}


def main(argv: list[str]) -> int:
    """`sluice pipeline ...`."""
    arguments = _parser().parse_args(argv)
    work: Callable[[argparse.Namespace], int] = arguments.work
    return work(arguments)


def _parser() -> argparse.ArgumentParser:
    ready = ", ".join(files.READY)
    parser = argparse.ArgumentParser(
        prog="sluice pipeline",
        description="Runs pipelines on Spark: plain PySpark over topics.",
        epilog=f"Ready pipelines: {ready}. `sluice pipeline list` says what they do and have.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in (
        ("run", "handle all that is there now, and end"),
        ("serve", "handle what is there and what comes, until it is stopped"),
    ):
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        one.add_argument("target", metavar="FILE", help=f"a Python file, or a name: {ready}")
        _add_running_flags(one)
        _add_cluster_flags(one)
        one.set_defaults(work=_run, is_once=name == "run")
    new = commands.add_parser("new", help="write a pipeline to begin with, and its test")
    new.add_argument("name", metavar="NAME", help="writes NAME.py and test_NAME.py")
    new.set_defaults(work=_new)
    generate = commands.add_parser(
        "generate", help="send traffic for a ready pipeline", allow_abbrev=False
    )
    generate.add_argument("name", metavar="NAME", choices=files.READY, help=ready)
    _add_generating_flags(generate)
    _add_cluster_flags(generate)
    generate.set_defaults(work=_generate)
    listing = commands.add_parser("list", help="the ready pipelines and their settings")
    listing.set_defaults(work=_list)
    return parser


def _add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--nameserver", help="host:port, several with ;. Default: $NAMESRV_ADDR, then local."
    )
    add_tls_flags(parser)


def _add_running_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the pipeline; may repeat",
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help=f"how far it is. Default: {_default_checkpoint('NAME')}"
    )
    parser.add_argument(
        "--from",
        dest="starting",
        choices=("earliest", "latest"),
        default="earliest",
        help="where a pipeline without a checkpoint begins. Default: earliest.",
    )
    parser.add_argument(
        "--batch-rows",
        type=int,
        default=100_000,
        metavar="N",
        help="messages of a stream in a batch, at most. Default: 100000.",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="serve: from one batch to the next. Default: 0, as soon as there is something.",
    )
    parser.add_argument(
        "--stop-seconds",
        type=float,
        default=60.0,
        metavar="N",
        help="when it is stopped, the running batch has so long to end. Default: 60.",
    )
    spark = parser.add_argument_group("Spark")
    spark.add_argument(
        "--master", default=session.LOCAL, help=f"where it runs. Default: {session.LOCAL}."
    )
    spark.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark; may repeat",
    )
    spark.add_argument(
        "--spark-log", metavar="FILE", help="Spark's own log. Default: spark.log in the checkpoint."
    )


def _add_generating_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=200.0, help="events a second. Default: 200.")
    parser.add_argument("--count", type=int, metavar="N", help="end after so many. Default: never.")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same events. Default: 1.")
    parser.add_argument(
        "--start",
        type=int,
        metavar="MS",
        help="time of the first event, in ms since 1970. Default: now.",
    )
    parser.add_argument(
        "--fast", action="store_true", help="do not wait until an event is due: send it at once"
    )


def _default_checkpoint(name: str) -> str:
    base = os.environ.get("XDG_STATE_HOME") or os.path.join("~", ".local", "state")
    return os.path.join(os.path.expanduser(base), "sluice", "pipelines", name)


# Running ----------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    for flag, low in (("batch_rows", 1), ("interval", 0.0), ("stop_seconds", 0.0)):
        value = getattr(arguments, flag)
        if not low <= value <= 2**31:
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: at least {low}")
    pipeline = files.find(arguments.target)
    settings = Settings(
        pipeline.name,
        nameserver_address(arguments.nameserver),
        read_values(pipeline.name, pipeline.defaults, arguments.set),
        connection_options(arguments),
        arguments.starting,
        arguments.batch_rows,
        tls=tls_of(arguments),
    )
    conf = session.read_conf(arguments.conf)
    needs.require(os.environ)
    require_cluster(settings.options)
    checkpoint = _checkpoint(arguments.checkpoint or _default_checkpoint(pipeline.name))
    log = arguments.spark_log or (
        os.devnull if "://" in checkpoint else os.path.join(checkpoint, "spark.log")
    )
    way = Way(checkpoint, arguments.is_once, arguments.interval, arguments.stop_seconds)
    with _stop_event() as stop:
        spark = session.make(pipeline.name, arguments.master, conf, log)
        _take_signals(stop)  # Spark puts a handler of its own in place
        begun = time.monotonic()
        try:
            with _Shown(pipeline.name) as shown:
                outcome = run(spark, pipeline, settings, way, stop, shown)
        except PipelineFailed as error:
            raise PipelineFailed(f"{error} (Spark's log: {log})") from error
        finally:
            _stop_quietly(spark)
    _tell(pipeline.name, outcome, time.monotonic() - begun)
    return 0


def _stop_quietly(spark: object) -> None:
    with contextlib.suppress(Exception):  # it ends with this process anyway
        spark.stop()  # type: ignore[attr-defined]


def _tell(name: str, outcome: Outcome, seconds: float) -> None:
    text = progress.summary(name, outcome.counts, outcome.lag, seconds, stopped=outcome.is_stopped)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def connection_options(arguments: argparse.Namespace) -> dict[str, str]:
    """TLS as the data source's options have it: flags, else SLUICE_CLIENT_TLS* variables."""
    if tls_of(arguments) is None:
        return {}

    def wanted(name: str) -> str:
        given = getattr(arguments, name, None)
        return str(given or os.environ.get(f"SLUICE_CLIENT_{name.upper()}", ""))

    options = {"sluice.tls": "true"}
    for name, option in _TLS_OPTIONS.items():
        if wanted(name):
            options[option] = os.path.abspath(wanted(name))
    if wanted("tls_any_name").lower() not in ("", "0", "no", "false", "off"):
        options["sluice.tls.any.name"] = "true"
    return options


def _checkpoint(path: str) -> str:
    """A directory that is there; one that Spark reaches otherwise (hdfs://, s3a://) as it is."""
    if "://" in path:
        return path.rstrip("/")
    path = os.path.abspath(path)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--checkpoint {path}: {error.strerror}") from error
    return path


@contextlib.contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """An event that a signal sets; the handlers of before are there again afterwards."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in _STOPPING}
    _take_signals(stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_signals(stop: threading.Event) -> None:
    for number in _STOPPING:
        signal.signal(number, lambda *_: stop.set())


class _Shown:
    """The line of progress, on a terminal or in a log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_terminal = sys.stderr.isatty()
        self._next = 0.0
        self._last = ""

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._write("\r\x1b[K")

    def __call__(self, counts: Mapping[str, QueryCount], lag: int | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_TERMINAL_SECONDS if self._is_terminal else _LINE_SECONDS)
        text = progress.line(self._name, counts, lag)
        if self._is_terminal:
            self._write(f"\r\x1b[K{text}")
        elif text != self._last:
            self._write(f"{text}\n")
        self._last = text

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


# The others -------------------------------------------------------------------------------------


def _new(arguments: argparse.Namespace) -> int:
    path, test_path = starter.write(arguments.name)
    sys.stdout.write(
        f"wrote {path} and {test_path}\n"
        f"run it:   sluice pipeline run {path}\n"
        f"test it:  pytest {test_path}\n"
    )
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.count is not None and arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: at least 1")
    start_ms = arguments.start if arguments.start is not None else int(time.time() * 1000)
    stream = generating.events(
        arguments.name,
        seed=arguments.seed,
        start_ms=start_ms,
        rate=arguments.rate,
        count=arguments.count,
    )
    nameservers = nameserver_address(arguments.nameserver)
    with (
        _stop_event() as stop,
        Producer(
            nameservers, group="sluice-generate", batching=True, tls=tls_of(arguments)
        ) as producer,
    ):
        sent = generating.send(producer, stream, stop, paced=not arguments.fast)
    rate = sent.count / sent.seconds if sent.seconds else 0.0
    sys.stdout.write(
        f"{arguments.name}: sent {sent.count:,} messages in {sent.seconds:.1f} s, {rate:,.0f}/s\n"
    )
    return 0


def _list(_: argparse.Namespace) -> int:
    for name in files.READY:
        pipeline = files.find(name)
        sys.stdout.write(f"{name:<9} {pipeline.summary.partition(': ')[2]}\n")
        for key, value in pipeline.defaults.items():
            sys.stdout.write(f"            {key}={value}\n")
    return 0
