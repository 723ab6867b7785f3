"""This module says which messages a queue takes, beyond what their layout allows. Pure.

A topic's name becomes a directory's name, and an entry that counts many offsets must say the same
of itself as its queue: recovery knows nothing but the entry.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from sluice.errors import MessageIllegal
from sluice.model import Message
from sluice.protocol import kafka_entries, records

# What both protocols allow, and nothing that leaves the directory.
_TOPIC_NAME: Final = re.compile(r"[%|a-zA-Z0-9._-]{1,255}")


def check_topic(topic: str) -> None:
    """Refuse a name that cannot be a directory's; raises MessageIllegal."""
    if _TOPIC_NAME.fullmatch(topic) is None or topic in (".", ".."):
        raise MessageIllegal(f"topic name {topic!r}: allowed are letters, digits and % | . _ -")


def check_count(message: Message, *, batches: bool) -> None:
    """Refuse a count of offsets that the entry does not tell, or that its queue cannot keep."""
    if kafka_entries.is_kafka(message.sys_flag):
        raise MessageIllegal("the flags of the message (0x4080) are the store's own")
    told = records.offset_count(message.sys_flag, message.properties)
    if message.count != told:
        raise MessageIllegal(
            f"the message is to take {message.count} offsets, its flags and INNER_NUM say {told}"
        )
    if message.count > 1 and not batches:
        raise MessageIllegal(
            f"topic {message.topic}: a message that takes {message.count} offsets needs a topic "
            "that was made with queue.type=BatchCQ"
        )


def with_base(message: Message, offset: int) -> Message:
    """A batch that is stored whole says which offset is its first."""
    # The separator before it: a producer may leave the last one out.
    gap = b"" if not message.properties or message.properties[-1] == 2 else b"\x02"
    base = b"%bINNER_BASE\x01%d\x02" % (gap, offset)
    return replace(message, properties=message.properties + base)
