"""This module is the crash model of the simulated disk: what a power cut leaves of one file.

Every change to the disk is in one of three states:

    pwritev, resize, create, rename, remove          sync, sync_directory, sync_many
        |                                                 |
        v                                                 v
      pending  --- a crash keeps it, drops it or ---->  durable: a crash keeps it
        |          tears it, as the policy says
        +--------- a sync that fails ---------------->  lost: read back now, gone after a power cut,
                                                        and no later sync brings it back

How a file is kept: one buffer with what readers see now, and for each pending change what it
overwrote. The durable bytes come out by undoing the pending changes from the last to the first. So
a sync costs nothing, and a crash one copy per file. Only a new length replaces the buffer, hence
views are live. Large files are sparse.

Everything is deterministic: the same changes and the same policy give the same bytes. This module
knows paths by their names only; `memory_files` makes a disk of it.
"""

import mmap
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from random import Random
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

BLOCK_BYTES: Final = 4096  # what a file system gives out
SECTOR_BYTES: Final = 512  # what a drive writes as a whole

# A bytearray of this size and more would be filled with zeros for nothing: such files are mapped
# memory, which the kernel hands out page by page, and only their written blocks are copied.
_SPARSE_BYTES: Final = 1 << 20

# Which bytes of a change a crash keeps, as (start, stop) inside it: () is nothing. A change without
# bytes (a length, a name) is kept by any range.
Ranges = Sequence[tuple[int, int]]


def one_at_a_time(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Let a method hold its object's `changing` while it runs."""

    @wraps(method)
    def held(self: Any, /, *words: Arguments.args, **names: Arguments.kwargs) -> Result:
        with self.changing:
            return method(self, *words, **names)

    return held


@lru_cache(maxsize=4096)
def split_path(path: str) -> tuple[str, str, str]:
    """Return a path in its one spelling, its directory, and its name in there."""
    full = posixpath.normpath(path)
    if full.startswith("//"):
        full = full[1:]  # POSIX lets // be something else; nobody does
    if full == ".":
        full = ""
    directory, name = posixpath.split(full)
    return full, directory, name


# ----------------------------------------------------------------------------- bytes and changes


class Image:
    """The bytes of one file at one time, and which of its blocks were ever written."""

    __slots__ = ("blocks", "memory", "view")

    def __init__(self, memory: memoryview, blocks: set[int]) -> None:
        self.memory = memory
        self.blocks = blocks
        self.view: memoryview | None = None

    def copy(self) -> "Image":
        memory = self.memory
        if len(memory) < _SPARSE_BYTES:
            return Image(memoryview(bytearray(memory)), self.blocks.copy())
        target = zeros(len(memory))
        _copy_blocks(target, memory, self.blocks)
        return Image(target, self.blocks.copy())

    def frozen(self) -> "Image":
        """Return what is here now without a copy; right only if `resize` follows at once."""
        return Image(self.memory, self.blocks.copy())

    def write(self, offset: int, data: bytes) -> None:
        stop = offset + len(data)
        if stop > len(self.memory):
            self.resize(stop)
        self.memory[offset:stop] = data
        self.blocks.update(blocks_of(offset, stop))

    def resize(self, size: int) -> None:
        memory = zeros(size)
        self.blocks = {block for block in self.blocks if block * BLOCK_BYTES < size}
        _copy_blocks(memory, self.memory, self.blocks)
        self.memory = memory
        self.view = None


def zeros(size: int) -> memoryview:
    if size < _SPARSE_BYTES:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size))


def _copy_blocks(target: memoryview, source: memoryview, blocks: Iterable[int]) -> None:
    limit = min(len(target), len(source))
    for block in blocks:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, limit)
        if start < stop:
            target[start:stop] = source[start:stop]


def blocks_of(start: int, stop: int) -> range:
    return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))


@dataclass(slots=True, eq=False)
class Write:
    """A pending pwritev. `before` is what it overwrote, or the whole file if it made it longer."""

    sequence: int
    offset: int
    data: bytes
    before: bytes | Image

    @property
    def length_bytes(self) -> int:
        return len(self.data)

    def apply(self, image: Image, kept: Ranges) -> None:
        for start, stop in kept:
            image.write(self.offset + start, self.data[start:stop])


@dataclass(slots=True, eq=False)
class Resize:
    """A pending new length."""

    sequence: int
    size: int
    before: Image

    @property
    def length_bytes(self) -> int:
        return 0

    def apply(self, image: Image, _kept: Ranges) -> None:
        image.resize(self.size)


@dataclass(slots=True, eq=False)
class NameChange:
    """A pending create (`added`), remove (`removed`) or rename (both)."""

    sequence: int
    removed: str | None
    added: str | None
    node: "Node"
    directories: frozenset[str]
    waits: frozenset[str]  # those of the directories that were not synced since

    @property
    def length_bytes(self) -> int:
        return 0

    @property
    def paths(self) -> set[str]:
        return {path for path in (self.removed, self.added) if path is not None}

    def apply(self, names: "dict[str, Node]") -> None:
        if self.removed is not None:
            names.pop(self.removed, None)
        if self.added is not None:
            names[self.added] = self.node


Change = Write | Resize | NameChange


