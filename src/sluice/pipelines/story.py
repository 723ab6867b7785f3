"""This module is `sluice story`: a broker, gifts that are sent to it, the pipeline `gifts` on Spark
and its boards on the terminal, as they change.

Broker and pipeline are processes of their own, as they would be elsewhere; they end when this one
does, however it ends. Data is in a temporary directory, unless one is named. Where Spark cannot run
this says why, and a plain consumer counts the gifts instead.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO, Final, Self

import orjson

from sluice.client.core.messages import ReceivedMessage
from sluice.client.sync.admin import Admin
from sluice.client.sync.consumers import PushConsumer
from sluice.client.sync.producers import Producer
from sluice.errors import ConfigError, PipelineFailed, SluiceError
from sluice.pipelines import board, generating, needs, tie
from sluice.pipelines.lag import LagWatch
from sluice.pipelines.ready import gifts
from sluice.pipelines.traffic import Event

_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 90.0
_CATCH_UP_SECONDS: Final = 300.0
_DRAW_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 2.0
_TOP: Final = 5
_GROUP: Final = "pipeline-gifts"
# Where a port of the usual ones is taken, the system chooses another.
_PORTS: Final = {
    "--nameserver-port": 9876,
    "--listen-port": 10911,
    "--kafka-port": 9092,
    "--metrics-port": 5557,
}


def main(argv: list[str]) -> int:
    """`sluice story`."""
    arguments = _arguments(argv)
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in _STOPPING}
    for number in _STOPPING:
        signal.signal(number, lambda *_: stop.set())
    try:
        with _directory(arguments.data) as directory:
            # The terminal shows the boards; what the client has to say is kept beside.
            logging.basicConfig(filename=os.path.join(directory, "story.log"))
            return _Story(arguments, directory, stop).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sluice story",
        description="Shows everything together: a broker, gifts of a live stream, their "
        "leaderboards by a pipeline on Spark, and the boards as they change.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="send gifts for so long, wait until all are counted, end. Default: until stopped.",
    )
    parser.add_argument("--rate", type=float, default=200.0, help="gifts a second. Default: 200.")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same gifts. Default: 1.")
    parser.add_argument(
        "--data", metavar="DIR", help="keep everything here. Default: a temporary directory."
    )
    parser.add_argument(
        "--no-spark", action="store_true", help="a plain consumer counts, also where Spark can run"
    )
    arguments = parser.parse_args(argv)
    if arguments.seconds is not None and not 0 < arguments.seconds <= 86_400:
        raise ConfigError(f"--seconds {arguments.seconds:g}: more than 0, up to 86400")
    return arguments


@contextlib.contextmanager
def _directory(given: str | None) -> Iterator[str]:
    if given is not None:
        try:
            os.makedirs(given, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--data {given}: {error.strerror}") from error
        yield os.path.abspath(given)
        return
    made = tempfile.mkdtemp(prefix="sluice-story-")
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class _Child:
    """A command of ours as a process that ends with this one."""

    def __init__(self, words: list[str], directory: str, name: str) -> None:
        self._log = os.path.join(directory, f"{name}.log")
        self._name = name
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own command, without a shell)
                [
                    *(sys.executable, "-IS", tie.__file__, str(os.getpid())),
                    *(sys.executable, "-m", "sluice", *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                # Ctrl-C is for this process alone: it ends the others in their order.
                start_new_session=True,
            )

    def output(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as log:
            return log.read()

    def check(self) -> None:
        """Raise where it has ended by itself."""
        status = self._process.poll()
        if status is not None:
            lines = self.output().strip().splitlines() or ["nothing was said"]
            last = lines[-1].removeprefix("sluice: ")
            raise PipelineFailed(f"the {self._name} has ended ({status}): {last}")

    def stop(self) -> None:
        """Let it end in its own way; after a while, end it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Gifts:
    """Gifts on their way to the broker, and what they come to, counted here."""

    def __init__(self, nameserver: str, arguments: argparse.Namespace) -> None:
        self.tally = board.Tally(int(gifts.SETTINGS["share_percent"]))
        self.sent = 0
        self.failure: SluiceError | None = None
        self._nameserver = nameserver
        self._arguments = arguments
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="gifts", daemon=True)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _send(self) -> None:
        given = self._arguments
        count = None if given.seconds is None else max(1, round(given.seconds * given.rate))
        start_ms = int(time.time() * 1000)
        stream = generating.events(
            "gifts", seed=given.seed, start_ms=start_ms, rate=given.rate, count=count
        )
        try:
            with Producer(self._nameserver, group="live-room", batching=True) as producer:
                generating.send(producer, self._counted(stream), self._over)
        except SluiceError as error:
            self.failure = error

    def _counted(self, stream: Iterator[Event]) -> Iterator[Event]:
        for event in stream:
            self.tally.take(orjson.loads(event.body))
            self.sent += 1
            yield event

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_START_SECONDS)


