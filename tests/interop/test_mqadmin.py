"""RocketMQ's own mqadmin against Sluice: each command prints what it prints against Apache.

All commands run in one Java process for each of the two, because a start of Java costs more than
any command. The two run side by side: most of the time mqadmin waits for its own threads to end.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from peers import Jars, JavaPrograms, PeerUnavailable, RocketMQ, RunningProgram
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, Event, kind
from tests.interop.mqadmin_table import (
    BROKER,
    CLUSTER,
    PAGE,
    ROWS,
    SCRIPT,
    Command,
    names_in_script,
    normalized,
    page,
)
from tests.interop.sluice_process import SluiceProcess

SCRIPT_TIMEOUT_S = 600.0

# What the issue of the RocketMQ door names; none of these may be missing.
REQUIRED = """
    updateTopic deleteTopic updateSubGroup deleteSubGroup updateBrokerConfig updateTopicPerm
    topicRoute topicList topicStatus printMsg printMsgByQueue queryMsgById queryMsgByKey
    queryMsgByUniqueKey queryMsgByOffset clusterList brokerStatus consumerProgress consumerStatus
    consumerConnection producerConnection resetOffsetByTime skipAccumulatedMessage cloneGroupOffset
    sendMessage consumeMessage statsAll getBrokerConfig wipeWritePerm addWritePerm allocateMQ
    checkMsgSendRT updateKvConfig deleteKvConfig
"""

# Runtime numbers of Apache's broker that Sluice does not measure, or that mean nothing here.
MISSING_NUMBERS = {
    *("dispatchMaxBuffer", "getMessageEntireTimeMax", "putLatency99", "putLatency999"),
    *("putMessageDistributeTime", "putMessageEntireTimeMax", "putMessageFailedTimes"),
}


# A running consumer that is told to go on elsewhere; and a topic that is made again.
MOVING = (
    Command(f"updateTopic -c {CLUSTER} -t Moved -r 1 -w 1"),
    Command("updateBrokerConfig -b {broker} -k useServerSideResetOffset -v false"),
    Command("@produce senders Moved 0 5"),
    Command("@consume movers Moved 2"),
    Command("@received movers 5"),
    Command("resetOffsetByTime -g movers -t Moved -s 0"),
    Command("@received movers 5"),
    Command("@produce before Again 0 3"),
    Command(f"deleteTopic -c {CLUSTER} -t Again"),
    Command("@produce after Again 0 1"),
    Command("topicStatus -t Again"),
    Command("setConsumeMode -b {broker} -t Again -g movers -m POP -q 0"),
    *(
        Command(f"{name} -b {{broker}}")
        for name in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog")
    ),
)


@contextlib.contextmanager
def script(
    programs: JavaPrograms,
    place: RocketMQ | SluiceProcess,
    commands: Sequence[Command] = SCRIPT,
) -> Iterator[RunningProgram]:
    arguments = ["--namesrv", place.nameserver_address]
    for command in commands:
        words = [word.replace("{broker}", place.broker_address) for word in command.words]
        arguments += ["--command", "\t".join(words)]
    with programs.started("Admin", *arguments) as program:
        yield program


class Output(NamedTuple):
    """What one command printed, in both places."""

    command: Command
    text: str
    errors: str
    apache_text: str
    apache_errors: str


def paired(events: Sequence[Event], apache_events: Sequence[Event]) -> list[Output]:
    commands = [command for command in SCRIPT if not command.line.startswith("@")]
    outputs = []
    for command, ours, theirs in zip(
        commands, kind(events, "command"), kind(apache_events, "command"), strict=True
    ):
        assert ours["name"] == theirs["name"] == command.words[0]
        texts = (ours["output"], ours["errors"], theirs["output"], theirs["errors"])
        outputs.append(Output(command, *(normalized(text) for text in texts)))
    return outputs


def differences(output: Output) -> list[str]:
    """Lines that only one of the two printed: - Apache, + Sluice."""
    only = output.command.only
    found: list[str] = []
    for theirs, ours in (
        (output.apache_text, output.text),
        (output.apache_errors, output.errors),
    ):
        lines = difflib.ndiff(only(theirs), only(ours))
        found += [f"{output.command.line}: {line}" for line in lines if line[0] in "-+"]
    return found


def numbers(text: str, separator: str) -> dict[str, str]:
    """Lines of the form `name : value`."""
    pairs = [line.split(separator, 1) for line in text.splitlines() if separator in line]
    return {name.strip(): value.strip() for name, value in pairs}


def check_numbers(output: Output) -> None:
    """brokerStatus: the same numbers, whatever they are."""
    # Behind the colon is nothing where Apache's broker has no samples yet.
    ours, theirs = numbers(output.text, ":"), numbers(output.apache_text, ":")
    theirs = {name: value for name, value in theirs.items() if "/" not in name}
    assert set(theirs) - set(ours) == MISSING_NUMBERS
    assert set(ours) - set(theirs) == {"heldPulls", "storeRefuses", "unequalSubscriptions"}
    assert ours["msgPutTotalTodayNow"] == theirs["msgPutTotalTodayNow"] == "6"
    assert ours["unequalSubscriptions"] == "none"


def check_config(output: Output) -> None:
    """getBrokerConfig: names that Apache's broker has, and values where they do not depend."""
    ours, theirs = numbers(output.text, "=  "), numbers(output.apache_text, "=  ")
    assert len(ours) > 40
    unknown = set(ours) - set(theirs)
    # Names of RocketMQ's that its broker does not list: from elsewhere, or empty.
    assert {name for name in unknown if not name.startswith("tls.")} <= {
        "brokerIP1",
        "metricsPromExporterHost",
    }
    for name in ("brokerName", "brokerClusterName", "brokerPermission", "fileReservedTime"):
        assert ours[name] == theirs[name]


