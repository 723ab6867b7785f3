"""This package is Sluice: a message queue on Apache RocketMQ's disk format.

What exists today, and where (arrows of import point down only; tests/tidy/test_imports.py watches):

    cli.py           the `sluice` command; demo.py makes a small store to look at
    storage/         one machine's durable log and its indexes
      store.py         the facade for an event loop; blocking.py the same for threads
      opening.py       opens a store; recovery.py finds the true end after a crash
      commit_log.py    the log: entries in, positions out
      flush.py         group commit: who waits, when it is durable
      queue_index.py   (topic, queue, offset) -> position; reads.py answers reads
      key_index.py     key -> positions; indexing.py keeps it at the log's heels
      state.py         settings and committed offsets: entries of the log
      housekeeping.py  from time to time: checkpoint.py, retention.py, snapshot.py
      background.py    slow work, away from the owner's thread
      files.py         the disk as a parameter; memory_files.py one that crashes and fails
      inspect.py       prints a store
    protocol/        bytes <-> values, no IO
      records.py       the stored message
    config/          every setting: default, unit, limit, RocketMQ's name
    model.py         the values that every layer shares
    errors.py        the one table of errors

Importing this package imports nothing else.
"""

from sluice._version import __version__

__all__ = ["__version__"]
