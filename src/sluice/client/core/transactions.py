"""This module holds the states of a transaction and the fields that end it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from sluice.errors import MessageInvalid, ProtocolError


class TransactionState(Enum):
    """What became of the local half: deliver the message, drop it, or ask again later."""

    UNKNOWN = 0
    COMMIT = 8
    ROLLBACK = 12


def state_of(value: object) -> TransactionState:
    """A state out of what an executor or a checker returned; True commits, False rolls back."""
    if isinstance(value, TransactionState):
        return value
    if value is None:
        return TransactionState.UNKNOWN
    if isinstance(value, bool):
        return TransactionState.COMMIT if value else TransactionState.ROLLBACK
    raise MessageInvalid(
        f"a transaction ends with a TransactionState, True or False, not {value!r}"
    )


class HalfPlace(NamedTuple):
    """Where a half message lies: what its broker finds it by."""

    queue_offset: int
    position: int


def place_of(offset_id: str, queue_offset: int) -> HalfPlace:
    """The place of a half message, from the answer to its send."""
    try:
        return HalfPlace(queue_offset, int(offset_id[-16:], 16))
    except ValueError:
        raise ProtocolError(f"{offset_id!r} is no message id") from None
