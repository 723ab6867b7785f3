"""This module makes images, one by one, as somebody would who reads what they are."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.protocol import records

Part = tuple[int, bytes, bytes]  # flag, body, properties


def image_of(part: Part, topic: bytes) -> bytes:
    flag, body, properties = part
    magic = 0xDAA320A7 if len(topic) <= 127 else 0xDAA320AB
    field = len(topic).to_bytes(1 if len(topic) <= 127 else 2, "big") + topic
    stored_bytes = len(properties) + records.CRC_PROPERTY_BYTES
    rest = field + stored_bytes.to_bytes(2, "big") + properties + bytes(records.CRC_PROPERTY_BYTES)
    size = 88 + len(body) + len(rest)
    head = b"".join(
        (
            *(size.to_bytes(4, "big"), magic.to_bytes(4, "big"), b"?" * 8),
            *(flag.to_bytes(4, "big", signed=True), b"?" * 64, len(body).to_bytes(4, "big")),
        )
    )
    return head + body + rest


def images_of(parts: Sequence[Part], topic: bytes) -> bytes:
    """Images as a request brings them."""
    made = [image_of(part, topic) for part in parts]
    return b"".join(made) + b"".join(len(each).to_bytes(4, "big") for each in made)
