"""This module decides which log files may go: by age at the set hour, and by how full the disk is.

    below 75 %            files older than the retention, at the hours of `retention_at`
    75 % and more         files older than the retention, at any hour
    85 % and more         the oldest files whatever their age
    90 % and more         as before, and writes are refused until there is room again

Only whole files, only from the oldest on, never the file that is written. Pure: given times and
sizes it answers; the store does what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HOUR_MS: Final = 3_600_000
# Deleting is done in steps, so that the disk's state is looked at again in between.
FORCED_FILES_MAX: Final = 1


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The settings that retention goes by."""

    retention_hours: int
    hours_of_day: frozenset[int]
    clean_ratio: float
    force_ratio: float
    refuse_ratio: float


@dataclass(frozen=True, slots=True)
class OldFile:
    """A log file that is closed: its end position and the store time of its newest entry."""

    end: int
    last_ms: int


def delete_before(
    closed: Sequence[OldFile],
    rules: RetentionRules,
    *,
    now_ms: int,
    hour_of_day: int,
    used_ratio: float,
) -> int:
    """The position below which the log may be deleted; 0 for nothing. `closed` is in log order."""
    position = 0
    if hour_of_day in rules.hours_of_day or used_ratio >= rules.clean_ratio:
        oldest_ms = now_ms - rules.retention_hours * HOUR_MS
        for file in closed:
            if file.last_ms >= oldest_ms:
                break
            position = file.end
    if used_ratio >= rules.force_ratio and not position and closed:
        position = closed[min(FORCED_FILES_MAX, len(closed)) - 1].end
    return position
