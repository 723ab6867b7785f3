"""Groups that are moved while Apache's Java consumers run: to a millisecond, an offset, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers import JavaPrograms, RunningProgram
from sluice.link import RemotingLink
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, Programs, kind
from tests.interop.sluice_process import Question, SluiceProcess, done, make_topic
from tests.interop.test_business_retries import WAIT_S, admin, until
from tests.unit.broker.broker_kit import send_fields

COUNT = 40


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path_factory.mktemp("rewind")) as process:
        yield process


@pytest.fixture
def java(rocketmq_jars: Any, tmp_path: Path) -> Programs:
    home = tmp_path / "java"
    return JavaPrograms(JAVA_SOURCES, rocketmq_jars, home=home, options=JAVA_OPTIONS)


def fill(sluice: SluiceProcess, topic: str, count: int, first: int = 0) -> None:
    """Messages that are stored in different milliseconds."""

    async def send() -> None:
        link = await RemotingLink.open(sluice.broker_address)
        for number in range(first, first + count):
            fields = send_fields(topic, 0, UNIQ_KEY=f"{topic}-{number}", KEYS=f"0-{number}")
            ext = {name: str(value) for name, value in fields.items()}
            answer = await link.request(
                Request.SEND_MESSAGE_V2, ext, b"body", timeout_seconds=WAIT_S
            )
            assert answer.code == 0, answer.remark
            await asyncio.sleep(0.003)
        await link.close()

    asyncio.run(send())


def stored_ms(sluice: SluiceProcess, topic: str) -> list[int]:
    messages = admin(sluice, "printMsg", "-t", topic)["messages"]
    return [message["storeTimestamp"] for message in messages]


def offsets(program: RunningProgram) -> list[int]:
    return [row["queueOffset"] for row in kind(program.events(), "end")]


def wait_for(program: RunningProgram, count: int) -> None:
    until(lambda: len(offsets(program)) >= count)


def reader(java: Programs, sluice: SluiceProcess, topic: str, work_ms: int = 0) -> Any:
    words = ("--role", "read", "--topic", topic, "--group", f"g-{topic}")
    more = ("--namesrv", sluice.nameserver_address, "--work-ms", str(work_ms))
    return java.started("Orders", *words, *more)


def test_back_to_a_millisecond_and_to_an_offset(java: Programs, sluice: SluiceProcess) -> None:
    topic = "Rewound"
    make_topic(sluice.broker_address, topic, 1)
    fill(sluice, topic, COUNT)
    times = stored_ms(sluice, topic)
    whole = list(range(COUNT))
    target = 17
    assert times[target - 1] < times[target], "two milliseconds"
    with reader(java, sluice, topic) as program:
        until(lambda: offsets(program) == whole)
        place = ("-g", f"g-{topic}", "-t", topic)
        for when_ms, expected in ((times[target], target), (times[target] + 1, target + 1)):
            before = len(offsets(program))
            shown = admin(sluice, "resetOffsetByTime", *place, "-s", str(when_ms))
            assert [row["offset"] for row in shown["offsetTable"]] == [expected]
            wait_for(program, before + COUNT - expected)
            assert offsets(program)[before:] == whole[expected:]
        before = len(offsets(program))
        queue = ("-b", sluice.broker_address, "-q", "0", "-o", "33", "-s", "0")
        admin(sluice, "resetOffsetByTime", *place, *queue)
        wait_for(program, before + COUNT - 33)
        assert offsets(program)[before:] == whole[33:]
        fill(sluice, topic, 1, COUNT)
        until(lambda: offsets(program)[-1] == COUNT)
        program.stop(WAIT_S)
    fields = {"consumerGroup": f"g-{topic}", "topic": topic, "queueId": "0"}
    question = Question(Request.QUERY_CONSUMER_OFFSET, fields)
    assert done(sluice.broker_address, question) == {"offset": str(COUNT + 1)}


def test_forward_to_the_end(java: Programs, sluice: SluiceProcess) -> None:
    topic = "Skipped"
    make_topic(sluice.broker_address, topic, 1)
    count = 500
    fill(sluice, topic, count)
    with reader(java, sluice, topic, work_ms=200) as program:
        until(lambda: len(offsets(program)) >= 3)
        admin(sluice, "skipAccumulatedMessage", "-g", f"g-{topic}", "-t", topic)
        fill(sluice, topic, 1, count)
        until(lambda: count in offsets(program))
        program.stop(WAIT_S)
    seen = offsets(program)
    assert seen == [*range(len(seen) - 1), count], "what lay between was left out"
    assert len(seen) < count // 2
