"""This module builds our small Go programs with the modules that they pin, and runs them.

A folder with a go.mod is one executable; its first word names the program. It is cached under the
hash of all its files and of the compiler, so nothing stale runs. What go.sum does not name is never
fetched; where the compiler or a module cannot be had, `PeerUnavailable` says why.
"""

import hashlib
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from peers.errors import PeerFailed, PeerUnavailable
from peers.fetch import (
    FETCH_TIMEOUT_S,
    OUTPUT_TAIL_CHARS,
    cache_directory,
    locked,
    published,
    require_tool,
)
from peers.process import run_tool
from peers.programs import RunningProgram, started

_EXECUTABLE: Final = "program"
# No other compiler is fetched, and no C is compiled.
_ENVIRONMENT: Final = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}


class GoPrograms:
    """The programs of one folder, built with the modules that its go.mod and go.sum name."""

    def __init__(self, sources: Path, *, home: Path) -> None:
        """`home` becomes the programs' HOME, where the client keeps its files."""
        self._sources = sources
        self._home = home
        self._executable = self._build()
        home.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *arguments: str, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Run a program to its end and return its events."""
        with self.started(name, *arguments) as program:
            return program.finish(timeout_s)

    def started(self, name: str, *arguments: str) -> AbstractContextManager[RunningProgram]:
        """Run a program in the background; it is killed when the block is left."""
        return started(
            name,
            [str(self._executable), name, *arguments],
            home=self._home,
            environment={"HOME": str(self._home), "ROCKETMQ_GO_LOG_LEVEL": "error"},
        )

    def _build(self) -> Path:
        compiler = require_tool("go")
        digest = hashlib.sha256(_run([compiler, "env", "GOVERSION", "GOOS", "GOARCH"]).encode())
        for source in sorted(self._sources.iterdir()):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        cache = cache_directory()
        target = cache / f"go-{digest.hexdigest()[:16]}"
        if not target.is_dir():
            with locked(cache / f"{target.name}.lock"):
                if not target.is_dir():
                    with published(target) as scratch:
                        self._compile(compiler, scratch / _EXECUTABLE)
        return target / _EXECUTABLE

    def _compile(self, compiler: str, output: Path) -> None:
        """First the modules, which may not be there; then our own code, which must compile."""
        try:
            _run([compiler, "mod", "download"], directory=self._sources)
        except PeerFailed as error:
            raise PeerUnavailable(f"the modules of {self._sources.name}: {error}") from error
        flags = ["-mod=readonly", "-buildvcs=false", "-trimpath", "-o", str(output)]
        _run([compiler, "build", *flags, "."], directory=self._sources)


def _run(command: list[str], directory: Path | None = None) -> str:
    try:
        done = run_tool(
            command, timeout_s=FETCH_TIMEOUT_S, directory=directory, environment=_ENVIRONMENT
        )
    except subprocess.TimeoutExpired as error:
        reason = f"go {command[1]} took more than {FETCH_TIMEOUT_S:.0f} s"
        raise PeerUnavailable(reason) from error
    if done.returncode != 0:
        tail = done.stdout[-OUTPUT_TAIL_CHARS:].strip()
        raise PeerFailed(f"go {' '.join(command[1:3])} failed:\n{tail}")
    return done.stdout
