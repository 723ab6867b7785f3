"""This module reads the option `schema`: what the columns of a table are, and how values are read.

    not given                      rows as they are
    "json"                         JSON; the fields are inferred from the first rows, then kept
    "host STRING, coins INT"       JSON, by Spark's DDL
    '{"type": "record", ...}'      Avro, by Avro's own schema

It runs on the driver; DDL is parsed by Spark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sluice.errors import ConfigError
from sluice.tables.json_rows import JsonRows
from sluice.tables.rows import DATE, ORIGIN, Rows, check_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

INFERRED: Final = "json"
SAMPLE_ROWS: Final = 1000
# Types that Arrow shows as structs of their insides. A name stands before a colon, a type behind.
_PACKED: Final = re.compile(r"[:<,](variant|geometry|geography)\b(?!:)")


class Shape:
    """What the rows of a stream become."""

    def __init__(self, given: str | None, partition_by: Sequence[str]) -> None:
        self.given = (given or "").strip()
        self.partition_by = tuple(partition_by)
        if len(set(self.partition_by)) < len(self.partition_by):
            raise ConfigError("option partition_by names a column twice")
        if given is not None and not self.given:
            raise ConfigError("option schema is empty; leave it out to write rows as they are")

    @property
    def is_inferred(self) -> bool:
        return self.given.lower() == INFERRED

    def known(self, frame: DataFrame) -> Rows | None:
        """How rows are made; None where the first rows have to be seen first."""
        names = frame.columns
        check_frame(names, has_schema=bool(self.given), partition_by=self.partition_by)
        if self.is_inferred:
            return None
        if not self.given:
            return self._with_date(Rows(arrow_of(frame.schema), None))
        if self.given.startswith("{"):
            from sluice.tables.avro_rows import AvroRows

            values = AvroRows(self.given)
            return self._with_date(Rows(_whole(values.schema), values))
        return self._json(_from_ddl(self.given))

    def inferred(self, values: Sequence[bytes | None]) -> Rows:
        """How rows are made, by a sample of values."""
        from sluice.tables.json_rows import infer

        return self._json(infer(values))

    def kept(self, table: StructType) -> Rows:
        """How rows are made for a table whose fields were inferred before."""
        own = {f"_{name}" for name, _ in ORIGIN} | {DATE}
        schema = arrow_of(table)
        return self._json(pa.schema([each for each in schema if each.name not in own]))

    def _json(self, fields: pa.Schema) -> Rows:
        return self._with_date(Rows(_whole(fields), JsonRows(fields)))

    def _with_date(self, rows: Rows) -> Rows:
        schema = rows.schema
        if DATE in self.partition_by and DATE not in schema.names:
            schema = schema.append(pa.field(DATE, pa.date32()))
        lower = [name.lower() for name in schema.names]
        twice = sorted({name for name in lower if lower.count(name) > 1})
        if twice:
            raise ConfigError(f"option schema: column {twice[0]} is there twice (case is ignored)")
        for name in self.partition_by:
            if name not in schema.names:
                raise ConfigError(
                    f"option partition_by: {name!r} is no column; there are "
                    f"{', '.join(schema.names)} and {DATE}"
                )
            kind = schema.field(name).type
            if not (
                pa.types.is_string(kind)
                or pa.types.is_integer(kind)
                or pa.types.is_date32(kind)
                or pa.types.is_boolean(kind)
            ):
                raise ConfigError(f"option partition_by: a table cannot be divided by {kind}")
        if len(self.partition_by) == len(schema.names):
            raise ConfigError("option partition_by: a column must be left for the files")
        return rows.with_schema(schema)


def _whole(fields: pa.Schema) -> pa.Schema:
    """The fields of the values, and where they are from."""
    return pa.schema([*fields, *(pa.field(f"_{name}", kind) for name, kind in ORIGIN)])


def _from_ddl(text: str) -> pa.Schema:
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType, StructType

    try:
        found = DataType.fromDDL(text)
    except PySparkException as error:
        raise ConfigError(
            f"option schema: {text[:80]!r} is neither 'json' nor DDL, as 'host STRING, coins INT', "
            f"nor an Avro schema: {str(error).strip().splitlines()[0]}"
        ) from None
    if not isinstance(found, StructType) or not found.fields:
        raise ConfigError(
            f"option schema: {text[:80]!r} names no columns, as 'host STRING, coins INT' does"
        )
    packed = _PACKED.search(found.simpleString())
    if packed is not None:
        raise ConfigError(f"option schema: {packed[1].upper()} cannot be read from JSON")
    return arrow_of(found)


def arrow_of(schema: StructType) -> pa.Schema:
    """Spark's schema as Arrow's."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        found = to_arrow_schema(schema, timezone="UTC")
    except PySparkException as error:
        raise ConfigError(f"option schema: {error}") from None
    return pa.schema([pa.field(each.name, each.type, each.nullable) for each in found])


def spark_of(schema: pa.Schema) -> StructType:
    """Arrow's schema as Spark's."""
    from pyspark.sql.pandas.types import from_arrow_schema

    found: StructType = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    return found
