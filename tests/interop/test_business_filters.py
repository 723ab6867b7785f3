"""Filters, replies and traces: RocketMQ's clients against Sluice, and Sluice beside RocketMQ.

Filters are compared twice. RocketMQ's own code judges thousands of them in one Java process; and
its broker and ours hold the same messages, and give the same ones to the same filters.
"""

from __future__ import annotations

import asyncio
import random
import re
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
import pytest

from peers import Jars, JavaPrograms, PeerUnavailable, RocketMQ
from peers.rocketmq import CLUSTER
from sluice.broker.sql_filter import read_filter
from sluice.errors import SubscriptionIllegal
from sluice.link import RemotingLink
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, Clients, SendPlan, kind, received
from tests.interop.sluice_process import Question, SluiceProcess, ask, make_topic
from tests.interop.sql_cases import TAGS, Expressions, properties, stored_form
from tests.interop.watching import wait_until

PROGRAM_S = 240.0
REQUEST_S = 60.0
QUEUES = 2
IN_FLIGHT = 64
_SUBSCRIPTION_IN_HEADER = 4
_FOUND, _NOT_FOUND, _NEXT = 0, 19, 20
SEED = 20261116
NEW_SEED = time.time_ns() % 1_000_000_007


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path_factory.mktemp("filters")) as process:
        yield process


@pytest.fixture
def programs(rocketmq_jars: Jars, tmp_path: Path) -> JavaPrograms:
    try:
        home = tmp_path / "programs"
        return JavaPrograms(JAVA_SOURCES, rocketmq_jars, home=home, options=JAVA_OPTIONS)
    except PeerUnavailable as error:
        pytest.skip(error.reason)


# -------------------------------------------------------------------------------- the filter itself


def packed(texts: Sequence[str]) -> bytes:
    encoded = [text.encode() for text in texts]
    return struct.pack(">i", len(texts)) + b"".join(
        struct.pack(">i", len(text)) + text for text in encoded
    )


def said(expression: str, messages: Sequence[bytes]) -> str:
    """What our filter says, in the oracle's words; its screen lets pass all that it wants."""
    try:
        wanted = read_filter(expression).test
    except SubscriptionIllegal:
        return "refused"
    letters = ""
    for message in messages:
        framed = b"\x02%b\x02" % message
        is_wanted = wanted.test(framed)
        if is_wanted and wanted.screen is not None:
            assert wanted.screen.search(framed), (expression, message)
        letters += "1" if is_wanted else "0"
    return letters


@pytest.mark.parametrize(
    ("seed", "count"),
    # With a name of its own: several workers have to find the same tests, whatever the time.
    [(SEED, 2_000), pytest.param(NEW_SEED, 60_000, marks=pytest.mark.soak, id="random")],
)
def test_rocketmqs_own_filter_says_the_same(
    programs: JavaPrograms, tmp_path: Path, seed: int, count: int
) -> None:
    chance = random.Random(seed)
    messages = [stored_form(properties(chance)) for _ in range(200)]
    maker = Expressions(seed)
    expressions = [maker.one() for _ in range(count)]
    cases = tmp_path / "cases"
    cases.write_bytes(packed(expressions) + packed(messages))
    events = programs.run("SqlOracle", "--cases", str(cases), timeout_s=PROGRAM_S)
    judged = [row["said"] for row in kind(events, "judged")]
    assert len(judged) == count
    stored = [message.encode() for message in messages]
    for expression, theirs in zip(expressions, judged, strict=True):
        assert said(expression, stored) == theirs, (seed, expression)
    words = Counter("refused" if "r" in row else "".join(sorted(set(row))) for row in judged)
    # Otherwise the comparison would say little.
    assert words["refused"] > count // 10
    assert words["01"] > count // 5


