"""Options of the data source: what is wrong is said when the DataFrame is made, by its name."""

from __future__ import annotations

import re

import pytest

from sluice.errors import ConfigError
from sluice.spark import columns
from sluice.spark.options import (
    EARLIEST,
    LATEST,
    Bound,
    Filters,
    check_either,
    read_options,
    write_options,
)

GOOD = {"sluice.bootstrap.servers": "a:1,b:2", "subscribe": "t, u,t"}


def refused(**changes: str) -> str:
    options = {**GOOD, **{name.replace("__", "."): value for name, value in changes.items()}}
    with pytest.raises(ConfigError) as caught:
        read_options({name: value for name, value in options.items() if value != "-"})
    return str(caught.value)


def test_the_defaults_are_those_of_sparks_kafka_source() -> None:
    options = read_options(GOOD)
    assert options.connection.nameservers == ("a:1", "b:2")
    assert options.topics == ("t", "u")
    assert options.columns == (
        *("key", "value", "topic", "partition", "offset", "timestamp", "timestampType"),
    )
    assert options.start is None
    assert options.end is None
    assert options.fail_on_data_loss
    assert options.strategy == "error"
    assert (options.max_offsets, options.min_offsets, options.max_delay_ms) == (None, None, 900_000)
    assert (options.min_partitions, options.max_records) == (None, None)
    assert (options.tries, options.try_interval_ms, options.poll_ms) == (3, 10, 120_000)
    assert options.fetch_bytes == 4 << 20


def test_a_job_of_the_kafka_source_is_understood() -> None:
    options = read_options(
        {
            "kafka.bootstrap.servers": "ns:9876",
            "kafka.group.id": "g",
            "kafka.max.poll.records": "500",
            "subscribepattern": "gift.*",
            "STARTINGOFFSETS": "earliest",
            "failondataloss": "false",
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": "10",
            "minOffsetsPerTrigger": "5",
            "maxTriggerDelay": "30s",
        }
    )
    assert (options.pattern, options.group) == ("gift.*", "g")
    assert options.start == Bound(all_at=EARLIEST)
    assert not options.fail_on_data_loss
    assert options.columns[-1] == "headers"
    assert (options.max_offsets, options.min_offsets, options.max_delay_ms) == (10, 5, 30_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kafka.enable.idempotence", "true"),
        ("kafka.retry.backoff.ms", "100"),
        ("kafka.max.block.ms", "any"),
        ("kafka.check.crcs", "false"),
        ("kafka.connections.max.idle.ms", "-1"),
        ("kafka.reconnect.backoff.max.ms", "1000"),
        ("kafka.client.rack", "r1"),
        ("kafka.client.dns.lookup", "use_all_dns_ips"),
        ("kafka.socket.connection.setup.timeout.ms", "10000"),
        ("kafka.metrics.recording.level", "INFO"),
        ("kafka.allow.auto.create.topics", "false"),
        ("kafka.max.in.flight.requests.per.connection", "5"),
        ("kafka.isolation.level", "read_committed"),
        ("kafka.security.protocol", "PLAINTEXT"),
    ],
)
def test_options_of_kafkas_client_that_change_nothing(name: str, value: str) -> None:
    assert read_options({**GOOD, name: value}).topics == ("t", "u")
    written = write_options({"sluice.bootstrap.servers": "a:1", "topic": "t", name: value})
    assert written.topic == "t"


def test_what_kafkas_source_ignores_is_ignored_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = read_options({**GOOD, "kafka.group.id": "g", "groupIdPrefix": "no group"})
    assert options.group == "g"
    assert "option groupIdPrefix is ignored" in caplog.text
    assert read_options({**GOOD, "groupIdPrefix": "com.acme: x"}).group == ""
    read_options({**GOOD, "maxOffsetsPerTrigger": "5"}).check_batch()
    assert "option maxOffsetsPerTrigger is for streams" in caplog.text


def test_numbers_are_as_large_as_javas() -> None:
    largest = str((1 << 63) - 1)
    options = read_options({**GOOD, "maxOffsetsPerTrigger": largest, "startingTimestamp": largest})
    assert (options.max_offsets, options.start) == (int(largest), Bound(timestamp_ms=int(largest)))
    assert "option maxOffsetsPerTrigger" in refused(maxOffsetsPerTrigger=str(1 << 63))


def test_a_group_of_kafkas_may_have_dots() -> None:
    assert read_options({**GOOD, "kafka.group.id": "com.acme.x"}).group == "com%2Eacme%2Ex"


