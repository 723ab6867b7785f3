"""`sluice admin` itself: its help, wrong command lines, the page about it, and every example."""

from __future__ import annotations

import argparse
import shlex

import pytest

from sluice.aio import Admin
from sluice.client import admin_flags
from sluice.client.admin_flags import COMMON, Command, Flag, Options, read_options
from sluice.client.admin_main import COMMANDS, GROUPS
from sluice.client.printing import Printer
from sluice.clock import wall_ms
from sluice.errors import ConfigError
from tests.unit.client.admin_kit import BROKER, CLUSTER, Site, cluster, one_line, sluice
from tests.unit.client.admin_table import PAGE, page

# What the issue of the RocketMQ door names; none of these may be missing.
REQUIRED = """
    updateTopic deleteTopic updateSubGroup deleteSubGroup updateBrokerConfig updateTopicPerm
    topicRoute topicList topicStatus printMsg printMsgByQueue queryMsgById queryMsgByKey
    queryMsgByUniqueKey queryMsgByOffset clusterList brokerStatus consumerProgress consumerStatus
    consumerConnection producerConnection resetOffsetByTime skipAccumulatedMessage cloneGroupOffset
    sendMessage consumeMessage statsAll getBrokerConfig wipeWritePerm addWritePerm allocateMQ
    checkMsgSendRT updateKvConfig deleteKvConfig
"""


