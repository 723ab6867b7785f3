"""`sluice admin` against Apache's broker and against Sluice: the same answers, the same flags.

Each command runs against both clusters, with Java consumers that are connected to both. What is
compared is the document for scripts: the same numbers and names, but for times, addresses and ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from peers import Jars, JavaPrograms, PeerUnavailable, RocketMQ, RunningProgram
from peers.rocketmq import BROKER, CLUSTER
from sluice.client.admin_main import COMMANDS
from sluice.link import RemotingLink
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, kind
from tests.interop.sluice_process import SluiceProcess
from tests.unit.client.admin_kit import Done, sluice

WAIT_S = 240.0
POLL_S = 0.1

# Members that are different in every run, or that a broker says of itself.
MASKED = frozenset(
    {
        *("brokerAddr", "namesrvAddr", "clientAddr", "clientId", "bornHost", "storeHost"),
        *("msgId", "offsetMsgId", "commitLogOffset", "storeSize", "subVersion"),
        *("bornTimestamp", "storeTimestamp", "lastUpdateTimestamp", "lastTimestamp", "timestamp"),
        *("topicPutTps", "consumeTps", "inTPS", "outTPS", "inTps", "outTps", "rt", "avgRT"),
        *("hour", "space", "pageCacheLockTimeMills", "wipeTopicCount", "addTopicCount"),
        *("spentTimeMills", "UNIQ_KEY"),
    }
)
# Only Sluice stores a checksum over a message; only Apache's broker keeps nobody's filter servers.
LEFT_OUT = frozenset({"__CRC32#", "filterServerTable"})


def normal(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {
            name: "X" if name in MASKED else "ADDRESS" if name == "0" else normal(member)
            for name, member in value.items()
            if name not in LEFT_OUT
        }
    if isinstance(value, list):
        return [normal(member) for member in value]
    if isinstance(value, str):
        return masked(value)
    return value


def masked(text: str) -> str:
    text = re.sub(r"\d+\.\d+\.\d+\.\d+@[\w#]+", "CLIENT", text)
    return re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)


def differences(theirs: Any, ours: Any) -> list[str]:
    """Lines that only one of the two has: - Apache, + Sluice."""

    def lines(value: Any) -> list[str]:
        return json.dumps(value, indent=1, sort_keys=True).splitlines()

    return [line for line in difflib.ndiff(lines(theirs), lines(ours)) if line[0] in "-+"]


class Place(NamedTuple):
    """A cluster, with the consumers that are connected to it."""

    peer: RocketMQ | SluiceProcess
    consumers: RunningProgram

    def admin(self, line: str) -> Done:
        words = [word.replace("~", " ") for word in line.split()]
        words = [word.replace("{broker}", self.peer.broker_address) for word in words]
        return sluice("admin", *words, "-n", self.peer.nameserver_address)

    def document(self, line: str) -> Any:
        done = self.admin(f"{line} --json")
        assert done.status == 0, (line, done)
        return json.loads(done.out)

    def received(self, reader: int) -> int:
        events = kind(self.consumers.events(), "received")
        return sum(1 for event in events if event.get("reader") == reader)


class Both(NamedTuple):
    """Apache's cluster and Sluice's."""

    apache: Place
    ours: Place

    def same(self, line: str, only: Callable[[Any], Any] = lambda document: document) -> Any:
        """What a command says, which has to be the same of both."""
        theirs = normal(only(self.apache.document(line)))
        ours = normal(only(self.ours.document(line)))
        assert ours == theirs, "\n".join([line, *differences(theirs, ours)])
        return ours

    def refused(self, line: str, status: int = 1) -> str:
        """What a command that is refused says; Sluice's broker in the words of Apache's."""
        theirs, ours = (place.admin(line) for place in self)
        assert (theirs.status, ours.status) == (status, status), (line, theirs, ours)
        assert masked(ours.err) == masked(theirs.err)
        assert theirs.out == ours.out == ""
        return masked(ours.err)

    def until(self, condition: Callable[[Place], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not all(condition(place) for place in self):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(POLL_S)


@contextlib.contextmanager
def reading(programs: JavaPrograms, peer: RocketMQ | SluiceProcess) -> Iterator[Place]:
    """A group that reads, and one whose members do not agree on what."""
    readers = ("push:readers", "push:divided:TagA", "push:divided:TagB")
    options = [word for reader in readers for word in ("--reader", reader)]
    arguments = ["--namesrv", peer.nameserver_address, "--topic", "Orders", *options]
    with programs.started("Receive", *arguments) as consumers:
        consumers.wait_for("ready", 1, WAIT_S)
        yield Place(peer, consumers)


@pytest.fixture(scope="module")
def programs(rocketmq_jars: Jars, tmp_path_factory: pytest.TempPathFactory) -> JavaPrograms:
    try:
        home = tmp_path_factory.mktemp("java")
        return JavaPrograms(JAVA_SOURCES, rocketmq_jars, home=home, options=JAVA_OPTIONS)
    except PeerUnavailable as error:
        pytest.skip(error.reason)


def test_flags_are_those_of_mqadmin(programs: JavaPrograms) -> None:
    """Letters, long names, whether a value follows, and which cannot be left out."""
    apache = {event["name"]: event["flags"] for event in kind(programs.run("Flags"), "flags")}
    own = {"subscriptions", "deadLetters", "resendDeadLetters", "delayed", "transactions"}
    own |= {"resumeCheckHalfMessage"}  # which only the library has
    assert set(COMMANDS) - set(apache) == own
    for name, command in COMMANDS.items():
        if name in own:
            continue
        ours = {
            flag.short or flag.long: flag.long
            + (" x" if flag.kind is not None else "")
            + (" !" if flag.required else "")
            for flag in command.flags
        }
        # Long names with blanks in them can hardly be typed: here they have none.
        theirs = {
            short: " ".join([words[0], *words[1:]]).replace("print msg", "printMsg")
            for short, words in ((key, value.split()) for key, value in apache[name].items())
        }
        extra = {key: value for key, value in ours.items() if key not in theirs}
        assert {key: ours.get(key) for key in theirs} == theirs, name
        assert extra in ({}, {"cplus": "cplus"}), name  # mqadmin hides it behind another flag


@pytest.mark.slow
def test_commands_say_the_same_of_apaches_broker(
    rocketmq_jars: Jars, programs: JavaPrograms, tmp_path: Path
) -> None:
    with (
        RocketMQ(tmp_path / "apache", jars=rocketmq_jars, heap_mb=512) as apache,
        SluiceProcess(tmp_path / "sluice") as serving,
    ):
        prepared = [sluice_admin(peer, *SETUP) for peer in (apache, serving)]
        assert all(done.status == 0 for dones in prepared for done in dones), prepared
        with reading(programs, apache) as theirs, reading(programs, serving) as ours:
            both = Both(theirs, ours)
            check_topics(both)
            check_messages(both)
            check_groups(both)
            check_clients(both)
            check_offsets(both)
            check_brokers(both)
            check_deletion(both)


SETUP = (
    f"updateTopic -c {CLUSTER} -t Orders -r 4 -w 4",
    "updateTopic -b {broker} -t Extra -r 1 -w 1 -a +message.type=FIFO",
    f"updateSubGroup -c {CLUSTER} -g copies",
)


def sluice_admin(peer: RocketMQ | SluiceProcess, *lines: str) -> list[Done]:
    return [
        sluice(
            *("admin", *line.replace("{broker}", peer.broker_address).split()),
            *("-n", peer.nameserver_address),
        )
        for line in lines
    ]


def check_topics(both: Both) -> None:
    assert both.same(f"updateTopicPerm -c {CLUSTER} -t Extra -p 4")["brokers"][0]["oldPerm"] == 6
    route = both.same("topicRoute -t Orders")
    assert route["queueDatas"][0]["readQueueNums"] == 4
    listed = both.same(
        "topicList", lambda d: [t for t in d["topicList"] if t in ("Orders", "Extra")]
    )
    assert listed == ["Extra", "Orders"]
    shares = both.same("allocateMQ -t Orders -i 10.0.0.1,10.0.0.2")["result"]
    assert [len(share) for share in shares.values()] == [2, 2]
    assert "topic Unknown is not known" in both.refused("topicRoute -t Unknown")
    assert "no cluster Nowhere" in both.refused("updateTopic -c Nowhere -t x")
    assert "illegal characters" in both.refused("updateTopic -b {broker} -t a*b")


def check_messages(both: Both) -> None:
    for number in range(5):
        line = f"sendMessage -t Orders -p body-{number} -k key-{number} -c TagA -b {BROKER} -i 1"
        assert both.same(line)["queueOffset"] == number
    both.same(f"sendMessage -t Orders -p hello~there -k sent -c TagB -b {BROKER} -i 2")
    both.until(lambda place: place.received(0) >= 6 and behind(place) == 0)
    status = both.same("topicStatus -t Orders")
    assert [row["maxOffset"] for row in status["offsetTable"]] == [0, 5, 1, 0]
    printed = both.same("printMsg -t Orders")["messages"]
    assert [m["body"] for m in printed] == [*(f"body-{n}" for n in range(5)), "hello there"]
    assert len(both.same("printMsg -t Orders -s TagB")["messages"]) == 1
    counted = both.same(f"printMsgByQueue -t Orders -a {BROKER} -i 1 -p true -f true")
    assert counted["tags"] == [{"tag": "TagA", "count": 5}]
    assert [m["body"] for m in both.same("queryMsgByKey -t Orders -k key-3")["messages"]] == [
        "body-3"
    ]
    assert len(both.same("queryMsgByKey -t Orders -k TagB -p T")["messages"]) == 1
    at = f"queryMsgByOffset -t Orders -b {BROKER} -i 1 -o"
    found = both.same(f"{at} 2", tracked_by_readers)["messages"][0]
    assert (found["keys"], found["messageTrackList"][0]["trackType"]) == ("key-2", "CONSUMED")
    both.refused(f"{at} 77")
    read = both.same(f"consumeMessage -t Orders -b {BROKER} -i 1 -o 1 -c 3")["messages"]
    assert [m["queueOffset"] for m in read] == [1, 2, 3]
    assert "has the key nothing" in both.refused("queryMsgByKey -t Orders -k nothing")
    for place in both:
        check_one_message(place)


def behind(place: Place) -> int:
    """How far the readers are behind; they commit what they have read every few seconds."""
    return int(place.document("consumerProgress -g readers -t Orders")["diffTotal"])


def tracked_by_readers(document: Any) -> Any:
    """The members of the other group share the queues as their names happen to be ordered."""
    for message in document["messages"]:
        tracks = message["messageTrackList"]
        message["messageTrackList"] = [t for t in tracks if t["consumerGroup"] == "readers"]
    return document


def check_one_message(place: Place) -> None:
    """Ids are each broker's own: found by each of them, and consumed again when told to."""
    sent = place.document(f"queryMsgByOffset -t Orders -b {BROKER} -i 1 -o 4")["messages"][0]
    for command, name in (
        ("queryMsgById", "offsetMsgId"),
        ("queryMsgById", "msgId"),
        ("queryMsgByUniqueKey", "msgId"),
    ):
        line = f"{command} -t Orders -i {sent[name]}"
        (found,) = place.document(line)["messages"]
        assert found["body"] == "body-4"
        tracks = {row["consumerGroup"]: row["trackType"] for row in found["messageTrackList"]}
        assert tracks["readers"] == "CONSUMED"
    (client_id,) = client_ids(place, "readers")
    direct = f"queryMsgById -t Orders -i {sent['msgId']} -g readers -d {client_id}"
    (result,) = place.document(direct)["results"]
    assert result["consumeResult"] == "CR_SUCCESS"


