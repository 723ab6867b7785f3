"""This module is the table of mqadmin's commands: what the test runs, what docs/mqadmin.md says.

    python -m tests.interop.mqadmin_table [FILE]

writes the page. A row that works has the command lines that `test_mqadmin.py` runs against Sluice
and against Apache's own broker; their outputs must be equal after `normalized`, but for what the
row's `only` leaves to compare.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CLUSTER, BROKER, TOPIC = "SluiceTests", "broker-a", "Orders"
PAGE = Path(__file__).parents[2] / "docs" / "mqadmin.md"

Only = Callable[[str], list[str]]


def lines_of(output: str) -> list[str]:
    """Everything that was printed: hash tables come in any order, numbers have any width."""
    return sorted(" ".join(line.split()) for line in output.splitlines() if line.strip())


def user_topics(output: str) -> list[str]:
    """Lines that speak of the topics of this test: brokers differ in those they keep themselves."""
    return [
        line for line in lines_of(output) if re.match(r"(SluiceTests +)?(Orders|Extra|#)", line)
    ]


def topics_and_groups(output: str) -> list[str]:
    """statsAll without its numbers: Apache samples them every ten seconds only."""
    return [" ".join(line.split()[:2]) for line in user_topics(output)]


def running_consumer(output: str) -> list[str]:
    """What a consumer tells of itself, without how far it is with its queues at this moment."""
    return [line.partition(" ProcessQueueInfo ")[0] for line in lines_of(output)]


def groups_of_others(output: str) -> list[str]:
    """Without mqadmin's own group: how soon it is gone after a command is its client's affair."""
    return [line for line in lines_of(output) if not line.startswith("TOOLS_CONSUMER ")]


def nothing(output: str) -> list[str]:
    """Not compared line by line; the test looks at it otherwise."""
    return []


class Command(NamedTuple):
    """One command line; {broker} stands for the broker's address."""

    line: str
    only: Only = lines_of

    @property
    def words(self) -> list[str]:
        return [word.replace("~", " ") for word in self.line.split()]


class Row(NamedTuple):
    """What the page says of one command, or of several."""

    name: str
    note: str = ""
    works: bool = True


