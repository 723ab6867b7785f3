"""This module tests that a server keeps the memory of one large request for the next."""

import platform
import subprocess
import sys

import pytest

# In a process of its own: the settings are for the whole life of one.
PROGRAM = """
import resource
from sluice.heap import keep_freed_memory
assert keep_freed_memory()
def request():
    held = [b"x" * 200_000 for _ in range(5)]
    held.clear()
for _ in range(20):
    request()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    request()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    """Page faults in a hundred requests of a megabyte."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_memory_that_was_freed_is_used_again() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("no glibc")
    assert faults() < 2_000  # 16,300 without it
