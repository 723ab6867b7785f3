"""This module measures the process itself: its version, CPU time, memory and open files.

The names are those that all of Prometheus's client libraries use, so that dashboards find them.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from typing import Final

from sluice._version import __version__
from sluice.telemetry import Metric, Page

BUILD: Final = Metric(
    "sluice_build_info", "gauge", "Always 1; the labels say what runs.", ("version", "python")
)
CPU: Final = Metric(
    "process_cpu_seconds_total", "counter", "CPU time that the process has used, in seconds."
)
RESIDENT: Final = Metric(
    "process_resident_memory_bytes", "gauge", "Memory in use, with pages of mapped files."
)
VIRTUAL: Final = Metric("process_virtual_memory_bytes", "gauge", "Address space in use.")
OPEN_FILES: Final = Metric("process_open_fds", "gauge", "Open files and sockets.")
OPEN_FILES_MAX: Final = Metric("process_max_fds", "gauge", "How many there may be.")
STARTED: Final = Metric(
    "process_start_time_seconds", "gauge", "When the process started, in seconds since 1970."
)
METRICS: Final = (BUILD, CPU, RESIDENT, VIRTUAL, OPEN_FILES, OPEN_FILES_MAX, STARTED)

_started_seconds = time.time()


async def collect(page: Page) -> None:
    """Add what the system says of this process."""
    page.add(BUILD, 1, __version__, platform.python_version())
    used = resource.getrusage(resource.RUSAGE_SELF)
    page.add(CPU, used.ru_utime + used.ru_stime)
    page.add(STARTED, _started_seconds)
    page.add(OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        virtual, resident, open_files = _from_proc()
    except OSError:
        return  # a system without /proc: the rest is known
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    page.add(VIRTUAL, virtual * page_bytes)
    page.add(RESIDENT, resident * page_bytes)
    page.add(OPEN_FILES, open_files)


def _from_proc() -> tuple[int, int, int]:
    """Pages of address space, pages in memory, open files. The kernel makes it up: no disk."""
    with open("/proc/self/statm", "rb") as opened:
        virtual, resident = opened.read(256).split()[:2]
    return int(virtual), int(resident), len(os.listdir("/proc/self/fd"))
