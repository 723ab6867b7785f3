"""This module is the log of a Parquet table: which files belong to it, and which offsets they hold.

    DIR/_sluice/table.json           what the table is: its id, schema, partition columns
    DIR/_sluice/commits/0...07.json  one file per commit: files that came, files that went, the
                                     query and batch they are of, the offsets of every queue
    DIR/_sluice/snapshots/...        the sum of all commits up to one, so that few have to be read
    DIR/_data/...                    Parquet files; one that no commit names is no part of the table

A commit is one step: its file is written under another name and linked to the next number, which
succeeds for one process only and never shows half a file. Spark and other tools pass over names
that begin with an underscore, so nobody reads a table by accident without its log.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from sluice.errors import ConfigError, StoreCorrupt, StoreError

LOG_NAME: Final = "_sluice"
DATA_NAME: Final = "_data"
_FORMAT: Final = 1
_SNAPSHOT_EVERY: Final = 50
_SNAPSHOTS_KEPT: Final = 3
_REMOVED_KEPT_MS: Final = 30 * 24 * 3_600_000
_COMMITS_KEPT_MS: Final = 24 * 3_600_000
_TRIES_MAX: Final = 1000

# {topic: {partition as text: (first offset, offset after the last)}}
Ranges = dict[str, dict[str, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file; `path` is below `_data`."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Description:
    """What a table is; never changes."""

    table_id: str
    schema: Any  # of all columns, as Spark writes it in JSON
    given: str  # the option `schema` that it was made with
    partition_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """One step of a table."""

    add: tuple[DataFile, ...]
    remove: tuple[str, ...] = ()
    query: str = ""  # empty: not a batch of a stream but a compaction
    batch: int = -1
    dead: tuple[DataFile, ...] = ()
    ranges: Ranges = field(default_factory=dict)
    at_ms: int = 0


@dataclass(slots=True)
class LastBatch:
    """The newest batch that a query committed."""

    batch: int
    dead: tuple[DataFile, ...]


@dataclass(slots=True)
class State:
    """The sum of all commits up to a version."""

    version: int = 0
    files: dict[str, DataFile] = field(default_factory=dict)
    ends: dict[str, dict[str, int]] = field(default_factory=dict)
    queries: dict[str, LastBatch] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)  # when, for who sweeps

    def apply(self, commit: Commit) -> None:
        for path in commit.remove:
            self.files.pop(path, None)
            self.removed[path] = commit.at_ms
        for file in commit.add:
            self.files[file.path] = file
        for topic, parts in commit.ranges.items():
            own = self.ends.setdefault(topic, {})
            for part, (_, stop) in parts.items():
                own[part] = max(stop, own.get(part, 0))
        if commit.query:
            self.queries[commit.query] = LastBatch(commit.batch, commit.dead)
        self.version += 1

    def has(self, query: str, batch: int) -> bool:
        last = self.queries.get(query)
        return last is not None and last.batch >= batch


class TableLog:
    """The log of one table, as far as it was read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = local_directory(path)
        self.data = self.directory / DATA_NAME
        self._log = self.directory / LOG_NAME
        self._commits = self._log / "commits"
        self._snapshots = self._log / "snapshots"
        self.state = State()

    # ------------------------------------------------------------------------------------ the table

    def describe(self) -> Description | None:
        """What is there: None where nothing is. Raises ConfigError for anything else."""
        content = _read(self._log / "table.json")
        if content is not None:
            if content.get("format") != _FORMAT:
                raise ConfigError(
                    f"{self.directory} was written by another version of sluice.tables (format "
                    f"{content.get('format')}, known is {_FORMAT})"
                )
            return Description(
                str(content["id"]),
                content["schema"],
                str(content["given"]),
                tuple(content["partition_by"]),
            )
        if (self.directory / "_delta_log").is_dir():
            raise ConfigError(
                f"option path: {self.directory} holds a Delta table; use format='delta', or "
                "another path"
            )
        if self.directory.is_dir():
            own = {LOG_NAME, DATA_NAME}  # there without table.json where a maker was killed
            others = [entry.name for entry in self.directory.iterdir() if entry.name not in own]
            if others:
                raise ConfigError(
                    f"option path: {self.directory} is not empty and no table of sluice.tables "
                    f"(it holds {min(others)}); use another path"
                )
        elif self.directory.exists():
            raise ConfigError(f"option path: {self.directory} is no directory")
        return None

    def require(self) -> Description:
        """What the table is, where there must be one."""
        found = self.describe() if self.directory.is_dir() else None
        if found is None:
            raise ConfigError(f"option path: there is no table in {self.directory}")
        return found

    def create(self, description: Description) -> Description:
        """Make the table; where another process was first, what that one made."""
        try:
            for each in (self.data, self._commits, self._snapshots):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"option path: {self.directory}: {error.strerror}") from None
        content = {
            "format": _FORMAT,
            "id": description.table_id,
            "schema": description.schema,
            "given": description.given,
            "partition_by": description.partition_by,
        }
        self._publish(self._log / "table.json", content)
        return self.require()

    # -------------------------------------------------------------------------------------- reading

    def refresh(self) -> State:
        """Read what was committed since."""
        newest = self._newest_snapshot()
        if newest > self.state.version:
            self._load(newest)
        while True:
            content = _read(self._commit_path(self.state.version + 1))
            if content is None:
                return self.state
            self.state.apply(_commit_of(content, self._commit_path(self.state.version + 1)))

    def paths(self) -> list[Path]:
        """The files of the table as it is now."""
        return [self.data / path for path in sorted(self.refresh().files)]

    def _newest_snapshot(self) -> int:
        return max(self._snapshot_versions(), default=0)

    def _snapshot_versions(self) -> list[int]:
        try:
            names = os.listdir(self._snapshots)
        except FileNotFoundError:
            return []
        return [int(name[:20]) for name in names if re.fullmatch(r"[0-9]{20}\.json", name)]

    def _load(self, version: int) -> None:
        path = self._snapshots / f"{version:020}.json"
        content = _read(path)
        if content is None:
            raise StoreError(f"{path} went away while it was read; try again")
        try:
            self.state = State(
                version,
                {file["path"]: DataFile(**file) for file in content["files"]},
                content["ends"],
                {
                    query: LastBatch(last["batch"], tuple(DataFile(**f) for f in last["dead"]))
                    for query, last in content["queries"].items()
                },
                content["removed"],
            )
        except (KeyError, TypeError) as error:
            raise StoreCorrupt(str(path), 0, f"no snapshot of a table: {error}") from None

    def _commit_path(self, version: int) -> Path:
        return self._commits / f"{version:020}.json"

    # -------------------------------------------------------------------------------------- writing

    def commit(self, commit: Commit, check: Callable[[State], bool]) -> bool:
        """Make it the next step of the table, if `check` still agrees to what is there by then."""
        for _ in range(_TRIES_MAX):
            state = self.refresh()
            if not check(state):
                return False
            self._require_files(commit)
            stamped = {**asdict(commit), "at_ms": time.time_ns() // 1_000_000}
            path = self._commit_path(state.version + 1)
            if not self._publish(path, stamped):
                continue  # another process was first: look at what it did
            if self._newest_snapshot() > state.version and not _holds(self.refresh(), commit):
                # This process slept so long that old commits were swept, and wrote into the past,
                # where nobody looks.
                path.unlink()
                continue
            self.refresh()
            if self.state.version % _SNAPSHOT_EVERY == 0:
                self._snapshot()
            return True
        raise StoreError(f"{self.directory}: other processes commit all the time; try again")

    def _require_files(self, commit: Commit) -> None:
        for file in (*commit.add, *commit.dead):
            if not (self.data / file.path).is_file():
                raise StoreError(
                    f"{self.data / file.path} is gone before it was committed: it was swept, or "
                    "the executors do not share this path with the driver"
                )

    def _publish(self, path: Path, content: Mapping[str, Any]) -> bool:
        """Write a whole file under a name that nobody has; whether it was free."""
        scratch = path.with_name(f".{uuid.uuid4().hex}")
        try:
            write_durably(scratch, orjson.dumps(content))
            try:
                os.link(scratch, path)
            except FileExistsError:
                return False
            except OSError as error:
                raise StoreError(
                    f"{path}: {error.strerror}; a Parquet table needs a file system with hard links"
                ) from None
        finally:
            scratch.unlink(missing_ok=True)
        sync_directory(path.parent)
        return True

    def _snapshot(self) -> None:
        state = self.state
        now_ms = time.time_ns() // 1_000_000
        state.removed = {p: at for p, at in state.removed.items() if now_ms - at < _REMOVED_KEPT_MS}
        content = {
            "files": [asdict(file) for file in state.files.values()],
            "ends": state.ends,
            "queries": {query: asdict(last) for query, last in state.queries.items()},
            "removed": state.removed,
        }
        self._publish(self._snapshots / f"{state.version:020}.json", content)
        for version in sorted(self._snapshot_versions())[:-_SNAPSHOTS_KEPT]:
            (self._snapshots / f"{version:020}.json").unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------- sweeping

    def sweep(self, keep_ms: int) -> list[Path]:
        """Delete files that no commit names (any more) for so long, and commits that snapshots
        hold; the data files that went.
        """
        state = self.refresh()
        now_ms = time.time_ns() // 1_000_000
        wanted = set(state.files)
        wanted.update(file.path for last in state.queries.values() for file in last.dead)
        gone = []
        for path in sorted(self.data.rglob("*.parquet")):
            name = path.relative_to(self.data).as_posix()
            since_ms = max(state.removed.get(name, 0), path.stat().st_mtime_ns // 1_000_000)
            if name not in wanted and now_ms - since_ms >= keep_ms:
                path.unlink(missing_ok=True)
                gone.append(path)
        oldest = min(self._snapshot_versions(), default=0)
        for path in self._commits.glob("*.json"):
            age_ms = now_ms - path.stat().st_mtime_ns // 1_000_000
            if int(path.stem) <= oldest and age_ms >= max(keep_ms, _COMMITS_KEPT_MS):
                path.unlink(missing_ok=True)
        return gone


# ------------------------------------------------------------------------------------------- pieces


def local_directory(path: str | os.PathLike[str]) -> Path:
    """A path of the file system; raises ConfigError for anything else."""
    text = os.fspath(path)
    if text.startswith("file:"):
        text = re.sub(r"^file:(//)?(?=/)", "", text)
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:/", text):
        raise ConfigError(
            f"option path: {text}: a Parquet table is a directory of a file system that driver and "
            "executors share; object stores are for format='delta'"
        )
    if not text or re.search(r"[{}\[\]*?\\\x00]", text):
        raise ConfigError(f"option path: {text!r} is empty or holds one of {{}}[]*?\\")
    return Path(os.path.abspath(text))


def overlap(ends: Mapping[str, Mapping[str, int]], ranges: Ranges) -> str:
    """The first range that begins before the table's end, in words; empty where none does."""
    for topic, parts in sorted(ranges.items()):
        for part, (first, _) in sorted(parts.items()):
            end = ends.get(topic, {}).get(part, 0)
            if first < end:
                return f"topic {topic}, partition {part}, offset {first}; it has all below {end}"
    return ""


def joined(many: Iterable[Ranges]) -> Ranges:
    """The ranges that cover several."""
    whole: Ranges = {}
    for ranges in many:
        for topic, parts in ranges.items():
            own = whole.setdefault(topic, {})
            for part, (first, stop) in parts.items():
                known = own.get(part, (first, stop))
                own[part] = (min(first, known[0]), max(stop, known[1]))
    return whole


def _holds(state: State, commit: Commit) -> bool:
    if commit.query:
        return state.has(commit.query, commit.batch)
    return any(file.path in state.files or file.path in state.removed for file in commit.add)


def _commit_of(content: Mapping[str, Any], path: Path) -> Commit:
    try:
        return Commit(
            tuple(DataFile(**file) for file in content["add"]),
            tuple(content["remove"]),
            str(content["query"]),
            int(content["batch"]),
            tuple(DataFile(**file) for file in content["dead"]),
            ranges_of(content["ranges"]),
            int(content["at_ms"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(str(path), 0, f"no commit of a table: {error}") from None


def ranges_of(content: Mapping[str, Mapping[str, Any]]) -> Ranges:
    """Ranges that were JSON."""
    return {
        topic: {part: (int(first), int(stop)) for part, (first, stop) in parts.items()}
        for topic, parts in content.items()
    }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except orjson.JSONDecodeError as error:
        raise StoreCorrupt(str(path), error.pos, "is no JSON") from None
    if not isinstance(content, dict):
        raise StoreCorrupt(str(path), 0, "is no JSON object")
    return content


def write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