def test_who_asks_is_said_by_options_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CLIENT_ACCESS_KEY", "ann")
    monkeypatch.setenv("SLUICE_CLIENT_SECRET_KEY", "shh")
    connection = read_options(GOOD).connection
    assert (connection.access_key, connection.secret_key) == ("ann", "shh")
    keys = {"sluice.access.key": "ben", "sluice.secret.key": "hush"}
    connection = write_options({"sluice.bootstrap.servers": "a:1", **keys}).connection
    assert (connection.access_key, connection.secret_key) == ("ben", "hush")
    assert "hush" not in repr(connection)


def test_bounds_count_in_kafkas_order() -> None:
    given = {
        **GOOD,
        "startingOffsets": '{"t": {"0": 5, "1": -2}}',
        "endingOffsets": "latest",
        "endingOffsetsByTimestamp": '{"t": {"0": 7}}',
        "endingTimestamp": "99",
    }
    options = read_options(given)
    assert options.start == Bound(offsets={"t": {"0": 5, "1": -2}})
    assert options.end == Bound(timestamp_ms=99)
    del given["endingTimestamp"]
    assert read_options(given).end == Bound(timestamps_ms={"t": {"0": 7}})
    assert read_options({**GOOD, "endingOffsets": "Latest"}).end == Bound(all_at=LATEST)


