"""This module reads and writes the bodies that say which topics, brokers and offsets there are.

They are JSON with traps: maps of integers and of queues have keys without quotes
(`json_members.py`), and Go takes routes apart by hand, so there may be no blank in them. A body
that cannot be read raises RequestInvalid: the frame around it is whole, so the connection stays.
No IO, no clock.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Final, NamedTuple

import orjson

from sluice.errors import RequestInvalid
from sluice.model import Buffer
from sluice.protocol.json_members import (
    MessageQueue,
    as_number,
    as_object,
    bare_keys,
    flag,
    items,
    mapping,
    number,
    objects,
    queue_keys,
    quoted_keys,
    read_integer_keys,
    read_object,
    read_queue_keys,
    text,
    text_map,
    texts,
)

# Versions are ordinals of a list in RocketMQ.
# A broker that listens on every address of its machine says so when it registers, in this field of
# the header, which other nameservers do not know and pass over.
EVERYWHERE_FIELD: Final = "sluiceListensOn"
VERSION_4_9_4: Final = 401  # from here on clients read routes with quoted keys
VERSION_5_0_0: Final = 413  # from here on a compressed registration ends with queue mappings

# A broker with 100,000 topics sends about 20 MiB of JSON, or 1 MiB compressed.
REGISTER_BYTES_MAX: Final = 64 * 1024 * 1024
# Lists of topics shrink to a twentieth or thirtieth. What shrinks to less than a hundredth was
# made to fill the memory of who unpacks it.
INFLATE_RATIO_MAX: Final = 100
_INFLATE_BYTES_MIN: Final = 64 * 1024

_I32: Final = Struct(">i")


# -------------------------------------------------------------------------------- topics, versions


class DataVersion(NamedTuple):
    """Which state of a table this is; any difference means that it changed."""

    counter: int = 0
    state_version: int = 0
    timestamp_ms: int = 0

    def members(self) -> dict[str, int]:
        return {
            "counter": self.counter,
            "stateVersion": self.state_version,
            "timestamp": self.timestamp_ms,
        }


def read_data_version(members: Mapping[str, Any]) -> DataVersion:
    return DataVersion(
        number(members, "counter", 0),
        number(members, "stateVersion", 0),
        number(members, "timestamp", 0),
    )


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of a topic on one broker."""

    name: str
    read_queue_count: int = 4
    write_queue_count: int = 4
    perm: int = 6
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    def members(self) -> dict[str, Any]:
        return {
            "attributes": self.attributes,
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queue_count,
            "topicFilterType": self.filter_type,
            "topicName": self.name,
            "topicSysFlag": self.sys_flag,
            "writeQueueNums": self.write_queue_count,
        }

    def line(self) -> bytes:
        """The form inside a compressed registration; flag and order do not fit into it."""
        attributes = orjson.dumps(self.attributes).decode()
        counts = f"{self.read_queue_count} {self.write_queue_count} {self.perm}"
        return f"{self.name} {counts} {self.filter_type} {attributes}".encode()


def read_topic_config(members: Mapping[str, Any]) -> TopicConfig:
    return TopicConfig(
        text(members, "topicName"),
        number(members, "readQueueNums", 16),
        number(members, "writeQueueNums", 16),
        number(members, "perm", 6),
        text(members, "topicFilterType", "SINGLE_TAG"),
        number(members, "topicSysFlag", 0),
        flag(members, "order"),
        text_map(members, "attributes"),
    )


def read_topic_line(line: bytes) -> TopicConfig:
    parts = line.decode("utf-8", "replace").split(" ", 5)
    if len(parts) < 5:
        raise RequestInvalid("a topic of a compressed registration has less than five parts")
    attributes: dict[str, str] = {}
    if len(parts) == 6 and parts[5]:
        try:
            attributes = text_map({"attributes": orjson.loads(parts[5])}, "attributes")
        except orjson.JSONDecodeError:
            attributes = {}  # RocketMQ ignores them too: a blank in a value breaks the line
    return TopicConfig(
        parts[0],
        as_number(parts[1], "readQueueNums"),
        as_number(parts[2], "writeQueueNums"),
        as_number(parts[3], "perm"),
        parts[4],
        attributes=attributes,
    )


# ------------------------------------------------------------------------------- routes, clusters


class BrokerData(NamedTuple):
    """One broker group: the addresses of its replicas by id; 0 is the master."""

    cluster: str
    name: str
    addresses: dict[int, str]
    acting_master: bool = False
    zone: str | None = None

    def members(self, *, quoted: bool) -> dict[str, Any]:
        members: dict[str, Any] = {
            "brokerAddrs": quoted_keys(self.addresses) if quoted else bare_keys(self.addresses),
            "brokerName": self.name,
            "cluster": self.cluster,
            "enableActingMaster": self.acting_master,
        }
        if self.zone is not None:
            members["zoneName"] = self.zone
        return members