# ------------------------------------------------------------------------------------- two brokers


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Reader:
    """Sends and pulls over one connection, many requests at a time."""

    def __init__(self, link: RemotingLink) -> None:
        self._link = link
        self._room = asyncio.Semaphore(IN_FLIGHT)

    async def ask(self, code: int, ext: dict[str, object], body: bytes = b"") -> RemotingCommand:
        fields = {name: str(value) for name, value in ext.items()}
        async with self._room:
            return await self._link.request(code, fields, body, timeout_seconds=REQUEST_S)

    async def send(self, topic: str, number: int, found: dict[str, str]) -> None:
        text = stored_form({"TAGS": "", **found, "SEQ": str(number)})
        values = ("senders", topic, "TBW102", QUEUES, number % QUEUES, 0, _now_ms(), 0, text)
        fields: dict[str, object] = dict(zip("abcdefghi", values, strict=True))
        answer = await self.ask(Request.SEND_MESSAGE_V2, fields, b"%d" % number)
        assert answer.code == 0, answer.remark

    async def delivered(self, topic: str, expression: str, kind_of: str) -> set[int] | int:
        """The numbers of all messages that a filter gets, or the code of a refusal."""
        found: set[int] = set()
        for queue_id in range(QUEUES):
            offset = 0
            while True:
                fields: dict[str, object] = {
                    "consumerGroup": "comparers",
                    "topic": topic,
                    "queueId": queue_id,
                    "queueOffset": offset,
                    "maxMsgNums": 32,
                    "sysFlag": _SUBSCRIPTION_IN_HEADER,
                    "commitOffset": 0,
                    "suspendTimeoutMillis": 0,
                    "subscription": expression,
                    "subVersion": 0,
                    "expressionType": kind_of,
                }
                answer = await self.ask(Request.PULL_MESSAGE, fields)
                if answer.code == _FOUND:
                    numbers = re.findall(rb"\x02SEQ\x01(\d+)\x02", bytes(answer.body))
                    assert not found & set(map(int, numbers)), "twice"
                    found.update(map(int, numbers))
                elif answer.code == _NOT_FOUND:
                    break
                elif answer.code != _NEXT:
                    return answer.code
                following = int(answer.ext["nextBeginOffset"])
                assert following > offset
                offset = following
        return found

    async def check(self, expression: str) -> int:
        """What a consumer with this filter hears before it starts."""
        wanted = bodies.Subscription("any", expression, 1, expression_type="SQL92")
        body = {"clientId": "c", "group": "g", "subscriptionData": wanted.members()}
        return (await self.ask(Request.CHECK_CLIENT_CONFIG, {}, orjson.dumps(body))).code


class Outcome:
    """What one broker does with messages and filters."""

    def __init__(self) -> None:
        self.checks: list[int] = []
        self.sql: list[set[int] | int] = []
        self.tags: list[set[int] | int] = []


async def compared(
    address: str, messages: Sequence[dict[str, str]], checked: Sequence[str], tags: Sequence[str]
) -> Outcome:
    """All of it at one broker; filters that it refuses are not tried."""
    link = await RemotingLink.open(address)
    reader, outcome = Reader(link), Outcome()
    topic = "Compared"
    await asyncio.gather(
        *(reader.send(topic, number, values) for number, values in enumerate(messages))
    )
    outcome.checks = await asyncio.gather(*(reader.check(text) for text in checked))
    valid = [text for text, code in zip(checked, outcome.checks, strict=True) if code == 0]
    outcome.sql = await asyncio.gather(*(reader.delivered(topic, text, "SQL92") for text in valid))
    outcome.tags = await asyncio.gather(*(reader.delivered(topic, text, "TAG") for text in tags))
    await link.close()
    return outcome


def tag_expressions(chance: random.Random, count: int) -> list[str]:
    odd = ["*", "", " ", " * ", "||", " || ", "||TagA", "TagA||", " TagB ", "TagZ", "x||x", "Tag"]
    made = [
        chance.choice((" || ", "||")).join(chance.choices(TAGS, k=chance.choice((1, 2, 3))))
        for _ in range(count)
    ]
    return [*odd, *made]


