"""This module shows gifts of a live stream: one message each, and three services that want it.

The leaderboard, the host's share and the badges are three groups. Each gets every gift, at its own
pace, and knows nothing of the others; a fourth one needs no change here. Some gifts are sent twice,
as by a phone that got no answer: each service remembers the gifts that it counted, in the same
transaction in which it counts.

    python -m examples.gifts --namesrv 127.0.0.1:9876
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from sluice import Admin, Message, Producer, PushConsumer, ReceivedMessage

TOPIC = "gifts"
SHARE_PERCENT = 40
BADGES = ((1000, "gold"), (300, "silver"), (1, "bronze"))


class Gift(NamedTuple):
    """So many coins from a viewer to a host."""

    id: str
    viewer: str
    host: str
    coins: int


class Service:
    """One consumer group with a table of its own; `score` says whose row gets how much."""

    def __init__(self, name: str, score: Callable[[Gift], tuple[str, int]]) -> None:
        self.name = name
        self._score = score
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE TABLE counted (gift TEXT PRIMARY KEY)")
        self._database.execute("CREATE TABLE totals (name TEXT PRIMARY KEY, total INTEGER)")
        self.repeated = 0

    def handle(self, message: ReceivedMessage) -> None:
        """Count a gift, once: its id and its effect are one transaction."""
        gift = Gift(**json.loads(message.body))
        name, amount = self._score(gift)
        with self._lock, self._database as database:
            sql = "INSERT OR IGNORE INTO counted VALUES (?)"
            if not database.execute(sql, (gift.id,)).rowcount:
                self.repeated += 1
                return
            database.execute(
                "INSERT INTO totals VALUES (?, ?) ON CONFLICT (name) "
                "DO UPDATE SET total = total + excluded.total",
                (name, amount),
            )

    @property
    def counted(self) -> int:
        with self._lock:
            (number,) = self._database.execute("SELECT count(*) FROM counted").fetchone()
        return int(number)

    def totals(self) -> dict[str, int]:
        """All rows, the highest first."""
        with self._lock:
            rows = self._database.execute("SELECT * FROM totals ORDER BY total DESC, name")
            return dict(rows.fetchall())

    def close(self) -> None:
        self._database.close()


def services() -> list[Service]:
    return [
        Service("leaderboard", lambda gift: (gift.viewer, gift.coins)),
        Service("host-share", lambda gift: (gift.host, gift.coins * SHARE_PERCENT)),
        Service("badges", lambda gift: (gift.viewer, gift.coins)),
    ]


def badge(coins: int) -> str:
    return next(name for least, name in BADGES if coins >= least)


def make_gifts(count: int, seed: int) -> list[Gift]:
    chance = random.Random(seed)
    stream = f"{int(time.time())}"
    return [
        Gift(
            f"{stream}-{number}",
            f"viewer-{chance.randrange(8)}",
            f"host-{chance.randrange(2)}",
            chance.choice((1, 5, 10, 66)),
        )
        for number in range(count)
    ]


def send_gifts(producer: Producer, gifts: list[Gift]) -> int:
    """Every tenth gift is sent twice; how many messages that makes."""
    sent = 0
    for number, gift in enumerate(gifts):
        message = Message(TOPIC, json.dumps(gift._asdict()), tags="gift", keys=gift.id)
        for _ in range(2 if number % 10 == 0 else 1):
            producer.send_async(message).result()
            sent += 1
    return sent


def run(namesrv: str, *, gift_count: int = 300) -> list[Service]:
    """A stream with its gifts, until every service has counted all of them."""
    gifts = make_gifts(gift_count, seed=7)
    running = services()
    with Admin(namesrv) as admin:
        admin.create_topic(TOPIC, queues=4)
    with contextlib.ExitStack() as stack:
        for service in running:
            stack.enter_context(
                PushConsumer(
                    namesrv,
                    group=service.name,
                    topics={TOPIC: "gift"},
                    handler=service.handle,
                    start_at="first",
                )
            )
        with Producer(namesrv, group="live-room", batching=True, linger_ms=1) as producer:
            sent = send_gifts(producer, gifts)
        print(f"{len(gifts)} gifts in {sent} messages, for {len(running)} services")
        deadline = time.monotonic() + 120
        while any(service.counted + service.repeated < sent for service in running):
            if time.monotonic() > deadline:
                raise TimeoutError("gifts are missing; does the broker run?")
            time.sleep(0.05)
    leaderboard, share, badges = running
    first, coins = next(iter(leaderboard.totals().items()))
    print(f"leaderboard: {first} leads with {coins} coins")
    for host, hundredths in sorted(share.totals().items()):
        print(f"{host} gets {hundredths / 100:.2f} of what was given")
    for viewer, coins in list(badges.totals().items())[:3]:
        print(f"{viewer} has a {badge(coins)} badge")
    return running


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Gifts, and three services that count them.")
    parser.add_argument("--namesrv", default=os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876"))
    arguments = parser.parse_args(argv)
    for service in run(arguments.namesrv):
        service.close()


if __name__ == "__main__":
    main()
