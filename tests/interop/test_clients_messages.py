"""RocketMQ's own clients against Sluice: every way to send and every way to read, by each of them.

One program of each client reads in all ways at once. Half of the messages are there before it
starts; the other half comes while it waits for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pytest

from peers import RunningProgram
from tests.interop.clients import STOP_TIMEOUT_S, Clients, Event, SendPlan, received
from tests.interop.sluice_process import Question, SluiceProcess, ask
from tests.interop.watching import wait_until

QUEUES = 4  # of a topic that a client makes by sending to it
STEPS = 80
COMPRESSED_BYTES = 6_000  # clients compress bodies of 4 KiB and more
_QUERY_OFFSET, _MAX_OFFSET = 14, 30

JAVA_READERS = (
    *("push:pushed", "orderly:ordered", "broadcast:told", "broadcast:told"),
    *("push:one-tag:TagA", "push:two-tags:TagA || TagB"),
    *("lite:lite", "assign:assigned", "pull:pulled"),
)
GO_READERS = (
    *("push:pushed", "orderly:ordered", "broadcast:told", "broadcast:told"),
    *("push:one-tag:TagA", "push:two-tags:TagA || TagB", "poll:polled"),
)
READERS = {
    "java-5": JAVA_READERS,
    "java-5-binary": JAVA_READERS,  # headers in RocketMQ's own form instead of JSON
    "java-4": JAVA_READERS,
    "go-2": GO_READERS,
}
# Those that commit to the broker how far they are.
COMMITTING = {"push", "orderly", "lite", "pull", "poll"}


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path_factory.mktemp("messages")) as process:
        yield process


def plan_for(prefix: str, topic: str, body_bytes: int = 100) -> SendPlan:
    modes = ("sync", "async", "oneway", "batch")
    return SendPlan(
        *(prefix, [topic], STEPS), queues=0, modes=modes, batch=5, body_bytes=body_bytes
    )


def tag_of(identity: str, plan: SendPlan) -> str | None:
    """The tag that the programs give to a message, by its number."""
    step, _, member = identity.removeprefix(f"{plan.prefix}-").partition(".")
    number = int(step) * plan.batch + int(member) if member else int(step)
    return ("TagA", "TagB", None)[number % 3]


def expected_ids(reader: str, plans: Sequence[SendPlan]) -> set[str]:
    tags = [*reader.split(":")[2:], "*"][0]
    return {
        identity
        for plan in plans
        for identity in plan.ids()
        if tags == "*" or tag_of(identity, plan) in tags.split(" || ")
    }


def wait_for_all(program: RunningProgram, expected: Sequence[set[str]]) -> None:
    """Until each reader has had as many messages as it should."""
    counts = Counter[int]()

    def enough() -> bool:
        counts.update(row["reader"] for row in received(program.new_events()))
        return all(counts[number] >= len(ids) for number, ids in enumerate(expected))

    wait_until(enough, lambda: f"{dict(counts)} of {[len(ids) for ids in expected]}")


@pytest.mark.parametrize("clients", READERS, indirect=True)
def test_every_way_to_send_and_to_read(clients: Clients, sluice: SluiceProcess) -> None:
    topic = f"Ways-{clients.name}"
    nameserver = sluice.nameserver_address
    readers = [
        ":".join([mode, f"{group}-{clients.name}", *tags])
        for mode, group, *tags in (reader.split(":") for reader in READERS[clients.name])
    ]
    before, while_reading = plan_for("before", topic), plan_for("while", topic, COMPRESSED_BYTES)
    expected = [expected_ids(reader, [before, while_reading]) for reader in readers]
    sent = clients.send(nameserver, before)
    with clients.receiving(nameserver, [topic], *readers) as program:
        program.wait_for("ready", 1, timeout_s=120)
        sent += clients.send(nameserver, while_reading)
        wait_for_all(program, expected)
        if clients.name.startswith("go"):
            # It commits an ordered batch some time after the handler, and a stop may come before.
            place = (sluice.broker_address, topic, readers)
            wait_until(lambda: not behind(*place), lambda: f"behind: {behind(*place)}")
        rows = received(program.stop(STOP_TIMEOUT_S))
    by_reader: dict[int, list[Event]] = defaultdict(list)
    for row in rows:
        by_reader[row["reader"]].append(row)
    for number, reader in enumerate(readers):
        check_reader(reader, by_reader[number], expected[number], sent)
    assert behind(sluice.broker_address, topic, readers) == []


def check_reader(reader: str, rows: list[Event], ids: set[str], sent: list[Event]) -> None:
    """What was asked for, once each, whole, and at the place that the sender was told."""
    seen = Counter(row["id"] for row in rows)
    assert sorted(ids - seen.keys())[:3] == [], (reader, "missing")
    assert sorted(seen.keys() - ids)[:3] == [], (reader, "not asked for")
    assert [name for name, count in seen.items() if count > 1][:3] == [], (reader, "twice")
    by_id = {row["id"]: row for row in rows}
    for row in sent:
        if row["id"] in ids:
            found = by_id[row["id"]]
            for field in ("topic", "queueId", "queueOffset", "offsetMsgId", "flag", "bodySha256"):
                assert found[field] == row[field], (reader, field, found, row)
            assert found["properties"]["text"] == "café 中文 😀"
    if reader.startswith("orderly"):
        queues: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            queues[row["queueId"]].append(row["queueOffset"])
        assert len(queues) == QUEUES
        assert all(offsets == sorted(offsets) for offsets in queues.values())


def behind(broker: str, topic: str, readers: Sequence[str]) -> list[str]:
    """The groups that have not committed everything: something would come again.

    With a tag, a client commits up to what matched; what follows is asked for again.
    """
    queues = [{"topic": topic, "queueId": str(queue_id)} for queue_id in range(QUEUES)]
    ends = [
        answer.ext["offset"] for answer in ask(broker, *(Question(_MAX_OFFSET, q) for q in queues))
    ]
    assert all(int(end) > 0 for end in ends)
    groups: list[str] = []
    for mode, group, *tags in (reader.split(":") for reader in readers):
        if mode in COMMITTING and not tags:
            questions = [Question(_QUERY_OFFSET, {"consumerGroup": group, **q}) for q in queues]
            if [answer.ext.get("offset") for answer in ask(broker, *questions)] != ends:
                groups.append(group)
    return groups


def test_the_go_client_pulls_every_queue_from_its_start(
    go_clients: Clients, sluice: SluiceProcess
) -> None:
    plan = plan_for("all", "PulledByGo")
    sent = go_clients.send(sluice.nameserver_address, plan)
    rows = go_clients.receive_all(sluice.nameserver_address, plan.topics)
    check_reader("all:interop-reader", rows, set(plan.ids()), sent)
