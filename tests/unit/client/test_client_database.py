"""A message and a database transaction: both happen, or neither does."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sluice import DatabaseProducer, Message, PullConsumer, ReceivedMessage, TransactionState
from sluice.client.core.messages import read_pulled
from sluice.clock import wall_ms
from sluice.errors import ConfigError, LinkLost
from tests.unit.client.admin_kit import Site
from tests.unit.client.test_core_messages import QUEUE, entry


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


def test_a_block_that_takes_too_long_changes_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker was told to drop the message, so the database must not have the rest."""
    given_up = threading.Event()
    plain = DatabaseProducer._check

    def check(self: DatabaseProducer, message: ReceivedMessage) -> TransactionState:
        state = plain(self, message)
        if state is TransactionState.ROLLBACK and message.body == b"late":
            given_up.set()
        return state

    monkeypatch.setattr(DatabaseProducer, "_check", check)
    shop = Shop(site, tmp_path, heartbeat_ms=200, patience_seconds=0)

    def take_long(producer: DatabaseProducer, connection: sqlite3.Connection) -> None:
        with producer.message(connection, Message("Long", "late")):
            assert given_up.wait(60)
            connection.execute("INSERT INTO orders VALUES ('late')")

    with shop.producer as producer, contextlib.closing(shop.connect()) as connection:
        with pytest.raises(sqlite3.IntegrityError) as raised:
            take_long(producer, connection)
        assert "patience_seconds" in str(raised.value.__notes__)
        with producer.message(connection, Message("Long", "fine")):
            connection.execute("INSERT INTO orders VALUES ('fine')")
        assert shop.orders() == ["fine"]
        assert received(site, "Long", 1) == [b"fine"]


def test_what_the_table_answers(tmp_path: Path, site: Site) -> None:
    shop = Shop(site, tmp_path, patience_seconds=3600)
    (question,) = read_pulled(entry(b"x", born_ms=wall_ms()), QUEUE)
    (old,) = read_pulled(entry(b"x", born_ms=1), QUEUE)
    assert shop.producer._check(question) is TransactionState.UNKNOWN
    with contextlib.closing(shop.connect()) as connection:
        rows = "SELECT message_id, created_ms < 0 FROM sluice_transactions"
        assert shop.producer._check(old) is TransactionState.ROLLBACK
        assert connection.execute(rows).fetchall() == [("U1", 1)]
        assert shop.producer._check(question) is TransactionState.ROLLBACK
        shop.producer.prune(3600)  # it is as young as a row would be
        assert connection.execute(rows).fetchall() == [("U1", 1)]
        shop.producer.prune(-3600)
        assert connection.execute(rows).fetchall() == []
        connection.execute("INSERT INTO sluice_transactions VALUES ('U1', 5)")
        connection.commit()
    assert shop.producer._check(old) is TransactionState.COMMIT


def test_a_row_that_is_just_being_written_is_waited_for(tmp_path: Path, site: Site) -> None:
    shop = Shop(site, tmp_path, patience_seconds=0)
    (old,) = read_pulled(entry(b"x", born_ms=1), QUEUE)
    shop.producer._connect = lambda: sqlite3.connect(shop.path, timeout=0)
    with contextlib.closing(shop.connect()) as connection:
        connection.execute("INSERT INTO sluice_transactions VALUES ('U1', 5)")
        assert shop.producer._check(old) is TransactionState.UNKNOWN
        connection.commit()
    assert shop.producer._check(old) is TransactionState.COMMIT


def test_a_broker_that_is_not_told_asks_and_nothing_is_raised(
    site: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unheard(*_: object, **__: object) -> None:
        raise LinkLost("nobody hears it")

    shop = Shop(site, tmp_path, heartbeat_ms=200)
    with shop.producer as producer, contextlib.closing(shop.connect()) as connection:
        with monkeypatch.context() as patch:
            patch.setattr("sluice.client.aio.transactions.TransactionProducer.end", unheard)
            with producer.message(connection, Message("Unheard", "kept")):
                connection.execute("INSERT INTO orders VALUES ('kept')")
            with (
                pytest.raises(ValueError, match="mine"),
                producer.message(connection, Message("Unheard", "dropped")),
            ):
                raise ValueError("mine")
        assert shop.orders() == ["kept"]
        assert received(site, "Unheard", 1) == [b"kept"]
    assert "the commit of" in caplog.text
    assert "the rollback of" in caplog.text


def test_who_rolls_the_message_back_rolls_back_both(site: Site, tmp_path: Path) -> None:
    shop = Shop(site, tmp_path)
    with shop.producer as producer, contextlib.closing(shop.connect()) as connection:
        with producer.message(connection, Message("Undone", "no")) as half:
            connection.execute("INSERT INTO orders VALUES ('no')")
            half.rollback()
        with producer.message(connection, Message("Undone", "yes")) as half:
            connection.execute("INSERT INTO orders VALUES ('yes')")
            half.commit()
        assert shop.orders() == ["yes"]
        assert received(site, "Undone", 1) == [b"yes"]


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="plain name"):
        DatabaseProducer("h:1", connect=dict, table="x; DROP TABLE y")
    with pytest.raises(ConfigError, match="qmark, format, pyformat"):
        DatabaseProducer("h:1", connect=dict, paramstyle="named")


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
