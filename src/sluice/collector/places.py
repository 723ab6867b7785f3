"""This module notes how far each file was sent, in a directory that one collector holds.

    DIR/lock         held while a collector runs; its number is in it, for people
    DIR/places.json  all places; written anew beside it, fsynced, and renamed over it

A file is known by device and inode, and by marks: digests of its first bytes and of the bytes
before the place. A file of the same number with other bytes is another file. The marks hold nothing
of what the file says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from sluice.clock import wall_ms
from sluice.errors import ConfigError, StoreInUse

MARK_BYTES: Final = 1024
_VERSION: Final = 1
_FILE_BYTES_MAX: Final = 256 * 1024 * 1024
_KEPT_MS: Final = 7 * 86_400_000  # places of files that are not there any more

Identity = tuple[int, int]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(slots=True)
class Place:
    """How far one file was sent, and how to know it again.

    `path` is where it was seen first: a log keeps its name when it is rotated away. `file` is an
    id of its content, so that whoever reads the messages can tell a repeated one.
    """

    path: str
    file: str
    device: int
    inode: int
    offset: int = 0
    part: int = 0
    head_bytes: int = 0
    head: str = ""
    tail_bytes: int = 0
    tail: str = ""
    seen_ms: int = 0

    @property
    def identity(self) -> Identity:
        return self.device, self.inode


def new_place(path: str, identity: Identity) -> Place:
    """The beginning of a file that was never seen."""
    return Place(path, secrets.token_hex(8), *identity, seen_ms=wall_ms())


class PlaceBook:
    """The places of one state directory, which this process holds until `release`."""

    def __init__(self, directory: str, lock: int) -> None:
        self.directory = directory
        self._lock = lock
        self._file = os.path.join(directory, "places.json")
        self._places: dict[Identity, Place] = {}
        self.patterns: set[str] = set()  # that files were looked for with

    @classmethod
    def open(cls, directory: str) -> Self:
        """Take the directory; raises where another has it, or where it cannot be used."""
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            lock = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"state directory {directory}: {error.strerror}; name another with --state"
            ) from error
        try:
            _hold(lock, directory)
            book = cls(directory, lock)
            book._load()
            book.write(book.image())  # so that a directory that cannot be written shows now
        except BaseException:
            os.close(lock)
            raise
        return book

    def release(self) -> None:
        os.close(self._lock)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places.values())

    def find(self, identity: Identity) -> Place | None:
        return self._places.get(identity)

    def put(self, place: Place) -> None:
        """Note a place instead of the one that the same file had."""
        self._places[place.identity] = place

    def forget(self, place: Place) -> None:
        """The file is gone for good; its number may be another's tomorrow."""
        self._places.pop(place.identity, None)

    def forget_old(self, there: Iterable[Identity]) -> None:
        """Drop places of files that were not seen for a week."""
        kept, oldest_ms = set(there), wall_ms() - _KEPT_MS
        for place in list(self):
            if place.identity not in kept and place.seen_ms < oldest_ms:
                self.forget(place)

    def image(self) -> bytes:
        """All of it, as it is written."""
        rows = [asdict(place) for place in self]
        table = {"version": _VERSION, "patterns": sorted(self.patterns), "places": rows}
        return json.dumps(table, separators=(",", ":")).encode()

    def write(self, image: bytes) -> None:
        """Write an image; when this returns it is durable, and when it raises the old one is."""
        new = self._file + ".new"
        try:
            with open(new, "wb", opener=_private) as file:
                file.write(image)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._file)
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(
                f"state directory {self.directory}: places cannot be written: {error.strerror}"
            ) from error

    def _load(self) -> None:
        try:
            with open(self._file, "rb") as file:
                data = file.read(_FILE_BYTES_MAX)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self._file}: {error.strerror}") from error
        try:
            table = json.loads(data)
            if table["version"] != _VERSION:
                raise ValueError(f"version {table['version']} is not known")
            self.patterns = {_text(pattern) for pattern in table["patterns"]}
            for row in table["places"]:
                self.put(_place(row))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._file} is damaged ({error}); without it every file is read from its "
                "start again: remove it if that is what you want"
            ) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _hold(lock: int, directory: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with contextlib.suppress(OSError):
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            raise StoreInUse(
                f"another collector (process {holder}) uses the state directory {directory}; "
                "give this one its own with --state"
            ) from error
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _place(row: dict[str, Any]) -> Place:
    """A place, each field of the type that it has to have."""
    place = Place(**row)
    for field in fields(Place):
        value = getattr(place, field.name)
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (is_number if field.type == "int" else isinstance(value, str)):
            raise ValueError(f"{field.name} is {value!r}")
    return place