def client_ids(place: Place, group: str) -> list[str]:
    rows = place.document(f"consumerConnection -g {group}")["connectionSet"]
    return [row["clientId"] for row in rows]


def queue_count(document: Any) -> int:
    return len(document["consumers"][0]["mqTable"])


def check_groups(both: Both) -> None:
    # A member takes its queues bit by bit: four of the topic, one for what is tried again.
    both.until(lambda place: queue_count(place.document("consumerStatus -g readers")) == 5)
    document = both.same(
        "consumerProgress -g readers -t Orders",
        lambda d: [
            (r["queueId"], r["brokerOffset"], r["consumerOffset"]) for r in d["offsetTable"]
        ],
    )
    assert document == [(0, 0, 0), (1, 5, 5), (2, 1, 1), (3, 0, 0)]
    rows = both.same(
        "consumerProgress",
        lambda d: [[r["group"], r["count"], r["version"], r["consumeType"]] for r in d["groups"]],
    )
    assert rows == [["divided", 2, "V5_5_0", "PUSH"], ["readers", 1, "V5_5_0", "PUSH"]]
    owners = both.same(
        "consumerProgress -g readers -t Orders -s true",
        lambda d: [row["clientIP"] != "N/A" for row in d["offsetTable"]],
    )
    assert owners == [True] * 4
    stats = both.same(
        "statsAll -t Orders", lambda d: [[r["topic"], r["consumerGroup"]] for r in d["stats"]]
    )
    assert ["Orders", "readers"] in stats
    both.refused("consumerProgress -g nobody")


