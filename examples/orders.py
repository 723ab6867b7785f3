"""This module shows an order's life: created, paid, shipped, and in no other order.

Messages of one order have its id as sharding key, so they go to one queue; `orderly` consumers
handle a queue one after the other. Three processes share the work through a database, and one of
them is killed with -9: the others take over its queues, and what it had not finished comes again.
A step that comes again is known by the row that it left.

    python -m examples.orders --namesrv 127.0.0.1:9876
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from sluice import Admin, Message, Producer, PushConsumer, ReceivedMessage

TOPIC = "order-steps"
GROUP = "order-desk"
STEPS = ("created", "paid", "shipped")


class OutOfOrder(Exception):
    """A step came before the one that it needs; the consumer gets it again later."""


def create_tables(path: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, step INTEGER NOT NULL)")
        database.execute("CREATE TABLE handled (member TEXT, outcome TEXT)")
        database.commit()


def take_step(path: str, member: str, order: str, step: str) -> str:
    """Move an order on by one step: `done`, or `repeated` where it has been there already."""
    number = STEPS.index(step) + 1
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
        if number == 1:
            sql = "INSERT OR IGNORE INTO orders VALUES (?, 1)"
            changed = database.execute(sql, (order,)).rowcount
        else:
            sql = "UPDATE orders SET step = ? WHERE id = ? AND step = ?"
            changed = database.execute(sql, (number, order, number - 1)).rowcount
        if not changed:
            row = database.execute("SELECT step FROM orders WHERE id = ?", (order,)).fetchone()
            if row is None or row[0] < number:
                raise OutOfOrder(f"{order} cannot be {step} yet")
        outcome = "done" if changed else "repeated"
        database.execute("INSERT INTO handled VALUES (?, ?)", (member, outcome))
    return outcome


def steps_done(path: str) -> int:
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as database:
        sql = "SELECT count(*) FROM handled WHERE outcome = 'done'"
        return int(database.execute(sql).fetchone()[0])


def orders_at(path: str, step: str) -> int:
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as database:
        sql = "SELECT count(*) FROM orders WHERE step = ?"
        return int(database.execute(sql, (STEPS.index(step) + 1,)).fetchone()[0])


def place_orders(producer: Producer, order_count: int, name: str) -> None:
    """All are created, then all are paid, then all are shipped: the steps of one are far apart."""
    for step in STEPS:
        for number in range(order_count):
            order = f"{name}-{number}"
            producer.send(Message(TOPIC, step, keys=order, sharding_key=order))


def work_as_member(namesrv: str, member: str, path: str) -> None:
    """One process of the group, until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def handle(message: ReceivedMessage) -> None:
        take_step(path, member, message.keys, message.body.decode())

    with PushConsumer(
        namesrv, group=GROUP, topics=TOPIC, handler=handle, orderly=True, start_at="first"
    ):
        stop.wait()


def start_member(namesrv: str, member: str, path: str) -> subprocess.Popen[bytes]:
    words = ["--namesrv", namesrv, "--member", member, "--database", path]
    return subprocess.Popen([sys.executable, os.path.abspath(__file__), *words])


def wait_until(holds: Callable[[], bool], timeout_seconds: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the orders are not shipped; does the broker run?")
        time.sleep(0.05)


def run(namesrv: str, path: str, *, order_count: int = 100, member_count: int = 3) -> None:
    """Orders from the first step to the last, with the loss of a member."""
    create_tables(path)
    with Admin(namesrv) as admin:
        admin.create_topic(TOPIC, queues=8)
    name = f"order-{int(time.time())}"
    steps_total = order_count * len(STEPS)
    members = [
        start_member(namesrv, f"member-{number}", path) for number in range(1, member_count + 1)
    ]
    try:
        with Producer(namesrv, group="shop") as producer:
            place_orders(producer, order_count, name)
        wait_until(lambda: steps_done(path) >= steps_total // 10)
        members[0].kill()
        print(f"{order_count} orders, {member_count} members; member-1 is killed")
        wait_until(lambda: steps_done(path) >= steps_total)
    finally:
        for process in members:
            process.terminate()
            process.wait()
    print(f"{orders_at(path, 'shipped')} orders are shipped, each after {' and '.join(STEPS[:-1])}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="An order's life, in order.")
    parser.add_argument("--namesrv", default=os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876"))
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--database", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.member:
        work_as_member(arguments.namesrv, arguments.member, arguments.database)
        return
    with tempfile.TemporaryDirectory() as directory:
        run(arguments.namesrv, os.path.join(directory, "orders.db"))


if __name__ == "__main__":
    main()
