"""`sluice admin`: messages printed, found, sent and read."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.link import RemotingLink
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import send_fields
from tests.unit.client.admin_kit import BROKER, CLUSTER, Site, cluster


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with cluster() as running:
        running.ok("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "2", "-w", "2")
        for number in range(3):
            tag = ("TagA", "TagB")[number % 2]
            running.send("orders", f"body-{number}", 1, "-k", f"key-{number} all", "-c", tag)
        running.send("orders", "other queue", 0)
        yield running


def bodies(document: Any) -> list[str]:
    return [message["body"] for message in document["messages"]]


def send_raw(site: Site, topic: str, body: bytes, sys_flag: int = 0, **properties: str) -> str:
    """Send as any producer may; the message's offset id."""

    async def send() -> str:
        fields: dict[str, object] = {**send_fields(topic, 0, **properties), "f": sys_flag}
        ext = {name: str(value) for name, value in fields.items()}
        link = await RemotingLink.open(site.broker.address)
        answer = await link.request(Request.SEND_MESSAGE_V2, ext, body, timeout_seconds=30)
        assert answer.code == 0, answer.remark
        await link.close()
        return answer.ext["msgId"]

    return site.call(send())


# ----------------------------------------------------------------------------------------- printing


def test_print_all_messages_of_a_topic(site: Site) -> None:
    rows = site.lines("printMsg", "-t", "orders")
    assert len(rows) == 4
    assert rows[1].startswith("20")
    assert f" {BROKER}/1 0 " in rows[1]
    assert rows[1].endswith(" [TagA] keys=key-0 all body-0")
    document = site.json("printMsg", "-t", "orders")
    assert bodies(document) == ["other queue", "body-0", "body-1", "body-2"]
    message = document["messages"][1]
    assert (message["topic"], message["queueId"], message["queueOffset"]) == ("orders", 1, 0)
    assert message["properties"]["TAGS"] == "TagA"
    assert message["bornHost"].startswith("127.0.0.1:")
    assert message["storeHost"] == site.broker.address


def test_print_only_some(site: Site) -> None:
    print_all = ("printMsg", "-t", "orders")
    assert bodies(site.json(*print_all, "-s", "TagB")) == ["body-1"]
    assert bodies(site.json(*print_all, "-b", "now")) == []
    assert bodies(site.json(*print_all, "-e", "0")) == []
    assert len(bodies(site.json(*print_all, "-b", "0", "-e", "2100-01-01#00:00:00:000"))) == 4
    document = site.json(*print_all, "-d", "false")
    assert "body" not in document["messages"][0]
    assert "body-0" not in site.ok(*print_all, "-d", "false")


def test_print_more_than_one_pull_brings(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "many", "-r", "1", "-w", "1")
    site.json("checkMsgSendRT", "-t", "many", "-a", "70", "-s", "10")
    assert len(bodies(site.json("printMsg", "-t", "many"))) == 70
    assert len(site.lines("consumeMessage", "-t", "many", "-c", "50")) == 50


def test_print_in_another_charset(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "chinese", "-r", "1", "-w", "1")
    send_raw(site, "chinese", "订单".encode("gbk"))
    assert bodies(site.json("printMsg", "-t", "chinese", "-c", "GBK")) == ["订单"]
    (message,) = site.json("printMsg", "-t", "chinese")["messages"]
    assert base64.b64decode(message["bodyBase64"]) == "订单".encode("gbk")
    for name in ("Klingon", "hex", "idna", "unicode_escape", "a\0b"):
        said = site.wrong("printMsg", "-t", "chinese", "-c", name)
        assert "is no known charset" in said
    send_raw(site, "chinese", b"+2AA-")  # half a character, to UTF-7
    message = site.json("printMsg", "-t", "chinese", "-c", "utf-7")["messages"][-1]
    assert base64.b64decode(message["bodyBase64"]) == b"+2AA-"
    site.ok("printMsg", "-t", "chinese", "-c", "utf-7")


