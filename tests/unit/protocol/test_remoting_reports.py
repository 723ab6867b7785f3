"""What brokers and consumers report to administrators, as Java writes it and as nonsense."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.errors import RequestInvalid
from sluice.protocol import remoting_admin
from sluice.protocol import remoting_reports as reports
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_admin import StatsSpan
from sluice.protocol.remoting_bodies import (
    QueueProgress,
    QueueSpan,
    write_consume_stats,
    write_topic_stats,
)

QUEUE = MessageQueue("orders", "broker-a", 1)


@pytest.mark.parametrize(
    ("ordinal", "text"),
    [
        (0, "V3"),
        (211, "V3"),
        (212, "V4_0_0_SNAPSHOT"),
        (213, "V4_0_0"),
        (401, "V4_9_4"),
        (413, "V5_0_0"),
        (512, "V5_5_0_SNAPSHOT"),
        (513, "V5_5_0"),
        (611, "V5_9_9"),
        (612, "HIGHER"),
        (9999, "HIGHER"),
    ],
)
def test_versions_have_rocketmqs_names(ordinal: int, text: str) -> None:
    assert reports.version_text(ordinal) == text


def test_offsets_of_topics_and_groups() -> None:
    span = QueueSpan(1, 5, 1700000000000)
    assert reports.read_topic_stats(write_topic_stats({QUEUE: span}, 1.5)) == ({QUEUE: span}, 1.5)
    progress = QueueProgress(10, 4, 6, 1700000000000)
    stats = reports.read_consume_stats(write_consume_stats({QUEUE: progress}, 2.0))
    assert stats == ({QUEUE: progress}, 2.0)
    assert (stats.behind, stats.in_flight) == (6, 2)


def test_statistics_and_the_longest_span_that_has_a_sum() -> None:
    minute, hour, day = StatsSpan(3, 0.5, 1.0), StatsSpan(7, 0.1, 1.0), StatsSpan(0, 0.0, 0.0)
    stats = reports.read_stats(remoting_admin.write_stats(minute, hour, day))
    assert stats == (minute, hour, day)
    assert stats.day_total == 7
    assert reports.read_stats(b"{}").day_total == 0


def test_what_a_java_consumer_says() -> None:
    body = (
        b'{"jstack":null,"mqPopTable":{},'
        b'"mqTable":{{"brokerName":"broker-a","queueId":1,"topic":"orders"}:'
        b'{"commitOffset":5,"droped":false}},'
        b'"properties":{"PROP_CONSUMEORDERLY":"false","PROP_CONSUME_TYPE":"CONSUME_PASSIVELY",'
        b'"PROP_CONSUMER_START_TIMESTAMP":1700000000000,"flag":true,"nothing":null},'
        b'"statusTable":{"orders":{"pullTPS":1.5}},'
        b'"subscriptionSet":[{"subString":"TagA","topic":"orders","subVersion":1}]}'
    )
    info = reports.read_running_info(body)
    assert info.queues == {QUEUE: {"commitOffset": 5, "droped": False}}
    assert (info.consume_type, info.is_orderly) == ("CONSUME_PASSIVELY", False)
    assert info.properties["PROP_CONSUMER_START_TIMESTAMP"] == "1700000000000"
    assert info.properties["flag"] == "true"
    assert "nothing" not in info.properties
    assert [(one.topic, one.expression) for one in info.subscriptions] == [("orders", "TagA")]
    assert info.stacks is None


def test_how_a_message_was_consumed() -> None:
    body = b'{"autoCommit":true,"consumeResult":"CR_SUCCESS","order":false,"spentTimeMills":12}'
    assert reports.read_direct_result(body) == ("CR_SUCCESS", "", 12)


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (reports.read_topic_stats, b"no JSON"),
        (reports.read_topic_stats, b'{"topicPutTps":"fast"}'),
        (reports.read_topic_stats, b'{"offsetTable":{"x":{}}}'),
        (reports.read_consume_stats, b'{"consumeTps":true}'),
        (reports.read_consume_stats, b"[]"),
        (reports.read_group_list, b'{"groupList":[1]}'),
        (reports.read_stats, b'{"statsDay":[]}'),
        (reports.read_running_info, b'{"properties":7}'),
        (reports.read_running_info, b'{"jstack":7}'),
        (reports.read_running_info, b'{"statusTable":{"orders":1}}'),
        (reports.read_direct_result, b'{"spentTimeMills":"soon"}'),
        (reports.read_one_topic, b"{}"),
    ],
)
def test_nonsense_is_refused(read: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(RequestInvalid):
        read(body)
