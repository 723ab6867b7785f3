"""This module shows the way of a log: a program writes it, `sluice collect` sends it, one reads it.

The program rotates its log while it is collected, and is not asked to do anything for it. The
reader counts lines by their level; a line that comes twice has the same file and offset.

    python -m examples.logs --namesrv 127.0.0.1:9876
"""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter

from sluice import Admin, PushConsumer, ReceivedMessage

TOPIC = "logs-shop"
GROUP = "log-counter"


class LevelCounter:
    """Counts lines by level, each line once."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()
        self.levels: Counter[str] = Counter()

    def handle(self, message: ReceivedMessage) -> None:
        properties = message.properties
        if os.path.dirname(properties["path"]) != self._directory:
            return  # of somebody else's shop
        with self._lock:
            place = properties["file"], properties["offset"]
            if place not in self._seen:
                self._seen.add(place)
                self.levels[message.body.split()[0].decode()] += 1

    @property
    def total(self) -> int:
        with self._lock:
            return self.levels.total()


def write_log(directory: str, line_count: int) -> None:
    """A program with a log that is rotated every few kilobytes."""
    handler = logging.handlers.RotatingFileHandler(
        os.path.join(directory, "shop.log"), maxBytes=20_000, backupCount=50
    )
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
    shop = logging.getLogger("examples.shop")
    shop.setLevel(logging.INFO)
    shop.propagate = False
    shop.addHandler(handler)
    for number in range(line_count):
        if number % 50 == 0:
            shop.error("order %d: no such address", number)
        else:
            shop.info("order %d: sold", number)
    shop.removeHandler(handler)
    handler.close()


def start_collector(namesrv: str, directory: str) -> subprocess.Popen[str]:
    words = [
        *("collect", os.path.join(directory, "shop.log*"), "--topic", "logs-{name}"),
        *("--nameserver", namesrv, "--state", os.path.join(directory, "state")),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "sluice", *words], stdout=subprocess.PIPE, text=True
    )


def run(namesrv: str, directory: str, *, line_count: int = 2000) -> Counter[str]:
    """A log from its writer to its reader."""
    counter = LevelCounter(directory)
    with Admin(namesrv) as admin:
        admin.create_topic(TOPIC, queues=4)
    collector = start_collector(namesrv, directory)
    try:
        write_log(directory, line_count)
        with PushConsumer(
            namesrv, group=GROUP, topics=TOPIC, handler=counter.handle, start_at="first"
        ):
            deadline = time.monotonic() + 120
            while counter.total < line_count:
                if time.monotonic() > deadline or collector.poll() is not None:
                    raise TimeoutError("lines are missing; does the broker run?")
                time.sleep(0.05)
    finally:
        collector.terminate()
        said, _ = collector.communicate()
    print(f"the collector {said.strip()}")
    print(", ".join(f"{count} {level}" for level, count in sorted(counter.levels.items())))
    return counter.levels


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A log is written, collected, read.")
    parser.add_argument("--namesrv", default=os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876"))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        run(arguments.namesrv, os.path.realpath(directory))


if __name__ == "__main__":
    main()