def test_bodies_cannot_act_on_the_terminal(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "evil", "-r", "1", "-w", "1")
    send_raw(site, "evil", b"\x1b[2Jgone\r\nnext line", KEYS="\x1b]0;title\x07")
    out = site.ok("printMsg", "-t", "evil")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert out.count("\n") == 1
    assert bodies(site.json("printMsg", "-t", "evil")) == ["\x1b[2Jgone\r\nnext line"]


def test_compressed_bodies_are_unpacked_where_that_is_known(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "packed", "-r", "1", "-w", "1")
    send_raw(site, "packed", zlib.compress(b"hello" * 100), sys_flag=1)
    send_raw(site, "packed", b"lz4 bytes", sys_flag=1 | 1 << 8)
    send_raw(site, "packed", b"no zlib", sys_flag=1 | 3 << 8)
    first, second, third = site.json("printMsg", "-t", "packed")["messages"]
    assert first["body"] == "hello" * 100
    assert (second["bodyCompression"], third["bodyCompression"]) == ("LZ4", "zlib")
    assert base64.b64decode(second["bodyBase64"]) == b"lz4 bytes"
    assert "(9 bytes, compressed by LZ4)" in site.ok("printMsg", "-t", "packed")


def test_print_or_count_one_queue(site: Site) -> None:
    queue = ("printMsgByQueue", "-t", "orders", "-a", BROKER, "-i", "1")
    assert site.ok(*queue) == ""
    assert site.lines(*queue, "-f", "true")[-3:] == ["Tag Count", "TagA 2", "TagB 1"]
    document = site.json(*queue, "--printMsg", "true", "-d", "true", "-f", "true")
    assert bodies(document) == ["body-0", "body-1", "body-2"]
    assert document["tags"] == [{"tag": "TagA", "count": 2}, {"tag": "TagB", "count": 1}]
    assert site.json(*queue) == {"messages": []}
    missing = site.refused("printMsgByQueue", "-t", "nowhere", "-a", BROKER, "-i", "0")
    assert missing.startswith("topic nowhere is not known")
    assert site.refused("printMsgByQueue", "-t", "orders", "-a", "broker-z", "-i", "0") == (
        f"no broker broker-z; there are: {BROKER}"
    )


# ------------------------------------------------------------------------------------------ reading


def test_consume_reads_and_moves_nobody(site: Site) -> None:
    consume = ("consumeMessage", "-t", "orders")
    assert len(bodies(site.json(*consume))) == 4
    assert bodies(site.json(*consume, "-c", "2")) == ["other queue", "body-0"]
    one = ("-b", BROKER, "-i", "1")
    assert bodies(site.json(*consume, *one, "-o", "1")) == ["body-1", "body-2"]
    assert bodies(site.json(*consume, *one, "-o", "9")) == []
    assert bodies(site.json(*consume, *one, "-s", "0", "-e", "now")) == [
        "body-0",
        "body-1",
        "body-2",
    ]
    site.ok("updateSubGroup", "-c", CLUSTER, "-g", "looking")
    assert len(site.lines(*consume, "-g", "looking")) == 4
    assert site.broker.core.offsets.committed("looking", "orders", 1) is None


def test_consume_with_flags_that_do_not_fit(site: Site) -> None:
    consume = ("consumeMessage", "-t", "orders")
    assert "-b/--brokerName" in site.wrong(*consume, "-i", "1")
    assert "-i/--queueId" in site.wrong(*consume, "-b", BROKER, "-o", "1")
    assert "is not over yet" in site.wrong(*consume, "-s", "2100-01-01#00:00:00:000")
    assert "after -e" in site.wrong(*consume, "-s", "now", "-e", "1000")
    assert "at least 1" in site.wrong(*consume, "-c", "0")


# ------------------------------------------------------------------------------------------ finding