class Node:
    """One file, whatever its names: what is read now, and what of it is pending."""

    __slots__ = ("cold", "image", "pending", "shadow")

    def __init__(self, image: Image) -> None:
        self.image = image
        self.pending: list[Write | Resize] = []
        # The durable bytes, kept apart only when undoing would not find them any more: after a
        # failed sync, or a flipped bit below a pending write.
        self.shadow: Image | None = None
        self.cold: list[tuple[int, int]] = []

    def write(self, sequence: int, offset: int, data: bytes) -> None:
        image = self.image
        stop = offset + len(data)
        longer = stop > len(image.memory)
        before = image.frozen() if longer else bytes(image.memory[offset:stop])
        self.pending.append(Write(sequence, offset, data, before))
        image.write(offset, data)

    def resize(self, sequence: int, size: int) -> None:
        self.pending.append(Resize(sequence, size, self.image.frozen()))
        self.image.resize(size)

    def warm(self, start: int, stop: int) -> None:
        """Bring a range into memory."""
        left = [(first, min(last, start)) for first, last in self.cold]
        right = [(max(first, stop), last) for first, last in self.cold]
        self.cold = [(first, last) for first, last in left + right if first < last]

    def durable(self) -> Image:
        """Return a copy of what a power cut leaves when it keeps nothing pending."""
        if self.shadow is not None:
            return self.shadow.copy()
        # Undo from the last to the first. Most steps write into the copy; one that changed the
        # length has kept the whole file, and is not copied before something is written into it.
        image, is_copy = self.image, False
        for change in reversed(self.pending):
            before = change.before
            if isinstance(change, Write) and isinstance(before, bytes):
                if not is_copy:
                    image, is_copy = image.copy(), True
                image.memory[change.offset : change.offset + len(before)] = before
            else:
                assert isinstance(before, Image)
                image, is_copy = before, False
        return image if is_copy else image.copy()

    def settle(self) -> None:
        """Make all pending changes durable. A write that comes meanwhile stays pending."""
        count = len(self.pending)
        if self.shadow is not None:
            for change in self.pending[:count]:
                change.apply(self.shadow, ((0, change.length_bytes),))
        del self.pending[:count]

    def lose(self) -> None:
        """Forget how to make the pending changes durable; readers still see them."""
        if self.pending:
            self.shadow = self.durable()
            self.pending.clear()

    def flip(self, bit_index: int) -> None:
        """Flip one bit, both as it is read now and as it is on the disk."""
        byte_index, bit = divmod(bit_index, 8)
        if not 0 <= byte_index < len(self.image.memory):
            raise ValueError(f"bit {bit_index} of a file of {len(self.image.memory)} bytes")
        if self.pending and self.shadow is None:
            self.shadow = self.durable()
        for image in (self.image, self.shadow):
            if image is not None and byte_index < len(image.memory):
                image.memory[byte_index] ^= 1 << bit
                image.blocks.update(blocks_of(byte_index, byte_index + 1))

    def killed(self) -> "Node":
        """Return a copy with the same pending changes."""
        node = Node(self.image.copy())
        node.pending = self.pending.copy()
        node.shadow = None if self.shadow is None else self.shadow.copy()
        return node


# ------------------------------------------------------------------------------- crash policies


class KeepPolicy(ABC):
    """Decides what a crash keeps of the changes that are pending on the whole disk."""

    @abstractmethod
    def decide(self, changes: Sequence[Change]) -> list[Ranges]:
        """Return for each change, all of them in the order they were made, what of it is kept."""


class KeepNothing(KeepPolicy):
    """A power cut that leaves only what was synced."""

    def decide(self, changes: Sequence[Change]) -> list[Ranges]:
        return [()] * len(changes)


class KeepAll(KeepPolicy):
    """kill -9: the process is gone, the kernel is not. Everything written is read back.

    What was pending or lost still is: a power cut after it may take what the new process has read.
    For a power cut that happened to keep everything use KeepPrefix(disk.unsynced_bytes()).
    """

    def decide(self, changes: Sequence[Change]) -> list[Ranges]:
        return [((0, change.length_bytes),) for change in changes]


class KeepPrefix(KeepPolicy):
    """A power cut of a disk that writes in order: the first `n_bytes` pending bytes are kept.

    The write in which they end is torn there. Lengths and names cost nothing: those before the cut
    are kept, also directly before it.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes < 0:
            raise ValueError(f"a prefix of {n_bytes} bytes")
        self._n_bytes = n_bytes

    def decide(self, changes: Sequence[Change]) -> list[Ranges]:
        left_bytes = self._n_bytes
        kept: list[Ranges] = []
        for change in changes:
            if change.length_bytes > left_bytes:
                kept.append(((0, left_bytes),) if left_bytes else ())
                break
            left_bytes -= change.length_bytes
            kept.append(((0, change.length_bytes),))
        return kept + [()] * (len(changes) - len(kept))


class KeepRandom(KeepPolicy):
    """A power cut that keeps, drops or tears each change by itself, in no order.

    A torn write is cut at any byte, or keeps any set of its sectors. Same state of the random
    numbers, same crash.
    """

    def __init__(self, random: Random) -> None:
        self._random = random

    def decide(self, changes: Sequence[Change]) -> list[Ranges]:
        return [self._decide_one(change) for change in changes]

    def _decide_one(self, change: Change) -> Ranges:
        choice = self._random.getrandbits(2)
        if choice == 0:
            return ()
        if choice == 1:
            return ((0, change.length_bytes),)
        if not isinstance(change, Write):
            return ((0, 0),) if choice == 2 else ()
        if choice == 2:
            kept_bytes = self._random.randrange(change.length_bytes + 1)
            return ((0, kept_bytes),) if kept_bytes else ()
        return self._some_sectors(change)

    def _some_sectors(self, change: Write) -> Ranges:
        """Sectors are counted from the start of the file, so the outer ones may be partial."""
        stop = change.offset + change.length_bytes
        first = change.offset // SECTOR_BYTES
        count = -(-stop // SECTOR_BYTES) - first
        mask = self._random.getrandbits(count)
        return [
            (
                max((first + index) * SECTOR_BYTES, change.offset) - change.offset,
                min((first + index + 1) * SECTOR_BYTES, stop) - change.offset,
            )
            for index in range(count)
            if mask >> index & 1
        ]
