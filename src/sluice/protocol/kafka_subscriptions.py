"""This module reads what consumers say of themselves when they join a group: the topics they read.

Groups hand these bytes through; they are looked into only to know which topics a group still reads.
All versions of the form begin with the same fields.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Final

_HEAD: Final = Struct(">hi")  # version, count of topics
_SIZE: Final = Struct(">h")


def subscribed_topics(data: bytes) -> set[str] | None:
    """The topics of a subscription; None where these bytes are none."""
    topics = set()
    try:
        _, count = _HEAD.unpack_from(data)
        at = _HEAD.size
        if count < 0 or count > len(data):
            return None
        for _ in range(count):
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size
            if size < 0 or at + size > len(data):
                return None
            topics.add(data[at : at + size].decode())
            at += size
    except (error, UnicodeDecodeError):
        return None
    return topics
