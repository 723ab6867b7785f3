"""This package is Sluice: a message queue for RocketMQ's and Kafka's clients, on RocketMQ's format.

What exists today, and where (arrows of import point down only; tests/tidy/test_imports.py watches):

    cli.py           the `sluice` command; serve.py runs the processes, demo.py makes a small store
    pages.py         writes the pages of docs/ that are made from declarations
    testing/         a broker, time and faults for tests of users: the pytest plugin
    aio.py           the client for asyncio; this package itself exports the blocking one
    client/          the client, and what the command line asks brokers for
      core/            what the client decides: routes, retries, batches, allocation, offsets
      aio/             drives it with asyncio  sync/           the same for threads that block
      simple.py        routes, sends, pulls   messages.py      messages by id, key, offset
      admin.py         what administrators ask, as values; group_checks.py judges a group
      administration/  what they do, as methods: the client `Admin`
      admin_main.py    `sluice admin`: admin_*.py its commands, printing.py tables and JSON
    collector/       `sluice collect`: follows files and sends their lines
    replay/          `sluice record` and `sluice replay`: traffic in files, sent again
    spark/           topics as Spark tables and streams; `pyspark_sluice` is where Spark finds it
    pipelines/       `sluice pipeline` and `sluice story`: PySpark over topics, ready pipelines
    tables/          topics into Parquet and Delta tables, exactly once; `sluice table`
    nameserver/      which broker serves which topic: routes.py the table, api.py its requests
    broker/          what a broker does for its clients
      server.py        the process; core.py joins the services; registration.py tells nameservers
      remoting_api.py  RocketMQ's requests -> services -> answers; admin_*.py those of mqadmin
      sending.py       sends; send_api.py their requests, with a short way for the usual one
      pulling.py       pulls; long_polling.py holds them
      bulk.py          reads of megabytes   staged_writes.py   batches that are published once
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
      kafka_groups.py  groups of Kafka's clients; kafka_group*.py one of them
      kafka_offsets.py what they have committed
      kafka_transactions.py  transactions of Kafka's producers; stable_offsets.py for readers
      kafka_door.py    Kafka's clients; kafka_api.py its table, kafka_*.py who answers
      producer_states.py  what Kafka's producers sent last; kafka_unfolding.py for RocketMQ
      kafka_delays.py     records of theirs that come later
      metrics.py       what is measured
    link.py          requests and answers over one connection
    net.py           frames over TCP: limits, time-outs; tls.py certificates and whom to trust
    tcp.py           sets up sockets: nothing is joined, and on one machine nothing is paced
    log_share.py     how many log lines one peer is worth; heap.py keeps memory for the next request
    metrics_http.py  /metrics and /healthz; process_metrics.py what the system says of a process
    storage/         one machine's durable log and its indexes
      store.py         the facade for an event loop; blocking.py the same for threads
      opening.py       opens a store; recovery.py finds the true end after a crash
      commit_log.py    the log: entries in, positions out; runs.py stages a batch
      slow_pages.py    memory for what is written next, where it is slow to get; old_pages.py gives
                       back that of old parts, page_blocks.py writes so that it is found again
      residency.py     what of a file is in memory; warmed.py where the system cannot tell
      mends.py         brings back pages that are missing between others that are there
      stretches.py     what is known to be in memory of a large file
      flush.py         group commit: who waits, when it is durable
      queue_index.py   (topic, queue, offset) -> position; reads.py answers reads, plain_reads.py
                       the usual ones
      key_index.py     key -> positions; indexing.py keeps it at the log's heels
      memory_topics.py topics whose messages are never written
      origins.py       entries made from others; copies.py makes them
      staging.py       what is staged and not published yet
      state.py         settings and committed offsets: entries of the log
      topic_removal.py deletes topics; closing.py closes the store
      housekeeping.py  from time to time: checkpoint.py, retention.py, snapshot.py
      background.py    slow work, away from the owner's thread
      files.py         the disk as a parameter; memory_files.py one that crashes and fails
      inspect.py       prints a store
    protocol/        bytes <-> values, no IO
      records.py       the stored message; record_runs.py a batch of them
      kafka.py         Kafka's requests and answers; kafka_*.py batches, views, bounds
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
    from sluice.client.core.allocation import by_config, by_machine_room, machine_room_nearby
    from sluice.client.core.messages import Message, ReceivedMessage, SendResult, SendStatus
    from sluice.client.core.selectors import (
        hash_selector,
        machine_room_selector,
        random_selector,
    )
    from sluice.client.core.subscriptions import Sql
    from sluice.client.core.transactions import TransactionState
    from sluice.client.sync.admin import Admin
    from sluice.client.sync.consumers import PullConsumer, PushConsumer
    from sluice.client.sync.database import DatabaseProducer
    from sluice.client.sync.producers import Producer, TransactionProducer
    from sluice.protocol.json_members import MessageQueue
    from sluice.protocol.remoting_bodies import TopicConfig
    from sluice.protocol.remoting_reports import GroupConfig

_NAMES = {
    "Admin": "client.sync.admin",
    "DatabaseProducer": "client.sync.database",
    "GroupConfig": "protocol.remoting_reports",
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
    "TopicConfig": "protocol.remoting_bodies",
    "TransactionProducer": "client.sync.producers",
    "TransactionState": "client.core.transactions",
    "by_config": "client.core.allocation",
    "by_machine_room": "client.core.allocation",
    "hash_selector": "client.core.selectors",
    "machine_room_nearby": "client.core.allocation",
    "machine_room_selector": "client.core.selectors",
    "random_selector": "client.core.selectors",
}

__all__ = [
    "Admin",
    "DatabaseProducer",
    "GroupConfig",
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
    "TopicConfig",
    "TransactionProducer",
    "TransactionState",
    "__version__",
    "by_config",
    "by_machine_room",
    "hash_selector",
    "machine_room_nearby",
    "machine_room_selector",
    "random_selector",
]


def __getattr__(name: str) -> Any:
    """A name of the client, imported when it is first asked for."""
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sluice.{module}"), name)
    globals()[name] = value
    return value
