"""This module runs a program that has no rights beyond those of an ordinary user.

Root may write everywhere, so a test of missing rights that runs as root gives up being root first.
The interpreter may lie where only root can read: the program imports what it needs, then drops its
rights, then does its work in a directory that it entered before. Nothing of the tests' own process
changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
WAIT_SECONDS = 60

_DROP = f"""
import os
os.chdir(sys.argv.pop(1))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
assert os.geteuid() != 0
"""


def make_read_only(directory: Path) -> None:
    """Let the directory belong to whom the program runs as, who may not write into it."""
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    directory.chmod(0o500)


def run_unprivileged(
    imports: str, work: str, directory: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run `imports`, then `work` in the directory without root's rights."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{imports}{_DROP}{work}", str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
