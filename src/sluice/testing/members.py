"""This module watches the consumers of this process: whether they are done with all that came.

A test that moves the clock wants to go on when handlers have run, not when messages could be read.
So consumers say here that they start, whoever made them: the program under test or a fixture.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from sluice.client.aio.member import Lane, Member
from sluice.client.aio.push import PushConsumer

QueueName = tuple[str, int]

_ANSWER_SECONDS: Final = 10.0


class MemberState(NamedTuple):
    """What a consumer is at."""

    client_id: str
    group: str
    busy: str  # what it is busy with; empty: nothing
    reading: dict[str, set[QueueName]]  # by broker: queues whose next messages it has asked for
    shares: (
        dict[str, set[QueueName]] | None
    )  # its part of what the group divides; None: it does not
    topics: frozenset[str]


_lock: Final = threading.Lock()
_members: weakref.WeakKeyDictionary[Member, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()
_watching = 0
_start_member = Member.start_member


async def _start_watched(self: Member) -> None:
    with _lock:
        _members[self] = asyncio.get_running_loop()
    await _start_member(self)


@contextmanager
def watching() -> Iterator[None]:
    """From now on consumers that start are known."""
    global _watching  # noqa: PLW0603  # one process, one list
    with _lock:
        _watching += 1
        Member.start_member = _start_watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            if not _watching:
                Member.start_member = _start_member  # type: ignore[method-assign]
                _members.clear()


def states() -> list[MemberState]:
    """What every open consumer is at; of those whose loop stands still nothing is said."""
    with _lock:
        known = list(_members.items())
    found = []
    for member, loop in known:
        if not member.session.is_open or not loop.is_running():
            continue
        if _current_loop() is loop:
            found.append(_state(member))
        else:
            asked = asyncio.run_coroutine_threadsafe(_state_later(member), loop)
            found.append(asked.result(_ANSWER_SECONDS))
    return found


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _state_later(member: Member) -> MemberState:
    return _state(member)


def _state(member: Member) -> MemberState:
    busy = ""
    reading: dict[str, set[QueueName]] = {}
    shares: dict[str, set[QueueName]] = {}
    for queue, lane in member.lanes.items():
        name = (queue.topic, queue.queue_id)
        shares.setdefault(queue.broker_name, set()).add(name)
        busy = busy or _busy_with(member, lane)
        if not lane.process.is_paused and not lane.process.why_full():
            reading.setdefault(queue.broker_name, set()).add(name)
    # Who reads in order waits for locks, which time may bring; who chose its queues has its own.
    divides = not (
        member.settings.broadcasting
        or member.locks_queues
        or getattr(member, "_assigned", None) is not None
    )
    return MemberState(
        member.session.client_id,
        member.group,
        busy,
        reading,
        shares if divides else None,
        frozenset(member.subscriptions),
    )


def _busy_with(member: Member, lane: Lane) -> str:
    process = lane.process
    if not isinstance(member, PushConsumer) or not process.unfinished_count or process.is_paused:
        return ""  # who pulls has what was fetched; when it takes it is its own affair
    oldest = process.oldest
    if member.push.orderly and not process.under_way and oldest is not None and oldest.attempts:
        return ""  # it failed and rests before it is tried again
    return f"{member.group} has {process.unfinished_count} messages of {lane.queue} in its hands"
