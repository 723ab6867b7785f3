"""This package is Sluice: a message queue that RocketMQ's clients use, on RocketMQ's disk format.

What exists today, and where (arrows of import point down only; tests/tidy/test_imports.py watches):

    cli.py           the `sluice` command; serve.py runs the processes, demo.py makes a small store
    client/          what the command line asks brokers for
    nameserver/      which broker serves which topic: routes.py the table, api.py its requests
    broker/          what a broker does for its clients
      server.py        the process; core.py joins the services; registration.py tells nameservers
      remoting_api.py  RocketMQ's requests -> services -> answers; admin_*.py those of mqadmin
      sending.py       sends                pulling.py       pulls; long_polling.py holds them
      topics.py        topics               groups.py        groups, and who is connected
      offsets.py       committed offsets    locks.py         queues lent to ordered consumers
      filters.py       tags                 stats.py         counters and rates
    link.py          requests and answers over one connection
    net.py           frames over TCP: limits, time-outs, TLS
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
      framing.py       frames out of any chunks; remoting*.py RocketMQ's commands and bodies
    config/          every setting: default, unit, limit, RocketMQ's name
    model.py         the values that every layer shares
    errors.py        the one table of errors

Importing this package imports nothing else.
"""

from sluice._version import __version__

__all__ = ["__version__"]
