"""A message and a database transaction: both happen, or neither does."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

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


# ----------------------------------------------------------------------------------- SQLAlchemy


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    name: Mapped[str] = mapped_column(primary_key=True)


class Alchemist:
    """A shop whose database is SQLAlchemy's: questions are answered over its connections too."""

    def __init__(self, site: Site, path: Path, **options: Any) -> None:
        self.engine = create_engine(f"sqlite:///{path / 'shop.db'}")
        Base.metadata.create_all(self.engine)
        self.producer = DatabaseProducer(
            site.nameserver.address, connect=self.engine.connect, group="alchemist", **options
        )
        self.producer.create_table()

    def orders(self) -> list[str]:
        with Session(self.engine) as session:
            return sorted(session.scalars(select(Order.name)))


@pytest.fixture
def alchemist(site: Site, tmp_path: Path) -> Iterator[Alchemist]:
    shop = Alchemist(site, tmp_path, heartbeat_ms=200)
    with shop.producer:
        yield shop
    shop.engine.dispose()


def test_a_session_and_a_message(site: Site, alchemist: Alchemist) -> None:
    producer = alchemist.producer
    with Session(alchemist.engine) as session:
        with producer.message(session, Message("Session", "one")):
            session.add(Order(name="one"))

        def fail() -> None:
            with producer.message(session, Message("Session", "two")):
                session.add(Order(name="two"))
                session.flush()
                raise ValueError("no money")

        with pytest.raises(ValueError, match="no money"):
            fail()
        with producer.message(session, Message("Session", "three")):
            session.add(Order(name="three"))
    assert alchemist.orders() == ["one", "three"]
    assert sorted(received(site, "Session", 2)) == [b"one", b"three"]


def test_a_connection_and_a_message(site: Site, alchemist: Alchemist) -> None:
    with alchemist.engine.connect() as connection:
        with alchemist.producer.message(connection, Message("Connection", "one")):
            connection.execute(insert(Order).values(name="one"))

        def twice() -> None:
            with alchemist.producer.message(connection, Message("Connection", "two")):
                connection.execute(insert(Order).values(name="one"))

        with pytest.raises(IntegrityError):
            twice()
    assert alchemist.orders() == ["one"]
    assert received(site, "Connection", 1) == [b"one"]
    alchemist.producer.prune(0)


def test_a_crash_is_settled_over_the_engine(
    site: Site, alchemist: Alchemist, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: object) -> None:
        raise KeyboardInterrupt

    with Session(alchemist.engine) as session, monkeypatch.context() as patch:
        patch.setattr("sluice.client.sync.producers.Transaction.commit", crash)
        with (
            pytest.raises(KeyboardInterrupt),
            alchemist.producer.message(session, Message("Settled", "kept")),
        ):
            session.add(Order(name="kept"))
    assert alchemist.orders() == ["kept"]
    assert received(site, "Settled", 1) == [b"kept"]