def test_filters_and_sizes() -> None:
    options = read_options(
        {**GOOD, "filter.tags": "A, B", "filter.keys": "k1,k2", "filter.sql": "a > 1"}
    )
    assert options.filters == Filters("A || B", ("k1", "k2"), "a > 1")
    assert read_options({**GOOD, "filter.tags": "*"}).filters == Filters()
    sized = read_options({**GOOD, "maxBytesPerTrigger": "64m", "fetchBytes": "2 MiB"})
    assert (sized.max_bytes, sized.fetch_bytes) == (64 << 20, 2 << 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"startingOffset": "earliest"}, "option startingOffset is not known"),
        ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"kafka__security__protocol": "SSL"}, "option kafka.security.protocol"),
        ({"kafka__isolation__level": "read_uncommitted"}, "option kafka.isolation.level"),
        ({"sluice__bootstrap__servers": "-"}, "sluice.bootstrap.servers is needed"),
        ({"kafka__bootstrap__servers": "x:1"}, "both say where"),
        ({"sluice__bootstrap__servers": "nowhere"}, "'nowhere' is not host:port"),
        ({"sluice__bootstrap__servers": "ns:1,ns:99999"}, "'ns:99999' is not host:port"),
        ({"sluice__bootstrap__servers": "ns:0"}, "'ns:0' is not host:port"),
        ({"sluice__bootstrap__servers": "http://ns:1"}, "'http://ns:1' is not host:port"),
        ({"subscribe": "-"}, "one of them is needed"),
        ({"assign": '{"t": [0]}'}, "subscribe and assign are given"),
        ({"subscribe": " , "}, "subscribe"),
        ({"subscribe": "-", "subscribePattern": "("}, "option subscribePattern"),
        ({"subscribe": "-", "assign": "[1]"}, "option assign"),
        ({"subscribe": "-", "assign": '{"t": 1}'}, "the partitions of t"),
        ({"startingOffsets": "now"}, "option startingOffsets: 'now' is no JSON"),
        ({"startingOffsets": '{"t": {"0": "5"}}'}, "t/0: '5' is no number"),
        ({"startingOffsets": '{"t": {"0": -3}}'}, "t/0: -3"),
        (
            {"startingOffsetsByTimestamp": '{"t": {"0": 9223372036854775808}}'},
            "option startingOffsetsByTimestamp: t/0: 9223372036854775808 is no number",
        ),
        ({"startingOffsets": '{"t": {"0": true}}'}, "t/0: True is no number"),
        ({"startingOffsets": '{"t": 5}'}, "option startingOffsets: t needs"),
        ({"startingOffsets": '{"t": {"a": 1}}'}, "option startingOffsets: t: 'a' is neither"),
        ({"startingOffsets": '{"t": {"/1": 1}}'}, "option startingOffsets: t: '/1' is neither"),
        ({"endingOffsetsByTimestamp": '{"t": {"1.5": 1}}'}, "option endingOffsetsByTimestamp: t"),
        ({"subscribe": "-", "assign": '{"t": ["a"]}'}, "option assign: t: 'a' is neither"),
        ({"startingTimestamp": "yesterday"}, "option startingTimestamp"),
        ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger: '0'"),
        ({"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, "minOffsetsPerTrigger (6)"),
        ({"maxTriggerDelay": "soon"}, "option maxTriggerDelay: 'soon'"),
        ({"maxBytesPerTrigger": "much"}, "option maxBytesPerTrigger: 'much'"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss: 'maybe'"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "'guess' is none of error, latest"),
        ({"columns": "offset,nothing"}, "option columns: 'nothing' is no column"),
        ({"columns": "offset,offset"}, "names a column twice"),
        ({"columns": "offset", "includeHeaders": "true"}, "includeHeaders"),
        ({"groupId": "a b"}, "option groupId: 'a b'"),
        ({"kafka__group__id": "a b"}, "option kafka.group.id: 'a b'"),
        ({"partition__metadata__cache__ttl__ms": "0"}, "partition.metadata.cache.ttl.ms: '0'"),
        ({"partition__metadata__cache__ttl__ms": "x"}, "partition.metadata.cache.ttl.ms: 'x'"),
        ({"groupId": "a", "groupIdPrefix": "b"}, "groupId and groupIdPrefix contradict"),
        ({"groupId": "a", "kafka__group__id": "b"}, "contradict"),
        ({"filter__keys": "a b"}, "option filter.keys: 'a b'"),
        ({"filter__sql": "a >"}, "option filter.sql: 'a >': "),
        ({"filter__sql": "a LIKE 'x%'"}, "filter.sql: brokers do not look at \"LIKE 'x%'\""),
        ({"filter__tags": " || "}, "option filter.tags: '||' names no tag"),
        ({"fetchBytes": "1g"}, "option fetchBytes: '1g' is over"),
        ({"sluice__tls__ca__file": "x"}, "sluice.tls.ca.file needs sluice.tls=true"),
        ({"sluice__access__key": "x"}, "sluice.secret.key is missing"),
        ({"sluice__secret__key": "x"}, "sluice.access.key is missing"),
        ({"path": "/x"}, "option path is not known"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str], words: str) -> None:
    assert words in refused(**changes)


def test_what_makes_no_sense_for_a_batch_or_a_stream() -> None:
    for change, words in (
        ({"startingOffsets": "latest"}, "cannot start at 'latest'"),
        ({"endingOffsets": "earliest"}, "cannot end at 'earliest'"),
        ({"startingOffsets": '{"t": {"0": -1}}'}, "t/0 cannot be latest"),
        ({"endingOffsets": '{"t": {"0": -2}}'}, "t/0 cannot be earliest"),
        (
            {"startingOffsets": '{"t": {"0": 6}}', "endingOffsets": '{"t": {"0": 5}}'},
            "startingOffsets and endingOffsets contradict: t/0 would begin at 6 and end at 5",
        ),
        (
            {"startingOffsetsByTimestamp": '{"t": {"0": 9}}',
             "endingOffsetsByTimestamp": '{"t": {"0": 8}}'},
            "t/0 would begin at 9 and end at 8",
        ),
        ({"startingTimestamp": "2", "endingTimestamp": "1"},
         "startingTimestamp (2) and endingTimestamp (1) contradict"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=re.escape(words)):
            read_options({**GOOD, **change}).check_batch()
    for change in (
        {"startingOffsets": '{"t": {"0": 6}}', "endingOffsets": '{"t": {"0": -1}}'},
        {"startingOffsets": '{"t": {"0": 6}}', "endingOffsets": '{"t": {"0": 6}}'},
        {"startingOffsets": '{"t": {"0": 6}}', "endingTimestamp": "5"},
        {"startingTimestamp": "5", "endingTimestamp": "5"},
    ):
        read_options({**GOOD, **change}).check_batch()
    with pytest.raises(ConfigError, match="endingOffsets is for batch queries"):
        read_options({**GOOD, "endingOffsets": "latest"}).check_stream()
    read_options(GOOD).check_batch()
    read_options({**GOOD, "startingOffsets": "latest"}).check_stream()


def test_options_of_writes() -> None:
    servers = {"sluice.bootstrap.servers": "a:1"}
    options = write_options({**servers, "topic": "t", "checkpointLocation": "/x"})
    assert (options.topic, options.delivery, options.version) == ("t", "", None)
    options = write_options({**servers, "delivery": "atleastonce"})
    assert (options.delivery, options.sink_id, options.version) == ("atLeastOnce", "", None)
    options = write_options({**servers, "txnAppId": "a", "txnVersion": "3"})
    assert (options.delivery, options.sink_id, options.version) == ("", "a", 3)
    assert write_options({**servers, "topic": "orders.new"}).topic == "orders.new"
    assert write_options({**servers, "txnAppId": "x" * 200}).sink_id == "x" * 200
    for change, words in (
        ({"txnAppId": ""}, "option txnAppId: '' is no name"),
        ({"txnAppId": "größe"}, "option txnAppId: 'größe' is no name"),
        ({"txnAppId": "x" * 201}, "1 to 200 printable ASCII characters"),
        ({"txnAppId": "a", "txnVersion": "one"}, "option txnVersion: 'one' is no whole number"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "option txnVersion: '-1'"),
        ({"txnAppId": "a", "delivery": "atLeastOnce"}, "txnAppId and delivery contradict"),
        ({"delivery": "twice"}, "'twice' is none of"),
        ({"topic": "a b"}, "option topic: 'a b' is no topic: letters"),
        ({"topic": "größe"}, "option topic: 'größe' is no topic"),
        ({"topic": "x" * 250}, "is no topic"),
        ({"txnVersion": "3"}, "txnVersion needs option txnAppId"),
        ({"subscribe": "t"}, "option subscribe is not known to the sluice sink"),
        ({"batchBytes": "1g"}, "batchBytes"),
    ):
        with pytest.raises(ConfigError, match=words):
            write_options({**servers, **change})


def test_a_users_schema_must_be_of_our_columns() -> None:
    assert columns.check_schema([("value", "binary"), ("offset", "bigint")]) == ("value", "offset")
    assert columns.check_schema([("headers", "array<struct<key:string,value:binary>>")])
    with pytest.raises(ConfigError, match="a column 'body'"):
        columns.check_schema([("body", "binary")])
    with pytest.raises(ConfigError, match="offset is int; it is bigint"):
        columns.check_schema([("offset", "int")])


def test_a_schema_and_options_name_the_same_columns() -> None:
    seven, some = columns.DEFAULT, ("value", "offset")
    columns.check_choice(seven, seven, ())
    columns.check_choice(some, seven, ())
    columns.check_choice(some, ("offset", "value"), ("columns",))
    columns.check_choice(("headers",), (*seven, "headers"), ("includeHeaders",))
    with pytest.raises(ConfigError, match="option columns asks for tag, and the schema for value"):
        columns.check_choice(("value",), ("tag",), ("columns",))
    with pytest.raises(ConfigError, match="option includeHeaders is true, but the schema leaves"):
        columns.check_choice(some, (*seven, "headers"), ("includeHeaders",))


def test_what_spark_itself_passes_to_a_sink_is_no_mistake() -> None:
    """The name of a query and its checkpoint are handed to the sink among its options."""
    given = {"sluice.bootstrap.servers": "a:1", "queryname": "q", "checkpointlocation": "c"}
    assert write_options(given).connection.nameservers == ("a:1",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**GOOD, "startingOffset": "earliest"}, "sluice source; did you mean startingOffsets"),
        ({**GOOD, "topic": "t"}, "option topic is not known to the sluice source"),
        ({"subscribe": "t", "assign": '{"t": [0]}'}, "sluice.bootstrap.servers is needed"),
        ({**GOOD, "minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, "contradict"),
        ({"sluice.bootstrap.servers": "a:1", "topic": "t", "delivery": "x"}, "'x' is none of"),
        ({"sluice.bootstrap.servers": "a:1", "topik": "t"}, "sluice sink; did you mean topic"),
        ({"sluice.bootstrap.servers": "a:1", "subscrib": "t"}, "did you mean subscribe"),
        ({}, "sluice.bootstrap.servers is needed"),
    ],
)
def test_what_neither_a_read_nor_a_write_takes(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_either(options)


def test_what_a_read_or_a_write_takes() -> None:
    check_either(GOOD)
    check_either({"sluice.bootstrap.servers": "a:1", "topic": "t"})


def test_the_source_checks_its_options_when_it_is_made() -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")
    from sluice.spark.source import SluiceSource

    with pytest.raises(ConfigError, match="did you mean startingOffsets"):
        SluiceSource({**GOOD, "startingOffset": "earliest"})
    assert SluiceSource(GOOD).options == GOOD
