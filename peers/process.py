"""This module starts one long-running program, waits for its ready line, and ends it by its id; or
runs a short one to its end.

Output goes to a file, never to a pipe nobody reads. A program that is still alive when the
interpreter exits is killed, and also when the interpreter itself is killed: a test run that is cut
short leaves nothing behind.
"""

import atexit
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from peers.errors import PeerFailed

LOG_TAIL_LINES = 40
# RocketMQ's logging library tells how it read its configuration before anything else is printed.
_CHATTER = re.compile(r"^\d\d:\d\d:\d\d,\d+ \|-.*\n?", re.MULTILINE)
POLL_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 180.0
# Below the ports of outgoing connections (32768 and up), above those that services have by custom.
_PORTS = range(20_000, 32_000)

_TIE = Path(__file__).parent / "tie.py"

_alive: set[subprocess.Popen[bytes]] = set()


@atexit.register
def _kill_leftovers() -> None:
    for process in list(_alive):
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def tied(command: Sequence[str]) -> list[str]:
    """The command that runs `command` no longer than the thread lives that starts it."""
    return [sys.executable, "-IS", str(_TIE), str(os.getpid()), *command]


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that ends by itself, and keep what it says; raises TimeoutExpired."""
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log file, for an error message."""
    if not path.exists():
        return f"({path} was never written)"
    text = without_chatter(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(text.splitlines()[-lines:])


def without_chatter(text: str) -> str:
    """A program's output without the lines in which its logging library talks about itself."""
    return _CHATTER.sub("", text)


class PeerProcess:
    """One child process whose standard output and error go to `log`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        # Appended to, so that a restart in the same directory keeps the first run's output;
        # the ready line is looked for behind this place only.
        self._log_start_bytes = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        _alive.add(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """What the program has printed since this start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start_bytes)
            return file.read().decode("utf-8", errors="replace")

    def wait_ready(self, ready_text: str, timeout_s: float) -> None:
        """Return when the program has printed `ready_text`; PeerFailed with the log tail if not."""
        deadline = time.monotonic() + timeout_s
        while ready_text not in self.output():
            if not self.running:
                code = self._process.returncode
                self._forget()
                raise PeerFailed(f"{self.name} ended with code {code}:\n{log_tail(self.log)}")
            if time.monotonic() > deadline:
                self.kill()
                raise PeerFailed(
                    f"{self.name} was not ready after {timeout_s:.0f} s:\n{log_tail(self.log)}"
                )
            time.sleep(POLL_INTERVAL_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask it to end (SIGTERM) and wait; killed, and PeerFailed, when it does not."""
        if not self.running:
            self._forget()
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise PeerFailed(
                f"{self.name} did not end within {timeout_s:.0f} s:\n{log_tail(self.log)}"
            ) from error
        self._forget()

    def pause(self) -> None:
        """Take the processor from it and its children (SIGSTOP) until `resume`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would."""
        if self.running:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._forget()

    def _forget(self) -> None:
        _alive.discard(self._process)

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def free_ports(count: int, *, also: Sequence[int] = ()) -> list[int]:
    """`count` loopback ports free now; `also` are distances from each that must be free too.

    They are bound together and then released, so they differ from one another. They are none of
    those that the system gives to outgoing connections: a client that dials a server while it is
    down would else take its port, or even reach itself. Another program could still take one before
    the peer does; the peer's start then fails and says so.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            if all(_bind(port + distance, held) for distance in (0, *also)):
                ports.append(port)
    if len(ports) < count:
        raise PeerFailed(f"no {count} of the ports {_PORTS[0]} to {_PORTS[-1]} are free")
    return ports


def _bind(port: int, held: contextlib.ExitStack) -> bool:
    listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
