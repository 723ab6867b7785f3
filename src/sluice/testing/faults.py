"""This module is what a test orders to go wrong: on the network, on the disk, with the process.

Everything holds for one broker: `sluice_faults` is that of `sluice_broker`, and every broker has
its own as `.faults`. At the end of the test all is lifted.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sluice.testing.gate import Action, Order

if TYPE_CHECKING:
    from sluice.testing.site import LiveBroker

_LOG: Final = "commitlog"


class Faults:
    """What goes wrong with one broker."""

    def __init__(self, broker: LiveBroker) -> None:
        self._broker = broker
        self._is_frozen = False

    # ----------------------------------------------------------------------------------- network

    def drop(self, kind: str | int = "", *, count: int = 1, answers: bool = False) -> Order:
        """The next requests of a kind get lost; with `answers`, they are done and nobody says so
        (Kafka's clients lose their connection too, because their answers come in order).

        A kind is "send", "pull", "commit", "heartbeat", "members", "end transaction" (of RocketMQ's
        clients and of Kafka's), "ack", "give back", "lock", the number of one of RocketMQ's
        requests, or empty for all.
        """
        return self._order("drop answer" if answers else "drop", kind, count)

    def delay(self, kind: str | int = "", *, seconds: float, count: int = 1) -> Order:
        """The next requests of a kind come late, and so does all behind them on the connection."""
        return self._order("delay", kind, count, seconds)

    def cut(self, kind: str | int | None = None, *, count: int = 1, done: bool = False) -> Order:
        """Cut connections. Without a kind: all that are open, now.

        With one, the connection of the next request of that kind, before the broker has seen it;
        with `done`, after: it does what it was asked for, and the answer is lost.
        """
        if kind is None:
            self._broker.cut_all()
            return Order("cut", "", 0)
        return self._order("cut after" if done else "cut", kind, count)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """Inside of this nobody reaches the broker: connections are cut, new ones refused."""
        self._broker.gate.is_closed = True
        if self._broker.is_up:
            self._broker.cut_all()
        try:
            yield
        finally:
            self._broker.gate.is_closed = False  # perhaps it was started anew meanwhile

    def _order(self, action: Action, kind: str | int, count: int, seconds: float = 0.0) -> Order:
        if count < 1:
            raise ValueError("count: 1 and more")
        gate = self._broker.gate
        order = Order(action, kind, count, seconds)

        def lift() -> None:
            if order in gate.orders:
                gate.orders.remove(order)

        order.lift = lambda: self._broker.host.call(lift)
        self._broker.host.call(gate.orders.append, order)
        return order

    # -------------------------------------------------------------------------------------- disk

    @property
    def fsync_count(self) -> int:
        """How many fsyncs of the log there were since the broker started."""
        return self._broker.files.fsync_count

    def fail_fsync(self, nth: int = 1) -> None:
        """The nth fsync of the log from now on fails. The broker takes no more messages then,
        until it is started again: nobody knows what is on the disk.
        """
        self._broker.files.fail("fsync", nth, errno.EIO, _LOG)

    def fail_write(self, nth: int = 1) -> None:
        """The nth write to the log from now on fails; what then is as with `fail_fsync`."""
        self._broker.files.fail("write", nth, errno.EIO, _LOG)

    @contextmanager
    def disk_full(self) -> Iterator[None]:
        """Inside of this the disk takes no byte more. The broker looks for room every 10 s, of its
        own time: with `sluice_clock`, advance it.
        """
        files = self._broker.files
        files.is_full = True
        try:
            yield
        finally:
            files.is_full = False

    @contextmanager
    def slow_disk(self) -> Iterator[None]:
        """Inside of this no fsync comes to its end: nothing more is acknowledged (flush=sync)."""
        files = self._broker.files
        files.hold_fsync()
        try:
            yield
        finally:
            files.let_fsync()

    # ----------------------------------------------------------------------------------- process

    def kill(self) -> None:
        """End the broker as kill -9 does, also where it is frozen; `restart` starts it again."""
        self._is_frozen = False
        self._broker.kill()

    def restart(self) -> None:
        """Start the broker again: after `kill`, or in order where it runs."""
        self.thaw()
        self._broker.restart()

    def freeze(self) -> None:
        """Stop the broker where it is, as SIGSTOP does: connections stay, and nobody answers."""
        self._broker.host.freeze()
        self._is_frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        if self._is_frozen:
            self._is_frozen = False
            self._broker.host.thaw()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """`freeze` inside of this."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def lift(self) -> None:
        """Nothing goes wrong any more; a broker that was killed stays so."""
        self.thaw()
        self._broker.files.heal()
        gate = self._broker.gate
        gate.is_closed = False
        self._broker.host.call(gate.orders.clear)
