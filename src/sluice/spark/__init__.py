"""This package is the Spark data source `sluice`: topics as tables and streams.

Spark finds it through the module `pyspark_sluice`. What runs where:

    source.py      on the driver: options in, readers and writers out
    options.py     every option, checked when the DataFrame is made
    columns.py     the columns, their types and defaults
    positions.py   offsets as Spark's checkpoint and the options have them
    planning.py    which offsets a batch takes and how they are divided; pure
    pushdown.py    which filters of a query the source answers itself; pure
    cluster.py     nameservers and brokers: routes, offsets, reads, sends; in every process
    decode.py      stored entries -> Arrow columns; on executors
    reading.py     one task's read, fetching ahead; on executors
    batch.py       the reader of a batch query      stream.py   that of a stream
    encode.py      Arrow columns -> batches of messages; on executors
    writing.py     the writers

Nothing here is imported before it is needed: Spark imports `pyspark_sluice` in every session.
"""
