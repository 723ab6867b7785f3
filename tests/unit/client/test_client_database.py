"""A message and a database transaction: both happen, or neither does."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice import DatabaseProducer, Message, PullConsumer
from sluice.errors import ConfigError
from tests.unit.client.admin_kit import Site


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(transaction_timeout_ms=100, transaction_check_interval_ms=100)
    site.start()
    yield site
    site.stop()


class Shop:
    """A database with orders, and a producer."""

    def __init__(self, site: Site, path: Path, **options: Any) -> None:
        self.path = path / "shop.db"
        self.producer = DatabaseProducer(
            site.nameserver.address, connect=self.connect, group="shop", **options
        )
        self.producer.create_table()
        with contextlib.closing(self.connect()) as connection:
            connection.execute("CREATE TABLE orders (name TEXT)")
            connection.commit()

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    def orders(self) -> list[str]:
        with contextlib.closing(self.connect()) as connection:
            return [row[0] for row in connection.execute("SELECT name FROM orders")]


def received(site: Site, topic: str, count: int) -> list[bytes]:
    with PullConsumer(
        site.nameserver.address, group=f"look-{topic}", topics=topic, start_at="first"
    ) as consumer:
        found: list[bytes] = []
        while len(found) < count:
            found += [message.body for message in consumer.poll()]
        return found


def test_both_or_neither(site: Site, tmp_path: Path) -> None:
    shop = Shop(site, tmp_path)
    with shop.producer as producer, contextlib.closing(shop.connect()) as connection:
        with producer.message(connection, Message("Paid", "one")):
            connection.execute("INSERT INTO orders VALUES ('one')")

        def fail() -> None:
            with producer.message(connection, Message("Paid", "two")):
                connection.execute("INSERT INTO orders VALUES ('two')")
                raise ValueError("no money")

        with pytest.raises(ValueError, match="no money"):
            fail()
        with producer.message(connection, Message("Paid", "three")):
            connection.execute("INSERT INTO orders VALUES ('three')")
        assert shop.orders() == ["one", "three"]
        assert sorted(received(site, "Paid", 2)) == [b"one", b"three"]
        producer.prune(0)


def test_a_crash_between_the_two_commits_is_settled_by_the_table(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has it, the broker was not told: it asks, and delivers."""
    shop = Shop(site, tmp_path, heartbeat_ms=200)
    with shop.producer as producer, contextlib.closing(shop.connect()) as connection:

        def crash(self: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("sluice.client.sync.producers.Transaction.commit", crash)
            with (
                pytest.raises(KeyboardInterrupt),
                producer.message(connection, Message("Crashed", "kept")),
            ):
                connection.execute("INSERT INTO orders VALUES ('kept')")
        assert shop.orders() == ["kept"]
        assert received(site, "Crashed", 1) == [b"kept"]


def test_what_the_database_never_had_is_dropped_when_patience_ends(
    site: Site, tmp_path: Path
) -> None:
    shop = Shop(site, tmp_path, heartbeat_ms=200, patience_seconds=0)
    with shop.producer as producer, contextlib.closing(shop.connect()) as connection:
        producer.begin(Message("Lost", "never"))  # and the process dies
        with producer.message(connection, Message("Lost", "fine")):
            pass
        assert received(site, "Lost", 1) == [b"fine"]


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="plain name"):
        DatabaseProducer("h:1", connect=dict, table="x; DROP TABLE y")
    with pytest.raises(ConfigError, match="qmark, format"):
        DatabaseProducer("h:1", connect=dict, paramstyle="pyformat")


class FakeSession:
    """What SQLAlchemy's session looks like from here."""

    def __init__(self, inner: sqlite3.Connection) -> None:
        self._inner = inner
        self.returns_rows = False

    def connection(self) -> Any:
        return self

    def exec_driver_sql(self, statement: str, values: tuple[object, ...]) -> Any:
        self._inner.execute(statement, values)
        return self

    def commit(self) -> None:
        self._inner.commit()

    def rollback(self) -> None:
        self._inner.rollback()


def test_sessions_of_sqlalchemy(site: Site, tmp_path: Path) -> None:
    shop = Shop(site, tmp_path)
    with shop.producer as producer, contextlib.closing(shop.connect()) as connection:
        with producer.message(FakeSession(connection), Message("Session", "one")):
            connection.execute("INSERT INTO orders VALUES ('one')")
        assert shop.orders() == ["one"]
        assert received(site, "Session", 1) == [b"one"]