# In the order in which they run: later ones look at what earlier ones did. A ~ is a blank.
SCRIPT: tuple[Command, ...] = (
    Command(f"updateTopic -c {CLUSTER} -t {TOPIC} -r 4 -w 4"),
    Command("updateTopic -b {broker} -t Extra -r 1 -w 1 -a +message.type=FIFO"),
    Command(f"updateSubGroup -c {CLUSTER} -g readers"),
    Command(f"updateSubGroup -c {CLUSTER} -g copies"),
    Command(f"updateTopicPerm -c {CLUSTER} -t Extra -p 4"),
    Command(f"topicRoute -t {TOPIC}"),
    Command("topicList", user_topics),
    Command("topicList -c", user_topics),
    Command(f"@produce senders {TOPIC} 1 5"),
    Command(f"@consume readers {TOPIC} 5"),  # the topic's, and the one for what comes again
    Command("@received readers 5"),
    Command(f"sendMessage -t {TOPIC} -p hello~there -k sent -c TagB -b {BROKER} -i 2"),
    Command("@received readers 1"),
    Command(f"topicStatus -t {TOPIC}"),
    Command(f"printMsg -t {TOPIC}"),
    Command(f"printMsgByQueue -t {TOPIC} -a {BROKER} -i 1 -p true -d true -f true"),
    Command(f"queryMsgById -i {{offsetId}} -t {TOPIC}"),
    Command(f"queryMsgByKey -t {TOPIC} -k key-3"),
    Command(f"queryMsgByKey -t {TOPIC} -k TagB -p T"),
    Command(f"queryMsgByUniqueKey -i {{uniqueKey}} -t {TOPIC}"),
    Command(f"queryMsgByOffset -t {TOPIC} -b {BROKER} -i 1 -o 2"),
    Command("clusterList"),
    Command("clusterList -m", nothing),
    Command("brokerStatus -b {broker}", nothing),
    Command("consumerProgress", groups_of_others),
    Command("consumerProgress -g readers"),
    Command("consumerStatus -g readers"),
    Command("consumerStatus -g readers -i {clientId}", running_consumer),
    Command("consumerConnection -g readers"),
    Command(f"producerConnection -g senders -t {TOPIC}"),
    Command(f"resetOffsetByTime -g readers -t {TOPIC} -s 0"),
    Command("@received readers 6"),
    Command(f"resetOffsetByTime -g copies -t {TOPIC} -s now"),
    Command(f"cloneGroupOffset -s readers -d copies -t {TOPIC}"),
    Command(f"skipAccumulatedMessage -g copies -t {TOPIC}"),
    Command(f"skipAccumulatedMessage -g unknown -t {TOPIC}"),
    Command(f"consumeMessage -t {TOPIC} -b {BROKER} -i 1 -o 0 -c 3"),
    Command(f"statsAll -t {TOPIC}", topics_and_groups),
    Command("getBrokerConfig -b {broker}", nothing),
    Command("updateBrokerConfig -b {broker} -k autoCreateTopicEnable -v false"),
    Command("updateBrokerConfig -b {broker} -k rocketmqHome -v /tmp"),
    Command(f"wipeWritePerm -b {BROKER}"),
    Command(f"topicRoute -t {TOPIC}"),
    Command(f"addWritePerm -b {BROKER}"),
    Command(f"topicRoute -t {TOPIC}"),
    Command(f"allocateMQ -t {TOPIC} -i 10.0.0.1,10.0.0.2"),
    Command(f"checkMsgSendRT -t {TOPIC} -a 5 -s 10"),
    Command("@level readers"),
    Command("updateKvConfig -s NS -k one -v 1"),
    Command("deleteKvConfig -s NS -k one"),
    Command("producer -b {broker}"),
    Command("brokerConsumeStats -b {broker}"),
    Command("haStatus -b {broker}"),
    Command("getConsumerConfig -g readers"),
    Command(f"queryCq -t {TOPIC} -q 1 -i 0 -c 3 -b {{broker}}"),
    Command(f"deleteSubGroup -c {CLUSTER} -g copies -r true"),
    Command(f"deleteTopic -c {CLUSTER} -t Extra"),
    Command("topicStatus -t Extra"),
    Command("consumerConnection -g nobody"),
)

_MASKS: tuple[tuple[str, str], ...] = (
    (r"^\d\d:\d\d:\d\d,\d+ \|-.*\n?", ""),  # the logging library's own words
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d+)?", "TIME"),
    (r"\b1\d{12}\b", "MS"),
    (r"\b20\d{12}\b", "TIME"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\b[0-9A-F]{32,}\b", "ID"),
    (r"(?<=storeSize=)\d+|(?<=physicSize=)\d+", "N"),
    (r"(?<=commitLogOffset=)\d+|(?<=physicOffset=)\d+", "N"),
    (r"(?<=CommitLog Offset:)  +\d+", " N"),
    (r"(?<=#MasterCommitLogMaxOffset\t)\d+", "N"),
    (r"@ID@\d+", "@ID@N"),  # the place inside an index key
    (r" __CRC32#=\d+,", ""),  # Sluice stores a checksum over the whole message
    (r"(?<![\d.])\d+\.\d+(?![\d.])", "F"),  # rates and times
    # Messages a second, whole ones: Apache's broker counts every ten seconds, ours at once.
    (r"(?<=CLUSTERING) +\d+(?= +\d+ *$)", " N"),
    (r"\b\d+-\d+(?=\(F)", "P"),  # how far timers are behind at this moment
    (r"(?<=true                    )\d+", "N"),  # how long a send took
    (r"[\w.$]+(?:\$\$Lambda\$\d+/0x[0-9a-f]+)?@[0-9a-f]{5,8}\b", "OBJECT"),
    (r"(?<= OK, )\d+", "N"),  # how many topics a nameserver changed
    (r"^\tat .*\n?", ""),
    (r"^\t\.\.\. \d+ more\n?", ""),
    (r" +$", ""),
)


def normalized(text: str) -> str:
    """An output without what differs from run to run."""
    for pattern, replacement in _MASKS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


