"""This module turns paths and patterns into the files that are there now.

A path that is named must exist when the collector starts. A pattern (`*`, `?`, `[a-z]`, `**`) says
which files may come. Links that a pattern finds are left alone unless wished otherwise: whoever may
write to a directory of logs could else make the collector read any file that it may read.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from sluice.collector.places import Identity
from sluice.errors import ConfigError

# What rotation leaves behind when it packs: the lines in it were read before.
PACKED: Final = ("*.gz", "*.bz2", "*.xz", "*.zst", "*.zip", "*.lz4")


class Found(NamedTuple):
    """A file that is to be followed, and by which path or pattern it was found."""

    path: str
    pattern: str
    identity: Identity
    size: int
    modified_ns: int


class Finder:
    """What to follow."""

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        excluded: Sequence[str] = PACKED,
        follow_links: bool = False,
        state_directory: str = "",
    ) -> None:
        self.patterns = [os.path.abspath(pattern) for pattern in patterns]
        self._excluded = re.compile("|".join(map(fnmatch.translate, excluded)) or r"(?!)")
        self._follow_links = follow_links
        self._state = os.path.realpath(state_directory) + os.sep if state_directory else ""

    def check(self, known_paths: set[str], *, once: bool) -> None:
        """Refuse what cannot be meant, before anything is read."""
        for pattern in self.patterns:
            if is_pattern(pattern):
                if once and not self._expanded(pattern):
                    raise ConfigError(f"{pattern}: no file matches; is the path right?")
                continue
            try:
                mode = os.stat(pattern).st_mode
            except FileNotFoundError as error:
                if pattern in known_paths:
                    continue  # it was there before; rotation makes it anew in a moment
                raise ConfigError(
                    f"{pattern}: no such file; write a pattern, {pattern}*, to wait for one"
                ) from error
            except OSError as error:
                raise ConfigError(f"{pattern}: {error.strerror}") from error
            if stat.S_ISDIR(mode):
                raise ConfigError(f"{pattern} is a directory; name its files, {pattern}/*.log")
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{pattern} is no plain file")
            if not os.access(pattern, os.R_OK):
                raise ConfigError(f"{pattern}: may not be read by this user")

    def look(self) -> list[Found]:
        """The files that are there now, each once."""
        found: dict[Identity, Found] = {}
        for pattern in self.patterns:
            for path in self._expanded(pattern):
                try:
                    status = os.stat(path)
                except OSError:
                    continue  # it was renamed or deleted a moment ago
                if not stat.S_ISREG(status.st_mode):
                    continue
                identity = (status.st_dev, status.st_ino)
                if identity not in found:
                    found[identity] = Found(
                        path, pattern, identity, status.st_size, status.st_mtime_ns
                    )
        return list(found.values())

    def _expanded(self, pattern: str) -> list[str]:
        if not is_pattern(pattern):
            return [pattern] if os.path.exists(pattern) else []
        wanted: list[str] = []
        is_own: dict[str, bool] = {}  # by directory: there are less of them than files
        for path in sorted(glob.glob(pattern, recursive=True)):
            folder, name = os.path.split(path)
            if folder not in is_own:
                is_own[folder] = (os.path.realpath(folder) + os.sep).startswith(self._state)
            if self._excluded.match(name) or (self._state and is_own[folder]):
                continue
            if self._follow_links or not os.path.islink(path):
                wanted.append(path)
        return wanted


def is_pattern(path: str) -> bool:
    """Whether it is a pattern; a file may have such signs in its name."""
    return glob.has_magic(path) and not os.path.exists(path)
