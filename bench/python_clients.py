"""This module brings other Python clients into environments of their own, in the peers' cache.

They must not be among our own packages, and two of them have the same module name. An environment
is complete or absent, and named by what it holds.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from peers.errors import PeerUnavailable
from peers.fetch import OUTPUT_TAIL_CHARS, cache_directory, locked, published
from peers.process import run_tool

INSTALL_TIMEOUT_S = 600.0


def python_with(*requirements: str) -> Path:
    """The interpreter that has these packages ("name==version"); PeerUnavailable without them."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join((version, *requirements)).encode()).hexdigest()
    name = requirements[0].replace("==", "-")
    cache = cache_directory()
    target = cache / f"python{version}-{name}-{digest[:16]}"
    if not target.is_dir():
        with locked(cache / f"{target.name}.lock"):
            if not target.is_dir():
                with published(target) as scratch:
                    _install(scratch, requirements)
    return target / "bin" / "python"


def _install(directory: Path, requirements: tuple[str, ...]) -> None:
    python = str(directory / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [*pip, "--only-binary", ":all:", *requirements],
    ):
        try:
            done = run_tool(command, timeout_s=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            text = f"installing {requirements[0]} took more than {INSTALL_TIMEOUT_S:.0f} s"
            raise PeerUnavailable(text) from error
        if done.returncode != 0:
            tail = done.stdout[-OUTPUT_TAIL_CHARS:].strip()
            raise PeerUnavailable(f"{requirements[0]} cannot be installed:\n{tail}")
