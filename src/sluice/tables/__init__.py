"""This package writes topics into tables of files, exactly once, from PySpark (docs/tables.md).

    api.py         what users call
    sinks.py       what both kinds of tables share on the driver: checks, dead letters
    parquet.py     a stream into a Parquet table      delta.py       into a Delta table
    schemas.py     the option `schema`                rows.py        rows of a table from messages
    json_rows.py   values that are JSON               avro_rows.py   values that are Avro
    log.py         which files are the table          compaction.py  many small files -> few
    parquet_files.py  writes them                     command.py     `sluice table`

Spark and Arrow are imported when they are used, not here.
"""

from sluice.tables.api import compact, files, read, starting_offsets, sweep, write_stream

__all__ = ["compact", "files", "read", "starting_offsets", "sweep", "write_stream"]
