"""This module asks the system what a process and its children cost: processor time and memory."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KIB = 1024


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of the processes since their start, and of their children that have ended."""
    return sum(_cpu_ticks(Path(f"/proc/{pid}/stat").read_text("ascii")) for pid in pids) / (
        _TICKS_PER_S
    )


def tree_cpu_seconds(pid: int) -> float:
    """The same of a process, of all that it and its children have started, dead or alive."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while it is looked at
                stat = (entry / "stat").read_text("utf-8", "replace")
                ticks[int(entry.name)] = _cpu_ticks(stat)
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    tree = [pid]
    for each in tree:
        tree += children.get(each, [])
    return sum(ticks.get(each, 0) for each in tree) / _TICKS_PER_S


def _cpu_ticks(stat: str) -> int:
    """utime, stime, cutime and cstime; the name of the program before them may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15])


def private_bytes(pids: Iterable[int]) -> int:
    """Memory that is the processes' own; see `private_in`."""
    return sum(private_in(Path(f"/proc/{pid}/smaps").read_text("utf-8")) for pid in pids)


def private_in(smaps: str) -> int:
    """Private_Clean + Private_Dirty of each mapping, but no more of it than is anonymous.

    What is left out is the pages of mapped files: the log of a broker that maps it belongs to the
    system's cache and not to the broker. Pages of a mapped program that it has changed are counted.
    """
    total = private = 0
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if name in {"Private_Clean", "Private_Dirty"}:
            private += _kib(value)
        elif name == "Anonymous":
            total += min(private, _kib(value))
        elif name == "Size":
            private = 0
    return total * _KIB


def _kib(value: str) -> int:
    number, unit = value.split()
    assert unit == "kB", value
    return int(number)