def read_broker_data(members: Mapping[str, Any]) -> BrokerData:
    addresses = read_integer_keys(text_map(members, "brokerAddrs"), "brokerAddrs")
    zone = members.get("zoneName")
    return BrokerData(
        text(members, "cluster", ""),
        text(members, "brokerName"),
        addresses,
        flag(members, "enableActingMaster"),
        None if zone is None else text(members, "zoneName"),
    )


class QueueData(NamedTuple):
    """How many queues of a topic a broker group has, and what may be done with them."""

    broker_name: str
    read_queue_count: int
    write_queue_count: int
    perm: int
    sys_flag: int = 0

    def members(self) -> dict[str, Any]:
        return {
            "brokerName": self.broker_name,
            "perm": self.perm,
            "readQueueNums": self.read_queue_count,
            "topicSysFlag": self.sys_flag,
            "writeQueueNums": self.write_queue_count,
        }


def read_queue_data(members: Mapping[str, Any]) -> QueueData:
    return QueueData(
        text(members, "brokerName"),
        number(members, "readQueueNums"),
        number(members, "writeQueueNums"),
        number(members, "perm"),
        number(members, "topicSysFlag", 0),
    )


class Route(NamedTuple):
    """Which brokers serve a topic."""

    brokers: tuple[BrokerData, ...]
    queues: tuple[QueueData, ...]
    order_config: str | None = None
    filter_servers: Mapping[str, tuple[str, ...] | None] = {}  # by broker address
    queue_mappings: Mapping[str, Any] | None = None  # of a static topic, by broker name


def wants_quoted_keys(version: int, accept_standard_json_only: bool | None) -> bool:
    """Whether who asks for a route reads (or only reads) standard JSON."""
    return bool(accept_standard_json_only) or version >= VERSION_4_9_4


def write_route(route: Route, *, quoted: bool) -> bytes:
    members: dict[str, Any] = {
        "brokerDatas": [broker.members(quoted=quoted) for broker in route.brokers],
        "filterServerTable": route.filter_servers,
        "queueDatas": [queue.members() for queue in route.queues],
    }
    if route.order_config is not None:
        members["orderTopicConf"] = route.order_config
    if route.queue_mappings is not None:
        members["topicQueueMappingByBroker"] = route.queue_mappings
    return orjson.dumps(members)


def read_route(body: Buffer) -> Route:
    members = read_object(body)
    order = members.get("orderTopicConf")
    return Route(
        tuple(read_broker_data(broker) for broker in objects(members, "brokerDatas")),
        tuple(read_queue_data(queue) for queue in objects(members, "queueDatas")),
        None if order is None else text(members, "orderTopicConf"),
    )


def write_cluster_info(brokers: Iterable[BrokerData]) -> bytes:
    brokers = list(brokers)
    clusters: dict[str, list[str]] = {}
    for broker in brokers:
        clusters.setdefault(broker.cluster, []).append(broker.name)
    table = {broker.name: broker.members(quoted=False) for broker in brokers}
    return orjson.dumps({"brokerAddrTable": table, "clusterAddrTable": clusters})


def read_cluster_info(body: Buffer) -> dict[str, BrokerData]:
    """The broker groups by name."""
    table = mapping(read_object(body), "brokerAddrTable")
    return {name: read_broker_data(as_object(row, name)) for name, row in table.items()}


def write_member_group(broker: BrokerData) -> bytes:
    group = {
        "brokerAddrs": bare_keys(broker.addresses),
        "brokerName": broker.name,
        "cluster": broker.cluster,
    }
    return orjson.dumps({"brokerMemberGroup": group})


# ------------------------------------------------------------------------------------ registration


@dataclass(frozen=True, slots=True)
class Registration:
    """What a broker tells a nameserver of its topics. Queue mappings are kept as they came."""

    topics: dict[str, TopicConfig]
    data_version: DataVersion = DataVersion()
    filter_servers: tuple[str, ...] = ()
    queue_mappings: dict[str, Any] = field(default_factory=dict)


def read_registration(body: Buffer, *, compressed: bool, version: int) -> Registration:
    if compressed:
        return _read_compressed(_inflate(body), version)
    members = read_object(body, REGISTER_BYTES_MAX)
    wrapper = mapping(members, "topicConfigSerializeWrapper")
    table = mapping(wrapper, "topicConfigTable")
    return Registration(
        {name: read_topic_config(as_object(row, name)) for name, row in table.items()},
        read_data_version(mapping(wrapper, "dataVersion")),
        texts(members, "filterServerList"),
        mapping(wrapper, "topicQueueMappingInfoMap"),
    )


