"""This module is a simulated disk: a `Files` in memory that can lose power, fail, fill up and rot.

It keeps what POSIX and ext4 promise and nothing more; `crash_model` draws the states of a change.

- The length that `create` gives a file is a pending change like any other: a name that was synced
  without its file is found as an empty file.
- A rename is all or nothing and durable when both directories are synced. `replace` is durable when
  it returns, and makes every name of its directory durable, as the real one does.
- A failed `sync_many` or `sync_directory` loses what it was to make durable, like a failed `sync`.
- Simplification: a directory is durable as soon as it is made, and so is the file made by `lock`.
- Simplification: space is free again when the last name goes, also while the file is still open.

Everything is deterministic: the same calls and the same policy give the same bytes. Several threads
may use one disk, and a crash falls between two of their changes. Memory grows with the number of
bytes never synced. This module may not touch a real disk or read a clock.
"""

import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import RLock
from typing import Final

from sluice.storage.crash_model import (
    BLOCK_BYTES,
    Change,
    Image,
    KeepAll,
    KeepNothing,
    KeepPolicy,
    KeepPrefix,
    KeepRandom,
    NameChange,
    Node,
    blocks_of,
    one_at_a_time,
    split_path,
    zeros,
)
from sluice.storage.files import LOCK_TEXT, UNREAD, Buffer, DiskUsage

__all__ = [
    "OPERATIONS",
    "KeepAll",
    "KeepNothing",
    "KeepPolicy",
    "KeepPrefix",
    "KeepRandom",
    "MemoryFile",
    "MemoryFiles",
    "MemoryLock",
]

OPERATIONS: Final = frozenset(
    {
        *("pwritev", "pread", "sync", "create", "open", "replace", "rename", "remove"),
        *("sync_directory", "sync_many", "resize"),
    }
)

_UNLIMITED_BYTES: Final = 1 << 40  # what `usage` calls the total of a disk without a limit


@dataclass(slots=True)
class _Fault:
    operation: str
    left_count: int  # it strikes when this reaches 0
    error: int
    sticky: bool
    within: str


@dataclass(slots=True)
class _Tear:
    left_count: int
    keep_bytes: int


