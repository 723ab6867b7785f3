"""This module joins small files of a Parquet table to large ones, beside a running stream.

New files are written first; one commit takes the old ones out and the new ones in. A reader sees
the table before or after it. The old files stay on the disk for who reads them still, until they
are swept. If another compaction was quicker, nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sluice.errors import ConfigError
from sluice.tables.log import Commit, DataFile, State, TableLog

KEEP_HOURS: Final = 24.0
_SMALL: Final = 0.5  # a file below this part of the target is worth joining


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did."""

    files_before: int
    files_after: int
    rows: int  # of the files that were joined
    size_before: int  # of those too, in bytes
    size_after: int


def groups(files: Iterable[DataFile], target_bytes: int) -> list[list[DataFile]]:
    """Which files become one: small ones of one directory, up to about the target."""
    by_directory: dict[str, list[DataFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.size < target_bytes * _SMALL:
            by_directory.setdefault(os.path.dirname(file.path), []).append(file)
    found = []
    for own in by_directory.values():
        group: list[DataFile] = []
        for file in own:
            if group and sum(each.size for each in group) + file.size > target_bytes:
                found.append(group)
                group = []
            group.append(file)
        found.append(group)
    return [group for group in found if len(group) > 1]


def compact(log: TableLog, target_bytes: int) -> Compaction:
    """Join what is small, one commit for each new file."""
    from sluice.tables.parquet_files import merged

    if target_bytes < 1:
        raise ConfigError("option target_file_bytes: at least 1")
    log.require()
    before = len(log.refresh().files)
    rows = size_before = size_after = 0
    for group in groups(log.state.files.values(), target_bytes):
        made = merged(log.data, group)
        names = tuple(file.path for file in group)

        def still_there(state: State, names: tuple[str, ...] = names) -> bool:
            return all(name in state.files for name in names)

        if log.commit(Commit((made,), names), still_there):
            rows += made.rows
            size_before += sum(file.size for file in group)
            size_after += made.size
        else:
            (log.data / made.path).unlink(missing_ok=True)
    return Compaction(before, len(log.refresh().files), rows, size_before, size_after)
