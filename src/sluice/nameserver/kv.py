"""This module keeps the values that administrators set at a nameserver: namespace, key, value.

Ordered topics live here, under ORDER_TOPIC_CONFIG. The file has the form and the name that
RocketMQ's nameserver gives it, so one can be taken over from there:

    kvConfig.json    {"configTable":{"namespace":{"key":"value"}}}

It is replaced as a whole, so a crash leaves the old or the new one. A lock file beside it keeps a
second nameserver out. Without a directory nothing is kept. Sizes are bounded. This module reads
and writes when it is told to, and blocks while it does.
"""

from __future__ import annotations

from typing import Final

import orjson

from sluice.errors import Busy, ConfigError, RequestInvalid
from sluice.protocol.json_members import mapping, read_object, text_map
from sluice.storage.files import FileLock, Files

FILE_NAME: Final = "kvConfig.json"
ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"
ITEMS_MAX: Final = 100_000
BYTES_MAX: Final = 16 * 1024 * 1024  # of all names, keys and values together
_FILE_BYTES_MAX: Final = 8 * BYTES_MAX  # JSON may take six bytes for one character


class KvTable:
    """The values in memory."""

    def __init__(self, *, items_max: int = ITEMS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._table: dict[str, dict[str, str]] = {}
        self._item_count = 0
        self._kept_bytes = 0

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value; raises Busy where the table is full."""
        old = self.get(namespace, key)
        added_bytes = len(value) + len(key) if old is None else len(value) - len(old)
        added_count = int(old is None)
        if namespace not in self._table:
            # A namespace stays when its last value is deleted, as in RocketMQ, so it counts.
            added_bytes += len(namespace)
            added_count += 1
        if added_count and self._item_count + added_count > self._items_max:
            raise Busy(f"{self._item_count} values are set, {self._items_max} may be")
        if added_bytes > 0 and self._kept_bytes + added_bytes > self._bytes_max:
            raise Busy(f"values take {self._kept_bytes} bytes, {self._bytes_max} are allowed")
        self._table.setdefault(namespace, {})[key] = value
        self._item_count += added_count
        self._kept_bytes += added_bytes

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: str) -> None:
        """Delete a value; nothing happens where there is none. Its namespace stays, if empty."""
        old = self._table.get(namespace, {}).pop(key, None)
        if old is not None:
            self._item_count -= 1
            self._kept_bytes -= len(key) + len(old)

    def namespace(self, name: str) -> dict[str, str] | None:
        """All values of a namespace; None where nothing was ever set in it."""
        table = self._table.get(name)
        return None if table is None else dict(table)

    def encode(self) -> bytes:
        """What the file has to hold."""
        return orjson.dumps({"configTable": self._table})

    def decode(self, data: bytes) -> None:
        """Take over what a file holds; raises RequestInvalid or Busy."""
        table = mapping(read_object(data, _FILE_BYTES_MAX), "configTable")
        for namespace in table:
            for key, value in text_map(table, namespace).items():
                self.put(namespace, key, value)


def load(files: Files, directory: str) -> tuple[FileLock, KvTable]:
    """The directory's lock, and the values in it; none where there is no file.

    Raises ConfigError.
    """
    try:
        files.make_directory(directory)
        lock = files.lock(f"{directory}/lock")
    except BlockingIOError as error:
        raise ConfigError(f"directory: {directory}: another nameserver uses it") from error
    except OSError as error:
        raise ConfigError(f"directory: {directory}: {error.strerror}; choose another") from error
    path = f"{directory}/{FILE_NAME}"
    table = KvTable()
    try:
        table.decode(files.read(path, _FILE_BYTES_MAX))
    except FileNotFoundError:
        pass
    except OSError as error:
        lock.release()
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (RequestInvalid, Busy) as error:
        lock.release()
        raise ConfigError(f"{path}: {error}; move it away or repair it") from error
    return lock, table


def save(files: Files, directory: str, data: bytes) -> None:
    """Replace the file; what was there before is gone only when the new one is durable."""
    files.replace(f"{directory}/{FILE_NAME}", data)