class MemoryFile:
    """An `OpenFile` of a `MemoryFiles`."""

    __slots__ = ("_closed", "_disk", "_node", "_path", "_viewed_from", "_writable", "changing")

    def __init__(self, disk: "MemoryFiles", node: Node, path: str, writable: bool) -> None:
        self._disk, self.changing = disk, disk.changing
        self._node, self._path, self._writable = node, path, writable
        self._closed, self._viewed_from = False, UNREAD

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return len(self._open_node().image.memory)

    @one_at_a_time
    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        node = self._open_node()
        if not self._writable:
            raise _error(errno.EBADF, self._path)
        if offset < 0:
            raise _error(errno.EINVAL, self._path)
        disk = self._disk
        disk._refuse_read_only(self._path)
        disk._call("pwritev", self._path)
        data = b"".join(buffers)
        failure = 0
        keep_bytes = disk._torn_bytes()
        if keep_bytes is not None:
            data, failure = data[:keep_bytes], errno.EIO
        if disk.capacity_bytes is not None:
            # Like the real one: what fits is written, then the disk is full.
            fit_bytes = disk._fitting_bytes(node, offset, len(data))
            if fit_bytes < len(data):
                data, failure = data[:fit_bytes], errno.ENOSPC
        if data:
            node.write(next(disk._sequence), offset, data)
        if failure:
            raise _error(failure, self._path)
        return len(data)

    def pread(self, size: int, offset: int) -> bytes:
        node = self._open_node()
        if size < 0 or offset < 0:
            raise _error(errno.EINVAL, self._path)
        self._disk._call("pread", self._path)
        return bytes(node.image.memory[offset : offset + size])

    def pread_now(self, size: int, offset: int) -> bytes | None:
        return self.pread(size, offset) if self.resident(offset, offset + size) else None

    def view(self, at: int = 0) -> memoryview:
        image = self._open_node().image
        self._viewed_from = min(self._viewed_from, at)
        if image.view is None:
            if not len(image.memory):
                raise ValueError(f"an empty file has no view: {self._path}")
            image.view = image.memory.toreadonly()
        return image.view

    def viewed_from(self) -> int:
        found, self._viewed_from = self._viewed_from, UNREAD
        return found

    def forget(self, start: int, stop: int) -> None:
        self._disk.cold(self._path, start, stop)

    def resident(self, start: int, stop: int) -> bool:
        node = self._open_node()
        if start >= stop:
            return True
        if start < 0 or stop > len(node.image.memory):
            return False
        return not any(start < last and first < stop for first, last in node.cold)

    cached = resident

    def data_from(self, start: int) -> int:
        return min(start, self.size)

    def fetch(self, start: int, stop: int) -> None:
        self.warm(start, stop)

    def warm(self, start: int, stop: int) -> None:
        node = self._open_node()
        self._disk.warm_calls += 1
        if start < 0 and start < stop:
            raise _error(errno.EINVAL, self._path)
        node.warm(start, max(start, stop))

    @one_at_a_time
    def sync(self) -> None:
        node = self._open_node()
        try:
            if node.pending:
                self._disk._refuse_read_only(self._path)
            self._disk._call("sync", self._path)
        except OSError:
            node.lose()
            raise
        node.settle()

    @one_at_a_time
    def resize(self, size: int) -> None:
        node = self._open_node()
        if not self._writable or size < 0:
            raise _error(errno.EINVAL, self._path)
        self._disk._refuse_read_only(self._path)
        self._disk._call("resize", self._path)
        if size != len(node.image.memory):
            node.resize(next(self._disk._sequence), size)

    def close(self) -> None:
        self._closed = True

    def _open_node(self) -> Node:
        if self._closed:
            raise _error(errno.EBADF, self._path)
        return self._node


class MemoryLock:
    """A `FileLock` of a `MemoryFiles`."""

    __slots__ = ("_held", "_locks", "_path")

    def __init__(self, locks: set[str], path: str) -> None:
        self._locks = locks
        self._path = path
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._locks.discard(self._path)


