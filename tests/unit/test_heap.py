"""This module tests that a server keeps the memory of one large request for the next, and that what
it has when it begins to serve is moved into large pages, if at all, unharmed.
"""

import platform
import subprocess
import sys

import pytest

from sluice.heap import large_ranges

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


MAPS = """\
00400000-00a00000 rw-p 00000000 08:01 12345                              /usr/bin/python3
01f00000-02f00000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f0000300000-7f0000500000 rw-p 00000000 00:00 0
7f0001000000-7f0002000000 ---p 00000000 00:00 0
7f0003000000-7f0004000000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
7f0005100000-7f0005b00000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_large_pages_are_whole_and_in_memory_of_the_process_alone() -> None:
    assert list(large_ranges(MAPS)) == [
        (0x2000000, 0x2E00000),
        (0x7F0000000000, 0x7F0000200000),
        (0x7F0005200000, 0x7F0005A00000),
    ]


def test_what_is_in_memory_stays_as_it_is() -> None:
    program = """
from sluice.heap import use_large_pages
held = [bytes([number & 255]) * 400 for number in range(60_000)]
moved = use_large_pages()
assert moved >= 0 and moved % (2 << 20) == 0
assert all(each == bytes([number & 255]) * 400 for number, each in enumerate(held))
print("well")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "well"