def test_query_by_offset_id_with_what_became_of_it(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "tracked", "-r", "1", "-w", "1")
    sent = site.send("tracked", "found", 0, "-k", "k", "-c", "TagA")
    site.join("done", {"tracked": "*"}, client_id="done")
    site.commit("done", "tracked", 0, 1)
    site.join("late", {"tracked": "*"}, client_id="late")
    site.join("picky", {"tracked": "TagZ"}, client_id="picky")
    site.commit("picky", "tracked", 0, 1)
    site.join("pulls", {"tracked": "*"}, client_id="pulls", consume_type="CONSUME_ACTIVELY")
    site.join("all", {"tracked": "*"}, client_id="all", model="BROADCASTING")
    site.call(site.join("gone", {"tracked": "*"}, client_id="gone").close())
    site.commit("gone", "tracked", 0, 1)
    (message,) = site.json("queryMsgById", "-t", "tracked", "-i", sent["offsetMsgId"])["messages"]
    assert message["body"] == "found"
    assert message["offsetMsgId"] == sent["offsetMsgId"]
    tracks = {row["consumerGroup"]: row["trackType"] for row in message["messageTrackList"]}
    assert tracks == {
        "done": "CONSUMED",
        "late": "NOT_CONSUME_YET",
        "picky": "CONSUMED_BUT_FILTERED",
        "pulls": "PULL",
        "all": "CONSUME_BROADCASTING",
        "gone": "NOT_ONLINE",
    }
    rows = site.lines("queryMsgById", "-t", "tracked", "-i", sent["offsetMsgId"])
    assert "Keys: k" in rows
    assert "Body: found" in rows
    assert "done CONSUMED" in rows


def test_query_by_several_ids_and_by_unique_keys(site: Site) -> None:
    first = site.send("orders", "first", 0)
    second = site.send("orders", "second", 0)
    ids = f"{first['offsetMsgId']},{second['msgId']}"
    assert bodies(site.json("queryMsgById", "-t", "orders", "-i", ids)) == ["first", "second"]
    for message_id in ("0" * 32, "7F00000100002A9F00000000000FFFFF", "nonsense"):
        said = site.refused("queryMsgById", "-t", "orders", "-i", message_id)
        assert said == f"no message of orders has the id {message_id}"
    rows = site.lines("queryMsgByUniqueKey", "-t", "orders", "-i", first["msgId"])
    assert f"MsgID: {first['msgId']}" in rows
    assert site.refused("queryMsgByUniqueKey", "-t", "orders", "-i", "X") == (
        "no message of orders has the unique key X"
    )


def test_a_message_that_is_sent_again_has_the_same_unique_key(site: Site) -> None:
    sent = site.send("orders", "again", 0, "-k", "twice")
    query = ("queryMsgById", "-t", "orders", "-i", sent["msgId"], "-s")
    (again,) = site.json(*query, "true")["sendResults"]
    assert again["queueOffset"] == sent["queueOffset"] + 1
    assert again["msgId"] == sent["msgId"]
    assert site.json(*query, "false")["sendResults"] == []
    unique = ("queryMsgByUniqueKey", "-t", "orders", "-i", sent["msgId"])
    assert len(site.json(*unique)["messages"]) == 1
    assert bodies(site.json(*unique, "-a")) == ["again", "again"]
    assert site.refused(*unique, "-e", "1000").startswith("no message of orders has")
    assert len(site.json("queryMsgByKey", "-t", "orders", "-k", "twice")["messages"]) == 2


def test_a_consumer_can_be_told_to_consume_a_message(site: Site) -> None:
    sent = site.send("orders", "direct", 0)
    site.join("told", {"orders": "*"}, client_id="told")
    site.join("asks", {"orders": "*"}, client_id="asks", consume_type="CONSUME_ACTIVELY")
    for query in ("queryMsgById", "queryMsgByUniqueKey"):
        ask = (query, "-t", "orders", "-i", sent["msgId"])
        (result,) = site.json(*ask, "-g", "told", "-d", "told")["results"]
        assert (result["consumeResult"], result["spentTimeMills"]) == ("CR_SUCCESS", 7)
        assert site.lines(*ask, "-g", "told", "-d", "told")[1].endswith("CR_SUCCESS 7 fine")
        assert "no push consumer" in site.refused(*ask, "-g", "asks", "-d", "asks")
        assert "together" in site.wrong(*ask, "-g", "told")