class MemoryFiles:
    """A `Files` in memory. `capacity_bytes` and `read_only` may be changed at any time.

    `calls` counts the calls of each operation that `fail` knows, so that a test can run a scenario
    once, and then once more for each call that could fail. `warm_calls` counts `warm`.
    """

    def __init__(self, *, capacity_bytes: int | None = None, read_only: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.read_only = read_only
        self.changing = RLock()  # held by who changes something, or crashes
        self.calls: Counter[str] = Counter()
        self.warm_calls = 0
        self._names: dict[str, Node] = {}
        self._durable_names: dict[str, Node] = {}
        self._pending_names: list[NameChange] = []
        # Each directory and the names in it. "" is where relative paths start.
        self._children: dict[str, set[str]] = {"/": set(), "": set()}
        # One numbering for all files and names: it is the order in which things were done.
        self._sequence = itertools.count()
        self._faults: list[_Fault] = []
        self._tears: list[_Tear] = []
        self._locks: set[str] = set()

    # ------------------------------------------------------------------------------ as `Files`

    @one_at_a_time
    def create(self, path: str, size: int) -> MemoryFile:
        full, directory, _ = split_path(path)
        self._refuse_read_only(path)
        self._call("create", path)
        if full in self._names or full in self._children:
            raise _error(errno.EEXIST, path)
        self._require_directory(directory, path)
        if size < 0:
            raise _error(errno.EINVAL, path)
        self._require_space(1, path)  # for the name; the file itself needs nothing yet
        node = Node(Image(zeros(0), set()))
        self._change_name(None, full, node)
        if size:
            node.resize(next(self._sequence), size)
        return MemoryFile(self, node, path, writable=True)

    def open(self, path: str, *, writable: bool = True) -> MemoryFile:
        self._call("open", path)
        node = self._node(path)
        if writable:
            self._refuse_read_only(path)
        return MemoryFile(self, node, path, writable)

    def exists(self, path: str) -> bool:
        full = split_path(path)[0]
        return full in self._names or full in self._children

    def size(self, path: str) -> int:
        return len(self._node(path).image.memory)

    def names(self, directory: str) -> list[str]:
        full = split_path(directory)[0]
        if full in self._names:
            raise _error(errno.ENOTDIR, directory)
        return sorted(self._children.get(full, ()))

    def is_directory(self, path: str) -> bool:
        return split_path(path)[0] in self._children

    @one_at_a_time
    def make_directory(self, path: str) -> None:
        full, parent, name = split_path(path)
        if full in self._children:
            return
        if full in self._names:
            raise _error(errno.EEXIST, path)
        self._refuse_read_only(path)
        if parent in self._names:
            raise _error(errno.ENOTDIR, path)
        self.make_directory(parent)
        self._children[parent].add(name)
        self._children[full] = set()

    def read(self, path: str, limit_bytes: int) -> bytes:
        file = self.open(path, writable=False)
        if file.size > limit_bytes:
            raise OSError(errno.EFBIG, f"longer than {limit_bytes} bytes", path)
        return file.pread(file.size, 0)

    @one_at_a_time
    def replace(self, path: str, data: bytes) -> None:
        self._refuse_read_only(path)
        self._call("replace", path)
        self._put(path, data)

    @one_at_a_time
    def rename(self, old: str, new: str) -> None:
        self._refuse_read_only(old)
        self._call("rename", old)
        node = self._node(old)
        full, directory, _ = split_path(new)
        self._require_directory(directory, new)
        if full in self._children:
            raise _error(errno.EISDIR, new)
        if full != split_path(old)[0]:
            self._change_name(split_path(old)[0], full, node)

    @one_at_a_time
    def remove(self, path: str) -> None:
        self._refuse_read_only(path)
        self._call("remove", path)
        self._change_name(split_path(path)[0], None, self._node(path))

    @one_at_a_time
    def sync_directory(self, path: str) -> None:
        full = split_path(path)[0]
        self._require_directory(full, path)
        self._sync("sync_directory", path, [], {full})

    @one_at_a_time
    def sync_many(self, paths: Sequence[str]) -> None:
        nodes = [self._node(path) for path in paths]
        directories = {split_path(path)[1] for path in paths}
        self._sync("sync_many", paths[0] if paths else "", nodes, directories)

    def apart(self, work: Callable[[], None]) -> None:
        work()

    def usage(self, path: str) -> DiskUsage:
        if not self.exists(path):
            raise _error(errno.ENOENT, path)
        total_bytes = _UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes
        used_bytes = self._used_blocks() * BLOCK_BYTES
        return DiskUsage(total_bytes, max(0, total_bytes - used_bytes))

    @one_at_a_time
    def lock(self, path: str) -> MemoryLock:
        full = split_path(path)[0]
        self._refuse_read_only(path)
        if full in self._locks:
            raise BlockingIOError(errno.EAGAIN, "locked by this process", path)
        if full not in self._names:
            self._put(path, LOCK_TEXT)
        self._locks.add(full)
        return MemoryLock(self._locks, full)

    # --------------------------------------------------------------------------------- crashes

    @one_at_a_time
    def crash(self, keep: KeepPolicy) -> "MemoryFiles":
        """Return the disk as it is found afterwards. This one stays as it is, to crash it again.

        Locks are released, faults and cold ranges forgotten. After a power cut whatever is found is
        durable; after KeepAll, a kill -9, it is as durable as it was.
        """
        disk = MemoryFiles(capacity_bytes=self.capacity_bytes, read_only=self.read_only)
        if isinstance(keep, KeepAll):
            self._copy_to(disk)
        else:
            self._cut_power_to(disk, keep)
        disk._children = {directory: set() for directory in self._children}
        for full in itertools.chain(self._children, disk._names):
            _, directory, name = split_path(full)
            if name:
                disk._children[directory].add(name)
        return disk

    def unsynced_bytes(self) -> int:
        """Count the pending bytes of the whole disk: the largest prefix that makes a difference."""
        return sum(change.length_bytes for change in self._changes())

    def _copy_to(self, disk: "MemoryFiles") -> None:
        copies = {node: node.killed() for node in self._nodes()}
        disk._names = {path: copies[node] for path, node in self._names.items()}
        disk._durable_names = {path: copies[node] for path, node in self._durable_names.items()}
        disk._pending_names = [
            replace(change, node=copies[change.node]) for change in self._pending_names
        ]
        disk._sequence = itertools.count(next(self._sequence))

    def _cut_power_to(self, disk: "MemoryFiles", keep: KeepPolicy) -> None:
        changes = self._changes()
        kept = {
            change.sequence: ranges
            for change, ranges in zip(changes, keep.decide(changes), strict=True)
            if ranges
        }
        names = dict(self._durable_names)
        for name_change in self._pending_names:
            if name_change.sequence in kept:
                name_change.apply(names)
        found: dict[Node, Node] = {}
        for path, node in names.items():
            if node not in found:
                image = node.durable()
                for change in node.pending:
                    if change.sequence in kept:
                        change.apply(image, kept[change.sequence])
                found[node] = Node(image)
            disk._names[path] = found[node]
        disk._durable_names = dict(disk._names)

    def _nodes(self) -> Iterable[Node]:
        """Every file that has a name, or may have one after a crash, once and in a fixed order."""
        pending = (change.node for change in self._pending_names)
        return dict.fromkeys(
            itertools.chain(self._durable_names.values(), self._names.values(), pending)
        )

    def _changes(self) -> list[Change]:
        changes: list[Change] = list(self._pending_names)
        for node in self._nodes():
            changes.extend(node.pending)
        changes.sort(key=attrgetter("sequence"))
        return changes

    # ---------------------------------------------------------------------------------- faults

    def fail(
        self, operation: str, *, nth: int = 1, error: int = errno.EIO, sticky: bool = False,
        within: str = "",
    ) -> None:  # fmt: skip
        """Let the nth next call of an operation raise OSError(error); all after it if sticky.

        The call does nothing else, but that a failed sync loses what it was to make durable.
        `within` is a part of the paths that count: threads of a running store write when they like.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"no such operation: {operation}")
        if nth < 1:
            raise ValueError(f"calls are counted from 1, not {nth}")
        self._faults.append(_Fault(operation, nth, error, sticky, within))

    def tear(self, nth: int, keep_bytes: int) -> None:
        """Let the nth next pwritev write only its first bytes and raise OSError(EIO)."""
        if nth < 1 or keep_bytes < 0:
            raise ValueError(f"cannot tear call {nth} after {keep_bytes} bytes")
        self._tears.append(_Tear(nth, keep_bytes))

    def clear_faults(self) -> None:
        """Forget every `fail` and `tear`; what they have lost stays lost."""
        self._faults.clear()
        self._tears.clear()

    def flip(self, path: str, bit_index: int) -> None:
        """Flip one bit of a file, now and on the disk; bit 0 is the lowest of the first byte."""
        self._node(path).flip(bit_index)

    def cold(self, path: str, start: int, stop: int) -> None:
        """Make a range not resident until it is warmed; reading it works as ever."""
        if start < stop:
            self._node(path).cold.append((start, stop))

    def _call(self, operation: str, path: str) -> None:
        """Count a call, and raise the fault that is due."""
        self.calls[operation] += 1
        if not self._faults:
            return
        met = [one for one in self._faults if one.operation == operation and one.within in path]
        for fault in met:
            fault.left_count -= 1
        if due := [fault for fault in met if fault.left_count <= 0]:
            self._faults = [fault for fault in self._faults if fault.sticky or fault not in due]
            raise _error(due[0].error, path)

    def _torn_bytes(self) -> int | None:
        """Return how much the pwritev under way may write, or None for all of it."""
        if not self._tears:
            return None
        for tear in self._tears:
            tear.left_count -= 1
        due = [tear.keep_bytes for tear in self._tears if tear.left_count == 0]
        self._tears = [tear for tear in self._tears if tear.left_count > 0]
        return min(due) if due else None

    # ----------------------------------------------------------------------------------- space

    def _used_blocks(self) -> int:
        return sum(len(node.image.blocks) for node in dict.fromkeys(self._names.values()))

    def _free_blocks(self) -> int:
        assert self.capacity_bytes is not None
        return max(0, self.capacity_bytes // BLOCK_BYTES - self._used_blocks())

    def _require_space(self, block_count: int, path: str) -> None:
        if self.capacity_bytes is not None and self._free_blocks() < block_count:
            raise _error(errno.ENOSPC, path)

    def _fitting_bytes(self, node: Node, offset: int, length_bytes: int) -> int:
        """Return how many of these bytes can be written before the disk is full."""
        blocks = blocks_of(offset, offset + length_bytes)
        new_blocks = [block for block in blocks if block not in node.image.blocks]
        free_count = self._free_blocks() if new_blocks else 0
        if len(new_blocks) <= free_count:
            return length_bytes
        return max(0, new_blocks[free_count] * BLOCK_BYTES - offset)

    # ----------------------------------------------------------------------------------- names

    def _node(self, path: str) -> Node:
        full = split_path(path)[0]
        node = self._names.get(full)
        if node is None:
            raise _error(errno.EISDIR if full in self._children else errno.ENOENT, path)
        return node

    def _require_directory(self, full: str, path: str) -> None:
        if full not in self._children:
            raise _error(errno.ENOTDIR if full in self._names else errno.ENOENT, path)

    def _refuse_read_only(self, path: str) -> None:
        if self.read_only:
            raise _error(errno.EROFS, path)

    def _put(self, path: str, data: bytes) -> None:
        """Make a file of these bytes, durably, in place of the one that has the name."""
        full, directory, _ = split_path(path)
        self._require_directory(directory, path)
        if full in self._children:
            raise _error(errno.EISDIR, path)
        # Old and new file are both there for a moment.
        self._require_space(max(1, len(blocks_of(0, len(data)))), path)
        image = Image(zeros(0), set())
        image.write(0, data)
        self._change_name(None, full, Node(image))
        self._settle_names({directory})

    def _change_name(self, removed: str | None, added: str | None, node: Node) -> None:
        directories = set()
        if removed is not None:
            _, directory, name = split_path(removed)
            directories.add(directory)
            del self._names[removed]
            self._children[directory].discard(name)
        if added is not None:
            _, directory, name = split_path(added)
            directories.add(directory)
            self._names[added] = node
            self._children[directory].add(name)
        both = frozenset(directories)
        self._pending_names.append(
            NameChange(next(self._sequence), removed, added, node, both, both)
        )

    def _sync(
        self, operation: str, path: str, nodes: Sequence[Node], directories: set[str]
    ) -> None:
        pending = [change for change in self._pending_names if change.directories & directories]
        try:
            if pending or any(node.pending for node in nodes):
                self._refuse_read_only(path)
            self._call(operation, path)
        except OSError:
            for node in nodes:
                node.lose()
            self._pending_names = [c for c in self._pending_names if c not in pending]
            raise
        for node in nodes:
            node.settle()
        self._settle_names(directories)

    def _settle_names(self, directories: set[str]) -> None:
        """Make the names in these directories durable."""
        # From the last to the first: whatever is durable needs the earlier changes of its paths,
        # or one of those that still waits would come later and undo it.
        settled_paths: set[str] = set()
        for change in reversed(self._pending_names):
            change.waits -= directories
            if not change.waits or settled_paths & change.paths:
                change.waits = frozenset()
                settled_paths |= change.paths
        for change in self._pending_names:
            if not change.waits:
                change.apply(self._durable_names)
        self._pending_names = [change for change in self._pending_names if change.waits]


def _error(code: int, path: str) -> OSError:
    """Return the subclass of OSError that Python raises for this code."""
    return OSError(code, os.strerror(code), path)