@pytest.mark.parametrize(
    ("seed", "message_count", "filter_count"),
    [
        (SEED, 2_000, 60),
        pytest.param(NEW_SEED, 10_000, 3_000, marks=pytest.mark.soak, id="random"),
    ],
)
def test_both_brokers_deliver_the_same(
    sluice: SluiceProcess,
    rocketmq_jars: Jars,
    tmp_path: Path,
    seed: int,
    message_count: int,
    filter_count: int,
) -> None:
    chance = random.Random(seed)
    messages = [properties(chance) for _ in range(message_count)]
    maker = Expressions(seed + 1)
    checked = [maker.one() for _ in range(filter_count)]
    tags = tag_expressions(chance, 12)
    make_topic(sluice.broker_address, "Compared", QUEUES)
    ours = asyncio.run(compared(sluice.broker_address, messages, checked, tags))
    config = {"enablePropertyFilter": "true", "flushDiskType": "ASYNC_FLUSH"}
    with RocketMQ(tmp_path / "apache", config=config, jars=rocketmq_jars) as apache:
        make_topic(apache.broker_address, "Compared", QUEUES)
        theirs = asyncio.run(compared(apache.broker_address, messages, checked, tags))
        apache.abandon()  # its clean end would take longer than all of this
    for text, code, apaches in zip(checked, ours.checks, theirs.checks, strict=True):
        assert code == apaches, (seed, text)
    valid = [text for text, code in zip(checked, ours.checks, strict=True) if code == 0]
    for text, found, apaches_found in zip(
        [*valid, *tags], [*ours.sql, *ours.tags], [*theirs.sql, *theirs.tags], strict=True
    ):
        assert found == apaches_found, (seed, text)
    assert len(valid) > filter_count // 3
    some = [found for found in ours.sql if isinstance(found, set) and found]
    assert len(some) > len(valid) // 4


# ----------------------------------------------------------------------------------------- clients


def numbered(count: int) -> dict[int, tuple[str, str | None]]:
    """Tag and colour of the messages that the Java program sends, by number."""
    return {
        n: ("TagABC"[:3] + "ABC"[n % 3], None if n % 5 == 0 else "red" if n % 2 == 0 else "blue")
        for n in range(count)
    }


def test_java_consumers_get_what_they_filter_for(
    programs: JavaPrograms, sluice: SluiceProcess
) -> None:
    count, topic = 200, "FilteredByJava"
    rows = numbered(count)
    late_red = {n for n, (_, colour) in rows.items() if n > 60 and colour == "red"}
    no_colour = {n for n, (tag, colour) in rows.items() if colour is None and tag != "TagB"}
    some = "n > 60 AND colour = 'red'"
    readers = [
        (f"push:sql-push:sql:{some}", late_red),
        (f"broadcast:sql-told:sql:{some}", late_red),
        (f"broadcast:sql-told:sql:{some}", late_red),
        ("lite:sql-lite:sql:colour IS NULL AND TAGS <> 'TagB'", no_colour),
        ("pull:sql-pull:sql:n BETWEEN 90 AND 109", set(range(90, 110))),
        ("pull:tag-pull:tag:TagA || TagC", {n for n in rows if rows[n][0] != "TagB"}),
        # What comes again comes from the group's own topic, whose messages no filter hides.
        ("again:sql-again:sql:n IN ('7', '8', '107')", {7, 8, 107}),
        ("push:sql-wrong:sql:n = = 1", set()),
    ]
    arguments = ["--namesrv", sluice.nameserver_address, "--topic", topic, "--count", str(count)]
    for reader, _ in readers:
        arguments += ["--reader", reader]
    make_topic(sluice.broker_address, topic, 4)
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    with programs.started("Filter", *arguments) as program:

        def enough() -> bool:
            for row in received(program.new_events()):
                seen[row["reader"]].append((row["n"], row["times"]))
            return all(
                len(seen[number]) >= len(ids) * (2 if reader.startswith("again") else 1)
                for number, (reader, ids) in enumerate(readers)
            )

        wait_until(enough, lambda: f"{ {n: len(rows) for n, rows in seen.items()} }")
        connection = ask(
            sluice.broker_address,
            Question(Request.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "sql-push"}),
        )[0]
        events = program.stop(60)
    refused = kind(events, "refused")
    assert [(row["reader"], row["code"]) for row in refused] == [(len(readers) - 1, 23)]
    assert "the SQL filter is wrong at character 5" in refused[0]["reason"]
    for number, (reader, ids) in enumerate(readers):
        times = {0: ids, 1: ids} if reader.startswith("again") else {0: ids}
        wanted = sorted((n, time) for time, numbers in times.items() for n in numbers)
        assert sorted(seen[number]) == wanted, reader
    table = orjson.loads(bytes(connection.body))["subscriptionTable"]
    assert (table[topic]["expressionType"], table[topic]["subString"]) == ("SQL92", some)