def write_registration(registration: Registration, *, compressed: bool = False) -> bytes:
    if compressed:
        return _write_compressed(registration)
    topics = registration.topics.items()
    wrapper = {
        "dataVersion": registration.data_version.members(),
        "mappingDataVersion": DataVersion().members(),
        "topicConfigTable": {name: topic.members() for name, topic in topics},
        "topicQueueMappingDetailMap": {},
        "topicQueueMappingInfoMap": registration.queue_mappings,
    }
    return orjson.dumps(
        {
            "filterServerList": list(registration.filter_servers),
            "topicConfigSerializeWrapper": wrapper,
        }
    )


def _inflate(body: Buffer) -> bytes:
    """Unpack, up to a limit that grows with what was received."""
    bytes_max = min(REGISTER_BYTES_MAX, _INFLATE_BYTES_MIN + INFLATE_RATIO_MAX * len(body))
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(body, bytes_max)
    except zlib.error as error:
        raise RequestInvalid(f"the compressed body cannot be unpacked: {error}") from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise RequestInvalid(f"the compressed body is cut short, or unpacks to over {bytes_max}")
    return data


def _read_compressed(data: bytes, version: int) -> Registration:
    at = 0

    def size() -> int:
        nonlocal at
        if at + 4 > len(data):
            raise RequestInvalid("the compressed registration is cut short")
        (value,) = _I32.unpack_from(data, at)
        at += 4
        # Whatever it counts takes at least one byte each, so no loop runs on a number alone.
        if not 0 <= value <= len(data) - at:
            raise RequestInvalid("the compressed registration is cut short")
        return int(value)

    def part() -> bytes:
        nonlocal at
        end = size() + at
        piece = data[at:end]
        at = end
        return piece

    data_version = read_data_version(read_object(part()))
    topics = [read_topic_line(part()) for _ in range(size())]
    filter_servers = _read_filter_servers(part())
    mappings = {}
    if version >= VERSION_5_0_0:
        for _ in range(size()):
            info = read_object(part())
            mappings[text(info, "topic")] = info
    return Registration(
        {topic.name: topic for topic in topics}, data_version, filter_servers, mappings
    )


def _read_filter_servers(part: bytes) -> tuple[str, ...]:
    try:
        return texts({"filterServerList": orjson.loads(part)}, "filterServerList")
    except orjson.JSONDecodeError:
        raise RequestInvalid("filterServerList is no JSON list") from None


def _write_compressed(registration: Registration) -> bytes:
    def part(data: bytes) -> bytes:
        return _I32.pack(len(data)) + data

    pieces = [part(orjson.dumps(registration.data_version.members()))]
    pieces.append(_I32.pack(len(registration.topics)))
    pieces += (part(topic.line()) for topic in registration.topics.values())
    pieces.append(part(orjson.dumps(list(registration.filter_servers))))
    pieces.append(_I32.pack(len(registration.queue_mappings)))
    pieces += (part(orjson.dumps(info)) for info in registration.queue_mappings.values())
    return zlib.compress(b"".join(pieces), 9)


# ---------------------------------------------------------------------------------- offset tables


class QueueSpan(NamedTuple):
    """First and next offset of a queue, and when it last changed (202)."""

    min_offset: int
    max_offset: int
    changed_ms: int
    stable_offset: int | None = None  # Sluice's own: where transactions keep readers further back


