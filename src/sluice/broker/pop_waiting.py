"""This module holds pops that found nothing until something comes, or their time is over.

They are held with the pulls (`long_polling.py`), under names that no topic has. What comes into a
queue, or comes again, wakes one of each group that waits for it: if that one leaves something, it
wakes the next. This module neither reads nor answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sluice.broker.filters import Subscription
from sluice.broker.long_polling import HeldRead
from sluice.broker.pop_log import retry_topic
from sluice.broker.pop_taking import Popped, PopRequest
from sluice.errors import Busy, SluiceError

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

_NOTICE: Final = "@notice"  # those who wait for a word only are held apart from those who pop

# The text: why no more can wait or be popped, empty where that is not so.
PopDone = Callable[[Popped | None, str, SluiceError | None], None]


@dataclass(slots=True)
class Waiting:
    """A request that may wait."""

    request: PopRequest
    subscription: Subscription
    owner: object
    until_ms: int
    done: PopDone


class Holding:
    """The pops of one broker that wait."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._held: dict[str, set[tuple[str, int]]] = {}  # topic -> group and queue of who waits
        self._retries: dict[str, set[tuple[str, str]]] = {}  # retry topic -> topic and group
        self._stirred: set[tuple[str, int]] = set()  # queues that something came into

    def hold(
        self, waiting: Waiting, again: Callable[[Waiting], None], *, for_notice: bool = False
    ) -> None:
        """Keep a request that found nothing, or say so where its time is over."""
        core, request = self._core, waiting.request

        def resume(timed_out: bool) -> None:
            if timed_out:
                waiting.until_ms = 0
            again(waiting)

        if waiting.until_ms <= core.now_ms():
            waiting.done(None, "", None)
            return
        key = _key(request.topic, request.group) + (_NOTICE if for_notice else "")
        read = HeldRead((key, request.queue_id), waiting.until_ms, None, resume, waiting.owner)
        try:
            is_held = core.polls.hold(read)
        except Busy as error:
            waiting.done(None, str(error), None)
            return
        if not is_held:
            waiting.done(None, "", None)
            return
        self._held.setdefault(request.topic, set()).add((request.group, request.queue_id))
        core.polls.watchers[request.topic] = self.stir
        again_topic = retry_topic(request.group, request.topic)
        if again_topic != request.topic:
            self._retries.setdefault(again_topic, set()).add((request.topic, request.group))
            core.polls.watchers[again_topic] = self.stir

    def stir(self, queue: tuple[str, int]) -> None:
        """Something came into a queue (-1: into any): who waits for it asks again when this turn is
        over, and so finds all that came in it.
        """
        if not self._stirred:
            self._core.call_soon(self._wake)
        self._stirred.add(queue)

    def _wake(self) -> None:
        stirred, self._stirred = self._stirred, set()
        wanted: dict[tuple[str, str, int], None] = {}  # topic, group, queue
        for name, came in stirred:
            for group, queue_id in self._held.get(name, ()):
                if -1 in (queue_id, came) or queue_id == came:
                    wanted[name, group, queue_id] = None
            for topic, group in self._retries.get(name, ()):
                for other, queue_id in self._held.get(topic, ()):
                    if other == group:
                        wanted[topic, group, queue_id] = None
        for topic, group, queue_id in wanted:
            self._wake_one(topic, group, queue_id)

    def _wake_one(self, topic: str, group: str, queue_id: int) -> None:
        polls = self._core.polls
        key = _key(topic, group)
        popping = polls.wake_first((key, queue_id))
        noticing = polls.wake_first((key + _NOTICE, queue_id))
        if not popping and not noticing:
            self._forget(topic, group, queue_id)

    def _forget(self, topic: str, group: str, queue_id: int) -> None:
        """Nobody waits there any more."""
        watchers = self._core.polls.watchers
        keys = self._held.get(topic, set())
        keys.discard((group, queue_id))
        if not keys:
            self._held.pop(topic, None)
            watchers.pop(topic, None)
        if not any(name == group for name, _ in keys):
            again_topic = retry_topic(group, topic)
            pairs = self._retries.get(again_topic, set())
            pairs.discard((topic, group))
            if not pairs and again_topic != topic:
                self._retries.pop(again_topic, None)
                watchers.pop(again_topic, None)

    def count(self, group: str, topic: str, queue_id: int) -> int:
        """How many pops of a queue wait."""
        return self._core.polls.waiting((_key(topic, group), queue_id))


def _key(topic: str, group: str) -> str:
    """Under what a request is held; no topic has such a name."""
    return f"{topic}@{group}"
