"""This module compiles our small Java programs against a peer's jars and runs them.

A program is one class in one file; it prints one JSON object per line, which comes back as a dict.
Classes are cached under the hash of all sources beside it and of the jars, so nothing stale runs.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from peers.errors import PeerFailed, PeerUnavailable
from peers.fetch import Jars, cache_directory, locked, published, require_tool
from peers.process import without_chatter

# RocketMQ reaches into the JDK for its buffers; Java 17 and later refuse without these.
OPEN_MODULES = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
)
# A client program lives for seconds: it is not worth the second compiler or a parallel collector.
SHORT_LIVED = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
COMPILE_TIMEOUT_S = 120.0
JAVA_VERSION_MIN = 17


def java_command() -> str:
    """Path of a Java that is new enough, or PeerUnavailable."""
    java = require_tool("java")
    done = subprocess.run(
        [java, "-version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
    )
    found = re.search(r'version "(\d+)', done.stdout)
    if found is None:
        raise PeerUnavailable(f"{java} does not tell its version: {done.stdout[:200]!r}")
    if int(found.group(1)) < JAVA_VERSION_MIN:
        raise PeerUnavailable(f"Java {found.group(1)} is older than {JAVA_VERSION_MIN}")
    return java


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
    """A Java program in the background; its events are read while it goes on."""

    def __init__(self, name: str, command: Sequence[str], output: Path) -> None:
        self.name = name
        self._output = output
        with output.open("wb") as sink:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )

    def events(self) -> list[dict[str, Any]]:
        """All events printed so far; a last line that is only half written is left out."""
        text = self._output.read_text(encoding="utf-8", errors="replace")
        return parse_events(text[: text.rfind("\n") + 1])

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
                    raise PeerFailed(f"{self.name} gave too few {event!r} events:\n{self._tail()}")
                time.sleep(0.02)

    def finish(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait until it ends by itself; its events. PeerFailed on a bad code or a timeout."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise PeerFailed(
                f"{self.name} did not end within {timeout_s:.0f} s:\n{self._tail()}"
            ) from error
        if code != 0:
            raise PeerFailed(f"{self.name} ended with code {code}:\n{self._tail()}")
        return self.events()

    def kill(self) -> None:
        """End it now, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _tail(self) -> str:
        text = without_chatter(self._output.read_text(encoding="utf-8", errors="replace"))
        return "\n".join(line[:400] for line in text.splitlines()[-30:])


class JavaPrograms:
    """The programs of one source folder, compiled against one set of jars."""

    def __init__(self, sources: Path, jars: Jars, *, home: Path) -> None:
        """`home` becomes the programs' user.home, so that their logs stay out of the real one."""
        self._sources = sources
        self._jars = jars
        self._home = home
        self._java = java_command()
        home.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *arguments: str, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Run a program to its end and return its events."""
        with self.started(name, *arguments) as program:
            return program.finish(timeout_s)

    @contextlib.contextmanager
    def started(self, name: str, *arguments: str) -> Iterator[RunningProgram]:
        """Run a program in the background; it is killed when the block is left."""
        command = [*self._command(name), *arguments]
        with tempfile.NamedTemporaryFile(
            dir=self._home, prefix=f"{name}-", suffix=".out", delete=False
        ) as file:
            output = Path(file.name)
        program = RunningProgram(name, command, output)
        try:
            yield program
        finally:
            program.kill()

    def _command(self, name: str) -> list[str]:
        classes = self._compile(name)
        return [
            self._java,
            *SHORT_LIVED,
            *OPEN_MODULES,
            f"-Duser.home={self._home}",
            "-Dfile.encoding=UTF-8",
            "-cp",
            f"{classes}:{self._jars.class_path}",
            name,
        ]

    def _compile(self, name: str) -> Path:
        digest = hashlib.sha256(self._jars.key.encode())
        for source in sorted(self._sources.glob("*.java")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        cache = cache_directory()
        target = cache / f"classes-{name}-{digest.hexdigest()[:16]}"
        if target.is_dir():
            return target
        compiler = require_tool("javac")
        with locked(cache / f"{target.name}.lock"):
            if not target.is_dir():
                with published(target) as scratch:
                    self._javac(compiler, name, scratch)
        return target

    def _javac(self, compiler: str, name: str, directory: Path) -> None:
        command = [
            compiler,
            "-nowarn",
            "-encoding",
            "UTF-8",
            "-sourcepath",
            str(self._sources),
            "-cp",
            self._jars.class_path,
            "-d",
            str(directory),
            str(self._sources / f"{name}.java"),
        ]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise PeerFailed(f"{name}.java does not compile:\n{done.stdout[-4000:]}")
