"""This package is Sluice: a message queue that RocketMQ's clients use, on RocketMQ's disk format.

What exists today, and where (arrows of import point down only; tests/tidy/test_imports.py watches):

    cli.py           the `sluice` command; serve.py runs the processes, demo.py makes a small store
    pages.py         writes the pages of docs/ that are made from declarations
    aio.py           the client for asyncio; this package itself exports the blocking one
    client/          the client, and what the command line asks brokers for
      core/            what the client decides: routes, retries, batches, allocation, offsets
      aio/             drives it with asyncio  sync/           the same for threads that block
      simple.py        routes, sends, pulls   messages.py      messages by id, key, offset
      admin.py         all that administrators ask, as values; group_checks.py judges a group
      admin_main.py    `sluice admin`: admin_*.py its commands, printing.py tables and JSON
    nameserver/      which broker serves which topic: routes.py the table, api.py its requests
    broker/          what a broker does for its clients
      server.py        the process; core.py joins the services; registration.py tells nameservers
      remoting_api.py  RocketMQ's requests -> services -> answers; admin_*.py those of mqadmin
      sending.py       sends; send_api.py their requests, with a short way for the usual one
      pulling.py       pulls; long_polling.py holds them
      topics.py        topics               groups.py        groups, and who is connected
      settings_table.py  how their settings change; topic_deletion.py what goes with a topic
      runtime_settings.py  the broker's own settings, changed while it runs
      offsets.py       committed offsets    locks.py         queues lent to ordered consumers
      allocation.py    which member of a group reads which queue
      filters.py       tags and SQL; sql_filter.py reads it, sql_*.py its parts and its values
      replies.py       answers to requests  stats.py         counters and rates
      admission.py     whether one more send is taken
      dedup.py         no business key twice; placing.py answers with the first one's place
      expiry.py        messages whose life ends   priorities.py    the queue by the priority
      memory_queues.py topics in memory only
      delays.py        messages that come later; delay_*.py its parts, timer_index.py what waits
      retries.py       what consumers fail with; retry_notes.py so that it is stored once
      pops.py          messages that are popped and acknowledged; pop_*.py its parts
      dead_letters.py  the desk for dead letters     ordering.py  queues that are read in order
      transactions.py  half messages, their ends, questions to producers; half_*.py its parts
      metrics.py       what is measured
    link.py          requests and answers over one connection
    net.py           frames over TCP: limits, time-outs; tls.py certificates and whom to trust
    log_share.py     how many log lines one peer is worth
    metrics_http.py  /metrics and /healthz; process_metrics.py what the system says of a process
    storage/         one machine's durable log and its indexes
      store.py         the facade for an event loop; blocking.py the same for threads
      opening.py       opens a store; recovery.py finds the true end after a crash
      commit_log.py    the log: entries in, positions out; runs.py stages a batch
      flush.py         group commit: who waits, when it is durable
      queue_index.py   (topic, queue, offset) -> position; reads.py answers reads
      key_index.py     key -> positions; indexing.py keeps it at the log's heels
      memory_topics.py topics whose messages are never written
      origins.py       entries made from others; copies.py makes them
      state.py         settings and committed offsets: entries of the log
      topic_removal.py deletes topics; closing.py closes the store
      housekeeping.py  from time to time: checkpoint.py, retention.py, snapshot.py
      background.py    slow work, away from the owner's thread
      files.py         the disk as a parameter; memory_files.py one that crashes and fails
      inspect.py       prints a store
    protocol/        bytes <-> values, no IO
      records.py       the stored message; record_runs.py a batch of them
      framing.py       frames out of any chunks; remoting*.py RocketMQ's commands and bodies
    config/          every setting: default, unit, limit, RocketMQ's name
    telemetry.py     metrics, times in buckets, Prometheus's text
    model.py         the values that every layer shares; clock.py the machine's time
    errors.py        the one table of errors

Importing this package imports nothing else: the client's names are brought when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sluice._version import __version__

if TYPE_CHECKING:
    from sluice.client.aio.observers import Observer
    from sluice.client.core.messages import Message, ReceivedMessage, SendResult, SendStatus
    from sluice.client.core.subscriptions import Sql
    from sluice.client.core.transactions import TransactionState
    from sluice.client.sync.consumers import PullConsumer, PushConsumer
    from sluice.client.sync.database import DatabaseProducer
    from sluice.client.sync.producers import Producer, TransactionProducer
    from sluice.protocol.json_members import MessageQueue

_NAMES = {
    "DatabaseProducer": "client.sync.database",
    "Message": "client.core.messages",
    "MessageQueue": "protocol.json_members",
    "Observer": "client.aio.observers",
    "Producer": "client.sync.producers",
    "PullConsumer": "client.sync.consumers",
    "PushConsumer": "client.sync.consumers",
    "ReceivedMessage": "client.core.messages",
    "SendResult": "client.core.messages",
    "SendStatus": "client.core.messages",
    "Sql": "client.core.subscriptions",
    "TransactionProducer": "client.sync.producers",
    "TransactionState": "client.core.transactions",
}

__all__ = [
    "DatabaseProducer",
    "Message",
    "MessageQueue",
    "Observer",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "ReceivedMessage",
    "SendResult",
    "SendStatus",
    "Sql",
    "TransactionProducer",
    "TransactionState",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """A name of the client, imported when it is first asked for."""
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sluice.{module}"), name)
    globals()[name] = value
    return value