def check_clients(both: Both) -> None:
    connected = both.same("consumerConnection -g readers")
    assert connected["connectionSet"][0]["language"] == "JAVA"
    assert connected["subscriptionTable"]["Orders"]["subString"] == "*"
    both.refused("consumerConnection -g nobody")
    status = both.same(
        "consumerStatus -g readers",
        lambda d: [d["sameSubscription"], d["problems"], queue_count(d)],
    )
    assert status == [True, [], 5]
    # Members that do not agree are found in both places: they are asked themselves.
    divided = both.same(
        "consumerStatus -g divided", lambda d: [d["sameSubscription"], d["unequalSubscriptions"]]
    )
    assert divided == [False, ["Orders: 'TagA' by CLIENT; 'TagB' by CLIENT"]]
    for place in both:
        done = place.admin("subscriptions")
        assert done.status == 1
        assert "WARNING: members of group divided subscribe differently" in done.out
        check_producer(place)
    # Sluice's broker says it to whoever asks for connections.
    ours = both.ours.document("consumerConnection -g divided")
    assert normal(ours)["unequalSubscriptions"] == divided[1]
    # mqadmin takes no offence at a member that it does not know.
    assert isinstance(both.apache.peer, RocketMQ)
    shown = both.apache.peer.mqadmin(
        *("consumerConnection", "-g", "divided"), nameserver=both.ours.peer.nameserver_address
    )
    assert shown.stdout.count("JAVA") == 2
    assert re.search(r"^Orders +Tag[AB]$", shown.stdout, re.MULTILINE), shown.stdout