def test_no_required_command_is_missing() -> None:
    assert set(REQUIRED.split()) <= set(COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_has_every_command_with_its_sentence(arguments: list[str]) -> None:
    done = sluice("admin", *arguments)
    assert (done.status, done.err) == (0, "")
    assert all(len(line) <= 100 for line in done.out.splitlines())
    for title, commands in GROUPS.items():
        assert f"\n{title}:\n" in done.out
        for command in commands:
            assert command.about.endswith(".")
            assert f"  {command.name} " in done.out
            assert command.about in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_its_flags_and_an_example(name: str) -> None:
    command = COMMANDS[name]
    done = sluice("admin", name, "--help")
    assert (done.status, done.err) == (0, "")
    for flag in (*command.flags, *COMMON):
        for spelling in flag.names:
            assert f"{spelling}" in done.out
    assert f"sluice admin {command.example}" in done.out
    assert shlex.split(command.example)[0] == name
    read_options(command, shlex.split(command.example)[1:])  # the example is a command line
    assert sluice("admin", "help", name) == done


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_has_a_flag_twice(name: str) -> None:
    spelled = [n for flag in (*COMMANDS[name].flags, *COMMON) for n in flag.names]
    assert len(spelled) == len(set(spelled))


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run script/check --fix"


# ------------------------------------------------------------------------------ wrong command lines


def wrong(*arguments: str) -> str:
    return one_line(sluice("admin", *arguments), 2)


def test_an_unknown_command_and_the_nearest_one() -> None:
    assert wrong("topicRout", "-t", "x") == (
        "admin: no command topicRout (did you mean topicRoute?); `sluice admin --help` lists all"
    )
    assert "did you mean" not in wrong("xyz")
    assert wrong("help", "xyz").startswith("admin: no command xyz;")
    assert "-t/--topic is needed" in wrong("TOPICROUTE")  # mqadmin takes any case too


def test_an_unknown_flag_and_the_nearest_one() -> None:
    assert wrong("topicRoute", "--topik", "x") == (
        "admin topicRoute: --topik: no such flag (did you mean --topic?); "
        "`sluice admin topicRoute --help` shows its flags"
    )
    assert "-z: no such flag" in wrong("topicRoute", "-t", "x", "-z")
    assert "orders: no such flag" in wrong("topicRoute", "orders")


def test_values_that_are_missing_or_nonsense() -> None:
    assert "-t/--topic: expected one argument" in wrong("topicRoute", "-t")
    assert "--topic: expected one argument" in wrong("deleteTopic", "-t", "-c", "C")
    assert "-t/--topic is needed" in wrong("topicRoute")
    assert "-t/--topic: may not be empty" in wrong("topicRoute", "-t", " ")
    update = ("updateTopic", "-c", "C", "-t", "x")
    assert "-r/--readQueueNums: 'many' is not a whole number" in wrong(*update, "-r", "many")
    assert "-w/--writeQueueNums: 0: allowed is 1 to 4096" in wrong(*update, "-w", "0")
    assert "-p/--perm: 9: allowed is 0 to 7" in wrong(*update, "-p", "9")
    assert "-o/--order: 'yes' is neither true nor false" in wrong(*update, "-o", "yes")
    huge = "1" * 30
    assert "does not fit into 64 bits" in wrong("queryMsgByKey", "-t", "x", "-k", "k", "-b", huge)


def test_either_a_broker_or_a_cluster() -> None:
    both = "one of -b/--brokerAddr and -c/--clusterName is needed"
    assert f"admin brokerStatus: {both};" in wrong("brokerStatus")
    assert f"only {both};" in wrong("brokerStatus", "-b", "x:1", "-c", "y")


def test_flags_are_read_as_mqadmin_reads_them() -> None:
    async def run(admin: Admin, options: Options, printer: Printer) -> int:
        return 0

    flags = (
        Flag("a", "attributes", "", admin_flags.text),
        Flag("s", "when", "", admin_flags.when_ms),
        Flag("l", "list", "", None, default=False),
    )
    command = Command("try", "", flags, run, "try")

    def read(*argv: str) -> Options:
        return read_options(command, list(argv))

    assert read("-a", "-x,-y").attributes == "-x,-y"
    assert read("-attributes", "+x=y").attributes == "+x=y"
    assert read("--attributes=+x=y").attributes == "+x=y"
    assert read("-a+x=y", "-l").list is True
    assert read("-s", "-1").when == -1
    assert read("-s", "1700000000123").when == 1700000000123
    assert abs(read("-s", "now").when - wall_ms()) < 60_000
    first, second = read("-s", "2026-01-31#10:00:00:000"), read("-s", "2026-01-31#10:00:01:234")
    assert second.when - first.when == 1234
    with pytest.raises(ConfigError):
        read("-s", "2026-01-31#10:00:00:1")
    with pytest.raises(argparse.ArgumentTypeError):
        admin_flags.yes_no("maybe")


# ------------------------------------------------------------------------------------ the examples


def test_every_example_works() -> None:
    """In an order in which each finds what it speaks of, on the cluster that they speak of."""
    with cluster() as site:
        prepare(site)
        sent = site.send("orders", "hello", 0, "-k", "order-500")
        site.give_up("billing", int(sent["offsetMsgId"][16:], 16))
        begun = site.begin("orders", "shop", "U1")
        last = ("deleteKvConfig", "deleteSubGroup", "deleteTopic")
        names = sorted(COMMANDS, key=lambda name: (name in last, name == "updateTopicPerm", name))
        for name in names:
            line = COMMANDS[name].example
            line = line.replace("7F00000100002A9F0000000000000B62", sent["offsetMsgId"])
            line = line.replace("7F00000100002A9F0000000000000E4A", begun["msgId"])
            line = line.replace("AC1100020000000000000B2F0A8D0001", sent["msgId"])
            line = line.replace("127.0.0.1:10911", site.broker.address)
            line = line.replace("-o 12", f"-o {sent['queueOffset']}")
            done = site.admin(*shlex.split(line))
            assert (done.status, done.err) == (0, ""), (line, done)
            site.ok("addWritePerm", "-b", BROKER)
            if name == "deleteSubGroup":
                assert site.broker.core.groups.get("billing") is None


def prepare(site: Site) -> None:
    site.ok("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "4", "-w", "4")
    site.ok("updateSubGroup", "-c", CLUSTER, "-g", "audit")
    site.join("billing", {"orders": "*"}, producer_groups=("shop",))
    site.commit("billing", "orders", 0, 0)
