"""This module reads the options of a DataFrame. Names and defaults are those of Spark's Kafka
source, so that a job changes one word; what RocketMQ has beside that has names of its own.

Everything is checked when the DataFrame is made, and what is wrong is named: an option that is not
known, one that contradicts another, one that makes no sense for a stream or for a batch. Nothing
here does IO.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from sluice.broker.sql_filter import read_filter
from sluice.errors import ConfigError, SubscriptionIllegal
from sluice.spark import columns, kafka_options

log_lines = logging.getLogger("sluice.spark")

Strategy = Literal["error", "latest"]

EARLIEST: Final = -2
LATEST: Final = -1
_LONG_MAX: Final = (1 << 63) - 1
_PORT_MAX: Final = 65535
_MIB: Final = 1024 * 1024
_UNITS: Final = {"": 1, "k": 1024, "m": _MIB, "g": 1024 * _MIB}
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([kmg]?)i?b?")
_TIME: Final = re.compile(r"([0-9]{1,12})\s*(ms|s|m|min|h|d)?")
_TIME_UNITS: Final = {
    None: 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000,
}  # fmt: skip
_ADDRESSES: Final = ("sluice.bootstrap.servers", "kafka.bootstrap.servers", "nameServer")
_COMMON: Final = (
    *_ADDRESSES,
    *("sluice.tls", "sluice.tls.ca.file", "sluice.tls.any.name", "sluice.tls.certificate.file"),
    *("sluice.tls.key.file", "sluice.request.timeout.ms"),
    *("sluice.access.key", "sluice.secret.key"),
    *kafka_options.TUNING,
)
_READ: Final = (
    *("subscribe", "subscribePattern", "assign"),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *("startingOffsetsByTimestampStrategy", "failOnDataLoss", "includeHeaders"),
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("minPartitions", "maxRecordsPerPartition", "maxBytesPerPartition"),
    *("groupId", "kafka.group.id", "groupIdPrefix"),
    *("fetchOffset.numRetries", "fetchOffset.retryIntervalMs", "kafkaConsumer.pollTimeoutMs"),
    *("partition.metadata.cache.ttl.ms", "columns", "filter.tags", "filter.keys", "filter.sql"),
    *("fetchBytes", "prefetch", "brokerOfPlainOffsets", "bulkFetch", "pushFilters"),
)
_WRITE: Final = (
    *("topic", "includeHeaders", "delivery", "txnAppId", "txnVersion", "batchBytes"),
    *("checkpointLocation", "queryName"),
)
_STREAM_ONLY: Final = (
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
)
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_SELECTING: Final = ("subscribe", "subscribePattern", "assign")
_HINT: Final = "did you mean"
_QUEUE_KEY: Final = re.compile(r"(?:.+/)?[0-9]{1,9}")
_GROUP: Final = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
_TOPIC: Final = re.compile(r"[%|a-zA-Z0-9._-]{1,249}")  # as Kafka has it; most are shorter
# Of a sink's name, which brokers take up to 255 characters of: the topic has room behind it.
_SINK: Final = re.compile(r"[ -~]{1,200}")

# {topic: {partition as text: offset or time}}
PerPartition = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach the cluster."""

    nameservers: tuple[str, ...]
    tls: bool = False
    tls_ca_file: str = ""
    tls_any_name: bool = False
    tls_certificate_file: str = ""
    tls_key_file: str = ""
    request_seconds: float = 30.0
    access_key: str = ""  # of brokers with access control
    secret_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Bound:
    """Where reading begins or ends: one of the fields counts, from the top."""

    timestamp_ms: int | None = None  # of all partitions
    timestamps_ms: PerPartition | None = None
    offsets: PerPartition | None = None
    all_at: int = LATEST  # EARLIEST or LATEST


