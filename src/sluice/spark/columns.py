"""This module knows the columns of the source: Kafka's seven, and what RocketMQ's messages have
beside them.

Spark prunes no columns of a Python source: what is not wanted is still made. So the default is
lean, and the option `columns` (or a schema given by the user) says what is made.
"""

from __future__ import annotations

from typing import Final

from sluice.errors import ConfigError

# Name -> type, as Spark's DDL has it. The first seven are those of Spark's Kafka source.
COLUMNS: Final = {
    "key": "BINARY",
    "value": "BINARY",
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "timestamp": "TIMESTAMP",
    "timestampType": "INT",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
    "tag": "STRING",
    "keys": "ARRAY<STRING>",
    "bornTimestamp": "TIMESTAMP",
    "messageId": "STRING",
    "broker": "STRING",
}
DEFAULT: Final = tuple(COLUMNS)[:7]
HEADERS: Final = "headers"
# Kafka's numbers for what `timestamp` is: what the producer said, or when the broker stored it.
CREATE_TIME: Final = 0
STORE_TIME: Final = 1


def choose(names: str, *, with_headers: bool) -> tuple[str, ...]:
    """The columns that the option `columns` asks for; empty text: the default."""
    if not names:
        return (*DEFAULT, HEADERS) if with_headers else DEFAULT
    wanted = tuple(name.strip() for name in names.split(","))
    known = {name.lower(): name for name in COLUMNS}
    unknown = [name for name in wanted if name.lower() not in known]
    if unknown:
        raise ConfigError(
            f"option columns: {unknown[0]!r} is no column; there are {', '.join(COLUMNS)}"
        )
    chosen = tuple(known[name.lower()] for name in wanted)
    if len(set(chosen)) != len(chosen):
        raise ConfigError(f"option columns: {names!r} names a column twice")
    if with_headers and HEADERS not in chosen:
        raise ConfigError("option includeHeaders is true, but option columns leaves headers out")
    return chosen


def ddl(names: tuple[str, ...]) -> str:
    """The schema of these columns as text."""
    return ", ".join(f"{name} {COLUMNS[name]}" for name in names)


def check_schema(fields: list[tuple[str, str]]) -> tuple[str, ...]:
    """The columns of a schema that a user gave: (name, type as Spark's `simpleString`)."""
    expected = {name: _simple(kind) for name, kind in COLUMNS.items()}
    for name, kind in fields:
        if name not in expected:
            raise ConfigError(
                f"the schema names a column {name!r}; the source has {', '.join(COLUMNS)}"
            )
        if kind != expected[name]:
            raise ConfigError(f"the schema says that {name} is {kind}; it is {expected[name]}")
    return tuple(name for name, _ in fields)


def check_choice(names: tuple[str, ...], chosen: tuple[str, ...], given: tuple[str, ...]) -> None:
    """Refuse options that ask for other columns than the schema; `chosen` is what they ask for."""
    if "columns" in given and set(names) != set(chosen):
        raise ConfigError(
            f"option columns asks for {', '.join(chosen)}, and the schema for {', '.join(names)}; "
            "give one of them"
        )
    if HEADERS in chosen and HEADERS not in names:
        raise ConfigError("option includeHeaders is true, but the schema leaves headers out")


def _simple(kind: str) -> str:
    return kind.lower().replace(": ", ":").replace(", ", ",")
