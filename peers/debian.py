"""This module finds kcat: the one that is installed, or else the packages of a Debian system, which
are unpacked into the cache and not installed.

Packages are asked for by name; the system's own tool fetches them and checks what it got.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from peers.errors import PeerUnavailable
from peers.fetch import (
    FETCH_TIMEOUT_S,
    OUTPUT_TAIL_CHARS,
    cache_directory,
    locked,
    published,
    require_tool,
)
from peers.process import run_tool

_PACKAGES: Final = ("kcat", "librdkafka1", "libyajl2")


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, and what its environment must have besides."""

    path: str
    environment: dict[str, str] = field(default_factory=dict)


def kcat() -> Tool:
    """kcat, or PeerUnavailable."""
    installed = shutil.which("kcat")
    if installed is not None:
        return Tool(installed)
    cache = cache_directory()
    target = cache / f"debian-{_version()}-kcat"
    if not target.is_dir():
        fetcher, unpacker = require_tool("apt-get"), require_tool("dpkg-deb")
        with locked(cache / f"{target.name}.lock"):
            if not target.is_dir():
                with published(target) as scratch:
                    _run([fetcher, "--quiet", "download", *_PACKAGES], scratch)
                    for archive in sorted(scratch.glob("*.deb")):
                        _run([unpacker, "--extract", str(archive), str(scratch)], scratch)
                        archive.unlink()
    libraries = ":".join(sorted({str(path.parent) for path in target.glob("usr/lib/**/*.so.*")}))
    tool = Tool(str(target / "usr/bin/kcat"), {"LD_LIBRARY_PATH": libraries})
    _run([tool.path, "-V"], target, tool.environment)  # what it needs besides may be missing
    return tool


def _version() -> str:
    """What kind of system this is; its packages fit no other."""
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PeerUnavailable(f"kcat is not installed, and {error}") from error
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    names = [values.get(name, "").strip('"') for name in ("ID", "VERSION_ID")]
    return "-".join((*names, os.uname().machine))


def _run(command: list[str], directory: Path, environment: dict[str, str] | None = None) -> None:
    try:
        done = run_tool(
            command, timeout_s=FETCH_TIMEOUT_S, directory=directory, environment=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"kcat cannot be had: {error}") from error
    if done.returncode != 0:
        tail = done.stdout[-OUTPUT_TAIL_CHARS:].strip()
        raise PeerUnavailable(f"kcat is not installed and cannot be fetched:\n{tail}")