@dataclass(frozen=True, slots=True)
class Filters:
    """What the broker leaves out."""

    tags: str = ""  # "A || B"
    keys: tuple[str, ...] = ()
    sql: str = ""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a DataFrame that is read."""

    connection: Connection
    topics: tuple[str, ...]
    pattern: str
    assigned: dict[str, tuple[str, ...]] | None
    start: Bound | None  # None: by default, which differs between batch and stream
    end: Bound | None
    strategy: Strategy
    fail_on_data_loss: bool
    columns: tuple[str, ...]
    filters: Filters
    max_offsets: int | None
    max_bytes: int | None
    min_offsets: int | None
    max_delay_ms: int
    min_partitions: int | None
    max_records: int | None
    max_partition_bytes: int | None
    group: str  # empty: progress is reported nowhere
    tries: int
    try_interval_ms: int
    poll_ms: int
    fetch_bytes: int
    prefetch: int
    plain_broker: str
    bulk: bool
    push_filters: bool
    given: tuple[str, ...]  # the names of the options that were given

    def check_batch(self) -> None:
        """Refuse what a batch query cannot have."""
        for name in _STREAM_ONLY:
            if name in self.given:
                log_lines.warning("option %s is for streams; a batch query ignores it", name)
        if self.start is not None and self.start.all_at == LATEST and _is_plain(self.start):
            raise ConfigError("option startingOffsets: a batch query cannot start at 'latest'")
        if self.end is not None and self.end.all_at == EARLIEST and _is_plain(self.end):
            raise ConfigError("option endingOffsets: a batch query cannot end at 'earliest'")
        for bound, name, wrong in (
            (self.start, "startingOffsets", LATEST),
            (self.end, "endingOffsets", EARLIEST),
        ):
            for topic, offsets in (bound.offsets or {}).items() if bound else ():
                for partition, offset in offsets.items():
                    if offset == wrong:
                        word = "latest (-1)" if wrong == LATEST else "earliest (-2)"
                        raise ConfigError(
                            f"option {name}: {topic}/{partition} cannot be {word} in a batch query"
                        )
        if self.start is not None and self.end is not None:
            _check_order(self.start, self.end)

    def check_stream(self) -> None:
        """Refuse what a stream cannot have."""
        for name in _BATCH_ONLY:
            if name in self.given:
                raise ConfigError(f"option {name} is for batch queries; a stream has no end")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a DataFrame that is written."""

    connection: Connection
    topic: str  # empty: the column says
    delivery: str  # "exactlyOnce" or "atLeastOnce"; empty: the default of what is written
    sink_id: str
    version: int | None
    batch_bytes: int


def _check_order(start: Bound, end: Bound) -> None:
    """Refuse bounds that cannot be kept whatever the topics hold."""
    if start.timestamp_ms is not None and end.timestamp_ms is not None:
        if start.timestamp_ms > end.timestamp_ms:
            raise ConfigError(
                f"options startingTimestamp ({start.timestamp_ms}) and endingTimestamp "
                f"({end.timestamp_ms}) contradict"
            )
        return
    for kind, firsts, lasts in (
        ("OffsetsByTimestamp", start.timestamps_ms, end.timestamps_ms),
        ("Offsets", start.offsets, end.offsets),
    ):
        for topic, own in (firsts or {}).items():
            for partition, first in own.items():
                last = (lasts or {}).get(topic, {}).get(partition, LATEST)
                if 0 <= last < first:
                    raise ConfigError(
                        f"options starting{kind} and ending{kind} contradict: {topic}/{partition} "
                        f"would begin at {first} and end at {last}"
                    )


def _is_plain(bound: Bound) -> bool:
    return bound.timestamp_ms is None and bound.timestamps_ms is None and bound.offsets is None


# ------------------------------------------------------------------------------------------ reading


