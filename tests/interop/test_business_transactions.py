"""Transactions by RocketMQ's own clients: ends, questions, another producer that answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.rocketmq_programs import TRANSACTION_PRODUCER, Load, Programs
from peers import Jars, RocketMQ, RunningProgram
from sluice.protocol import records
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_transactions import OpenHalf, read_open_halves
from tests.interop.clients import STOP_TIMEOUT_S, Clients, JavaClients, kind
from tests.interop.sluice_process import Question, SluiceProcess, ask, make_topic
from tests.interop.store_load import APACHE_SIZES
from tests.interop.watching import wait_until
from tests.unit.broker.broker_kit import FLAG_SUBSCRIPTION, pull_fields

COUNT = 24  # a multiple of what the words below come round in
QUEUES = 4
COLUMNS = re.compile(r"\| Check: (\d+) \| UnexpectedCheck: (\d+) \| DuplicatedCheck: (\d+)")
FLAGS = ("--transaction-timeout-ms", "1000", "--transaction-check-interval-ms", "500")
# For a program that takes it amiss if it is asked while its word is on the way.
PATIENT_FLAGS = ("--transaction-timeout-ms", "4000", "--transaction-check-interval-ms", "8000")


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path_factory.mktemp("transactions"), *FLAGS) as process:
        yield process


def open_halves(sluice: SluiceProcess, **fields: str) -> list[OpenHalf]:
    answer = ask(sluice.broker_address, Question(Request.SLUICE_LIST_TRANSACTIONS, fields))[0]
    assert answer.code == 0, answer.remark
    return read_open_halves(answer.body)


def stored_ids(sluice: SluiceProcess, topic: str) -> list[str]:
    """The ids of all messages that anybody can read."""
    ids: list[str] = []
    for queue_id in range(QUEUES):
        fields = pull_fields(topic, queue_id, 0, "readers", FLAG_SUBSCRIPTION)
        ext = {name: str(value) for name, value in fields.items()}
        answer = ask(sluice.broker_address, Question(Request.PULL_MESSAGE, ext))[0]
        at = 0
        while at < len(answer.body):
            entry = records.decode(answer.body, at)
            ids.append(records.parse_properties(entry.properties)["id"])
            at += entry.size
    return ids


def wait_until_all_ended(sluice: SluiceProcess, topic: str) -> None:
    def still_open() -> list[OpenHalf]:
        return open_halves(sluice, topic=topic)

    wait_until(lambda: not still_open(), lambda: f"{len(still_open())}: {still_open()[:2]}")


def transact(
    clients: Clients, sluice: SluiceProcess, topic: str, prefix: str, count: int, **words: str
) -> list[str]:
    """The words of a program that sends so many messages; --local and --check several times."""
    arguments = ["--namesrv", sluice.nameserver_address, "--group", f"shop-{clients.name}"]
    arguments += ["--topic", topic, "--prefix", prefix, "--count", str(count)]
    for name, text in words.items():
        for word in text.split():
            arguments += [f"--{name}", word]
    return arguments


def wait_for_answers(program: RunningProgram, count: int) -> None:
    """Until the program has said something else than that it does not know, so many times."""
    answers: list[str] = []

    def enough() -> bool:
        answers.extend(e["answer"] for e in program.new_events() if e["event"] == "asked")
        return len(answers) - answers.count("unknown") >= count

    wait_until(enough, lambda: f"{len(answers)} questions")


@pytest.mark.parametrize("clients", ["java-5", "go-2"], indirect=True)
def test_ends_and_questions(clients: Clients, sluice: SluiceProcess) -> None:
    topic = f"Orders-{clients.name}"
    make_topic(sluice.broker_address, topic, QUEUES)
    words = {"local": "commit rollback unknown unknown", "check": "unknown odd-rollback:commit"}
    started = clients.started
    with started("Transact", *transact(clients, sluice, topic, "a", COUNT, **words)) as program:
        program.wait_for("ready", 1, timeout_s=120)
        wait_for_answers(program, COUNT // 2)
        wait_until_all_ended(sluice, topic)
        events = program.stop(STOP_TIMEOUT_S)
    asked = Counter((event["id"], event["times"]) for event in kind(events, "asked"))
    undecided = {f"a-{number}" for number in range(COUNT) if number % 4 >= 2}
    # An answer that takes longer than the broker's patience is asked for once more.
    assert asked.keys() >= {(name, times) for name in undecided for times in (1, 2)}
    assert {name for name, _ in asked} == undecided
    assert {event["topic"] for event in kind(events, "asked")} == {topic}
    assert all(event.get("whole", 1) for event in kind(events, "asked"))
    sent = kind(events, "sent")
    assert all(event["transactionId"] == event["msgId"] for event in sent)

    # Another producer of the group answers for one that is gone without a word.
    words = {"local": "unknown", "check": "unknown"}
    with started("Transact", *transact(clients, sluice, topic, "b", 6, **words)) as program:
        program.wait_for("ready", 1, timeout_s=120)
        program.wait_for("asked", 6, timeout_s=60)
        program.kill()
    reason = f"no producer of group shop-{clients.name} is connected"
    wait_until(
        lambda: {half.waits_for for half in open_halves(sluice, topic=topic)} == {reason},
        lambda: str(open_halves(sluice, topic=topic)),
    )
    assert len(open_halves(sluice, topic=topic, group=f"shop-{clients.name}")) == 6
    words = {"local": "commit", "check": "odd-rollback:commit"}
    with started("Transact", *transact(clients, sluice, topic, "c", 1, **words)) as program:
        wait_for_answers(program, 6)
        wait_until_all_ended(sluice, topic)
        program.stop(STOP_TIMEOUT_S)

    if isinstance(clients, JavaClients):
        ids = [row["id"] for row in clients.receive_all(sluice.nameserver_address, [topic])]
    else:
        ids = stored_ids(sluice, topic)  # Go's consumer needs half a minute to say that it is done
    committed = [f"a-{n}" for n in range(COUNT) if n % 2 == 0] + ["b-0", "b-2", "b-4", "c-0"]
    assert sorted(ids) == sorted(committed)


def test_rocketmqs_own_program_finds_nothing_wrong(rocketmq_jars: Jars, tmp_path: Path) -> None:
    with SluiceProcess(tmp_path / "sluice", *PATIENT_FLAGS) as sluice:
        run_rocketmqs_own_program(rocketmq_jars, sluice, tmp_path / "programs")


def run_rocketmqs_own_program(jars: Jars, sluice: SluiceProcess, directory: Path) -> None:
    topic = "BenchmarkTransactions"
    make_topic(sluice.broker_address, topic, QUEUES)
    options = ("-w", "4", "-s", "512", "-i", "5", "-sr", "0.2", "-su", "0.2", "-cr", "0.3")
    load = Load("transactions", TRANSACTION_PRODUCER, (*options, "-cu", "0.3"))
    programs = Programs(directory, jars)
    with programs.running(load, sluice.nameserver_address, topic) as running:

        def was_asked() -> bool:
            """Its first heartbeat may be late, and it is asked after that only."""
            running.check()
            return any(int(checks) for checks, _, _ in COLUMNS.findall(running.output()))

        wait_until(was_asked, running.output)
        output = running.output()
    assert "unexpected check" not in output
    found = COLUMNS.findall(output)
    assert {(unexpected, twice) for _, unexpected, twice in found} == {("0", "0")}


@pytest.mark.soak
def test_apaches_broker_goes_on_with_open_transactions_and_gives_them_back(
    java_clients: JavaClients, rocketmq_jars: Jars, tmp_path: Path
) -> None:
    """One directory: begun here and ended there, begun there and ended here; each message once."""
    clients, topic = java_clients, "Taken"
    sizes = {
        "segment-bytes": APACHE_SIZES["mappedFileSizeCommitLog"],
        "key-index-slots": APACHE_SIZES["maxHashSlotNum"],
        "key-index-entries": APACHE_SIZES["maxIndexNum"],
    }
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    sluice = SluiceProcess(tmp_path, *FLAGS, *flags)
    # It notes ends every three seconds; asking earlier it would take them for open.
    config = {**APACHE_SIZES, "transactionTimeOut": 5000, "transactionCheckInterval": 1000}
    config["transactionCheckMax"] = 1000  # also those without a producer count there
    apache = RocketMQ(tmp_path, config=config, jars=rocketmq_jars)

    def leave_open(address: str, prefix: str, local: str) -> None:
        """A producer that is gone after it was asked."""
        words = ["--local", *" --local ".join(local.split()).split(), "--check", "unknown"]
        with clients.started("Transact", *begin(address, prefix, 8), *words) as program:
            program.wait_for("ready", 1, timeout_s=120)
            program.wait_for("asked", 4, timeout_s=120)
            program.kill()

    def begin(address: str, prefix: str, count: int) -> list[str]:
        return ["--namesrv", address, "--group", "shop", "--topic", topic, "--prefix", prefix,
                "--count", str(count)]  # fmt: skip

    def end(address: str, prefix: str, count: int) -> None:
        """Another producer of the group, which knows."""
        words = ["--local", "commit", "--check", "odd-rollback:commit"]
        with clients.started("Transact", *begin(address, prefix, 1), *words) as program:
            wait_for_answers(program, count)
            program.stop(STOP_TIMEOUT_S)

    with sluice:
        make_topic(sluice.broker_address, topic, QUEUES)
        leave_open(sluice.nameserver_address, "a", "commit rollback unknown unknown")
    with apache:
        end(apache.nameserver_address, "b", 4)
        leave_open(apache.nameserver_address, "c", "commit rollback unknown unknown")
        apache.stop()
    with sluice:
        end(sluice.nameserver_address, "d", 4)
        wait_until_all_ended(sluice, topic)
        received = clients.receive_all(sluice.nameserver_address, [topic])
    expected = [f"{prefix}-{number}" for prefix in "ac" for number in (0, 2, 4, 6)]
    assert sorted(event["id"] for event in received) == sorted([*expected, "b-0", "d-0"])
