"""This module brings packages of Node.js into the cache, and runs our small programs with them.

A package is named with its version and the checksum of its archive; what they need themselves is
named too, so nothing is chosen by the tool that fetches. Where one is partly C++ it is compiled,
which takes minutes: only who asks for that waits for it. What cannot be had raises
`PeerUnavailable` with the reason.
"""

import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from peers.errors import PeerUnavailable
from peers.fetch import (
    FETCH_TIMEOUT_S,
    OUTPUT_TAIL_CHARS,
    READ_TIMEOUT_MS,
    cache_directory,
    locked,
    published,
    require_tool,
)
from peers.process import run_tool
from peers.programs import RunningProgram, started

_MODULES: Final = "node_modules"
# What a compiler leaves behind; none of it is needed by who uses the package.
_LEFT_OVERS: Final = ("deps", "build/Release/obj.target", "build/Release/.deps")


@dataclass(frozen=True, slots=True)
class Package:
    """One package, as the registry's archive of it."""

    name: str
    version: str
    sha512: str  # of the archive, in hexadecimal digits
    compiled: bool = False


KAFKAJS: Final = (
    Package(
        "kafkajs",
        "2.2.4",
        "8ff61e6a9075bdf3d3da2388527fefc5dc8a12e86e6363f1301bdfe495aec7a8"
        "926ae90071caccb57118fcb6fb3af6af0e1396304e7cf5ba4bac47675478df8c",
    ),
)
NODE_RDKAFKA: Final = (
    Package(
        "bindings",
        "1.5.0",
        "a76abfb7f9a1bee3a3fd478b955eb9eba183fe0ba8c25af4847c42948d16f66e"
        "cc59890bd45d212e8fb401ec6cf4748f0ad4754974344c3dcc30aad765a8db89",
    ),
    Package(
        "file-uri-to-path",
        "1.0.0",
        "d19b7eb372fb55fd5b8b0599dbd6804625582f1ee23069c4525f71df77db07f8"
        "f78d1f35bbf3b62dba8af819b508348d0ca56d27f623c18ed351de5291e2d02f",
    ),
    Package(
        "nan",
        "2.30.0",
        "3f99a8903912bc2181cfa9990c3ff697ec3d428202457742c99f4e34699378fa"
        "f8d288a1260dcaa67d18537b7029de8f267c1294b05635078e4fac96115d9ce0",
    ),
    Package(
        "node-rdkafka",
        "3.6.1",
        "b1fa536eb4f7e78dbd72cd1113c61bf5abc65fd062451be957b6b0790b2084a4"
        "e3b6b5593f78c1aca38f22d59702a1dbf1da328774a4b86b945412e08a0d5246",
        compiled=True,
    ),
)


class NodePrograms:
    """The programs of one folder, run with these packages."""

    def __init__(
        self, sources: Path, packages: Sequence[Package], *, home: Path, compiles: bool = True
    ) -> None:
        """`home` becomes the programs' HOME. Without `compiles`, what is not compiled is missed."""
        self._sources = sources
        self._home = home
        self._node = require_tool("node")
        self._modules = _fetched(self._node, tuple(packages), compiles)
        home.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *arguments: str, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Run a program to its end and return its events."""
        with self.started(name, *arguments) as program:
            return program.finish(timeout_s)

    def started(self, name: str, *arguments: str) -> AbstractContextManager[RunningProgram]:
        """Run a program in the background; it is killed when the block is left."""
        libraries = [str(path) for path in self._modules.glob("*/build/deps")]
        environment = {"HOME": str(self._home), "NODE_PATH": str(self._modules)}
        if libraries:
            environment["LD_LIBRARY_PATH"] = ":".join(libraries)
        command = [self._node, str(self._sources / f"{name}.js"), *arguments]
        return started(name, command, home=self._home, environment=environment)


def _fetched(node: str, packages: tuple[Package, ...], compiles: bool) -> Path:
    """The folder that holds the packages."""
    is_compiled = any(package.compiled for package in packages)
    digest = hashlib.sha256(repr(packages).encode())
    if is_compiled:
        digest.update(_run([node, "--version"]).encode())  # what is compiled is for one of them
    cache = cache_directory()
    name = packages[-1].name
    target = cache / f"node-{name}-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        if is_compiled and not compiles:
            raise PeerUnavailable(f"{name} is not compiled here yet; the soak run does it")
        npm = require_tool("npm")
        with locked(cache / f"{target.name}.lock"):
            if not target.is_dir():
                with published(target) as scratch:
                    for package in packages:
                        _bring(npm, package, scratch)
    return target / _MODULES


def _bring(npm: str, package: Package, directory: Path) -> None:
    words = ["pack", f"{package.name}@{package.version}", "--silent", "--ignore-scripts"]
    words += ["--fetch-retries", "1", "--fetch-timeout", str(READ_TIMEOUT_MS)]
    _run([npm, *words, "--pack-destination", str(directory)])
    archive = directory / f"{package.name}-{package.version}.tgz"
    if hashlib.sha512(archive.read_bytes()).hexdigest() != package.sha512:
        raise PeerUnavailable(f"{package.name} {package.version} is not what it was")
    target = directory / _MODULES / package.name
    with tarfile.open(archive) as packed:
        # What it holds is known by its checksum. Before 3.11.4 there are no filters.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(directory / "unpacked")  # noqa: S202
    target.parent.mkdir(exist_ok=True)
    (directory / "unpacked" / "package").rename(target)
    archive.unlink()
    if package.compiled:
        _run([npm, "rebuild", package.name, "--foreground-scripts"], directory)
        for path in _LEFT_OVERS:
            shutil.rmtree(target / path, ignore_errors=True)


def _run(command: list[str], directory: Path | None = None) -> str:
    try:
        done = run_tool(
            command,
            timeout_s=FETCH_TIMEOUT_S,
            directory=directory,
            environment={"JOBS": "1"},  # their steps depend on each other
        )
    except subprocess.TimeoutExpired as error:
        reason = f"{Path(command[0]).name} {command[1]} took more than {FETCH_TIMEOUT_S:.0f} s"
        raise PeerUnavailable(reason) from error
    if done.returncode != 0:
        tail = done.stdout[-OUTPUT_TAIL_CHARS:].strip()
        raise PeerUnavailable(f"{Path(command[0]).name} {command[1]} failed:\n{tail}")
    return done.stdout