class _Given:
    """The options as they were given, by name; names are compared without regard to case."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...], other: str) -> None:
        names = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for name, value in options.items():
            if kafka_options.KEPT.get(name.lower()) == str(value).strip().lower():
                continue
            if name.lower() not in names:
                raise ConfigError(_unknown(name, known, other))
            self._values[names[name.lower()]] = str(value).strip()
        self.names = tuple(self._values)

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, str(default)).lower()
        if value not in ("true", "false"):
            raise ConfigError(f"option {name}: {value!r} is neither true nor false")
        return value == "true"

    def number(self, name: str, default: int | None, low: int = 1) -> int | None:
        value = self._values.get(name)
        if value is None:
            return default
        if not re.fullmatch(r"-?[0-9]{1,19}", value) or not low <= int(value) <= _LONG_MAX:
            raise ConfigError(f"option {name}: {value!r} is no whole number of at least {low}")
        return int(value)

    def size(self, name: str, default: int | None, low: int = 1) -> int | None:
        value = self._values.get(name)
        if value is None:
            return default
        match = _SIZE.fullmatch(value.lower())
        if match is None or int(match[1]) * _UNITS[match[2]] < low:
            raise ConfigError(
                f"option {name}: {value!r} is no size, for example 4m (at least {low})"
            )
        return int(match[1]) * _UNITS[match[2]]

    def span_ms(self, name: str, default: int) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        match = _TIME.fullmatch(value.lower())
        if match is None:
            raise ConfigError(f"option {name}: {value!r} is no span of time, for example 15m")
        return int(match[1]) * _TIME_UNITS[match[2]]

    def word(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._values.get(name, default)
        for one in allowed:
            if value.lower() == one.lower():
                return one
        raise ConfigError(f"option {name}: {value!r} is none of {', '.join(allowed)}")


def _unknown(name: str, known: tuple[str, ...], other: str) -> str:
    if name.lower().startswith("kafka."):
        return (
            f"option {name}: Sluice is not asked in Kafka's protocol here, and what this option "
            "says cannot be kept; leave it out"
        )
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, 1)
    hint = f"; {_HINT} {lower[near[0]]}?" if near else ""
    return f"option {name} is not known to the sluice {other}{hint}"


def _connection(given: _Given) -> Connection:
    named = [name for name in _ADDRESSES if given.text(name)]
    if len(named) > 1:
        raise ConfigError(f"options {named[0]} and {named[1]} both say where the cluster is")
    if not named:
        raise ConfigError(
            "option sluice.bootstrap.servers is needed: the nameservers, as host:port,host:port"
        )
    addresses = tuple(part for part in re.split(r"[,;\s]+", given.text(named[0])) if part)
    for address in addresses:
        match = re.fullmatch(r"[^/@]+:([0-9]{1,5})", address)
        if match is None or not 0 < int(match[1]) <= _PORT_MAX:
            raise ConfigError(f"option {named[0]}: {address!r} is not host:port")
    timeout_ms = given.number("sluice.request.timeout.ms", 30_000)
    assert timeout_ms is not None
    connection = Connection(
        addresses,
        given.flag("sluice.tls", False),
        given.text("sluice.tls.ca.file"),
        given.flag("sluice.tls.any.name", False),
        given.text("sluice.tls.certificate.file"),
        given.text("sluice.tls.key.file"),
        timeout_ms / 1000,
        *_credentials(given),
    )
    if not connection.tls:
        for name in given.names:
            if name.startswith("sluice.tls."):
                raise ConfigError(f"option {name} needs sluice.tls=true")
    return connection


def _credentials(given: _Given) -> tuple[str, str]:
    """Who asks brokers with access control: the options, else the variables of all commands.

    They are read on the driver and go to the executors with the readers and writers.
    """
    access_key, secret_key = given.text("sluice.access.key"), given.text("sluice.secret.key")
    if not access_key and not secret_key:
        return (
            os.environ.get("SLUICE_CLIENT_ACCESS_KEY", ""),
            os.environ.get("SLUICE_CLIENT_SECRET_KEY", ""),
        )
    if not access_key or not secret_key:
        missing = "sluice.secret.key" if access_key else "sluice.access.key"
        raise ConfigError(f"options sluice.access.key and sluice.secret.key: {missing} is missing")
    return access_key, secret_key


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of `spark.read` or `spark.readStream`; raises ConfigError."""
    given = _Given(options, (*_COMMON, *_READ), "source")
    connection = _connection(given)
    topics, pattern, assigned = _selection(given)
    numbers = {
        name: given.number(name, None)
        for name in (
            *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "minPartitions"),
            "maxRecordsPerPartition",
        )
    }
    least, most = numbers["minOffsetsPerTrigger"], numbers["maxOffsetsPerTrigger"]
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"options minOffsetsPerTrigger ({least}) and maxOffsetsPerTrigger ({most}) contradict"
        )
    if given.number("partition.metadata.cache.ttl.ms", -1, -1) == 0:
        raise ConfigError(
            "option partition.metadata.cache.ttl.ms: '0' is neither a number of milliseconds nor "
            "-1 for none"
        )
    strategy = given.word("startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
    return ReadOptions(
        connection,
        topics,
        pattern,
        assigned,
        _bound(given, "starting", assigned),
        _bound(given, "ending", assigned),
        "error" if strategy == "error" else "latest",
        given.flag("failOnDataLoss", True),
        columns.choose(given.text("columns"), with_headers=given.flag("includeHeaders", False)),
        _filters(given),
        most,
        given.size("maxBytesPerTrigger", None),
        least,
        given.span_ms("maxTriggerDelay", 15 * 60_000),
        numbers["minPartitions"],
        numbers["maxRecordsPerPartition"],
        given.size("maxBytesPerPartition", None),
        _group(given),
        given.number("fetchOffset.numRetries", 3, 0) or 0,
        given.number("fetchOffset.retryIntervalMs", 10, 0) or 0,
        given.number("kafkaConsumer.pollTimeoutMs", 120_000) or 0,
        _at_most(given, "fetchBytes", given.size("fetchBytes", 4 * _MIB), 16 * _MIB),
        _at_most(given, "prefetch", given.number("prefetch", 2, 0), 64),
        given.text("brokerOfPlainOffsets"),
        given.flag("bulkFetch", True),
        given.flag("pushFilters", False),
        given.names,
    )


def _at_most(given: _Given, name: str, value: int | None, high: int) -> int:
    assert value is not None
    if value > high:
        raise ConfigError(f"option {name}: {given.text(name)!r} is over {high}")
    return value


def _selection(
    given: _Given,
) -> tuple[tuple[str, ...], str, dict[str, tuple[str, ...]] | None]:
    named = [name for name in _SELECTING if name in given.names]
    if len(named) != 1:
        what = "one of them is needed" if not named else f"{' and '.join(named)} are given"
        raise ConfigError(f"options subscribe, subscribePattern and assign: {what}; give one")
    value = given.text(named[0])
    if not value:
        raise ConfigError(f"option {named[0]} is empty")
    if named[0] == "subscribe":
        topics = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
        if not topics:
            raise ConfigError(f"option subscribe: {value!r} names no topic")
        return topics, "", None
    if named[0] == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(f"option subscribePattern: {value!r}: {error}") from None
        return (), value, None
    assigned: dict[str, tuple[str, ...]] = {}
    content = _json("assign", value)
    for topic, partitions in content.items():
        if not isinstance(partitions, list) or not partitions:
            raise ConfigError(f"option assign: the partitions of {topic} are no list of numbers")
        assigned[topic] = tuple(str(each) for each in partitions)
        for key in assigned[topic]:
            _check_key("assign", topic, key)
    return tuple(assigned), "", assigned


def _group(given: _Given) -> str:
    group, prefix = given.text("groupId"), given.text("groupIdPrefix")
    kafka = given.text("kafka.group.id")
    if group and kafka and group != kafka:
        raise ConfigError("options groupId and kafka.group.id contradict")
    if group and prefix:
        raise ConfigError("options groupId and groupIdPrefix contradict; give one")
    if kafka and prefix:
        log_lines.warning("option groupIdPrefix is ignored: kafka.group.id names the group")
    name = "groupId" if group else "kafka.group.id"
    # RocketMQ's groups have no dots, Kafka's often do: they are written as those of topics are.
    stored = (group or kafka).replace(".", "%2E")
    if stored and not _GROUP.fullmatch(stored):
        raise ConfigError(
            f"option {name}: {group or kafka!r} is no group: letters, digits, %, |, _, - and ., "
            "up to 120"
        )
    return stored


def _filters(given: _Given) -> Filters:
    keys = tuple(part.strip() for part in given.text("filter.keys").split(",") if part.strip())
    for key in keys:
        if re.search(r"[\s\x01\x02]", key):
            raise ConfigError(f"option filter.keys: {key!r} holds a blank, which keys cannot have")
    tags = given.text("filter.tags")
    if tags and "||" not in tags and "," in tags:
        tags = " || ".join(part.strip() for part in tags.split(",") if part.strip())
    if tags and not tags.replace("||", "").strip():
        raise ConfigError(f"option filter.tags: {tags!r} names no tag")
    _check_sql(given.text("filter.sql"))
    return Filters("" if tags == "*" else tags, keys, given.text("filter.sql"))


def _check_sql(text: str) -> None:
    """Refuse what brokers would refuse, and what they would leave out without a word."""
    if not text:
        return
    try:
        ignored_at = read_filter(text).ignored_at
    except SubscriptionIllegal as error:
        raise ConfigError(f"option filter.sql: {text[:80]!r}: {error}") from None
    if ignored_at >= 0:
        raise ConfigError(
            f"option filter.sql: brokers do not look at {text[ignored_at:][:80]!r}, because the "
            "filter is whole before it"
        )


# ------------------------------------------------------------------------------------------- bounds


def _bound(given: _Given, which: str, assigned: dict[str, tuple[str, ...]] | None) -> Bound | None:
    """In Kafka's order: one time for all, times, offsets."""
    stamp = given.number(f"{which}Timestamp", None, 0)
    if stamp is not None:
        return Bound(timestamp_ms=stamp)
    name = f"{which}OffsetsByTimestamp"
    if given.text(name):
        return Bound(timestamps_ms=_per_partition(name, given.text(name), assigned, 0))
    name = f"{which}Offsets"
    value = given.text(name)
    if not value:
        return None
    if value.lower() in ("earliest", "latest"):
        return Bound(all_at=EARLIEST if value.lower() == "earliest" else LATEST)
    return Bound(offsets=_per_partition(name, value, assigned, EARLIEST))


def _per_partition(
    name: str, value: str, assigned: dict[str, tuple[str, ...]] | None, low: int
) -> PerPartition:
    content = _json(name, value)
    for topic, partitions in content.items():
        if not isinstance(partitions, dict) or not partitions:
            raise ConfigError(f'option {name}: {topic} needs {{"0": number, ...}}')
        for partition, number in partitions.items():
            _check_key(name, topic, partition)
            if type(number) is not int or not low <= number <= _LONG_MAX:
                raise ConfigError(f"option {name}: {topic}/{partition}: {number!r} is no number")
            if assigned is not None and partition not in assigned.get(topic, ()):
                raise ConfigError(f"option {name}: {topic}/{partition} is not in option assign")
    return content


def _check_key(name: str, topic: str, key: str) -> None:
    if not _QUEUE_KEY.fullmatch(key):
        raise ConfigError(
            f"option {name}: {topic}: {key!r} is neither a queue's number nor broker/number"
        )


def _json(name: str, value: str) -> dict[str, Any]:
    try:
        content = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"option {name}: {value[:80]!r} is no JSON: {error}") from None
    if not isinstance(content, dict) or not content:
        raise ConfigError(f'option {name}: {value[:80]!r} is not {{"topic": ...}}')
    return content


