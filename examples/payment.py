"""This module shows a payment whose message exists if, and only if, the money was taken.

`DatabaseProducer` ties both: a half message that nobody sees yet, the database's transaction with a
row of the message's id, the message's commit. Two processes crash here, one before and one after
the database's commit. Nobody tells the broker what became of their messages, so it asks another
producer of the group, and the row, or its absence, answers.

    python -m examples.payment --namesrv 127.0.0.1:9876
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

from sluice import Admin, DatabaseProducer, Message, PullConsumer

TOPIC = "order-paid"
GROUP = "payments"
ACCOUNT = "alice"
CRASHES = ("before-commit", "after-commit")
CRASHED = 9


class NotEnough(Exception):
    """The account cannot pay for the order."""


def connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=60)


def create_tables(path: str, balance: int) -> None:
    with contextlib.closing(connect(path)) as database:
        database.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, balance INTEGER NOT NULL)")
        database.execute("CREATE TABLE payments (order_id TEXT PRIMARY KEY, amount INTEGER)")
        database.execute("INSERT INTO accounts VALUES (?, ?)", (ACCOUNT, balance))
        database.commit()


def paid_orders(path: str) -> dict[str, int]:
    """What the database says was paid."""
    with contextlib.closing(connect(path)) as database:
        return dict(database.execute("SELECT order_id, amount FROM payments").fetchall())


class Desk:
    """Takes money for orders. `patience_seconds`: no transaction takes longer than that."""

    def __init__(self, namesrv: str, path: str, patience_seconds: float) -> None:
        self.producer = DatabaseProducer(
            namesrv,
            group=GROUP,
            connect=partial(connect, path),
            patience_seconds=patience_seconds,
        )
        self._path = path

    def pay(self, order: str, amount: int, hook: Callable[[], None] = lambda: None) -> None:
        """Take the money and tell of it; `hook` runs before the commit of the database."""
        with contextlib.closing(connect(self._path)) as database:
            message = Message(TOPIC, f"{order} {amount}", keys=order)
            with self.producer.message(database, message):
                sql = "UPDATE accounts SET balance = balance - ? WHERE name = ? AND balance >= ?"
                if not database.execute(sql, (amount, ACCOUNT, amount)).rowcount:
                    raise NotEnough(f"{order}: {ACCOUNT} has less than {amount}")
                database.execute("INSERT INTO payments VALUES (?, ?)", (order, amount))
                hook()


def crash() -> None:
    """As kill -9: nothing is closed, nothing is said."""
    os._exit(CRASHED)


class CrashingConnection(sqlite3.Connection):
    """A database whose client dies right after the commit."""

    def commit(self) -> None:
        super().commit()
        crash()


def pay_and_crash(namesrv: str, path: str, order: str, when: str) -> None:
    """A process of its own, which does not survive this."""
    desk = Desk(namesrv, path, 60)
    desk.producer.start()
    if when == "before-commit":
        desk.pay(order, 10, hook=crash)
    message = Message(TOPIC, f"{order} 10", keys=order)
    database = sqlite3.connect(path, timeout=60, factory=CrashingConnection)
    with desk.producer.message(database, message):
        database.execute("UPDATE accounts SET balance = balance - 10")
        database.execute("INSERT INTO payments VALUES (?, 10)", (order,))


def run(namesrv: str, path: str, *, patience_seconds: float = 10.0) -> list[str]:
    """Four payments, of which two are made; the orders that shipping hears of."""
    create_tables(path, balance=100)
    with Admin(namesrv) as admin:
        admin.create_topic(TOPIC, queues=4)
    desk = Desk(namesrv, path, patience_seconds)
    desk.producer.create_table()
    for number, when in enumerate(CRASHES, 3):
        words = ["--namesrv", namesrv, "--database", path, "--crash", f"order-{number}", when]
        done = subprocess.run([sys.executable, os.path.abspath(__file__), *words], check=False)
        assert done.returncode == CRASHED, "it was to crash"
        print(f"order-{number}: the process crashed {when.replace('-', ' the ')}")
    with desk.producer:
        desk.pay("order-1", 30)
        print("order-1: paid 30")
        try:
            desk.pay("order-2", 1000)
        except NotEnough as error:
            print(error)
        expected = paid_orders(path)
        heard: list[str] = []
        with PullConsumer(namesrv, group="shipping", topics=TOPIC, start_at="first") as consumer:
            for message in consumer:
                heard.append(message.keys)
                if expected.keys() <= set(heard):
                    break
    print(f"shipping hears of {', '.join(sorted(heard))}")
    print(f"the database has  {', '.join(sorted(expected))}")
    return heard


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A payment and its message: both or neither.")
    parser.add_argument("--namesrv", default=os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876"))
    parser.add_argument("--patience-seconds", type=float, default=10.0)
    parser.add_argument("--database", help=argparse.SUPPRESS)
    parser.add_argument("--crash", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.crash:
        pay_and_crash(arguments.namesrv, arguments.database, *arguments.crash)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "bank.db")
        run(arguments.namesrv, path, patience_seconds=arguments.patience_seconds)


if __name__ == "__main__":
    main()
