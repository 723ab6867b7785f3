"""This module looks at what users give a message: texts, times, numbers of the right kind.

What is wrong is refused where it is given, with what to give instead. Later it would be an error of
the encoder's, or of a broker's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from datetime import datetime
from typing import Any, Final

from sluice.errors import MessageInvalid

_SEPARATORS: Final = ("\x01", "\x02")
_SECONDS_MAX: Final = (1 << 63) // 1000
_FLAG_MAX: Final = 1 << 31


def bytes_of(body: object) -> bytes:
    """A body that was not given as bytes."""
    if isinstance(body, str):
        return utf8_of("the body", body)
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise MessageInvalid(
        f"a body is bytes or text, not {type(body).__name__}; json.dumps makes text of values"
    )


def utf8_of(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MessageInvalid(f"{what} is no text that UTF-8 can hold: {error}") from None


def keys_of(keys: Any) -> str:
    """Keys that were not given as one text."""
    try:
        return " ".join(keys)
    except TypeError:
        raise MessageInvalid(f"keys {keys!r}: give a text, or a list of texts") from None


def delay_ms_of(seconds: object) -> int:
    """A span of time from now on."""
    if isinstance(seconds, int | float) and 0 <= seconds < _SECONDS_MAX:
        return int(seconds * 1000)
    raise MessageInvalid(f"delay_seconds {seconds!r} is no span of time; give seconds, as 1.5")


def time_ms_of(when: object) -> int:
    """A time to deliver at."""
    seconds = when
    if isinstance(when, datetime):
        try:
            seconds = when.timestamp()
        except (ValueError, OverflowError, OSError):  # too far away for the system's calendar
            seconds = None
    if isinstance(seconds, int | float) and 0 <= seconds < _SECONDS_MAX:
        return int(seconds * 1000)
    raise MessageInvalid(
        f"deliver_at {when!r} is no time; give a datetime, or seconds since 1970 (time.time() + 60)"
    )


def check_flag(flag: object) -> None:
    if not isinstance(flag, int) or not -_FLAG_MAX <= flag < _FLAG_MAX:
        raise MessageInvalid(f"flag {flag!r}: give a number of 32 bits")


def check_texts(
    tags: object, keys: object, sharding_key: object, properties: object, reserved: Set[str]
) -> None:
    """Refuse texts that cannot go over the wire, and names that are not the user's."""
    texts = [("tags", tags), ("keys", keys), ("sharding_key", sharding_key)]
    if properties and not isinstance(properties, Mapping):
        kind = type(properties).__name__
        raise MessageInvalid(f"properties: give a table of names and texts, not {kind}")
    for name, value in properties.items() if isinstance(properties, Mapping) else ():
        if name in reserved:
            raise MessageInvalid(f"property {name} is RocketMQ's own; use another name")
        if not name or value == "":
            raise MessageInvalid(f"property {name!r}: name and value must not be empty")
        texts += ((f"the name of property {name!r}", name), (f"property {name}", value))
    for what, text in texts:
        if not isinstance(text, str):
            raise MessageInvalid(f"{what} must be a text, not {type(text).__name__}")
        if _SEPARATORS[0] in text or _SEPARATORS[1] in text:
            raise MessageInvalid(f"{what} holds 0x01 or 0x02, which separate properties")
        if not text.isascii():
            utf8_of(what, text)
