"""This module keeps the offsets of a broadcasting consumer in a file, where Java's client does.

Each member of such a group reads everything, so brokers keep nothing for it. The file is replaced
as a whole: after a crash it is the old one or the new one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Final

import orjson

from sluice.errors import ConfigError, SluiceError
from sluice.protocol.json_members import (
    MessageQueue,
    as_number,
    queue_keys,
    read_object,
    read_queue_keys,
)

_numbers: Final = count(1)


class OffsetFile:
    """The offsets of one group on this machine."""

    def __init__(self, directory: str, client_id: str, group: str) -> None:
        root = Path(directory) if directory else Path.home() / ".rocketmq_offsets"
        self.path = root / client_id / group / "offsets.json"

    def read(self) -> dict[MessageQueue, int]:
        """What was kept; nothing where there is no file yet."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error
        try:
            table = read_queue_keys(read_object(data), "offsetTable")
            return {queue: as_number(value, "an offset") for queue, value in table.items()}
        except SluiceError as error:
            raise ConfigError(
                f"{self.path}: {error}; delete it to begin as a new consumer does"
            ) from error

    def write(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Keep these; raises ConfigError where the disk does not take them."""
        data = orjson.dumps({"offsetTable": queue_keys(sorted(offsets.items()))})
        # Several processes of a machine may have the file: each writes its own beside it.
        beside = self.path.with_name(f"offsets.{os.getpid()}.{next(_numbers)}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror}") from error