@pytest.mark.slow
def test_every_command_prints_what_it_prints_against_apache(
    rocketmq_jars: Jars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # consumerStatus writes files where it runs
    try:
        home = tmp_path / "java"
        programs = JavaPrograms(JAVA_SOURCES, rocketmq_jars, home=home, options=JAVA_OPTIONS)
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    with (
        RocketMQ(tmp_path / "apache", jars=rocketmq_jars, heap_mb=512) as apache,
        SluiceProcess(tmp_path / "sluice") as sluice,
        script(programs, apache) as theirs,
        script(programs, sluice) as ours,
    ):
        outputs = paired(ours.finish(SCRIPT_TIMEOUT_S), theirs.finish(SCRIPT_TIMEOUT_S))
    found = [line for output in outputs for line in differences(output)]
    assert not found, "\n".join(found)
    by_line = {output.command.line: output for output in outputs}
    check_numbers(by_line["brokerStatus -b {broker}"])
    check_config(by_line["getBrokerConfig -b {broker}"])
    check_contents(by_line)


@pytest.mark.slow
def test_a_running_consumer_moves_and_a_topic_starts_anew(
    rocketmq_jars: Jars, tmp_path: Path
) -> None:
    try:
        home = tmp_path / "java"
        programs = JavaPrograms(JAVA_SOURCES, rocketmq_jars, home=home, options=JAVA_OPTIONS)
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    with SluiceProcess(tmp_path / "sluice") as sluice, script(programs, sluice, MOVING) as program:
        events = kind(program.finish(SCRIPT_TIMEOUT_S), "command")
    names = [command.words[0] for command in MOVING if not command.line.startswith("@")]
    assert [event["name"] for event in events] == names
    texts = {event["name"]: normalized(event["output"] + event["errors"]) for event in events}
    assert re.search(r"broker-a +0 +0", texts["resetOffsetByTime"])
    assert re.search(r"broker-a +0 +0 +1 +TIME", texts["topicStatus"])
    for name in ("setConsumeMode", "cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        assert "success" in texts[name], texts[name]


def check_contents(by_line: dict[str, Output]) -> None:
    """Equal to Apache's could also mean empty: the parts that matter are there."""

    def has(line: str, *parts: str) -> None:
        text = by_line[line].text + by_line[line].errors
        for part in parts:
            assert re.search(part, text), (line, part, text)

    has(f"updateTopic -c {CLUSTER} -t Orders -r 4 -w 4", r"create topic to ADDRESS success")
    has("topicStatus -t Orders", r"broker-a +1 +0 +5 +TIME", r"broker-a +2 +0 +1 +TIME")
    has("printMsg -t Orders", r"minOffset=0, maxOffset=5", r"BODY: body-4", r"BODY: hello there")
    has("queryMsgById -i {offsetId} -t Orders", r"Keys: +\[key-4\]", r"trackType=CONSUMED")
    has("queryMsgByKey -t Orders -k key-3", r"ID +1 +3 ")
    has("queryMsgByKey -t Orders -k TagB -p T", r"ID +2 +0 ")
    has("queryMsgByUniqueKey -i {uniqueKey} -t Orders", r"Queue Offset: +4")
    has(f"queryMsgByOffset -t Orders -b {BROKER} -i 1 -o 2", r"Keys: +\[key-2\]")
    has("clusterList", rf"{CLUSTER} +{BROKER} +0 +ADDRESS +V5_5_0", r"true$")
    has("clusterList -m", rf"{CLUSTER} +{BROKER} +0 +0 +6 +\d+")
    has("consumerProgress", r"readers +1 +V5_5_0 +PUSH +CLUSTERING +N +0")
    has("consumerProgress -g readers", r"Orders +broker-a +1 +5 +5 +0 +0", r"Diff Total: 0")
    has("consumerStatus -g readers", "Same subscription", "Rebalance OK")
    has("consumerConnection -g readers", r"@readers +ADDRESS +JAVA +V5_5_0", r"Orders +\*")
    has("producerConnection -g senders -t Orders", r"@senders +ADDRESS +JAVA")
    has("resetOffsetByTime -g readers -t Orders -s 0", r"broker-a +1 +0")
    has("resetOffsetByTime -g copies -t Orders -s now", r"broker-a +1 +5")
    has("skipAccumulatedMessage -g copies -t Orders", r"broker-a +2 +1")
    has("skipAccumulatedMessage -g unknown -t Orders", "Group unknown does not exist")
    has(f"consumeMessage -t Orders -b {BROKER} -i 1 -o 0 -c 3", "Consume ok", "queueOffset=2")
    # 6 in, and 12 out: all of them were handed out twice.
    has(
        "statsAll -t Orders",
        r"Orders +readers +0 +F +F +6 +1[2-9]",
        r"Orders +copies +0 +F +F +6 +0",
    )
    has("updateBrokerConfig -b {broker} -k rocketmqHome -v /tmp", "CODE: 16", "black list")
    has("allocateMQ -t Orders -i 10.0.0.1,10.0.0.2", r'"10.0.0.1":\[', r'"queueId":3')
    has("checkMsgSendRT -t Orders -a 5 -s 10", r"broker-a +3 +true", "Avg RT: F")
    has("topicStatus -t Extra", "No topic route info in name server for the topic: Extra")
    has("consumerConnection -g nobody", "No topic route info in name server for the topic: %RETRY%")


def test_nothing_that_is_required_is_missing_from_the_script() -> None:
    assert set(REQUIRED.split()) <= names_in_script()
    listed = {name for row in ROWS for name in row.name.split(", ")}
    assert names_in_script() <= listed


def test_the_page_says_what_is_tested() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
