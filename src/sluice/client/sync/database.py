"""This module ties a message to a database transaction: both happen, or neither does.

    half message --> the caller's statements + a row with the message's id --> commit --> delivered
                                                                     |
                     error: rollback, the message is dropped <-------+

The row is written in the same transaction as the caller's statements. So whoever is asked later
what became of a half message (after a crash between the two commits) looks for the row. Where it is
not there after a while, a tombstone takes its place: a block that goes on all the same cannot write
its row any more, and is rolled back. Works with DB-API connections, and with SQLAlchemy's
connections and sessions.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from sluice.client.core.messages import Message, ReceivedMessage
from sluice.client.core.transactions import TransactionState
from sluice.client.sync.producers import Transaction, TransactionProducer
from sluice.clock import wall_ms
from sluice.errors import ConfigError, SluiceError

log_lines = logging.getLogger("sluice.client")

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,120}")
_MARKS: Final = {
    "qmark": ("?", "?"),
    "format": ("%s", "%s"),
    "pyformat": ("%s", "%s"),  # all drivers of this style take values by their place as well
    "numeric": (":1", ":2"),
}


class DatabaseProducer(TransactionProducer):
    """A producer of messages that belong to database transactions.

    `connect` makes a connection of its own for each question about an old message. `paramstyle` is
    the driver's: qmark (sqlite3), format or pyformat (psycopg, MySQL), numeric (Oracle).
    """

    def __init__(
        self,
        nameservers: str | Sequence[str] | None = None,
        *,
        connect: Callable[[], Any],
        table: str = "sluice_transactions",
        paramstyle: str = "qmark",
        patience_seconds: float = 60.0,
        **options: Any,
    ) -> None:
        """`patience_seconds`: a transaction without a row is believed to go on for so long. One
        that takes longer may be rolled back, with its message.
        """
        if not _NAME.fullmatch(table):
            raise ConfigError(f"table {table!r} is no plain name")
        if paramstyle not in _MARKS:
            raise ConfigError(f"paramstyle {paramstyle!r}: allowed are {', '.join(_MARKS)}")
        first, second = _MARKS[paramstyle]
        self._connect = connect
        self._patience_ms = patience_seconds * 1000
        # The name is checked above, and is the only part that is not a parameter.
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} "
            "(message_id VARCHAR(64) PRIMARY KEY, created_ms BIGINT NOT NULL)"
        )
        columns = "(message_id, created_ms)"
        self._insert = f"INSERT INTO {table} {columns} VALUES ({first}, {second})"  # noqa: S608
        # A tombstone is a row whose time is negative: tables of two columns are there already.
        self._find = f"SELECT created_ms FROM {table} WHERE message_id = {first}"  # noqa: S608
        is_old = f"created_ms < {first} AND created_ms > {second}"
        self._prune = f"DELETE FROM {table} WHERE {is_old}"  # noqa: S608
        super().__init__(nameservers, checker=self._check, **options)

    def create_table(self) -> None:
        """Make the table, where it does not exist yet."""
        with contextlib.closing(self._connect()) as connection:
            _execute(connection, self._create, ())
            connection.commit()

    def prune(self, older_than_seconds: float = 7 * 86_400) -> None:
        """Delete rows of messages that no broker asks for any more."""
        limit_ms = wall_ms() - int(older_than_seconds * 1000)
        with contextlib.closing(self._connect()) as connection:
            _execute(connection, self._prune, (limit_ms, -limit_ms))
            connection.commit()

    @contextlib.contextmanager
    def message(self, connection: Any, message: Message) -> Iterator[Transaction]:
        """Deliver a message if, and only if, what the block does on the connection is committed.

        The block must not commit itself; one that rolls the message back itself rolls back both.
        Where the commit raises, nobody knows whether it was done: the broker asks later, and the
        table answers. It does so too where the broker was not told: then nothing is raised.
        """
        half = self.begin(message)
        try:
            yield half
            if half.state is not TransactionState.ROLLBACK:
                self._write_row(connection, half.message_id)
        except BaseException:
            connection.rollback()
            half.give_up()
            raise
        if half.state is TransactionState.ROLLBACK:
            connection.rollback()
            return
        connection.commit()
        try:
            if half.state is None:
                half.commit()
        except SluiceError as error:
            text = "the commit of %s was not told, its broker asks for it: %s"
            log_lines.warning(text, half.message_id, error)

    def _write_row(self, connection: Any, message_id: str) -> None:
        try:
            _execute(connection, self._insert, (message_id, wall_ms()))
        except Exception as error:
            error.add_note(
                "where the row is there already the block took longer than patience_seconds, and "
                "the message was given up: make it quicker, or give it more time"
            )
            raise

    def _check(self, message: ReceivedMessage) -> TransactionState:
        with contextlib.closing(self._connect()) as connection:
            rows = _execute(connection, self._find, (message.message_id,))
            if rows:
                return TransactionState.COMMIT if rows[0][0] >= 0 else TransactionState.ROLLBACK
            if wall_ms() - message.born_ms < self._patience_ms:
                return TransactionState.UNKNOWN
            try:
                _execute(connection, self._insert, (message.message_id, -wall_ms()))
                connection.commit()
            except Exception as error:  # every driver has its own; perhaps the block is quicker
                connection.rollback()
                log_lines.warning("%s cannot be given up now: %r", message, error)
                return TransactionState.UNKNOWN
        return TransactionState.ROLLBACK


def _execute(connection: Any, statement: str, values: tuple[object, ...]) -> list[Any]:
    """Run a statement on whatever this is; its rows, where it has any."""
    if callable(getattr(connection, "connection", None)):  # a session of SQLAlchemy's
        connection = connection.connection()
    if hasattr(connection, "exec_driver_sql"):
        result = connection.exec_driver_sql(statement, values)
        return list(result) if result.returns_rows else []
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute(statement, values)
        return list(cursor.fetchall()) if cursor.description else []