# ------------------------------------------------------------------------------------------ writing


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """The options of `df.write` or `df.writeStream`; raises ConfigError."""
    given = _Given(options, (*_COMMON, *_WRITE), "sink")
    version = given.number("txnVersion", None, 0)
    sink_id = given.text("txnAppId")
    if version is not None and not sink_id:
        raise ConfigError("option txnVersion needs option txnAppId")
    if "txnAppId" in given.names and not _SINK.fullmatch(sink_id):
        raise ConfigError(
            f"option txnAppId: {sink_id[:80]!r} is no name: 1 to 200 printable ASCII characters"
        )
    delivery = ""
    if given.text("delivery"):
        delivery = given.word("delivery", ("exactlyOnce", "atLeastOnce"), "")
    if sink_id and delivery == "atLeastOnce":
        raise ConfigError(
            "options txnAppId and delivery contradict: what is named to be written once is not "
            "sent at least once; leave one out"
        )
    batch_bytes = given.size("batchBytes", 2 * _MIB, 1024)
    check_topic("topic", given.text("topic"))
    return WriteOptions(
        _connection(given),
        given.text("topic"),
        delivery,
        sink_id,
        version,
        _at_most(given, "batchBytes", batch_bytes, 4 * _MIB),
    )


def check_topic(option: str, topic: str) -> None:
    """Refuse a topic that no broker has. Those of Kafka's clients may have dots."""
    if topic and not _TOPIC.fullmatch(topic):
        raise ConfigError(
            f"option {option}: {topic[:80]!r} is no topic: letters, digits, %, |, _, - and ."
        )


# ------------------------------------------------------------------------------------------- either


def check_either(options: Mapping[str, str]) -> None:
    """Refuse what neither a read nor a write takes, with the error of what it seems to be."""
    try:
        read_options(options)
        return
    except ConfigError as error:
        as_read = error
    try:
        write_options(options)
    except ConfigError as error:
        raise (error if _is_of_write(options, as_read, error) else as_read) from None


def _is_of_write(options: Mapping[str, str], as_read: ConfigError, as_write: ConfigError) -> bool:
    given = {name.lower() for name in options}
    if not given.isdisjoint(name.lower() for name in _SELECTING):
        return False
    if not given.isdisjoint(name.lower() for name in _WRITE if name not in _READ):
        return True
    return _HINT in str(as_write) and _HINT not in str(as_read)
