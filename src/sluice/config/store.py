"""This module declares the settings of the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from sluice.config.kinds import GIB, KIB, MIB, parse_delay_levels, parse_hours_of_day
from sluice.config.settings import (
    INT32_MAX,
    check,
    choice,
    count,
    flag,
    hours,
    millis,
    multiple,
    percent,
    ratio,
    size,
    text,
    words,
)
from sluice.errors import ConfigError

Flush = Literal["sync", "async"]

_DAY_MS: Final = 86_400_000
_INDEX_HEADER_BYTES: Final = 40
_INDEX_SLOT_BYTES: Final = 4
_INDEX_ENTRY_BYTES: Final = 20
_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def _directory(path: str) -> None:
    if not path or path.isspace():
        raise ValueError("is empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The settings of one store, checked when the object is made."""

    # A property is written with a 16-bit signed size in front: a limit of the format, not a choice.
    properties_bytes_max: ClassVar[int] = 32767

    directory: str = text(
        "./data",
        "Where the store lives. One process at a time may use a directory.",
        syntax=_directory,
        rocketmq="storePathRootDir",
    )
    segment_bytes: int = size(
        GIB,
        "Size of each commit log file. A store is opened with the size that it was made with.",
        4 * KIB,
        INT32_MAX,
        rocketmq=("mappedFileSizeCommitLog", "mapedFileSizeCommitLog"),
    )
    queue_file_units: int = count(
        300_000,
        "Entries in each file of a queue's index. As for segment_bytes, part of the format.",
        1,
        INT32_MAX // 46,
        rocketmq=(
            multiple("mappedFileSizeConsumeQueue", 20, "bytes, 20 per entry"),
            multiple("mapedFileSizeConsumeQueue", 20, "bytes, 20 per entry"),
            multiple("mapperFileSizeBatchConsumeQueue", 46, "bytes, 46 per entry"),
        ),
    )
    flush: Flush = choice(
        ("sync", "async"),
        "When an append is answered: after fdatasync (many appends share one), or after the write.",
        rocketmq=words("flushDiskType", {"SYNC_FLUSH": "sync", "ASYNC_FLUSH": "async"}),
    )
    flush_interval_ms: int = millis(
        500,
        "flush=async: how often written data is made durable.",
        1,
        _DAY_MS,
        rocketmq="flushIntervalCommitLog",
        dynamic=True,
    )
    flush_thorough_interval_ms: int = millis(
        10_000,
        "flush=async: the longest time between two flushes, however little was written.",
        1,
        _DAY_MS,
        rocketmq="flushCommitLogThoroughInterval",
        dynamic=True,
    )
    flush_least_pages: int = count(
        4,
        "flush=async: pages of 4 KiB that must have been written for a flush to be worth it.",
        0,
        1_000_000,
        rocketmq="flushCommitLogLeastPages",
        dynamic=True,
    )
    checkpoint_interval_ms: int = millis(
        10_000,
        "The longest time between two checkpoints; recovery scans the log from the last one.",
        1,
        _DAY_MS,
        dynamic=True,
    )
    checkpoint_bytes_max: int = size(
        256 * MIB,
        "A checkpoint is also taken after so much log: with the next, it bounds recovery time.",
        64 * KIB,
        1024 * GIB,
        dynamic=True,
    )
    checkpoint_messages_max: int = count(
        400_000,
        "A checkpoint is also taken after so many messages.",
        1,
        INT32_MAX,
        dynamic=True,
    )
    retention_hours: int = hours(
        72,
        "Age at which a commit log file may be deleted, counted from its last write.",
        1,
        24 * 36_500,
        rocketmq="fileReservedTime",
        dynamic=True,
    )
    retention_at: str = text(
        "04",
        "Hours of the day (local time) at which old files are deleted: 04, or 04;16.",
        syntax=parse_hours_of_day,
        rocketmq="deleteWhen",
        dynamic=True,
    )
    disk_clean_ratio: float = ratio(
        0.75,
        "Share of the disk in use above which old files are deleted at any hour.",
        0.10,
        1.0,
        rocketmq=percent("diskMaxUsedSpaceRatio"),
        dynamic=True,
    )
    disk_force_ratio: float = ratio(
        0.85,
        "Share above which the oldest files are deleted though they are not old; 1.0 never does.",
        0.10,
        1.0,
        rocketmq=(
            percent("diskSpaceCleanForciblyRatio"),
            words("cleanFileForciblyEnable", {"true": None, "false": 1.0}),
        ),
        dynamic=True,
    )
    disk_refuse_ratio: float = ratio(
        0.90,
        "Share above which appends are refused, until there is room again.",
        0.10,
        1.0,
        rocketmq=percent("diskSpaceWarningLevelRatio"),
        dynamic=True,
    )
    key_index: bool = flag(
        True,
        "Whether messages can be found by key and by id. Costs disk, not append time.",
        rocketmq="messageIndexEnable",
    )
    kafka_key_index: bool = flag(
        False,
        "Whether the records of Kafka's producers are found by their keys too; each batch is "
        "unpacked for it when it is stored.",
    )
    key_index_slots: int = count(
        5_000_000,
        "Hash slots of each key index file. Part of the format: set once.",
        1,
        INT32_MAX // _INDEX_SLOT_BYTES,
        rocketmq="maxHashSlotNum",
    )
    key_index_entries: int = count(
        20_000_000,
        "Entries of each key index file. Part of the format: set once.",
        2,
        INT32_MAX // _INDEX_ENTRY_BYTES,
        rocketmq="maxIndexNum",
    )
    key_index_interval_ms: int = millis(
        1000,
        "How often new messages are entered into the key index, in one batch.",
        1,
        _DAY_MS,
        dynamic=True,
    )
    message_crc: bool = flag(
        True,
        "Whether each stored message ends in a checksum of all of it, not only of its body.",
        rocketmq="enabledAppendPropCRC",
    )
    message_bytes_max: int = size(
        4 * MIB,
        "The largest message body that is accepted.",
        1,
        GIB,
        rocketmq="maxMessageSize",
        dynamic=True,
    )
    delay_levels: str = text(
        _LEVELS,
        "The delays that a message can ask for by number, level 1 first (s, m, h, d).",
        syntax=parse_delay_levels,
        rocketmq="messageDelayLevel",
    )
    cold_read_threads: int = count(
        4, "Threads that read what is not in memory, so that nobody waits for them.", 1, 256
    )
    cold_reads_max: int = count(
        10_000,
        "Reads that may wait for those threads at one time; further ones are refused.",
        1,
        10_000_000,
        dynamic=True,
    )
    hot_bytes: int = size(
        64 * MIB,
        "The newest part of the log that is taken to be in memory, without asking the system: what "
        "was written within half a minute.",
        0,
        1024 * GIB,
        dynamic=True,
    )
    log_cached_bytes_min: int = size(
        0,
        "How much of the newest log stays in memory where memory is slow to get, so that pages of "
        "older parts which nobody reads make room for new ones; 0: an eighth of the machine's "
        "memory, at least 256 MiB.",
        0,
        1024 * GIB,
    )
    state_batch_ms: int = millis(
        1000,
        "How long committed offsets are gathered before they go into the log as one entry.",
        0,
        _DAY_MS,
        rocketmq="flushConsumerOffsetInterval",
        dynamic=True,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.key_index_file_bytes > INT32_MAX:
            raise ConfigError(
                f"key_index_slots, key_index_entries: together they make key index files of "
                f"{self.key_index_file_bytes} bytes; allowed: up to {INT32_MAX}"
            )

    @property
    def key_index_file_bytes(self) -> int:
        slots = self.key_index_slots * _INDEX_SLOT_BYTES
        return _INDEX_HEADER_BYTES + slots + self.key_index_entries * _INDEX_ENTRY_BYTES

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delay of each level; level n is at n - 1."""
        return parse_delay_levels(self.delay_levels)

    @property
    def retention_hours_of_day(self) -> tuple[int, ...]:
        return parse_hours_of_day(self.retention_at)
