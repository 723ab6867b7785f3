"""Topics that keep less than the log does: by age, by size, over restarts, for both doors."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.broker.kafka_configs import KafkaConfigs
from sluice.broker.kafka_log_api import KafkaLogs
from sluice.broker.topics import TopicSettings
from sluice.model import Message
from sluice.storage.memory_files import KeepNothing
from tests.unit.broker.kafka_kit import BEGIN_MS, TOPIC, KafkaBroker

HOUR_MS = 3_600_000
PLAIN = "plain"


def new_broker(**configs: str) -> KafkaBroker:
    """A broker with a topic that has these configurations."""
    broker = KafkaBroker(topic_retention_interval_ms=1000)
    serve_admin(broker)
    named = {name.replace("_", "."): value for name, value in configs.items()}
    broker.core.kafka_topics.create(TOPIC, 2, named)
    broker.settle()
    return broker


def serve_admin(broker: KafkaBroker) -> None:
    KafkaConfigs(broker.core).register(broker.api)
    KafkaLogs(broker.core).register(broker.api)


def starts(broker: KafkaBroker, topic: str = "orders%2Enew") -> list[int]:
    return [broker.core.store.min_offset(topic, queue_id) for queue_id in (0, 1)]


def alter(broker: KafkaBroker, name: str, value: str, topic: str = TOPIC) -> int:
    configs = [{"name": name, "config_operation": 0, "value": value}]
    resource = {"resource_type": 2, "resource_name": topic, "configs": configs}
    answer = broker.ask(44, 1, resources=[resource], validate_only=False)
    return int(answer.responses[0].error_code)


def config(broker: KafkaBroker, name: str) -> tuple[str, int]:
    asked = {"resource_type": 2, "resource_name": TOPIC, "configuration_keys": [name]}
    answer = broker.ask(32, 4, resources=[asked])
    (found,) = answer.results[0].configs
    return found.value, int(found.config_source)


def test_what_is_older_goes() -> None:
    broker = new_broker(retention_ms=str(HOUR_MS))
    broker.produce(-1, -1, -1, b"a", b"b")
    broker.pass_ms(HOUR_MS // 2)
    broker.produce(-1, -1, -1, b"c")
    broker.pass_ms(HOUR_MS // 2)
    assert starts(broker) == [0, 0]  # exactly as old as it may be
    broker.pass_ms(1000)
    assert starts(broker) == [2, 0]
    assert [head.base_offset for head, _ in broker.batches()] == [2]
    broker.pass_ms(HOUR_MS)
    assert starts(broker) == [3, 0]
    assert broker.core.store.max_offset("orders%2Enew", 0) == 3
    assert broker.produce(-1, -1, -1, b"d").offset == 3


def test_a_record_counts_by_its_own_time() -> None:
    broker = new_broker(retention_ms=str(HOUR_MS))
    broker.now_ms = BEGIN_MS - 2 * HOUR_MS
    broker.produce(-1, -1, -1, b"late")
    broker.now_ms = BEGIN_MS
    broker.produce(-1, -1, -1, b"new")
    broker.pass_ms(1000)
    assert starts(broker) == [1, 0]


def test_a_young_record_keeps_those_behind_it() -> None:
    broker = new_broker(retention_ms=str(HOUR_MS))
    broker.produce(-1, -1, -1, b"young")
    broker.now_ms -= 2 * HOUR_MS
    broker.produce(-1, -1, -1, b"old")
    broker.now_ms += 2 * HOUR_MS
    broker.pass_ms(1000)
    assert starts(broker) == [0, 0]


def test_the_oldest_go_while_the_rest_has_as_many_bytes() -> None:
    broker = new_broker(retention_bytes="5000")
    for number in range(10):
        broker.produce(-1, -1, -1, b"%04d" % number * 250)
        broker.pass_ms(1000)
        begins = starts(broker)[0]
        kept = [len(data) for _, data in broker.batches()]
        assert sum(kept) + 200 * len(kept) >= min(5000, 1000 * (number + 1))
        assert sum(kept[1:]) < 5000
        assert begins == max(0, number - 4)
    assert starts(broker) == [5, 0]
    # The limit is changed: it holds from the next look on.
    assert alter(broker, "retention.bytes", "1500") == 0
    broker.pass_ms(1000)
    assert starts(broker) == [8, 0]
    assert alter(broker, "retention.bytes", "0") == 0
    broker.pass_ms(1000)
    assert starts(broker) == [10, 0]


def test_bytes_are_counted_over_many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.broker.topic_retention.UNITS_AT_ONCE", 4)
    monkeypatch.setattr("sluice.broker.queue_units.UNITS_AT_ONCE", 4)
    broker = new_broker(retention_bytes="20000")
    for number in range(60):
        broker.produce(-1, -1, -1, b"%04d" % number * 100)
        if number % 7 == 0:
            broker.pass_ms(1000)
    broker.pass_ms(1000)
    queue = broker.core.store.queues["orders%2Enew", 0]
    raw = queue.units(0, queue.count, broker.core.store.queue_files, wait=True)
    sizes = [unit[1] for unit in queue.iterate(raw, 0)]
    start = starts(broker)[0]
    assert 0 < start < 60
    assert sum(sizes[start:]) >= 20_000 > sum(sizes[start + 1 :])


def test_where_a_topic_begins_holds_after_a_crash() -> None:
    broker = new_broker(retention_ms=str(HOUR_MS))
    broker.produce(-1, -1, -1, b"a", b"b")
    broker.pass_ms(HOUR_MS + 1000)
    broker.produce(-1, -1, -1, b"c")
    assert starts(broker) == [2, 0]
    broker.crash()
    assert starts(broker) == [2, 0]
    broker.crash(KeepNothing())
    assert starts(broker) == [2, 0]
    assert broker.core.store.read("orders%2Enew", 0, 0).next_offset == 2


def test_nothing_undecided_goes() -> None:
    broker = new_broker(retention_ms=str(HOUR_MS))
    broker.produce(-1, -1, -1, b"a")
    broker.core.producers.stable_offsets("orders%2Enew", 0).data(7, 1)
    broker.produce(-1, -1, -1, b"b")
    broker.pass_ms(2 * HOUR_MS)
    assert starts(broker) == [1, 0]


def test_without_a_limit_the_log_decides() -> None:
    broker = new_broker()
    broker.produce(-1, -1, -1, b"a")
    broker.pass_ms(100 * HOUR_MS)
    assert starts(broker) == [0, 0]
    hours = broker.core.config.store.retention_hours
    assert config(broker, "retention.ms") == (str(hours * HOUR_MS), 5)
    assert config(broker, "retention.bytes") == ("-1", 5)
    assert alter(broker, "retention.ms", "-1") == 0
    assert config(broker, "retention.ms") == ("-1", 1)
    broker.pass_ms(100 * HOUR_MS)
    assert starts(broker) == [0, 0]
    assert alter(broker, "retention.ms", "-2") == 40
    assert alter(broker, "retention.ms", "soon") == 40


def test_a_topic_of_rocketmqs_clients_may_have_limits_too() -> None:
    broker = KafkaBroker(topic_retention_interval_ms=1000)
    serve_admin(broker)
    core = broker.core
    core.topics.put([TopicSettings(PLAIN, 2, 2)])
    broker.settle()
    for number in range(5):
        core.append(Message(PLAIN, 0, b"%d" % number * 500, born_ms=broker.now_ms))
        broker.settle()
        broker.pass_ms(HOUR_MS)
    assert starts(broker, PLAIN) == [0, 0]
    assert alter(broker, "retention.ms", str(3 * HOUR_MS + 1500), PLAIN) == 0
    broker.pass_ms(1000)
    assert starts(broker, PLAIN) == [2, 0]
    assert alter(broker, "retention.bytes", "1000", PLAIN) == 0
    broker.pass_ms(1000)
    assert starts(broker, PLAIN) == [3, 0]
    settings = core.topics.get(PLAIN)
    assert settings is not None
    assert settings.attributes["kafka.retention.bytes"] == "1000"
    broker.crash()
    assert starts(broker, PLAIN) == [3, 0]


def test_compaction_is_for_topics_of_kafkas_clients() -> None:
    broker = KafkaBroker()
    serve_admin(broker)
    broker.core.topics.put([TopicSettings(PLAIN, 2, 2)])
    broker.settle()
    assert alter(broker, "cleanup.policy", "compact", PLAIN) == 40
    assert alter(broker, "cleanup.policy", "delete", PLAIN) == 0


def test_a_deleted_topic_begins_anew() -> None:
    broker = new_broker(retention_ms=str(HOUR_MS))
    broker.produce(-1, -1, -1, b"a")
    broker.pass_ms(2 * HOUR_MS)
    assert starts(broker) == [1, 0]
    done: list[Any] = []
    broker.core.topics.delete("orders%2Enew", done.append)
    broker.core.kafka_topics.forget("orders%2Enew")
    broker.core.producers.forget_topic("orders%2Enew")
    broker.core.ask_turn()
    broker.settle()
    assert broker.produce(-1, -1, -1, b"b").offset == 0
    broker.crash()
    assert starts(broker) == [0, 0]
