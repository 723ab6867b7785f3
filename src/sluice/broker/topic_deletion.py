"""This module deletes a topic everywhere at once: settings, queues, offsets, statistics, waiters.

From the moment it is asked for, nobody sees anything of the topic, and its name is free. If the
store cannot write it down, everything is as it was. It knows no wire format.
"""

from __future__ import annotations

from sluice.broker.core import BrokerCore
from sluice.broker.settings_table import Done
from sluice.broker.topics import CLOSED_TOPICS
from sluice.errors import SluiceError


def delete_topic(core: BrokerCore, name: str, done: Done) -> None:
    """`done(None)` when the topic is gone for good, or never was there."""
    settings = core.topics.get(name)
    has_offsets = name in core.offsets.topics() or name in core.kafka_offsets.topics()
    if settings is None and not has_offsets and not core.store.has_queues(name):
        done(None)  # and nothing is written for a name that somebody made up
        return
    offsets = core.offsets.take_topic(name)
    kafka_offsets = core.kafka_offsets.take_topic(name)
    keys = core.dedup.take_topic(name)
    popped = core.pops.take_topic(name)
    retries = core.pops.retry_topics(name)

    def take_back() -> None:
        core.offsets.give_back(offsets)
        core.kafka_offsets.give_back(kafka_offsets)
        core.dedup.give_back(name, keys)
        core.pops.give_back(popped)

    def told(error: SluiceError | None) -> None:
        if error is not None:
            take_back()
        done(error)

    try:
        core.topics.delete(name, told)
    except SluiceError:
        take_back()
        raise
    core.stats.forget_topic(name)
    core.retry_notes.forget_topic(name)
    core.kafka_topics.forget(name)
    core.producers.forget_topic(name)
    core.ask_turn()
    # Who waits for its messages waits in vain.
    for queue_id in range(settings.read_queues if settings is not None else 0):
        core.polls.wake((name, queue_id))
    # Messages that were popped and wait there to come again are of no use without it.
    for retry in retries:
        delete_topic(core, retry, lambda error: None)


def unused_topics(core: BrokerCore) -> list[str]:
    """Topics that have queues and no settings: what a store from elsewhere may hold."""
    return sorted(
        topic
        for topic in {topic for topic, _ in core.store.queues}
        if core.topics.get(topic) is None
        and not core.topics.is_system(topic)
        and topic not in CLOSED_TOPICS
    )
