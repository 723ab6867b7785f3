"""This module is the process that test_business_transactions.py looks at: it kills itself.

It begins and ends transactions as fast as it can, and reports on standard output, one line each:

    half NUMBER OFFSET POSITION      commit NUMBER      rollback NUMBER      ended NUMBER

At the point that it is told it ends itself as kill -9 does, in the sixth round or soon after.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from sluice.broker import transactions as service
from sluice.broker.half_messages import COMMIT, ROLLBACK
from sluice.storage.files import RealFiles
from tests.unit.broker.transaction_kit import Broker

ROUNDS = 6
SPREAD = 4
POINTS = (
    "half staged",
    "half stored",
    "commit staged",
    "commit stored, operation not",
    "operation staged",
    "operation stored",
    "copy staged",
    "copy stored",
    "progress stored",
)


def body_of(run: int, number: int) -> bytes:
    return f"run {run} message {number}".encode()


class Transactor:
    """One process at work."""

    def __init__(self, directory: str, point: str, run: int) -> None:
        service.SPREAD_SLACK = SPREAD  # type: ignore[misc]  # copies come soon
        self._point = point
        self._run = run
        self._round = 0
        self._broker = Broker(files=RealFiles(), directory=directory, flush="sync")
        operations = self._broker.core.transactions._operations
        self._watch(operations, "write", "operation staged", "operation stored")
        self._watch(self._broker.core.transactions, "_copy", "copy staged", "copy stored")

    def _watch(self, owner: object, name: str, staged: str, stored: str) -> None:
        """The points after a method, and after the turn in which it was called."""
        method: Callable[..., None] = getattr(owner, name)

        def watched(*arguments: object, **named: object) -> None:
            method(*arguments, **named)
            self._reach(staged)
            if self._point == stored:
                self._broker.core.store.write_staged()
            self._reach(stored)

        setattr(owner, name, watched)

    def _reach(self, point: str) -> None:
        if point == self._point and self._round >= ROUNDS - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def _report(self, *words: object) -> None:
        os.write(sys.stdout.fileno(), (" ".join(map(str, words)) + "\n").encode())

    def run(self) -> None:
        for self._round in range(ROUNDS * 3):
            for number in range(self._round * 4, self._round * 4 + 4):
                self._transact(number)
            self._broker.tick()
            self._broker.tick(1100)
            self._reach("progress stored")

    def _transact(self, number: int) -> None:
        broker = self._broker
        message = broker.message(body_of(self._run, number))
        settings = broker.core.topics.get(message.topic)
        assert settings is not None
        placed = broker.core.append(broker.sending.stored_form(message, settings))
        self._reach("half staged")
        broker.settle()
        self._report("half", number, placed.queue_offset, placed.position)
        self._reach("half stored")
        if number % 4 == 3:
            return  # it stays open
        verdict = ROLLBACK if number % 4 == 1 else COMMIT
        self._report("commit" if verdict == COMMIT else "rollback", number)
        if self._point == "commit staged" and verdict == COMMIT:
            append = broker.core.append

            def appended(*arguments: object, **named: object) -> object:
                result = append(*arguments, **named)  # type: ignore[arg-type]
                self._reach("commit staged")
                return result

            broker.core.append = appended  # type: ignore[method-assign,assignment]
        assert broker.end(placed, verdict) == ""
        self._report("ended", number)
        self._reach("commit stored, operation not")


if __name__ == "__main__":
    Transactor(sys.argv[1], sys.argv[2], int(sys.argv[3])).run()
