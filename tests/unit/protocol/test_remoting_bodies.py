"""Bodies are read as RocketMQ's classes write them, and written so that they read the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from sluice.errors import RequestInvalid
from sluice.protocol import remoting_bodies as bodies
from sluice.protocol import remoting_clients as clients
from sluice.protocol.json_members import MessageQueue, read_object
from tests.unit.protocol.codec import GOLDEN

JAVA = {
    name: text.encode()
    for line in (GOLDEN / "rocketmq-5.5.0-bodies.txt").read_text(encoding="utf-8").splitlines()
    for name, _, text in (line.partition(" "),)
}
NOW_MS = 1794772393024
QUEUE, QUEUE_1 = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-a", 1)
BROKER = bodies.BrokerData("C", "broker-a", {0: "127.0.0.1:10911", 1: "127.0.0.1:10921"})
ROUTE = bodies.Route((BROKER,), (bodies.QueueData("broker-a", 4, 8, 6),))
SUBSCRIPTION = clients.Subscription(
    "T", "TagA || TagB", NOW_MS, ("TagA", "TagB"), (2598919, 2598920)
)
HEARTBEAT = clients.Heartbeat(
    "10.0.0.1@77",
    ("PG",),
    (
        clients.ConsumerData(
            "CG", "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET", (SUBSCRIPTION,)
        ),
    ),
)
MAPPING = {
    "bname": "broker-a",
    "currIdMap": {"0": 0, "1": 3},
    "dirty": False,
    "epoch": 5,
    "scope": "__global__",
    "topic": "S",
    "totalQueues": 4,
}
REGISTRATION = bodies.Registration(
    {"T": bodies.TopicConfig("T", 4, 8, attributes={"message.type": "NORMAL"})},
    bodies.DataVersion(9, 0, NOW_MS),
    ("10.0.0.2:99",),
    {"S": MAPPING},
)
CONNECTION = clients.ConsumerConnection(
    (clients.ConnectionInfo("c", "127.0.0.1:5", "GO", 317),),
    "CONSUME_PASSIVELY",
    "CLUSTERING",
    "CONSUME_FROM_LAST_OFFSET",
    {"T": SUBSCRIPTION},
)
LOCK = clients.LockRequest("c", "CG", (QUEUE,))

# name of the golden body, reader, value, writer
CASES: list[tuple[str, Callable[[bytes], Any], Any, Callable[[Any], bytes]]] = [
    ("route", bodies.read_route, ROUTE, lambda v: bodies.write_route(v, quoted=False)),
    (
        "cluster",
        bodies.read_cluster_info,
        {"broker-a": BROKER},
        lambda v: bodies.write_cluster_info(v.values()),
    ),
    ("heartbeat", clients.read_heartbeat, HEARTBEAT, clients.write_heartbeat),
    ("lock", clients.read_lock_request, LOCK, clients.write_lock_request),
    ("locked", clients.read_locked_queues, (QUEUE,), clients.write_locked_queues),
    (
        "topic-stats",
        bodies.read_topic_stats,
        {QUEUE: bodies.QueueSpan(1, 7, NOW_MS)},
        lambda v: bodies.write_topic_stats(v, 0.0),
    ),
    (
        "consume-stats",
        bodies.read_consume_stats,
        {QUEUE: bodies.QueueProgress(9, 4, 6, NOW_MS)},
        lambda v: bodies.write_consume_stats(v, 1.5),
    ),
    ("reset", bodies.read_queue_offsets, {QUEUE_1: 6, QUEUE: 5}, bodies.write_queue_offsets),
    (
        "consumer-connection",
        clients.read_consumer_connection,
        CONNECTION,
        clients.write_consumer_connection,
    ),
    (
        "consumer-offsets",
        bodies.read_consumer_offsets,
        {"T@CG": {0: 5, 1: 7}},
        lambda v: bodies.write_consumer_offsets(v, bodies.DataVersion(9, 0, NOW_MS)),
    ),
    ("kv", bodies.read_kv_table, {"a": "b"}, bodies.write_kv_table),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_bodies_are_those_of_java_to_the_byte(case: Any) -> None:
    name, read, value, write = case
    assert read(JAVA[name]) == value
    assert write(value) == JAVA[name]


def test_the_status_of_a_consumer_has_another_name_for_its_table() -> None:
    assert bodies.read_queue_offsets(JAVA["status"], "messageQueueTable") == {QUEUE: 5}
    written = bodies.write_queue_offsets({QUEUE: 5}, "messageQueueTable")
    assert written in JAVA["status"].replace(b'"consumerTable":{},', b"")


def test_a_registration_in_both_forms() -> None:
    compressed = bytes.fromhex(JAVA["register-compressed"].decode())
    for body, is_compressed in ((JAVA["register"], False), (compressed, True)):
        read = bodies.read_registration(body, compressed=is_compressed, version=513)
        assert read == REGISTRATION
        written = bodies.write_registration(read, compressed=is_compressed)
        again = bodies.read_registration(written, compressed=is_compressed, version=513)
        assert again == REGISTRATION


def test_a_compressed_registration_of_version_4_has_no_queue_mappings() -> None:
    compressed = bytes.fromhex(JAVA["register-compressed"].decode())
    read = bodies.read_registration(compressed, compressed=True, version=401)
    assert read.queue_mappings == {}
    assert read.topics == REGISTRATION.topics


@pytest.mark.parametrize("cut", range(0, 250, 7))
def test_a_compressed_registration_cut_anywhere_is_refused(cut: int) -> None:
    inner = zlib.decompress(bodies.write_registration(REGISTRATION, compressed=True))
    assert len(inner) > 250
    for body in (zlib.compress(inner[:cut]), zlib.compress(inner)[: cut // 2], inner[:cut]):
        with pytest.raises(RequestInvalid):
            bodies.read_registration(body, compressed=True, version=513)


@pytest.mark.parametrize(
    "inner",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\2[]",
        b"\0\0\0\2{}\x7f\xff\xff\xff",
        b"\0\0\0\2{}\0\0\0\1\0\0\0\3a 1",
        b"\0\0\0\2{}\0\0\0\1\0\0\0\x09a x 1 6 T",
        b"\0\0\0\2{}\0\0\0\0\0\0\0\2{}\0\0\0\0",
        b"\0\0\0\2{}\0\0\0\0\0\0\0\0\0\0\0\0",
        b'\0\0\0\2{}\0\0\0\0\0\0\0\2[]\0\0\0\1\0\0\0\x50{"topic":"S"}',
    ],
)
def test_a_compressed_registration_of_nonsense_is_refused(inner: bytes) -> None:
    with pytest.raises(RequestInvalid):
        bodies.read_registration(zlib.compress(inner), compressed=True, version=513)


def test_a_registration_that_unpacks_to_too_much_is_refused() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    assert len(bomb) < 60_000
    with pytest.raises(RequestInvalid, match="unpacks to over"):
        bodies.read_registration(bomb, compressed=True, version=513)


def test_attributes_with_a_blank_are_lost_as_in_rocketmq() -> None:
    assert bodies.read_topic_line(b"T 4 8 6 SINGLE_TAG {broken") == bodies.TopicConfig("T", 4, 8)
    assert bodies.read_topic_line(b"T 4 8 6 SINGLE_TAG") == bodies.TopicConfig("T", 4, 8)


def test_routes_have_quoted_keys_for_those_who_read_them() -> None:
    quoted = bodies.write_route(ROUTE._replace(order_config="broker-a:4"), quoted=True)
    assert orjson.loads(quoted)["brokerDatas"][0]["brokerAddrs"]["1"] == "127.0.0.1:10921"
    assert bodies.read_route(quoted) == ROUTE._replace(order_config="broker-a:4")
    assert b" " not in quoted
    assert b" " not in bodies.write_route(ROUTE, quoted=False)
    assert bodies.wants_quoted_keys(401, None)
    assert bodies.wants_quoted_keys(317, True)
    assert not bodies.wants_quoted_keys(317, None)
    assert not bodies.wants_quoted_keys(317, False)


def test_a_zone_is_written_where_there_is_one() -> None:
    zoned = bodies.Route((BROKER._replace(zone="z1"),), ())
    assert bodies.read_route(bodies.write_route(zoned, quoted=True)) == zoned
    assert b"zoneName" not in bodies.write_route(ROUTE, quoted=True)


def test_a_member_group() -> None:
    assert bodies.write_member_group(BROKER) == (
        b'{"brokerMemberGroup":{"brokerAddrs":{0:"127.0.0.1:10911",1:"127.0.0.1:10921"},'
        b'"brokerName":"broker-a","cluster":"C"}}'
    )


def test_the_heartbeat_of_go() -> None:
    body = (
        b'{"clientID":"c","producerDataSet":[{"groupName":"p"}],"consumerDataSet":[{"groupName":'
        b'"g",'
        b'"consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING","consumeFromWhere":'
        b'"CONSUME_FROM_FIRST_OFFSET","subscriptionDataSet":[{"classFilterMode":false,"topic":"T",'
        b'"subString":"TagA","tagsSet":["TagA"],"codeSet":["2598919"],'
        b'"subVersion":1794772393024000000,"expressionType":"TAG"}],"unitMode":false}]}'
    )
    heartbeat = clients.read_heartbeat(body)
    (consumer,) = heartbeat.consumers
    assert consumer.subscriptions[0].codes == (2598919,)
    assert consumer.subscriptions[0].version == 1794772393024000000
    assert heartbeat.producer_groups == ("p",)
    assert heartbeat.fingerprint == 0


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ((0, 1, 1), ("CONSUME_FROM_LAST_OFFSET", "CONSUME_PASSIVELY", "CLUSTERING")),
        ((4, 0, 0), ("CONSUME_FROM_FIRST_OFFSET", "CONSUME_ACTIVELY", "BROADCASTING")),
        ((5, 2, 1), ("CONSUME_FROM_TIMESTAMP", "CONSUME_POP", "CLUSTERING")),
    ],
)
def test_the_heartbeat_of_cpp_has_numbers_for_names(
    numbers: tuple[int, int, int], names: tuple[str, str, str]
) -> None:
    members = ("consumeFromWhere", "consumeType", "messageModel")
    row = {"groupName": "g", **dict(zip(members, numbers, strict=True))}
    body = orjson.dumps({"clientID": "c", "consumerDataSet": [row]})
    (consumer,) = clients.read_heartbeat(body).consumers
    said = (consumer.consume_from_where, consumer.consume_type, consumer.message_model)
    assert said == names
    for member in members:
        for value in (-1, 6, True, 1.0):
            bad = orjson.dumps({"clientID": "c", "consumerDataSet": [row | {member: value}]})
            with pytest.raises(RequestInvalid):
                clients.read_heartbeat(bad)


def test_a_subscription_without_a_type_is_of_tags() -> None:
    for kind in (None, ""):
        members = SUBSCRIPTION.members() | {"expressionType": kind}
        assert clients.read_subscription(members).expression_type == "TAG"


def test_the_check_of_a_client() -> None:
    subscription = SUBSCRIPTION._replace(expression_type="SQL92", expression="a > 1")
    body = {"clientId": "c", "group": "g", "subscriptionData": subscription.members()}
    assert clients.read_client_check(orjson.dumps(body)) == ("c", "g", subscription)


def test_lists() -> None:
    assert bodies.write_topic_list(["a", "b"]) == b'{"topicList":["a","b"]}'
    assert bodies.read_topic_list(bodies.write_topic_list(["a"], "h:1")) == ("a",)
    assert orjson.loads(bodies.write_topic_list([], "h:1")) == {
        "brokerAddr": "h:1",
        "topicList": [],
    }
    assert bodies.write_group_list(["g"]) == b'{"groupList":["g"]}'
    assert clients.read_consumer_ids(clients.write_consumer_ids(["c1", "c2"])) == ("c1", "c2")
    producers = clients.write_producer_connection(CONNECTION.connections)
    assert clients.read_producer_connection(producers) == CONNECTION.connections
    topics = orjson.dumps({"topicConfigList": [REGISTRATION.topics["T"].members()]})
    assert bodies.read_topic_configs(topics) == [REGISTRATION.topics["T"]]
    assert bodies.write_delay_offsets({3: 7, 1: 5}, bodies.DataVersion()) == (
        b'{"dataVersion":{"counter":0,"stateVersion":0,"timestamp":0},"offsetTable":{1:5,3:7}}'
    )


def test_the_table_of_producers() -> None:
    table = clients.write_producer_table({"PG": CONNECTION.connections}, {"c": NOW_MS})
    (row,) = orjson.loads(table)["data"]["PG"]
    assert row["remoteIP"] == "/127.0.0.1:5"
    assert row["lastUpdateTimestamp"] == NOW_MS


def test_settings_as_text() -> None:
    table = {"b": "2", "a": "x=y", "empty": ""}
    assert bodies.write_properties(table) == b"a=x=y\nb=2\nempty=\n"
    assert bodies.read_properties(bodies.write_properties(table)) == table
    java = (
        b"# comment\n! other\n\n a\\=b : c\\\\d\\u4e2d \r\npair=\\ud83d\\ude00\nhalf=\\ud83d\nalone"
    )
    assert bodies.read_properties(java) == {
        "a=b": "c\\d中",
        "pair": "😀",
        "half": "\ufffd",
        "alone": "",
    }


@pytest.mark.parametrize(
    "text",
    [
        b'{"offsetTable" : { {"topic":"T", "queueId" : 0, "brokerName":"broker-a"} : 5 } }',
        b'{"offsetTable":{{"topic":"T","queueId":"0","brokerName":"broker-a"}:"5"}}',
    ],
)
def test_queue_keys_with_blanks_in_any_order(text: bytes) -> None:
    assert bodies.read_queue_offsets(text) == {QUEUE: 5}


def test_keys_without_quotes_are_found_outside_of_strings_only() -> None:
    tricky = b'{"a":"{0:1,{x}:2}","b\\"":{-5:1, 7 :2},"c":[{"d":{}},{"e":1}],"f":"\\\\"}'
    assert read_object(tricky) == {
        "a": "{0:1,{x}:2}",
        'b"': {"-5": 1, "7": 2},
        "c": [{"d": {}}, {"e": 1}],
        "f": "\\",
    }
    braces = MessageQueue('T{}":1,', "b}", 0)
    assert bodies.read_queue_offsets(bodies.write_queue_offsets({braces: 1})) == {braces: 1}


READERS: list[Callable[[bytes], Any]] = [
    bodies.read_route,
    bodies.read_cluster_info,
    bodies.read_topic_stats,
    bodies.read_consume_stats,
    bodies.read_queue_offsets,
    bodies.read_consumer_offsets,
    bodies.read_kv_table,
    bodies.read_topic_list,
    bodies.read_topic_configs,
    lambda body: bodies.read_registration(body, compressed=False, version=513),
    lambda body: bodies.read_registration(body, compressed=True, version=513),
    clients.read_heartbeat,
    clients.read_client_check,
    clients.read_lock_request,
    clients.read_locked_queues,
    clients.read_consumer_connection,
    clients.read_producer_connection,
    clients.read_consumer_ids,
]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'"',
        b"\xff",
        b"[" * 100_000,
        b'"' + b'\\"' * 200_000,
        b"{{" * 100_000,
        b'{"brokerDatas":[1],"clusterAddrTable":1,"brokerAddrTable":{"a":1},"offsetTable":{"a":1},'
        b'"table":{"a":1},"topicList":[1],"topicConfigList":[1],"consumerDataSet":[1],'
        b'"topicConfigSerializeWrapper":[],"mqSet":{},"lockOKMQSet":[{}],"connectionSet":[[]],'
        b'"consumerIdList":[null]}',
    ],
    ids=lambda body: body[:20],
)
@pytest.mark.parametrize("read", READERS)
def test_nonsense_is_refused_and_the_connection_stays(
    read: Callable[[bytes], Any], body: bytes
) -> None:
    with pytest.raises(RequestInvalid) as caught:
        read(body)
    assert not caught.value.closes_connection


@pytest.mark.parametrize(
    "change",
    [
        {"codeSet": ["x"]},
        {"codeSet": [1 << 40]},
        {"codeSet": ["9" * 5000]},
        {"codeSet": {}},
        {"subVersion": 1 << 64},
        {"subVersion": "soon"},
        {"topic": None},
        {"tagsSet": [1]},
        {"classFilterMode": "false"},
    ],
    ids=str,
)
def test_a_subscription_with_a_bad_member_is_refused(change: dict[str, Any]) -> None:
    assert clients.read_subscription(SUBSCRIPTION.members()) == SUBSCRIPTION
    with pytest.raises(RequestInvalid, match=next(iter(change))):
        clients.read_subscription(SUBSCRIPTION.members() | change)


def test_a_body_over_its_limit_is_not_parsed() -> None:
    with pytest.raises(RequestInvalid, match="is over 1048576"):
        clients.read_heartbeat(b"{" + b" " * (1 << 20) + b"}")


def test_keys_of_queues_that_are_no_queues() -> None:
    for key in (b'"x"', b'"[]"', b'{"topic":1}', b'{"\xff":1}'):
        with pytest.raises(RequestInvalid):
            bodies.read_queue_offsets(b'{"offsetTable":{%b:1}}' % key)
