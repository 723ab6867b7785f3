"""Options of the data source: what is wrong is said when the DataFrame is made, by its name."""

from __future__ import annotations

import pytest

from sluice.errors import ConfigError
from sluice.spark import columns
from sluice.spark.options import EARLIEST, LATEST, Bound, Filters, read_options, write_options

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
        ({"sluice__bootstrap__servers": "-"}, "sluice.bootstrap.servers is needed"),
        ({"kafka__bootstrap__servers": "x:1"}, "both say where"),
        ({"sluice__bootstrap__servers": "nowhere"}, "'nowhere' is not host:port"),
        ({"subscribe": "-"}, "one of them is needed"),
        ({"assign": '{"t": [0]}'}, "subscribe and assign are given"),
        ({"subscribe": " , "}, "subscribe"),
        ({"subscribe": "-", "subscribePattern": "("}, "option subscribePattern"),
        ({"subscribe": "-", "assign": "[1]"}, "option assign"),
        ({"subscribe": "-", "assign": '{"t": 1}'}, "the partitions of t"),
        ({"startingOffsets": "now"}, "option startingOffsets: 'now' is no JSON"),
        ({"startingOffsets": '{"t": {"0": "5"}}'}, "t/0: '5' is no number"),
        ({"startingOffsets": '{"t": {"0": -3}}'}, "t/0: -3"),
        ({"startingOffsets": '{"t": 5}'}, "option startingOffsets: t needs"),
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
        ({"groupId": "a", "groupIdPrefix": "b"}, "groupId and groupIdPrefix contradict"),
        ({"groupId": "a", "kafka__group__id": "b"}, "contradict"),
        ({"filter__keys": "a b"}, "option filter.keys: 'a b'"),
        ({"fetchBytes": "1g"}, "option fetchBytes: '1g' is over"),
        ({"sluice__tls__ca__file": "x"}, "sluice.tls.ca.file needs sluice.tls=true"),
        ({"path": "/x"}, "option path is not known"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str], words: str) -> None:
    assert words in refused(**changes)


def test_what_makes_no_sense_for_a_batch_or_a_stream() -> None:
    for change, words in (
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for streams"),
        ({"startingOffsets": "latest"}, "cannot start at 'latest'"),
        ({"endingOffsets": "earliest"}, "cannot end at 'earliest'"),
        ({"startingOffsets": '{"t": {"0": -1}}'}, "t/0 cannot be latest"),
        ({"endingOffsets": '{"t": {"0": -2}}'}, "t/0 cannot be earliest"),
    ):
        with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
            read_options({**GOOD, **change}).check_batch()
    with pytest.raises(ConfigError, match="endingOffsets is for batch queries"):
        read_options({**GOOD, "endingOffsets": "latest"}).check_stream()
    read_options(GOOD).check_batch()
    read_options({**GOOD, "startingOffsets": "latest"}).check_stream()


def test_options_of_writes() -> None:
    servers = {"sluice.bootstrap.servers": "a:1"}
    options = write_options({**servers, "topic": "t", "checkpointLocation": "/x"})
    assert (options.topic, options.delivery, options.version) == ("t", "", None)
    options = write_options(
        {**servers, "delivery": "atleastonce", "txnAppId": "a", "txnVersion": "3"}
    )
    assert (options.delivery, options.sink_id, options.version) == ("atLeastOnce", "a", 3)
    for change, words in (
        ({"delivery": "twice"}, "'twice' is none of"),
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


def test_what_spark_itself_passes_to_a_sink_is_no_mistake() -> None:
    """The name of a query and its checkpoint are handed to the sink among its options."""
    given = {"sluice.bootstrap.servers": "a:1", "queryname": "q", "checkpointlocation": "c"}
    assert write_options(given).connection.nameservers == ("a:1",)
