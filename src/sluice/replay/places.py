"""This module is where a recording lies: a directory, or a bucket that pyarrow can reach (s3://).

A file is written under a hidden name, made durable, and renamed: it is there whole or not at all.
Hidden files that a killed process left behind mean nothing and are deleted by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from sluice.errors import ConfigError, DiskFull, StoreError, StoreInUse
from sluice.replay.arrow import filesystems, pa

LOCK: Final = ".lock"
_HIDDEN: Final = "."
_SCHEMES: Final = ("s3", "file")
_ARROW_FAULTS: Final = (OSError, pa.ArrowException)


class Place:
    """A directory of some file system."""

    def __init__(self, text: str, files: Any, base: str) -> None:
        """`text` is its name for people."""
        self.text = text
        self._files = files
        self._base = base.rstrip("/")

    @property
    def is_local(self) -> bool:
        return isinstance(self._files, filesystems.LocalFileSystem)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def make(self) -> None:
        """Make the directory where it is not there."""
        with self._faults("cannot be made"):
            self._files.create_dir(self._base, recursive=True)

    def names(self) -> list[str]:
        """Everything in it, hidden files too; none where it does not exist."""
        with self._faults("cannot be listed"):
            chosen = filesystems.FileSelector(self._base, allow_not_found=True)
            found = self._files.get_file_info(chosen)
        return sorted(each.base_name for each in found)

    def size(self, name: str) -> int:
        """Bytes of a file; -1 where it is not there."""
        with self._faults(f"{name} cannot be found"):
            info = self._files.get_file_info(self._path(name))
        is_file = info.type == filesystems.FileType.File
        return int(info.size) if is_file else -1

    def open(self, name: str) -> Any:
        """A file to read from, as pyarrow has it."""
        with self._faults(f"{name} cannot be opened"):
            return self._files.open_input_file(self._path(name))

    def read(self, name: str, bytes_max: int) -> bytes:
        with self._faults(f"{name} cannot be read"), self.open(name) as file:
            return bytes(file.read(bytes_max))

    def delete(self, name: str) -> None:
        with self._faults(f"{name} cannot be deleted"):
            self._files.delete_file(self._path(name))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A stream that becomes a file of this name when all went well, and nothing else."""
        hidden = f"{_HIDDEN}{name}.new"
        with self._faults(f"{name} cannot be written"):
            try:
                with self._files.open_output_stream(self._path(hidden)) as stream:
                    yield stream
                self._make_durable(hidden)
                self._files.move(self._path(hidden), self._path(name))
                self._make_durable("")
            except BaseException:
                with contextlib.suppress(*_ARROW_FAULTS):
                    self._files.delete_file(self._path(hidden))
                raise

    def write(self, name: str, data: bytes) -> None:
        with self.writing(name) as stream:
            stream.write(data)

    def _make_durable(self, name: str) -> None:
        """fsync where there is such a thing; a bucket has what it has acknowledged."""
        if self.is_local:
            handle = os.open(self._path(name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """One process writes at a time; in a bucket nobody watches over that."""
        if not self.is_local:
            yield
            return
        with self._faults("cannot be locked"):
            handle = os.open(self._path(LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreInUse(f"{self.text}: another `sluice record` writes there") from error
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        """What pyarrow and the system raise, as one line."""
        try:
            yield
        except _ARROW_FAULTS as error:
            number = getattr(error, "errno", None)
            if number in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{self.text}: {what}: no room is left") from error
            reason = os.strerror(number) if number else " ".join(str(error).split())
            raise StoreError(f"{self.text}: {what}: {reason}") from error


def open_place(flag: str, text: str) -> Place:
    """A directory, or what a URI names; secrets have no place in one."""
    if "://" not in text:
        if not text:
            raise ConfigError(f"{flag}: a directory or s3://bucket/path")
        return Place(text, filesystems.LocalFileSystem(), os.path.abspath(text))
    parts = urlsplit(text)
    if parts.username or parts.password:
        raise ConfigError(
            f"{flag}: no keys in an address: other users of this machine would see them; set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile"
        )
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"{flag} {text}: it is a directory or s3://bucket/path")
    try:
        files, base = filesystems.FileSystem.from_uri(text)
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{flag} {parts.scheme}://: {reason}") from error
    return Place(text, files, base)
