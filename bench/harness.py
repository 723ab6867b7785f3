"""This module is what every benchmark shares: figures, interleaved rounds, tables and JSON.

The machine is noisy, so the things compared take turns (A B A B ...) and the median of each is
reported. A ratio above 1 always means that ours is better, whether more or less of the unit is.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Of these units less is better; of every other unit more is.
LOWER_IS_BETTER = frozenset({"s", "ms", "us", "MB"})


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value of ours, and the peer's if there is one."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    peer_name: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times better ours is than the peer; None without a peer."""
        if self.peer is None or not self.peer or not self.ours:
            return None
        return self.peer / self.ours if self.unit in LOWER_IS_BETTER else self.ours / self.peer

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer,
            "ratio": self.ratio,
            "peer_name": self.peer_name,
        }


class Unusable(Exception):
    """What was asked for cannot be measured; the text says what can."""


class Failed(Exception):
    """Something went wrong while it was measured, so there is no figure."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a benchmark is to run: where it may write, and whether it must end within 3 minutes.

    `only` names the figures that are wanted (empty: all of them), `ours_only` leaves the peer out,
    and `seconds` is how long one measurement takes.
    """

    directory: Path
    quick: bool
    only: frozenset[str] = frozenset()
    ours_only: bool = False
    seconds: float | None = None
    begin: float = field(default_factory=time.monotonic)

    def progress(self, text: str) -> None:
        """Say what is going on, on standard error."""
        print(f"bench: {time.monotonic() - self.begin:4.0f} s  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A name for the command line, one sentence about it, and the function that measures.

    `has_parts` says whether a part of it can be asked for: see `Run`.
    """

    name: str
    sentence: str
    measure: Callable[[Run], list[Figure]]
    has_parts: bool = False


def rounds(contestants: Mapping[str, Callable[[], float]], count: int) -> dict[str, float]:
    """Let each contestant measure itself once a round; the median of each.

    A contestant cleans up after itself, off its own clock, so that the next one starts even.
    """
    assert count > 0
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(count):
        for name, measure in contestants.items():
            measured[name].append(measure())
    return {name: statistics.median(values) for name, values in measured.items()}


def machine_facts(directory: Path) -> dict[str, str]:
    """What a reader needs to know to judge the figures."""
    facts = {
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(directory),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "commit": _commit(),
    }
    if facts["filesystem"].startswith("tmpfs"):
        facts["filesystem"] += " (memory only: sync figures mean nothing; give --directory)"
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _filesystem(directory: Path) -> str:
    """Type and device of the mount that holds the directory, from the longest matching mount."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    best = ("", "unknown")
    for line in lines:
        device, mount, kind = line.split()[:3]
        if directory.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit} with local changes" if changed else commit


def table(figures: Sequence[Figure]) -> str:
    """The figures for people: aligned columns, three significant digits where it matters."""
    head = ("figure", "unit", "ours", "peer", "ratio", "peer is")
    rows = [
        (
            figure.name,
            figure.unit,
            _number(figure.ours),
            _number(figure.peer),
            "-" if figure.ratio is None else f"{figure.ratio:.2f}",
            figure.peer_name or "-",
        )
        for figure in figures
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        left = row[0].ljust(widths[0]) + "  " + row[1].ljust(widths[1])
        right = "  ".join(row[column].rjust(widths[column]) for column in (2, 3, 4))
        lines.append(f"{left}  {right}  {row[5]}".rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def write_json(path: Path, figures: Sequence[Figure]) -> None:
    """The figures for machines."""
    document = {"figures": [figure.as_json() for figure in figures]}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