def check_producer(place: Place) -> None:
    async def work() -> Done:
        link = await RemotingLink.open(place.peer.broker_address)
        body = bodies.write_heartbeat(bodies.Heartbeat("me@1", ("senders",)))
        heard = await link.request(Request.HEART_BEAT, {}, body, timeout_seconds=WAIT_S)
        assert heard.code == 0
        done = await asyncio.to_thread(place.admin, "producerConnection -g senders -t Orders")
        await link.close()
        return done

    done = asyncio.run(work())
    assert done.status == 0, done
    assert re.search(r"^me@1 +127\.0\.0\.1:\d+ +PYTHON +V5_5_0$", done.out, re.MULTILINE)


def check_offsets(both: Both) -> None:
    before = [place.received(0) for place in both]
    reset = both.same("resetOffsetByTime -g readers -t Orders -s 0")
    assert [row["offset"] for row in reset["offsetTable"]] == [0, 0, 0, 0]
    both.until(lambda place: place.received(0) >= before[both.index(place)] + 6)  # all again
    ended = both.same("resetOffsetByTime -g copies -t Orders -s now")
    assert [row["offset"] for row in ended["offsetTable"]] == [0, 5, 1, 0]
    skipped = both.same("skipAccumulatedMessage -g copies -t Orders")
    assert [row["offset"] for row in skipped["offsetTable"]] == [0, 5, 1, 0]
    one = both.same("resetOffsetByTime -g copies -t Orders -s 0 -b {broker} -q 1 -o 3")
    assert one["offsetTable"] == [{"brokerName": BROKER, "queueId": 1, "offset": 3}]
    both.same(f"updateSubGroup -c {CLUSTER} -g cloned")
    cloned = both.same("cloneGroupOffset -s copies -d cloned -t Orders")
    assert [row["offset"] for row in cloned["offsetTable"]] == [0, 3, 1, 0]
    progress = both.same(
        "consumerProgress -g cloned -t Orders",
        lambda d: [row["consumerOffset"] for row in d["offsetTable"]],
    )
    assert progress == [0, 3, 1, 0]
    assert "does not exist" in both.refused("skipAccumulatedMessage -g unknown -t Orders")


def check_brokers(both: Both) -> None:
    brokers = both.same("clusterList")["brokers"]
    assert [(b["brokerName"], b["brokerVersionDesc"], b["brokerActive"]) for b in brokers] == [
        (BROKER, "V5_5_0", True)
    ]
    totals = both.same("clusterList -m", lambda d: d["brokers"][0]["inTotalToday"])
    assert totals == 6
    names = both.same(
        "brokerStatus -b {broker}",
        lambda d: [n for n in d["brokers"][0]["table"] if n in ("putTps", "commitLogMaxOffset")],
    )
    assert names == ["commitLogMaxOffset", "putTps"]
    both.same("updateBrokerConfig -b {broker} -k autoCreateTopicEnable -v false")
    shown = both.same(
        f"getBrokerConfig -c {CLUSTER}",
        lambda d: d["brokers"][0]["properties"]["autoCreateTopicEnable"],
    )
    assert shown == "false"
    assert "black list" in both.refused("updateBrokerConfig -b {broker} -k rocketmqHome -v x")
    both.same(f"wipeWritePerm -b {BROKER}")
    assert both.same("topicRoute -t Orders")["queueDatas"][0]["perm"] == 4
    both.same(f"addWritePerm -b {BROKER}")
    assert both.same("topicRoute -t Orders")["queueDatas"][0]["perm"] == 6
    sends = both.same("checkMsgSendRT -t Orders -a 5 -s 10")["sends"]
    assert [row["queueId"] for row in sends] == [0, 1, 2, 3, 0]
    both.same("updateKvConfig -s NS -k one -v 1")
    both.same("deleteKvConfig -s NS -k one")


def check_deletion(both: Both) -> None:
    both.same(f"deleteSubGroup -c {CLUSTER} -g copies -r true")
    both.same(f"deleteTopic -c {CLUSTER} -t Extra")
    assert "topic Extra is not known" in both.refused("topicStatus -t Extra")
