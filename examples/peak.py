"""This module shows a peak that a queue takes, and a threshold above which requests are dropped.

In the last second of a contest everybody presses the button. The door writes requests into the
queue, which takes them much faster than the server behind it works. When too many wait, the door
says no at once, which is better than an answer that nobody waits for any more. Requests also have a
life: what was not handled when it ends is not handed out.

    python -m examples.peak --namesrv 127.0.0.1:9876
"""

from __future__ import annotations

import argparse
import os
import threading
import time

from sluice import Admin, Message, Producer, PushConsumer, ReceivedMessage
from sluice.errors import SluiceError

TOPIC = "contest"
GROUP = "contest-server"
_LOOK_SECONDS = 0.1


class Door:
    """Takes requests while less than `waiting_max` wait, and counts those that it drops.

    How many wait is asked for now and then; in between, what was let in counts as waiting. So the
    door may drop a little too early, and never lets more in.
    """

    def __init__(
        self, producer: Producer, admin: Admin, *, waiting_max: int, life_seconds: float
    ) -> None:
        self._producer = producer
        self._admin = admin
        self._waiting_max = waiting_max
        self._properties = {"MSG_TTL_MS": str(int(life_seconds * 1000))}
        self._waiting = 0
        self._looked_at = 0.0
        self.entered = 0
        self.dropped = 0
        self.waiting_most = 0

    def enter(self, request: str) -> bool:
        """Whether the request waits in the queue now; if not, tell the user at once."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_SECONDS:
            self._looked_at = now
            self._waiting = waiting(self._admin, self._waiting)
            self.waiting_most = max(self.waiting_most, self._waiting)
        if self._waiting >= self._waiting_max:
            self.dropped += 1
            return False
        self._producer.send(Message(TOPIC, request, properties=self._properties))
        self._waiting += 1
        self.entered += 1
        return True


class Server:
    """Handles so many requests a second and no more."""

    def __init__(self, per_second: float) -> None:
        self._pause_seconds = 1 / per_second
        self._lock = threading.Lock()
        self.handled = 0

    def handle(self, message: ReceivedMessage) -> None:
        time.sleep(self._pause_seconds)  # what a request costs
        with self._lock:
            self.handled += 1


def waiting(admin: Admin, otherwise: int) -> int:
    """How many requests the server has not read yet; before it has connected nobody knows."""
    try:
        return admin.lag(GROUP, TOPIC)
    except SluiceError:
        return otherwise


def run(
    namesrv: str,
    *,
    request_count: int = 2000,
    peak_per_second: float = 2000.0,
    waiting_max: int = 200,
    per_second: float = 200.0,
    life_seconds: float = 30.0,
) -> tuple[Door, Server]:
    """One peak, from the first request until nothing waits any more."""
    server = Server(per_second)
    with Admin(namesrv) as admin:
        admin.create_topic(TOPIC, queues=2)
    with (
        Admin(namesrv) as admin,
        Producer(namesrv, group="contest-door") as producer,
        # One thread, and few messages in its memory: the others wait in the queue, where they are
        # counted, and where their lives end.
        PushConsumer(
            namesrv,
            group=GROUP,
            topics=TOPIC,
            handler=server.handle,
            start_at="first",
            concurrency=1,
            pull_count=4,
            queue_count_max=4,
            commit_ms=100,
        ),
    ):
        door = Door(producer, admin, waiting_max=waiting_max, life_seconds=life_seconds)
        for number in range(request_count):
            door.enter(f"request {number}")
            time.sleep(1 / peak_per_second)
        print(f"{request_count} requests: {door.entered} taken, {door.dropped} dropped at the door")
        deadline = time.monotonic() + 120
        while waiting(admin, otherwise=1):
            if time.monotonic() > deadline:
                raise TimeoutError("requests still wait; does the broker run?")
            time.sleep(_LOOK_SECONDS)
    expired = door.entered - server.handled
    print(f"{server.handled} handled, {expired} expired, at most {door.waiting_most} waited")
    return door, server


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A peak, a queue, and a door that drops.")
    parser.add_argument("--namesrv", default=os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876"))
    arguments = parser.parse_args(argv)
    run(arguments.namesrv)


if __name__ == "__main__":
    main()
