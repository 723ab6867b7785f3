"""This module brings the jars of an artifact set into a cache folder with Maven.

The cache is $SLUICE_PEER_CACHE, or ~/.cache/sluice-peers; it is never inside the repository. A set
is complete or absent: Maven fills a temporary folder, which is renamed when it is whole. A file
lock per set makes the second of two simultaneous runs wait for the first and then find the jars.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.artifacts import COPY_PLUGIN, ArtifactSet
from peers.errors import PeerUnavailable
from peers.process import run_tool

# A cold download of the largest set is about 120 MB; a quarter of an hour is a broken network.
FETCH_TIMEOUT_S = 900.0
CONNECT_TIMEOUT_MS = 15_000
READ_TIMEOUT_MS = 60_000
# How much of a failed tool's output is shown: enough for Maven's last error block.
OUTPUT_TAIL_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Jars:
    """A folder of jars and the key that names its contents."""

    key: str
    directory: Path

    @property
    def class_path(self) -> str:
        """The folder in the form that `java -cp` expands itself (no shell is involved)."""
        return str(self.directory / "*")


def cache_directory() -> Path:
    """The cache folder, made if it is missing."""
    configured = os.environ.get("SLUICE_PEER_CACHE")
    directory = Path(configured) if configured else Path.home() / ".cache" / "sluice-peers"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PeerUnavailable(f"the peer cache {directory} cannot be made: {error}") from error
    return directory.resolve()


def require_tool(name: str) -> str:
    """Absolute path of a program, or PeerUnavailable; $JAVA_HOME is honoured for Java's own."""
    java_home = os.environ.get("JAVA_HOME")
    if java_home and name in ("java", "javac"):
        candidate = Path(java_home) / "bin" / name
        if candidate.is_file():
            return str(candidate)
    found = shutil.which(name)
    if found is None:
        raise PeerUnavailable(f"{name} is not installed")
    return found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; waits for another holder, the kernel frees it at death."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside `target` that becomes `target` when the body succeeds."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def fetch(artifact_set: ArtifactSet, *, cache: Path | None = None) -> Jars:
    """The jars of a set, from the cache or else through Maven; PeerUnavailable if neither works."""
    cache = cache if cache is not None else cache_directory()
    key = artifact_set.key()
    target = cache / key
    if not target.is_dir():
        maven = require_tool("mvn")
        require_tool("java")
        with locked(cache / f"{key}.lock"):
            if not target.is_dir():
                with published(target) as scratch:
                    _copy_dependencies(maven, artifact_set, scratch)
    return Jars(key=key, directory=target / "lib")


def _copy_dependencies(maven: str, artifact_set: ArtifactSet, directory: Path) -> None:
    pom = directory / "pom.xml"
    pom.write_text(artifact_set.pom(), encoding="utf-8")
    command = [
        maven,
        "--batch-mode",
        "--quiet",
        "--file",
        str(pom),
        # Maven 3.8 and older listen to the first pair of names, newer ones to the second.
        f"-Dmaven.wagon.http.connectionTimeout={CONNECT_TIMEOUT_MS}",
        f"-Dmaven.wagon.rto={READ_TIMEOUT_MS}",
        f"-Daether.connector.connectTimeout={CONNECT_TIMEOUT_MS}",
        f"-Daether.connector.requestTimeout={READ_TIMEOUT_MS}",
        f"-DoutputDirectory={directory / 'lib'}",
        "-DincludeScope=runtime",
        COPY_PLUGIN,
    ]
    try:
        done = run_tool(command, timeout_s=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        reason = f"fetching {artifact_set.name} took more than {FETCH_TIMEOUT_S:.0f} s"
        raise PeerUnavailable(reason) from error
    if done.returncode != 0:
        tail = done.stdout[-OUTPUT_TAIL_CHARS:].strip()
        raise PeerUnavailable(f"Maven could not fetch {artifact_set.name}:\n{tail}")
    if not any((directory / "lib").glob("*.jar")):
        raise PeerUnavailable(f"Maven fetched no jar for {artifact_set.name}")