def test_query_by_key_and_by_tag(site: Site) -> None:
    rows = site.lines("queryMsgByKey", "-t", "orders", "-k", "key-1")
    assert rows[0] == "Message Broker Queue Offset Stored"
    assert f" {BROKER} 1 1 20" in rows[1]
    query = ("queryMsgByKey", "-t", "orders")
    assert bodies(site.json(*query, "-k", "all")) == ["body-0", "body-1", "body-2"]
    assert len(bodies(site.json(*query, "-k", "all", "-m", "1"))) == 1
    assert bodies(site.json(*query, "-k", "TagB", "-p", "T")) == ["body-1"]
    assert len(bodies(site.json(*query, "-k", "all", "-b", "0", "-c", CLUSTER))) == 3
    assert site.refused(*query, "-k", "missing") == "no message of orders has the key missing"
    assert site.refused(*query, "-k", "all", "-e", "1000").startswith("no message of orders")
    assert "K is for keys" in site.wrong(*query, "-k", "all", "-p", "X")


def test_query_by_offset(site: Site) -> None:
    query = ("queryMsgByOffset", "-t", "orders", "-b", BROKER, "-i", "1")
    rows = site.lines(*query, "-o", "2", "-r", "orders")
    assert "Queue Offset: 2" in rows
    assert "Body: body-2" in rows
    assert "No group reads this topic." not in rows  # consumers joined it above
    assert bodies(site.json(*query, "-o", "0", "-f", "ascii")) == ["body-0"]
    assert site.refused(*query, "-o", "77") == (
        f"orders queue 1 of {BROKER} has no message at offset 77 (OFFSET_ILLEGAL, go on at 3)"
    )


# ------------------------------------------------------------------------------------------ sending


def test_send_a_message(site: Site) -> None:
    send = ("sendMessage", "-t", "orders", "-p", "hello there")
    rows = site.lines(*send, "-k", "a b", "-c", "TagC", "-b", BROKER)
    assert rows[0] == "Broker Queue Offset Result Message Offset Id"
    assert " SEND_OK " in rows[1]
    sent = site.json(*send, "-m", "false")
    assert sent["brokerName"] == BROKER
    assert (len(sent["msgId"]), len(sent["offsetMsgId"])) == (32, 32)
    assert "-b/--broker" in site.wrong(*send, "-i", "1")
    assert "no message traces" in site.wrong(*send, "-m", "true")
    assert site.refused(*send, "-b", BROKER, "-i", "9") == (
        f"orders has no queue 9 that can be written on {BROKER}"
    )
    assert "-p/--body is needed" in site.wrong("sendMessage", "-t", "orders")


def test_a_message_that_the_broker_refuses(site: Site) -> None:
    said = site.refused("sendMessage", "-t", "orders", "-p", "x" * 70_000)
    assert said.startswith(f"{site.broker.address}: sending to orders: ")
    done = site.admin("checkMsgSendRT", "-t", "orders", "-a", "2", "-s", "70000")
    assert done.status == 1
    assert "false" in done.out


def test_how_long_sends_take(site: Site) -> None:
    document = site.json("checkMsgSendRT", "-t", "orders", "-a", "3", "-s", "10")
    assert [row["queueId"] for row in document["sends"]] == [0, 1, 0]
    assert all(row["sendResult"] and row["rt"] > 0 for row in document["sends"])
    rows = site.lines("checkMsgSendRT", "-t", "orders", "-a", "1")
    assert rows[0] == "Broker Queue Sent ms Error"
    assert rows[1].startswith(f"{BROKER} 0 true ")
    assert rows[-1].startswith("Avg RT: ")
