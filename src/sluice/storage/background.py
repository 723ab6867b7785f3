"""This module runs the store's slow work away from its owner: threads in production, steps in
tests.

The store belongs to one thread (its owner, usually an event loop). Whatever can wait for a disk is
handed to a lane here as a pair (work, done): `work` runs elsewhere and may touch files only, `done`
runs with the owner again and may touch the store. Work in one lane runs one at a time and in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Done = Callable[[T | None, BaseException | None], None]


class Background(Protocol):
    """Where slow work goes."""

    def submit(self, lane: str, work: Callable[[], T], done: Done[T]) -> None: ...

    def close(self) -> None: ...


def _run(
    work: Callable[[], Any], done: Done[Any], post: Callable[[Callable[[], None]], None]
) -> None:
    try:
        result = work()
    except BaseException as error:
        # Handed to `done`, which decides: a lane must outlive any one piece of work.
        failure = error
        post(lambda: done(None, failure))
    else:
        post(lambda: done(result, None))


class Threads:
    """One daemon thread per lane, started at its first use. `post` brings `done` back to the
    owner.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._lanes: dict[str, tuple[Thread, SimpleQueue[Any]]] = {}
        self._closed = False

    def submit(self, lane: str, work: Callable[[], T], done: Done[T]) -> None:
        assert not self._closed, "no work after close"
        if lane not in self._lanes:
            jobs: SimpleQueue[Any] = SimpleQueue()
            thread = Thread(target=self._serve, args=(jobs,), name=f"sluice-{lane}", daemon=True)
            self._lanes[lane] = (thread, jobs)
            thread.start()
        self._lanes[lane][1].put((work, done))

    def _serve(self, jobs: SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            _run(job[0], job[1], self._post)

    def close(self) -> None:
        """Finish what was submitted, then stop the threads."""
        self._closed = True
        for _, jobs in self._lanes.values():
            jobs.put(None)
        for thread, _ in self._lanes.values():
            thread.join()
        self._lanes.clear()


class Inline:
    """Does everything at once, in the owner's thread: tools and tests that want no threads."""

    def submit(self, lane: str, work: Callable[[], T], done: Done[T]) -> None:
        _run(work, done, lambda callback: callback())

    def close(self) -> None:
        return


class Steps:
    """Does nothing until told: a test decides which lane goes on, and where a crash falls
    between.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, deque[tuple[Callable[[], Any], Done[Any]]]] = {}

    def submit(self, lane: str, work: Callable[[], T], done: Done[T]) -> None:
        self.waiting.setdefault(lane, deque()).append((work, done))

    def step(self, lane: str) -> bool:
        """Run the next piece of work of a lane; False where there is none."""
        if not self.waiting.get(lane):
            return False
        work, done = self.waiting[lane].popleft()
        _run(work, done, lambda callback: callback())
        return True

    def run_all(self) -> None:
        """Run until every lane is empty."""
        going = True
        while going:
            going = False
            for lane in list(self.waiting):
                going |= self.step(lane)

    def close(self) -> None:
        self.run_all()
