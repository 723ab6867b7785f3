"""This module is time for tests: it stands still, or runs, and jumps when it is told to.

A jump is made in steps: the clock goes to the next moment at which a broker has something to do,
that is done, consumers of this process handle what comes of it, and only then it goes on. So ten
retries, each some time after the one before it failed, happen in one jump, each at its own time.
Whoever is connected to a broker is taken along: nobody is gone because of a jump.

docs/adr/0022 says why it is so. Everything is for the thread of the test.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from sluice.clock import wall_ms
from sluice.testing import members

if TYPE_CHECKING:
    from sluice.testing.site import LiveBroker

_PAUSE_SECONDS: Final = 0.0005
_LIMIT_SECONDS: Final = 60.0
_CHECK_SECONDS: Final = 3.0  # so long a producer may take to say what became of a transaction


@dataclass(slots=True)
class Reading:
    """A clock's hands; each broker has its own, which are moved on the broker's thread."""

    stopped_ms: int | None = None  # None: it runs
    ahead_ms: int = 0  # of the machine's time, while it runs

    def now_ms(self) -> int:
        return self.stopped_ms if self.stopped_ms is not None else wall_ms() + self.ahead_ms

    def copy(self) -> Reading:
        return Reading(self.stopped_ms, self.ahead_ms)


class Clock:
    """The time of all brokers of a test. `sluice_clock` gives one that stands still."""

    def __init__(self) -> None:
        self._hands = Reading()
        self._brokers: list[LiveBroker] = []
        self.limit_seconds = _LIMIT_SECONDS  # how long handlers may take, in the machine's time

    # -------------------------------------------------------------------------------------- looking

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._hands.now_ms()

    def time(self) -> float:
        """Seconds since 1970, as time.time() has them: for `deliver_at` and the like."""
        return self.now_ms() / 1000

    def now(self) -> datetime:
        """The same with its time zone, UTC."""
        return datetime.fromtimestamp(self.time(), UTC)

    @property
    def is_running(self) -> bool:
        return self._hands.stopped_ms is None

    def __repr__(self) -> str:
        return f"Clock({self.now().isoformat()}, {'running' if self.is_running else 'standing'})"

    def reading(self) -> Reading:
        """Hands for a broker that starts now."""
        return self._hands.copy()

    # --------------------------------------------------------------------------------------- moving

    def stop(self) -> None:
        """Stand still: from now on only `advance` moves it."""
        if self.is_running:
            self._set(Reading(self.now_ms(), self._hands.ahead_ms))

    def run(self) -> None:
        """Go on with the machine's time, from where it stands."""
        if not self.is_running:
            self._set(Reading(None, self.now_ms() - wall_ms()))

    def advance(
        self,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        milliseconds: float = 0,
        in_steps: bool = True,
    ) -> None:
        """Let time pass, and return when everything that became due has happened.

        `in_steps=False` makes one jump: what was due on the way happens late, all of it at the end.
        """
        span = _span_ms(days, hours, minutes, seconds, milliseconds)
        self._wait(self._advancing(span, in_steps=in_steps))

    async def aio_advance(
        self,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        milliseconds: float = 0,
        in_steps: bool = True,
    ) -> None:
        """`advance` for a coroutine: consumers on its own loop go on meanwhile."""
        span = _span_ms(days, hours, minutes, seconds, milliseconds)
        for _ in self._advancing(span, in_steps=in_steps):
            await asyncio.sleep(_PAUSE_SECONDS)

    def settle(self) -> None:
        """Return when all that is due now has happened, and consumers are done with it."""
        self._wait(self._settling())

    async def aio_settle(self) -> None:
        """`settle` for a coroutine."""
        for _ in self._settling():
            await asyncio.sleep(_PAUSE_SECONDS)

    @staticmethod
    def _wait(work: Iterator[None]) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            for _ in work:
                time.sleep(_PAUSE_SECONDS)
        else:
            raise RuntimeError(
                "this would stop the loop that it is called on; await aio_advance() or "
                "aio_settle() instead"
            )

    def _advancing(self, span_ms: int, *, in_steps: bool) -> Iterator[None]:
        target_ms = self.now_ms() + span_ms
        yield from self._settling()
        while in_steps:
            next_ms = self.next_ms()
            if next_ms is None or next_ms >= target_ms:
                break
            self._move(next_ms)
            yield from self._settling()
        self._move(target_ms)
        yield from self._settling()

    def _move(self, to_ms: int) -> None:
        jump_ms = to_ms - self.now_ms()
        if jump_ms <= 0:
            return
        if self.is_running:
            self._set(Reading(None, self._hands.ahead_ms + jump_ms), jump_ms)
        else:
            self._set(Reading(to_ms, self._hands.ahead_ms), jump_ms)

    def _set(self, hands: Reading, jump_ms: int = 0) -> None:
        self._hands = hands
        for broker in self._up():
            broker.set_time(hands.copy(), jump_ms)

    # ------------------------------------------------------------------------------------- settling

    def attach(self, broker: LiveBroker) -> None:
        self._brokers.append(broker)

    def detach(self, broker: LiveBroker) -> None:
        self._brokers.remove(broker)

    def _up(self) -> list[LiveBroker]:
        return [broker for broker in self._brokers if broker.is_up]

    def next_ms(self) -> int | None:
        """When a broker has something to do next; None where nothing waits for its time."""
        times = [broker.look().next_ms for broker in self._up()]
        return min((each for each in times if each is not None), default=None)

    def _settling(self) -> Iterator[None]:
        begun = time.monotonic()
        while reason := self._unsettled(time.monotonic() - begun):
            if time.monotonic() - begun > self.limit_seconds:
                raise TimeoutError(
                    f"not all is done after {self.limit_seconds:g} s: {reason}; does a handler "
                    "hang?"
                )
            yield

    def _unsettled(self, waited_seconds: float) -> str:
        """Why it is not over; empty where it is."""
        brokers = self._up()
        looks = [broker.look() for broker in brokers]
        for broker, look in zip(brokers, looks, strict=True):
            if not look.is_quiet:
                return f"{broker.name} delivers"
        # First who waits for messages, then who is busy: a message is on its way in between.
        readers = {broker.name: broker.readers() for broker in brokers}
        states = members.states()
        for state in states:
            if state.busy:
                return state.busy
            for name in readers.keys() & state.reading.keys():
                asked = readers[name].asked.get(state.client_id, set())
                if not state.reading[name] <= asked:
                    return f"{state.group} does not wait for messages of {name} yet"
        for broker in brokers:
            reason = readers[broker.name].undivided(broker.name, states)
            if reason:
                return reason
            if broker.checks_open and waited_seconds < _CHECK_SECONDS:
                return f"a producer of {broker.name} was asked for a transaction"
            broker.forget_checks()
        again = [broker.look() for broker in brokers]
        return "something happened meanwhile" if again != looks else ""


@contextmanager
def time_of_clients(clock: Clock) -> Iterator[None]:
    """Inside of this, clients of this process take the time of a clock for what they send."""
    for name in (
        *("sluice.aio", "sluice.client.aio.trace"),
        *("sluice.client.sync.producers", "sluice.client.sync.database"),
    ):
        importlib.import_module(name)  # so that all their modules are there

    changed = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("sluice.client.") and getattr(module, "wall_ms", None) is wall_ms
    ]
    for module in changed:
        module.wall_ms = clock.now_ms  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in changed:
            module.wall_ms = wall_ms  # type: ignore[attr-defined]


def _span_ms(days: float, hours: float, minutes: float, seconds: float, milliseconds: float) -> int:
    span = timedelta(
        days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds
    )
    if span < timedelta(0):
        raise ValueError("time does not go back")
    return round(span / timedelta(milliseconds=1))
