"""This module keeps archives of a peer's classes, from which Java starts in half of the time.

Java writes such an archive at its end, of the classes that it has loaded until then. So a lesson is
run once for each set of jars, before the first program; what cannot be had is done without, since
an archive changes nothing but the time. At a start Java refuses by itself an archive of another
Java or of other jars. The jars must be the first of the class path, with nothing before them.
"""

import functools
import hashlib
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peers.errors import PeerFailed
from peers.fetch import Jars, cache_directory, locked, published
from peers.process import POLL_INTERVAL_S, PeerProcess, free_ports

_ARCHIVE: Final = "classes.jsa"
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Lesson:
    """A run that loads the classes that later runs need.

    In its words and in its settings {directory} is a folder of its own and {port} a free port.
    """

    name: str
    arguments: tuple[str, ...]  # the main class and its words
    settings: str = ""  # the text of {directory}/settings
    ready: str | None = None  # what a server says when it can be stopped; else it ends by itself


def archive_options(java: str, jars: Jars, lesson: Lesson, options: tuple[str, ...]) -> list[str]:
    """What tells Java to start from the archive, made first where it is missing."""
    archive = _archive(java, jars, lesson, options)
    # Nor does it say a word about an archive that it does not take.
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:disable"] if archive is not None else []


@functools.cache
def _archive(java: str, jars: Jars, lesson: Lesson, options: tuple[str, ...]) -> Path | None:
    digest = hashlib.sha256(repr((jars.key, lesson, options)).encode() + _version(java))
    cache = cache_directory()
    target = cache / f"archive-{lesson.name}-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        with locked(cache / f"{target.name}.lock"):
            if not target.is_dir():
                try:
                    with published(target) as scratch:
                        _learn(java, jars, lesson, options, scratch / _ARCHIVE)
                except PeerFailed:
                    return None
    return target / _ARCHIVE


def _version(java: str) -> bytes:
    done = subprocess.run(
        [java, "-version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.stdout + done.stderr


def _learn(java: str, jars: Jars, lesson: Lesson, options: tuple[str, ...], archive: Path) -> None:
    """Run the lesson to its end; PeerFailed if there is no archive then."""
    port = free_ports(1, also=(-2, 1))[0]
    with tempfile.TemporaryDirectory() as directory:

        def filled(text: str) -> str:
            return text.replace("{directory}", directory).replace("{port}", str(port))

        home = Path(directory)
        (home / "settings").write_text(filled(lesson.settings), encoding="utf-8")
        command = [
            *(java, *options, f"-XX:ArchiveClassesAtExit={archive}", "-Xlog:disable"),
            *(f"-Duser.home={home}", "-cp", jars.class_path),
            *(filled(word) for word in lesson.arguments),
        ]
        environment = {"ROCKETMQ_HOME": directory}
        with PeerProcess(
            lesson.name, command, log=home / "log", environment=environment
        ) as process:
            if lesson.ready is not None:
                process.wait_ready(lesson.ready, _TIMEOUT_S)
                process.stop(_TIMEOUT_S)
            deadline = time.monotonic() + _TIMEOUT_S
            while process.running and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
            if process.running or not archive.is_file():
                raise PeerFailed(f"{lesson.name} left no archive of {jars.key}")
