"""This module says how a batch of Kafka's is kept in an entry of the log.

The entry's body is the batch, byte for byte, with its base offset and epoch written in. Two system
flags say so: 0x80, RocketMQ's own for a batch that is stored whole, and 0x4000. No client may set
both; the second alone is of a message that shows one record. Properties tell the rest in RocketMQ's
form, so that its tools find their way:

    INNER_NUM    how many records, and so offsets, it takes
    INNER_BASE   the offset of the first
    __KAFKA      highest timestamp << 16 | attributes: what the queue's unit has as its tags code,
                 so that searches by time and for transactions touch the queue's units only

Pure; it knows nothing of what is inside of a batch.
"""

from __future__ import annotations

from typing import Final

from sluice.protocol import records

SYS_KAFKA: Final = 0x4000
KAFKA_FLAGS: Final = SYS_KAFKA | records.SYS_INNER_BATCH
_CODE_NAME: Final = b"__KAFKA"
_TIME_MAX: Final = (1 << 46) - 1
_CODE_DIGITS_MAX: Final = 19


def is_kafka(sys_flag: int) -> bool:
    """Whether an entry's body is a batch of Kafka's."""
    return sys_flag & KAFKA_FLAGS == KAFKA_FLAGS


def code_of(max_ms: int, attributes: int) -> int:
    """The tags code of a batch; times beyond reason are cut, below zero there are none."""
    return min(max(max_ms, 0), _TIME_MAX) << 16 | attributes & 0xFFFF


def code_ms(code: int) -> int:
    """The highest timestamp that a tags code tells."""
    return code >> 16


def code_attributes(code: int) -> int:
    return code & 0xFFFF


def properties_of(count: int, base_offset: int, code: int) -> bytes:
    """The properties of an entry that holds a batch."""
    return b"INNER_NUM\x01%d\x02__KAFKA\x01%d\x02INNER_BASE\x01%d\x02" % (count, code, base_offset)


def code_in(properties: bytes) -> int:
    """The tags code that an entry tells of itself."""
    value = records.property_value(properties, _CODE_NAME)
    if value is None or not value.isdigit() or len(value) > _CODE_DIGITS_MAX:
        return 0
    return int(value) & ((1 << 62) - 1)
