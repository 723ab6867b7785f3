"""This module brings packages of Python into the cache: another version of one that the tests have
already, so that the same tests run with both.

They are pinned with their checksums by a file of `requirements/`, and lie in a folder that is put
before those of the interpreter (PYTHONPATH): nothing of the environment itself changes. What cannot
be had raises `PeerUnavailable` with the reason.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from peers.errors import PeerUnavailable
from peers.fetch import (
    FETCH_TIMEOUT_S,
    OUTPUT_TAIL_CHARS,
    cache_directory,
    locked,
    published,
)
from peers.process import run_tool


def python_packages(requirements: Path, *, cache: Path | None = None) -> Path:
    """The folder with what a file of requirements names, from the cache or else through pip."""
    cache = cache if cache is not None else cache_directory()
    digest = hashlib.sha256(requirements.read_bytes())
    digest.update(repr((sys.implementation.cache_tag, sys.platform)).encode())
    target = cache / f"python-{requirements.stem}-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        with locked(cache / f"{target.name}.lock"):
            if not target.is_dir():
                with published(target) as scratch:
                    _install(requirements, scratch)
    return target


def _install(requirements: Path, directory: Path) -> None:
    words = ["--disable-pip-version-check", "install", "--quiet", "--require-hashes"]
    words += ["--target", str(directory), "--requirement", str(requirements.resolve())]
    try:
        done = run_tool([sys.executable, "-m", "pip", *words], timeout_s=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        reason = f"pip took more than {FETCH_TIMEOUT_S:.0f} s for {requirements.name}"
        raise PeerUnavailable(reason) from error
    if done.returncode != 0:
        tail = done.stdout[-OUTPUT_TAIL_CHARS:].strip()
        raise PeerUnavailable(f"pip could not install {requirements.name}:\n{tail}")