class QueueProgress(NamedTuple):
    """How far a group has read a queue, and how far it could (208)."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_ms: int


def write_topic_stats(spans: Mapping[MessageQueue, QueueSpan], put_tps: float) -> bytes:
    rows = (
        (
            queue,
            {
                "lastUpdateTimestamp": span.changed_ms,
                "maxOffset": span.max_offset,
                "minOffset": span.min_offset,
                **({} if span.stable_offset is None else {"stableOffset": span.stable_offset}),
            },
        )
        for queue, span in spans.items()
    )
    return orjson.dumps({"offsetTable": queue_keys(rows), "topicPutTps": put_tps})


def read_topic_stats(body: Buffer) -> dict[MessageQueue, QueueSpan]:
    table = read_queue_keys(read_object(body), "offsetTable")
    return {
        queue: QueueSpan(
            number(row, "minOffset"),
            number(row, "maxOffset"),
            number(row, "lastUpdateTimestamp"),
            number(row, "stableOffset") if "stableOffset" in row else None,
        )
        for queue, value in table.items()
        for row in (as_object(value, "a value of offsetTable"),)
    }


def consume_stats(progress: Mapping[MessageQueue, QueueProgress], tps: float) -> dict[str, Any]:
    """The value of a 208 answer; 317 has lists of them."""
    rows = (
        (
            queue,
            {
                "brokerOffset": row.broker_offset,
                "consumerOffset": row.consumer_offset,
                "lastTimestamp": row.last_ms,
                "pullOffset": row.pull_offset,
            },
        )
        for queue, row in progress.items()
    )
    return {"consumeTps": tps, "offsetTable": queue_keys(rows)}


def write_consume_stats(progress: Mapping[MessageQueue, QueueProgress], tps: float) -> bytes:
    return orjson.dumps(consume_stats(progress, tps))


def read_consume_stats(body: Buffer) -> dict[MessageQueue, QueueProgress]:
    table = read_queue_keys(read_object(body), "offsetTable")
    return {
        queue: QueueProgress(
            number(row, "brokerOffset"),
            number(row, "consumerOffset"),
            number(row, "pullOffset", 0),
            number(row, "lastTimestamp", 0),
        )
        for queue, value in table.items()
        for row in (as_object(value, "a value of offsetTable"),)
    }


def write_queue_offsets(offsets: Mapping[MessageQueue, int], name: str = "offsetTable") -> bytes:
    """Offsets by queue: offsetTable (220, 222), messageQueueTable (221)."""
    return orjson.dumps({name: queue_keys(offsets.items())})


def read_queue_offsets(body: Buffer, name: str = "offsetTable") -> dict[MessageQueue, int]:
    table = read_queue_keys(read_object(body), name)
    return {queue: as_number(value, f"a value of {name}") for queue, value in table.items()}


def write_consumer_offsets(offsets: Mapping[str, Mapping[int, int]], version: DataVersion) -> bytes:
    """Committed offsets by "topic@group", then by queue (43)."""
    table = {key: bare_keys(queues) for key, queues in offsets.items()}
    return orjson.dumps({"dataVersion": version.members(), "offsetTable": table})


def read_consumer_offsets(body: Buffer) -> dict[str, dict[int, int]]:
    table = mapping(read_object(body, REGISTER_BYTES_MAX), "offsetTable")
    return {
        key: {
            queue: as_number(offset, f"an offset of {key}")
            for queue, offset in read_integer_keys(as_object(row, key), key).items()
        }
        for key, row in table.items()
    }


def write_delay_offsets(offsets: Mapping[int, int], version: DataVersion) -> bytes:
    """Progress of the delay levels (45)."""
    return orjson.dumps({"dataVersion": version.members(), "offsetTable": bare_keys(offsets)})


# -------------------------------------------------------------------------------- tables and lists


def write_kv_table(table: Mapping[str, str]) -> bytes:
    return orjson.dumps({"table": dict(table)})


def read_kv_table(body: Buffer) -> dict[str, str]:
    return text_map(read_object(body), "table")


def write_topic_list(topics: Iterable[str], broker_address: str | None = None) -> bytes:
    members: dict[str, Any] = {"topicList": list(topics)}
    if broker_address is not None:
        members["brokerAddr"] = broker_address
    return orjson.dumps(members)


def read_topic_list(body: Buffer) -> tuple[str, ...]:
    return texts(read_object(body, REGISTER_BYTES_MAX), "topicList")


def write_group_list(groups: Iterable[str]) -> bytes:
    return orjson.dumps({"groupList": list(groups)})


def read_topic_configs(body: Buffer) -> list[TopicConfig]:
    """The body of 18: topicConfigList."""
    members = read_object(body, REGISTER_BYTES_MAX)
    rows = items(members, "topicConfigList")
    return [read_topic_config(as_object(row, "a topic")) for row in rows]


_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SEPARATOR: Final = re.compile(r"(?<!\\)[=:]")


def write_properties(table: Mapping[str, str]) -> bytes:
    """Settings as text, `name=value` a line, sorted (26, 319): what mqadmin prints."""
    return "".join(f"{name}={table[name]}\n" for name in sorted(table)).encode()


def read_properties(body: Buffer) -> dict[str, str]:
    """Settings out of text (25, 318): comments are left out, backslashes taken as Java does."""
    table = {}
    for line in bytes(body).decode("utf-8", "replace").splitlines():
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        found = _SEPARATOR.search(line)
        name, value = (line, "") if found is None else (line[: found.start()], line[found.end() :])
        table[_unescaped(name.strip())] = _unescaped(value.strip())
    return table


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    units = _ESCAPE.sub(_character, text).encode("utf-16-le", "surrogatepass")
    return units.decode("utf-16-le", "replace")  # two escapes may make one character


def _character(match: re.Match[str]) -> str:
    digits, character = match.groups()
    if digits is not None:
        return chr(int(digits, 16))
    return _ESCAPED.get(character, character)
