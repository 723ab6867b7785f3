"""This module compiles our small Java programs against a peer's jars and runs them.

A program is one class in one file; how it is run and read is in `peers.programs`. Classes are
cached under the hash of all sources beside it and of the jars, so nothing stale runs. All programs
of a folder are compiled together, unless one of them needs what these jars do not hold.
"""

import functools
import hashlib
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from peers.archives import Lesson, archive_options
from peers.errors import PeerFailed, PeerUnavailable
from peers.fetch import Jars, cache_directory, locked, published, require_tool
from peers.process import run_tool
from peers.programs import RunningProgram, started

# RocketMQ reaches into the JDK for its buffers; Java 17 and later refuse without these.
OPEN_MODULES = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
)
# A client program lives for seconds: it is not worth the second compiler or a parallel collector.
SHORT_LIVED = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# A client that finds nobody has loaded most of what one needs that finds somebody.
CLIENT_LESSONS = {
    "rocketmq-5.5.0": Lesson(
        "client",
        (
            *("org.apache.rocketmq.tools.command.MQAdminStartup", "sendMessage"),
            *("-t", "Lesson", "-p", "text", "-n", "127.0.0.1:{port}"),
        ),
    ),
}
COMPILE_TIMEOUT_S = 300.0
JAVA_VERSION_MIN = 17


def java_command() -> str:
    """Path of a Java that is new enough, or PeerUnavailable."""
    return _checked(require_tool("java"))


@functools.cache
def _checked(java: str) -> str:
    done = run_tool([java, "-version"], timeout_s=COMPILE_TIMEOUT_S)
    found = re.search(r'version "(\d+)', done.stdout)
    if found is None:
        raise PeerUnavailable(f"{java} does not tell its version: {done.stdout[:200]!r}")
    if int(found.group(1)) < JAVA_VERSION_MIN:
        raise PeerUnavailable(f"Java {found.group(1)} is older than {JAVA_VERSION_MIN}")
    return java


class JavaPrograms:
    """The programs of one source folder, compiled against one set of jars."""

    def __init__(
        self, sources: Path, jars: Jars, *, home: Path, options: Sequence[str] = ()
    ) -> None:
        """`home` becomes the programs' user.home, so that their logs stay out of the real one.

        `options` go to Java itself, before the program's name.
        """
        self._options = options
        self._sources = sources
        self._jars = jars
        self._home = home
        self._java = java_command()
        home.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *arguments: str, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Run a program to its end and return its events."""
        with self.started(name, *arguments) as program:
            return program.finish(timeout_s)

    def started(self, name: str, *arguments: str) -> AbstractContextManager[RunningProgram]:
        """Run a program in the background; it is killed when the block is left."""
        return started(name, [*self._command(name), *arguments], home=self._home)

    def _command(self, name: str) -> list[str]:
        return [
            self._java,
            *SHORT_LIVED,
            *OPEN_MODULES,
            *client_archive_options(self._java, self._jars),
            f"-Duser.home={self._home}",
            "-Dfile.encoding=UTF-8",
            *self._options,
            "-cp",
            class_path(self._sources, name, self._jars),
            name,
        ]


def client_archive_options(java: str, jars: Jars) -> list[str]:
    """What makes a client program start from an archive, if there is a lesson for these jars."""
    for name, lesson in CLIENT_LESSONS.items():
        if jars.key.startswith(f"{name}-"):
            return archive_options(java, jars, lesson, (*SHORT_LIVED, *OPEN_MODULES))
    return []


def class_path(sources: Path, name: str, jars: Jars) -> str:
    """What Java needs for one of our programs: the jars, and its classes, compiled if need be."""
    digest = hashlib.sha256(jars.key.encode())
    paths = sorted(sources.glob("*.java"))
    for source in paths:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    key = digest.hexdigest()[:16]
    target = cache_directory() / f"classes-{name}-{key}"
    if not target.is_dir():
        try:
            target = _classes(f"classes-{key}", paths, sources, jars)
        except PeerFailed:
            _classes(target.name, [sources / f"{name}.java"], sources, jars)
    return f"{jars.class_path}:{target}"


def _classes(key: str, paths: Sequence[Path], sources: Path, jars: Jars) -> Path:
    cache = cache_directory()
    target = cache / key
    if not target.is_dir():
        compiler = require_tool("javac")
        with locked(cache / f"{key}.lock"):
            if not target.is_dir():
                with published(target) as scratch:
                    _compile(compiler, paths, sources, jars, scratch)
    return target


def _compile(
    compiler: str, paths: Sequence[Path], sources: Path, jars: Jars, directory: Path
) -> None:
    command = [
        compiler,
        "-nowarn",
        "-encoding",
        "UTF-8",
        "-sourcepath",
        str(sources),
        "-cp",
        jars.class_path,
        "-d",
        str(directory),
        *(str(path) for path in paths),
    ]
    done = run_tool(command, timeout_s=COMPILE_TIMEOUT_S)
    if done.returncode != 0:
        names = " ".join(path.name for path in paths)
        raise PeerFailed(f"{names} does not compile:\n{done.stdout[-4000:]}")