# ----------------------------------------------------------------------------------------- the page

ROWS: tuple[Row, ...] = (
    Row("updateTopic", "attributes `lite.*` and `cleanup.policy=COMPACTION` are refused"),
    Row(
        "deleteTopic",
        "a topic of the same name starts anew; the old messages stay in the log, unseen, until "
        "retention takes them",
    ),
    Row("updateSubGroup"),
    Row("deleteSubGroup"),
    Row(
        "updateBrokerConfig",
        "settings marked live in [settings.md](settings.md); any other is refused with the reason. "
        "The change outlives the broker",
    ),
    Row("updateTopicPerm"),
    Row("topicRoute"),
    Row("topicList"),
    Row("topicStatus"),
    Row("printMsg"),
    Row("printMsgByQueue"),
    Row("queryMsgById"),
    Row("queryMsgByKey"),
    Row("queryMsgByUniqueKey"),
    Row("queryMsgByOffset"),
    Row("clusterList"),
    Row(
        "brokerStatus",
        "without the times of single puts and gets; with `heldPulls`, `storeRefuses` and "
        "`unequalSubscriptions` besides",
    ),
    Row("consumerProgress"),
    Row("consumerStatus"),
    Row("consumerConnection"),
    Row("producerConnection"),
    Row(
        "resetOffsetByTime",
        "consumers hear of it at their next pull, those that wait for messages at once; with "
        "`useServerSideResetOffset=false` all that are connected are told, as before RocketMQ 5",
    ),
    Row("skipAccumulatedMessage"),
    Row("cloneGroupOffset"),
    Row("sendMessage"),
    Row("consumeMessage"),
    Row("statsAll"),
    Row("getBrokerConfig", "shows the settings that mean something here"),
    Row("wipeWritePerm"),
    Row("addWritePerm"),
    Row("allocateMQ"),
    Row("checkMsgSendRT"),
    Row("updateKvConfig"),
    Row("deleteKvConfig"),
    Row("producer"),
    Row("brokerConsumeStats"),
    Row("haStatus", "always a master without replicas"),
    Row("getConsumerConfig"),
    Row("queryCq"),
    Row("updateTopicList, updateSubGroupList"),
    Row(
        "cleanExpiredCQ, cleanUnusedTopic, deleteExpiredCommitLog",
        "files go within seconds after the answer; queues that are cleaned keep their offsets",
    ),
    Row("setConsumeMode", "`-m PULL` or `-m POP`"),
    Row("exportPopRecord", "what was popped is kept in one way only: there is nothing to export"),
    Row("updateStaticTopic, remappingStaticTopic", "refused: there are no static topics", False),
    Row("getBrokerEpoch, getSyncStateSet, electMaster", "there is no controller", False),
    Row("addBroker, removeBroker", "there is no broker container", False),
    Row("createUser, createAcl and the like", "access control is not in this version", False),
    Row("lite topic commands, switchTimerEngine", "not in this version", False),
    Row("cold data and RocksDB commands", "they have a meaning in Apache's store only", False),
)

_TOP = """\
<!-- Written by `python -m tests.interop.mqadmin_table docs/mqadmin.md`. Edits here are lost. -->
# mqadmin

RocketMQ's own command line tool, `mqadmin` 5.5.0, works with Sluice's nameserver and broker. For
every command marked *tested*, a test runs it against Sluice and against Apache's broker and
compares what is printed: it is the same but for times, addresses, rates and places in the log.

| Command | Works | Tested | Remarks |
|---|---|---|---|
"""


def names_in_script() -> set[str]:
    """The commands of mqadmin that the test runs."""
    return {command.words[0] for command in SCRIPT if not command.line.startswith("@")}


def page() -> str:
    lines = [_TOP]
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.name.split(", ")) if row.works else row.name
        tested = "yes" if row.name in names_in_script() else ""
        lines.append(f"| {names} | {'yes' if row.works else 'no'} | {tested} | {row.note} |\n")
    return "".join(lines)


def main(arguments: list[str]) -> int:
    """Print the page, or write it to the file that is named."""
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
