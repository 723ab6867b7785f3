"""This module runs our small programs that use a peer's client, and reads what they print.

A program prints one JSON object per line, an event; other lines are a library's chatter. SIGTERM
asks it to finish what is under way and to say "done"; a program may also be killed at any moment,
so whatever it has done must have been printed before.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from peers.errors import PeerFailed
from peers.process import tied, without_chatter

POLL_INTERVAL_S = 0.02


def parse_events(text: str) -> list[dict[str, Any]]:
    """The JSON lines among a program's output; other lines are a library's chatter."""
    events: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                assert isinstance(event, dict)
                events.append(event)
    return events


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines added since the last call; one that is still being written is left for the next."""
    while (line := file.readline()).endswith(b"\n"):
        yield line
    file.seek(-len(line), os.SEEK_CUR)


class RunningProgram:
    """A program in the background; its events are read while it goes on."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        output: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._output = output
        self._read_bytes = 0
        with output.open("wb") as sink:
            self._process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    def events(self) -> list[dict[str, Any]]:
        """All events printed so far; a last line that is only half written is left out."""
        text = self._output.read_text(encoding="utf-8", errors="replace")
        return parse_events(text[: text.rfind("\n") + 1])

    def new_events(self) -> list[dict[str, Any]]:
        """The events printed since the last call; for who watches a program that prints much."""
        with self._output.open("rb") as lines:
            lines.seek(self._read_bytes)
            text = b"".join(_whole_lines(lines))
        self._read_bytes += len(text)
        return parse_events(text.decode("utf-8", errors="replace"))

    def wait_for(self, event: str, count: int, timeout_s: float) -> None:
        """Return once `count` events of the kind `event` have been printed."""
        deadline = time.monotonic() + timeout_s
        wanted = f'"event":"{event}"'.encode()
        found = 0
        with self._output.open("rb") as lines:
            while True:
                ended = self._process.poll() is not None
                found += sum(line.count(wanted) for line in _whole_lines(lines))
                if found >= count:
                    return
                if ended or time.monotonic() > deadline:
                    self.kill()
                    raise PeerFailed(f"{self.name} gave too few {event!r} events:\n{self.tail()}")
                time.sleep(POLL_INTERVAL_S)

    def finish(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait until it ends by itself; its events. PeerFailed on a bad code or a timeout."""
        code = self._ended(timeout_s)
        if code != 0:
            raise PeerFailed(f"{self.name} ended with code {code}:\n{self.tail()}")
        return self.events()

    def stop(self, timeout_s: float) -> list[dict[str, Any]]:
        """Ask it to end, wait for it; its events. PeerFailed if it does not say that it is done."""
        self._process.terminate()
        code = self._ended(timeout_s)
        events = self.events()
        if not any(event.get("event") == "done" for event in events):
            raise PeerFailed(f"{self.name} was stopped, code {code}, undone:\n{self.tail()}")
        return events

    def kill(self) -> None:
        """End it now, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def _ended(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise PeerFailed(
                f"{self.name} did not end within {timeout_s:.0f} s:\n{self.tail()}"
            ) from error

    def tail(self) -> str:
        """The last lines of its output, for an error message."""
        text = without_chatter(self._output.read_text(encoding="utf-8", errors="replace"))
        return "\n".join(line[:400] for line in text.splitlines()[-30:])


@contextlib.contextmanager
def started(
    name: str, command: Sequence[str], *, home: Path, environment: Mapping[str, str] | None = None
) -> Iterator[RunningProgram]:
    """Run a program in the background; it is killed when the block is left."""
    with tempfile.NamedTemporaryFile(
        dir=home, prefix=f"{name}-", suffix=".out", delete=False
    ) as file:
        output = Path(file.name)
    program = RunningProgram(name, command, output, environment)
    try:
        yield program
    finally:
        program.kill()