def tag_of(identity: str, plan: SendPlan) -> str | None:
    """The tag that the programs give to a message, by its number."""
    step, _, member = identity.removeprefix(f"{plan.prefix}-").partition(".")
    number = int(step) * plan.batch + int(member) if member else int(step)
    return ("TagA", "TagB", None)[number % 3]


def test_go_consumers_get_what_they_filter_for(go_clients: Clients, sluice: SluiceProcess) -> None:
    plan = SendPlan("go", ["FilteredByGo"], 60, queues=0, modes=("sync", "batch"), batch=4)
    ids = plan.ids()
    tagged = {one for one in ids if tag_of(one, plan)}
    begins = {one for one in tagged if one.startswith("go-1")}
    ends = {one for one in ids if one.endswith("7") or ".3" in one}
    readers = [
        ("push:go-sql:sql id ENDSWITH '7' OR id CONTAINS '.3'", ends),
        ("broadcast:go-told:sql id STARTSWITH 'go-1' AND TAGS IS NOT NULL", begins),
        ("broadcast:go-told:sql id STARTSWITH 'go-1' AND TAGS IS NOT NULL", begins),
        ("push:go-tags:TagA || TagB", tagged),
    ]
    go_clients.send(sluice.nameserver_address, plan)
    seen: dict[int, list[str]] = defaultdict(list)
    words = [words for words, _ in readers]
    with go_clients.receiving(sluice.nameserver_address, plan.topics, *words) as program:

        def enough() -> bool:
            for row in received(program.new_events()):
                seen[row["reader"]].append(row["id"])
            return all(len(seen[number]) >= len(row[1]) for number, row in enumerate(readers))

        wait_until(enough, lambda: f"{ {n: len(rows) for n, rows in seen.items()} }")
        program.stop(60)
    for number, (reader, wanted) in enumerate(readers):
        assert sorted(seen[number]) == sorted(wanted), reader


# ------------------------------------------------------------------------------ replies and traces


def test_java_asks_and_is_answered_and_traced(
    programs: JavaPrograms, sluice: SluiceProcess
) -> None:
    topic, traces, count = "Questions", "RMQ_SYS_TRACE_TOPIC", 5
    make_topic(sluice.broker_address, topic, 4)
    kept_before = kept_replies(sluice)
    arguments = ["--namesrv", sluice.nameserver_address, "--topic", topic]
    events = programs.run(
        *("Ask", *arguments, "--trace-topic", traces, "--count", str(count)), timeout_s=PROGRAM_S
    )
    replies = kind(events, "reply")
    assert sorted((row["way"], row["asked"], row["body"]) for row in replies) == sorted(
        (way, f"{way}-{number}", f"{way}-{number}".upper())
        for way in ("sync", "async")
        for number in range(count)
    )
    assert all("PUSH_REPLY_TIME" in row["properties"] for row in replies)
    assert [row["asked"] for row in kind(events, "timeout")] == ["silence"]
    (failed,) = kind(events, "failed")
    assert "push reply message fail, channel of <nobody> not found." in failed["reason"]
    # All replies are kept, also the one that nobody waited for.
    assert kept_replies(sluice) - kept_before == 2 * count + 1
    (sent,) = kind(events, "sent")
    shown = traced(programs, sluice, sent["msgId"])
    assert re.search(r"^Pub +askers +\S+ .*success", shown, re.MULTILINE), shown
    assert re.search(r"^Sub +answering +\S+ .*success", shown, re.MULTILINE), shown


def kept_replies(sluice: SluiceProcess) -> int:
    place = {"topic": f"{CLUSTER}_REPLY_TOPIC", "queueId": "0"}
    kept = ask(sluice.broker_address, Question(Request.GET_MAX_OFFSET, place))[0]
    return int(kept.ext.get("offset", 0))


def traced(programs: JavaPrograms, sluice: SluiceProcess, message_id: str) -> str:
    """What mqadmin shows of a message's trace, when both its ends are there."""
    command = f"queryMsgTraceById\t-i\t{message_id}"
    words = ["--namesrv", sluice.nameserver_address, "--command", command]
    events = programs.run("Admin", *words, timeout_s=PROGRAM_S)
    (shown,) = kind(events, "command")
    return str(shown["output"])
