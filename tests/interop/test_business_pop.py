"""Apache's Java client pops from Sluice: queues that are shared, messages that fail and come again,
consumers that are killed, a broker that is killed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from peers import Jars, RocketMQ, RunningProgram
from sluice.link import RemotingLink
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.interop.clients import STOP_TIMEOUT_S, Event, JavaClients, kind
from tests.interop.conftest import clients_named
from tests.interop.sluice_process import Question, SluiceProcess, done, make_topic
from tests.interop.watching import wait_until
from tests.unit.broker.broker_kit import send_fields, topic_fields
from tests.unit.client.admin_kit import sluice as run_sluice

WAIT_S = 240.0
FIRST_WAIT_MS = 10_000  # after the first failure, as the client asks for it


@pytest.fixture
def sluice(tmp_path: Path) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path / "sluice") as process:
        yield process


def pops(sluice: SluiceProcess, topic: str, group: str) -> None:
    """From now on the group pops the topic."""
    body = orjson.dumps({"groupName": group})
    done(sluice.broker_address, Question(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body))
    mode = {"consumerGroup": group, "mode": "POP", "popShareQueueNum": 0, "topic": topic}
    body = orjson.dumps(mode)
    done(sluice.broker_address, Question(Request.SET_MESSAGE_REQUEST_MODE, {}, body))


def words(sluice: SluiceProcess, readers: Sequence[str], sends: Sequence[str] = ()) -> list[str]:
    return [
        *("--namesrv", sluice.nameserver_address),
        *(word for reader in readers for word in ("--reader", reader)),
        *(word for send in sends for word in ("--send", send)),
    ]


def progress(sluice: SluiceProcess, group: str) -> dict[str, Any]:
    """What `sluice admin consumerProgress` shows of a group."""
    shown_by = run_sluice(
        *("admin", "consumerProgress", "-g", group, "-n", sluice.nameserver_address, "--json")
    )
    assert shown_by.status == 0, shown_by
    shown: dict[str, Any] = json.loads(shown_by.out)
    return shown


def until_left(sluice: SluiceProcess, group: str, count: int) -> None:
    """Wait until the group has acknowledged all but so many, which consumers have, or fewer.

    Those that failed come again after ten seconds, and may be done with before anybody looks.
    """

    def is_left() -> bool:
        shown = progress(sluice, group)
        return bool(shown["diffTotal"] == shown["inflightTotal"] <= count)

    wait_until(is_left, lambda: str(progress(sluice, group)), WAIT_S)


def of_group(events: Sequence[Event], group: str) -> list[Event]:
    return [event for event in kind(events, "received") if event["group"] == group]


def until_seen(program: RunningProgram, group: str, names: Sequence[str]) -> None:
    """Wait until the group got each of these as often as it is named."""

    def missing() -> Counter[str]:
        return Counter(names) - ids(program, group)

    wait_until(lambda: not missing(), lambda: f"{group} misses {missing()}", WAIT_S)


def ids(program: RunningProgram, group: str) -> Counter[str]:
    return Counter(event["id"] for event in of_group(program.events(), group))


def until_both_take_part(program: RunningProgram, sluice: SluiceProcess, group: str) -> list[str]:
    """Send one after the other until both readers got something; returns what was sent.

    Who pops first may get all that was sent in one go.
    """
    sent: list[str] = []

    def has_both() -> bool:
        if {event["reader"] for event in of_group(program.events(), group)} == {0, 1}:
            return True
        sent.append(f"one{len(sent)}")
        fields = send_fields("Shared", 0, KEYS=sent[-1], TAGS="blue", rule="ok")
        words = {name: str(value) for name, value in fields.items()}
        done(sluice.broker_address, Question(Request.SEND_MESSAGE_V2, words, b"x"))
        until_seen(program, group, sent)
        return False

    wait_until(has_both, lambda: f"only one reader got any of {len(sent)} messages", WAIT_S)
    return sent


def test_java_pops_acknowledges_and_fails_while_broker_and_client_are_killed(
    java_clients: JavaClients, sluice: SluiceProcess, tmp_path: Path
) -> None:
    make_topic(sluice.broker_address, "Shared", 4)
    make_topic(sluice.broker_address, "Stuck", 2)
    pops(sluice, "Shared", "pair")
    pops(sluice, "Shared", "picky")
    pops(sluice, "Stuck", "stuck")
    good = [f"ok{number}" for number in range(40)]
    sends = [f"Shared:{name}:blue:ok" for name in good]
    sends += ["Shared:once:blue:1", "Shared:red1:red:ok", "Shared:red2:red:1"]
    hanging = [f"hang{number}" for number in range(3)]
    sends += [f"Stuck:{name}:x:hang" for name in hanging]
    readers = ["pair:Shared:*", "pair:Shared:*", "picky:Shared:red", "stuck:Stuck:*"]
    options = [*words(sluice, readers, sends), "--hang", "true"]
    with java_clients.started("Pop", *options) as program:
        program.wait_for("ready", 1, WAIT_S)
        until_seen(program, "stuck", hanging)
        until_seen(program, "pair", [*good, "red1", "once", "red2"])
        until_seen(program, "picky", ["red1", "red2"])
        good += until_both_take_part(program, sluice, "pair")
        # Those that failed are invisible for 10 s; all others are acknowledged, and stay so.
        until_left(sluice, "pair", 2)
        until_left(sluice, "picky", 1)
        sluice.kill()
        sluice.start()
        until_seen(program, "pair", [*good, "red1", *["once", "red2"] * 2])
        until_seen(program, "picky", ["red1", "red2", "red2"])
        for group in ("pair", "picky"):
            until_left(sluice, group, 0)
        events = program.events()
        program.kill()
    pair = of_group(events, "pair")
    assert Counter(event["id"] for event in pair) == Counter([*good, "red1", *["once", "red2"] * 2])
    assert {event["topic"] for event in pair} == {"Shared"}
    for group, name in (("pair", "once"), ("pair", "red2"), ("picky", "red2")):
        first, again = [event for event in of_group(events, group) if event["id"] == name]
        assert (first["times"], again["times"]) == (0, 1)
        assert again["nowMs"] - first["nowMs"] >= FIRST_WAIT_MS
    # In binary headers the codes are cut to 16 bits.
    binary_clients = clients_named("java-5-binary", tmp_path / "binary-clients")
    with binary_clients.started("Pop", *words(sluice, ["stuck:Stuck:*"])) as program:
        until_seen(program, "stuck", hanging)
        until_left(sluice, "stuck", 0)
        later = of_group(program.stop(STOP_TIMEOUT_S), "stuck")
    # The one that is dead held them: they came again, one more time counted.
    assert all(event["times"] > 0 for event in later)
    assert Counter(event["id"] for event in later) == Counter(hanging)


# --------------------------------------------------------------------------- beside Apache's broker

SAME = ("invisibleTime", "restNum", "startOffsetInfo", "msgOffsetInfo", "orderCountInfo", "hasMsg")


async def script(address: str) -> dict[str, tuple[int, dict[str, str]]]:
    """One consumer's questions, each with the answer's code and the fields that can be compared."""
    link = await RemotingLink.open(address)
    answers: dict[str, tuple[int, dict[str, str]]] = {}

    async def ask(
        label: str, code: int, ext: Mapping[str, object], body: bytes = b""
    ) -> dict[str, str]:
        fields = {name: str(value) for name, value in ext.items()}
        answer = await link.request(code, fields, body, timeout_seconds=120)
        same = {name: answer.ext[name] for name in SAME if name in answer.ext}
        answers[label] = (answer.code, same if answer.code in (0, 19, 210) else {})
        return dict(answer.ext)

    def pop(**changes: object) -> dict[str, object]:
        fields = {"consumerGroup": "g", "topic": "t", "queueId": -1, "maxMsgNums": 32}
        times = {"invisibleTime": 5_000, "pollTime": 0, "bornTime": 0, "initMode": 0}
        return {**fields, **times, **changes}

    def ticket(popped: dict[str, str], offset: int, group: str = "g") -> dict[str, object]:
        head = f"0 {popped['popTime']} {popped['invisibleTime']} {popped['reviveQid']}"
        extra = f"{head} 0 broker-a 0 {offset}"
        place = {"consumerGroup": group, "topic": "t", "queueId": 0}
        return {**place, "offset": offset, "extraInfo": extra}

    await ask("topic", Request.UPDATE_AND_CREATE_TOPIC, topic_fields("t", 2))
    body = orjson.dumps({"groupName": "g"})
    await ask("group", Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
    await ask("nothing", Request.POP_MESSAGE, pop())
    await ask("nothing to see", Request.PEEK_MESSAGE, pop())
    await ask("nothing to notice", Request.NOTIFICATION, pop())
    for number in range(5):
        await ask(f"send {number}", Request.SEND_MESSAGE_V2, send_fields("t", 0), b"%d" % number)
    await ask("notice", Request.NOTIFICATION, pop(pollTime=10_000))
    await ask("peek", Request.PEEK_MESSAGE, pop())
    two = await ask("two", Request.POP_MESSAGE, pop(maxMsgNums=2))
    await ask("ack", Request.ACK_MESSAGE, ticket(two, 0))
    await ask("ack nothing", Request.ACK_MESSAGE, ticket(two, 44))
    await ask("ack nowhere", Request.ACK_MESSAGE, {**ticket(two, 0), "queueId": 7})
    await ask("ack garbage", Request.ACK_MESSAGE, {**ticket(two, 1), "extraInfo": "zz"})
    change = Request.CHANGE_MESSAGE_INVISIBLETIME
    await ask("change", change, {**ticket(two, 1), "invisibleTime": 2_000})
    await ask("change nothing", change, {**ticket(two, 99), "invisibleTime": 2_000})
    await ask("many", Request.POP_MESSAGE, pop(maxMsgNums=33))
    await ask("no queue", Request.POP_MESSAGE, pop(queueId=9))
    await ask("no topic", Request.POP_MESSAGE, pop(topic="none"))
    await ask("bad filter", Request.POP_MESSAGE, pop(exp="a >", expType="SQL92"))
    await ask("who waits", Request.POLLING_INFO, pop())
    nobody = b'{"brokerName":"broker-a","acks":[]}'
    await ask("no acks", Request.BATCH_ACK_MESSAGE, {}, nobody)
    order = pop(order="true", queueId=0, consumerGroup="g2", invisibleTime=2_000)
    first = await ask("order", Request.POP_MESSAGE, {**order, "maxMsgNums": 1})
    await ask("blocked", Request.POP_MESSAGE, order)
    await ask("not in it", Request.ACK_MESSAGE, ticket(first, 3, "g2"))
    await ask("again", Request.POP_MESSAGE, {**order, "maxMsgNums": 3, "pollTime": 10_000})
    await ask("retry", Request.POP_MESSAGE, pop(pollTime=30_000, queueId=1))
    await link.close()
    return answers


@pytest.mark.soak
def test_answers_are_those_of_apaches_broker(
    sluice: SluiceProcess, rocketmq_jars: Jars, tmp_path: Path
) -> None:
    ours = asyncio.run(script(sluice.broker_address))
    with RocketMQ(tmp_path / "apache", jars=rocketmq_jars, heap_mb=512) as apache:
        theirs = asyncio.run(script(apache.broker_address))
    assert ours == theirs