class _Story:
    """Everything together, from the first line to the last."""

    def __init__(
        self, arguments: argparse.Namespace, directory: str, stop: threading.Event
    ) -> None:
        self._arguments = arguments
        self._directory = directory
        self._stop = stop
        self._screen = _Screen(sys.stdout)
        self._lacks = "" if arguments.no_spark else needs.missing(os.environ)
        self._with_spark = not self._lacks and not arguments.no_spark
        self._board = board.Board()
        self._plain = board.Tally(int(gifts.SETTINGS["share_percent"]))
        self._lock = threading.Lock()  # boards are changed by the reader's thread
        self._children: list[_Child] = []

    def run(self) -> int:
        """Until it is stopped, or all gifts of --seconds are counted."""
        with contextlib.ExitStack() as stack:
            nameserver = self._start_broker(stack)
            if not nameserver:
                return 0
            self._screen.say(*self._opening(nameserver))
            with Admin(nameserver) as admin:
                for topic in (gifts.TOPIC, str(gifts.SETTINGS["output"])):
                    admin.create_topic(topic, queues=4)
            if self._with_spark:
                words = ["pipeline", "serve", "gifts", "-n", nameserver, "--interval", "1"]
                words += ["--checkpoint", os.path.join(self._directory, "checkpoint")]
                child = _Child(words, self._directory, "pipeline")
                self._children.append(stack.enter_context(child))
            stack.enter_context(self._reader(nameserver))
            sending = stack.enter_context(_Gifts(nameserver, self._arguments))
            watched = {_GROUP: (gifts.TOPIC,)} if self._with_spark else {}
            options = {"sluice.bootstrap.servers": nameserver}
            lag = stack.enter_context(LagWatch(options, watched))
            is_whole = self._watch(sending, lag)
        if self._arguments.seconds is not None and not self._stop.is_set():
            return self._close(sending, is_whole)
        self._screen.say(f"{sending.sent:,} messages were sent; everything is stopped")
        return 0

    def _start_broker(self, stack: contextlib.ExitStack) -> str:
        """Where its nameserver is; empty where all of it was stopped before.

        A port that is free now may be taken when the broker comes to it: then it is started again,
        on ports that the system chooses.
        """
        for ports in ({flag: p for flag, p in _PORTS.items() if _is_free(p)}, {}):
            words = ["serve", "--directory", os.path.join(self._directory, "broker")]
            words += ["--flush", "async", "--log-level", "error"]
            for flag in _PORTS:
                words += [flag, str(ports.get(flag, 0))]
            broker = stack.enter_context(_Child(words, self._directory, "broker"))
            try:
                address = self._address(broker)
            except PipelineFailed as error:
                if not ports or "in use" not in str(error):
                    raise
                continue
            self._children.append(broker)
            return address
        raise AssertionError("the system chooses ports that are free")

    def _address(self, broker: _Child) -> str:
        """Where the broker's nameserver listens; empty where it was stopped before."""
        limit = time.monotonic() + _START_SECONDS
        while not self._stop.wait(0.05):
            text = broker.output()
            if "try it:" in text:
                return text.partition("namesrvAddr=")[2].split()[0]
            broker.check()
            if time.monotonic() > limit:
                raise PipelineFailed(f"the broker does not start: {text[-200:]}")
        return ""

    def _opening(self, nameserver: str) -> list[str]:
        lines = [f"broker    namesrvAddr={nameserver}, data in {self._directory}"]
        rate = f"{self._arguments.rate:g} gifts a second to topic {gifts.TOPIC}"
        lines.append(f"traffic   {rate}, one in ten of them twice")
        if self._with_spark:
            output = gifts.SETTINGS["output"]
            lines.append(f"pipeline  gifts on local Spark, which starts now; boards in {output}")
        elif self._lacks:
            lines.append(f"pipeline  Spark cannot run here: {self._lacks}")
            lines.append("          a plain consumer counts the gifts instead")
        else:
            lines.append("pipeline  none (--no-spark): a plain consumer counts the gifts")
        return [*lines, ""]

    def _reader(self, nameserver: str) -> PushConsumer:
        """Who reads the boards, or, without Spark, the gifts themselves."""

        def lines(message: ReceivedMessage) -> None:
            with self._lock:
                self._board.take(orjson.loads(message.body))

        def counted(message: ReceivedMessage) -> None:
            with self._lock:
                self._plain.take(orjson.loads(message.body))

        return PushConsumer(
            nameserver,
            group=f"story-{os.getpid()}-{int(time.time())}",
            topics=str(gifts.SETTINGS["output"] if self._with_spark else gifts.TOPIC),
            handler=lines if self._with_spark else counted,
            concurrency=1,
            start_at="first",
        )

    def _shown(self) -> board.Board:
        """The boards as they are at this moment."""
        with self._lock:
            return self._board.copy() if self._with_spark else self._plain.board()

    def _watch(self, sending: _Gifts, lag: LagWatch) -> bool:
        """Draw until it is over; whether everything that was sent is on the board."""
        catch_up: float | None = None
        while not self._stop.wait(_DRAW_SECONDS):
            for child in self._children:
                child.check()
            if sending.failure is not None:
                raise sending.failure
            shown = self._shown()
            self._screen.draw(self._status(sending, lag), shown)
            if sending.is_over:
                if board.agree(shown, sending.tally.board(), _TOP):
                    return True
                catch_up = catch_up or time.monotonic() + _CATCH_UP_SECONDS
                if time.monotonic() > catch_up:
                    return False
        return False

    def _status(self, sending: _Gifts, lag: LagWatch) -> str:
        text = f"{sending.sent:,} messages sent"
        if self._with_spark:
            text += f", lag {lag.lag:,}" if lag.lag is not None else ", lag unknown"
        return text

    def _close(self, sending: _Gifts, is_whole: bool) -> int:
        self._screen.say(*board.draw(self._shown(), _TOP), "")
        who = "Spark" if self._with_spark else "the plain consumer"
        if not is_whole:
            self._screen.say(f"{who} has not counted all of {sending.sent:,} messages in time")
            return 1
        self._screen.say(
            f"{sending.sent:,} messages, {sending.tally.gifts:,} gifts: the boards of {who} are "
            "what was sent"
        )
        return 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class _Screen:
    """The boards, drawn over themselves on a terminal; elsewhere a line from time to time."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._drawn = 0  # lines that are drawn over the next time
        self._next = 0.0
        self._last = ""

    def say(self, *lines: str) -> None:
        self._clear()
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()

    def draw(self, status: str, shown: board.Board) -> None:
        now = time.monotonic()
        clock = time.strftime("%H:%M:%S")
        if self._is_terminal:
            lines = [f"{clock}  {status}", "", *board.draw(shown, _TOP)]
            self._clear()
            self._out.write("".join(f"{line}\n" for line in lines))
            self._drawn = len(lines)
        elif now >= self._next:
            self._next = now + _LINE_SECONDS
            text = f"{status}; {board.brief(shown, 3)}"
            if text != self._last:
                self._out.write(f"{clock}  {text}\n")
            self._last = text
        self._out.flush()

    def _clear(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0
