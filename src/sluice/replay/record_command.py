"""This module is `sluice record`: its flags, its signals, what it says while it works.

Progress goes to standard error, the result to standard output: a sentence, or with --json an object
each second and one at the end. Exit codes: 0 all is recorded; 1 some messages were gone before they
could be read; 2 it could not be done. A signal is a good end: what was read is written.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import orjson

from sluice.client.core.settings import check_topic, split_nameservers
from sluice.client.simple import add_tls_flags, credentials_of, nameserver_address
from sluice.clock import wall_ms
from sluice.errors import ConfigError, StoreError
from sluice.replay.fetching import End, Fetcher, Start
from sluice.replay.manifest import Manifest, read_manifest, sweep
from sluice.replay.places import open_place
from sluice.replay.recording import Limits, Progress, Recorder
from sluice.replay.texts import read_size, read_span, read_time
from sluice.spark.cluster import Cluster, Queue
from sluice.spark.options import Connection

_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
_FIRST_PATIENCE_MS: Final = 3_000  # before anything was done there is nothing to wait for
_PATIENCE_MS: Final = 60_000
_PROGRESS_SECONDS: Final = 1.0
_FILE_BYTES_MIN, _FILE_BYTES_MAX = 1 << 16, 1 << 30
_NO: Final = ("0", "no", "false", "off")


def main(argv: list[str]) -> int:
    """`sluice record TOPIC... --to DIR`."""
    arguments = _parser().parse_args(argv)
    start, end, limits = _bounds(arguments)
    # Kafka's names may have dots; the store has them in this form.
    topics = sorted({topic.replace(".", "%2E") for topic in arguments.topics})
    for topic in topics:
        check_topic(topic)
    logging.basicConfig(stream=sys.stderr, format=_LOG_FORMAT)
    place = open_place("--to", arguments.to)
    connection = _connection(arguments)

    def opened(patience_ms: int) -> Cluster:
        return Cluster(connection, patience_ms, credentials_of())

    _look(opened(_FIRST_PATIENCE_MS), topics)
    cluster = opened(_PATIENCE_MS)
    try:
        place.make()
        with place.held():
            manifest = read_manifest(place)
            sweep(place, manifest)
            if manifest is None:
                manifest = Manifest(wall_ms(), wall_ms())
            elif manifest.topics != topics:
                raise StoreError(
                    f"{place.text} is a recording of {', '.join(manifest.topics)}; go on with "
                    "the same topics, or record elsewhere"
                )
            places = {Queue(*state.key): state.next for state in manifest.queues}
            fetcher = Fetcher(cluster, topics, places, start=start, end=end, now_ms=wall_ms)
            recorder = Recorder(place, manifest, fetcher, limits, now_ms=wall_ms)
            with _stopping(recorder), _shown(recorder.progress, arguments.json):
                recorder.run()
    finally:
        cluster.close()
    _result(recorder.progress, manifest, arguments)
    return 1 if recorder.progress.lost else 0


def _look(cluster: Cluster, topics: list[str]) -> None:
    """Raise at once where a topic is not known: no directory is left behind."""
    try:
        for topic in topics:
            cluster.queues(topic)
    finally:
        cluster.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice record",
        description="Keeps the messages of topics in Parquet files, to look at or to replay. "
        "Started again on the same directory it goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("topics", nargs="+", metavar="TOPIC")
    parser.add_argument("--to", required=True, metavar="DIR|s3://BUCKET/PATH", help="where to")
    parser.add_argument(
        "-n", "--nameserver", help="host:port, several with ;. Default: $NAMESRV_ADDR, then local."
    )
    parser.add_argument(
        "--from",
        dest="start",
        default="earliest",
        metavar="WHEN",
        help="earliest, latest, or a time: 2024-05-01T12:00:00, now-10m. Default: earliest. Queues "
        "that are in the recording already go on where they are.",
    )
    parser.add_argument(
        "--until",
        dest="end",
        metavar="WHEN",
        help="now, never, or a time. Default: now; never with --from latest or --seconds.",
    )
    parser.add_argument("--seconds", metavar="SPAN", help="end after so long: 90s, 2m, 1h")
    parser.add_argument(
        "--max-bytes", metavar="SIZE", help="end when so many bytes of bodies are recorded: 10g"
    )
    parser.add_argument(
        "--file-bytes",
        default="64m",
        metavar="SIZE",
        help="a file is written when so much waits in memory. Default: 64m.",
    )
    parser.add_argument(
        "--file-seconds",
        default="30s",
        metavar="SPAN",
        help="or when the oldest has waited so long. Default: 30s.",
    )
    parser.add_argument("--json", action="store_true", help="progress and result as JSON lines")
    add_tls_flags(parser)
    return parser


def _bounds(arguments: argparse.Namespace) -> tuple[Start, End, Limits]:
    now_ms = wall_ms()
    start: Start
    match arguments.start:
        case "earliest" | "latest":
            start = arguments.start
        case _:
            start = read_time("--from", arguments.start, now_ms)
    end: End
    match arguments.end:
        case None:
            end = "never" if start == "latest" or arguments.seconds else "now"
        case "now" | "never":
            end = arguments.end
        case _:
            end = read_time("--until", arguments.end, now_ms)
    first = now_ms if start == "latest" else start
    if isinstance(first, int) and isinstance(end, int) and first >= end:
        raise ConfigError(f"--from {arguments.start} is not before --until {arguments.end}")
    file_bytes = read_size("--file-bytes", arguments.file_bytes)
    if not _FILE_BYTES_MIN <= file_bytes <= _FILE_BYTES_MAX:
        raise ConfigError(f"--file-bytes {arguments.file_bytes}: allowed are 64k to 1g")
    limits = Limits(
        file_bytes,
        read_span("--file-seconds", arguments.file_seconds),
        read_size("--max-bytes", arguments.max_bytes) if arguments.max_bytes else None,
        read_span("--seconds", arguments.seconds) if arguments.seconds else None,
        end if isinstance(end, int) else None,
    )
    return start, end, limits


def _connection(arguments: argparse.Namespace) -> Connection:
    """How to reach the cluster: the flags and variables that all commands have."""

    def wanted(name: str) -> str:
        given = getattr(arguments, name, None)
        value = str(given or os.environ.get(f"SLUICE_CLIENT_{name.upper()}", ""))
        return "" if value in _NO else value

    names = ("tls", "tls_ca", "tls_any_name", "tls_certificate", "tls_key")
    return Connection(
        split_nameservers(nameserver_address(arguments.nameserver)),
        any(wanted(name) for name in names),
        wanted("tls_ca"),
        bool(wanted("tls_any_name")),
        wanted("tls_certificate"),
        wanted("tls_key"),
    )


@contextlib.contextmanager
def _stopping(recorder: Recorder) -> Iterator[None]:
    """Signals end the recording in order; a second one ends the process as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: Any) -> None:
        recorder.stop()
        signal.signal(number, before[number])

    before = {int(number): signal.signal(number, stop) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _shown(progress: Progress, as_json: bool) -> Iterator[None]:
    """Say each second how it goes: as JSON, or in one line where a person looks."""
    is_terminal = sys.stderr.isatty()
    over = threading.Event()
    show = threading.Thread(target=_show, args=(progress, as_json, over), daemon=True)
    if as_json or is_terminal:
        show.start()
    try:
        yield
    finally:
        over.set()
        if show.is_alive():
            show.join()  # nothing of it comes behind the result
        if is_terminal and not as_json:
            sys.stderr.write("\r\x1b[K")


def _show(progress: Progress, as_json: bool, over: threading.Event) -> None:
    before, at = 0, time.monotonic()
    while not over.wait(_PROGRESS_SECONDS):
        if as_json:
            _line(orjson.dumps(asdict(progress)).decode())
            continue
        now = time.monotonic()
        rate = (progress.messages - before) / (now - at)
        before, at = progress.messages, now
        sys.stderr.write(
            f"\r\x1b[K{progress.messages:,} messages, {progress.body_bytes / 1e6:,.1f} MB, "
            f"{rate:,.0f}/s, {progress.files} files, {progress.behind:,} to go"
        )
        sys.stderr.flush()


def _result(progress: Progress, manifest: Manifest, arguments: argparse.Namespace) -> None:
    if arguments.json:
        total = {"total_messages": manifest.rows, "total_files": len(manifest.files)}
        _line(orjson.dumps({**asdict(progress), **total}).decode())
        return
    lost = f"; {progress.lost:,} were gone before" if progress.lost else ""
    _line(
        f"recorded {progress.messages:,} messages ({progress.body_bytes:,} bytes){lost}; the "
        f"recording has {manifest.rows:,} in {len(manifest.files)} files"
    )


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
