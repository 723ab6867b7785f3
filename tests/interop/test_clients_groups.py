"""Groups of RocketMQ's own clients on Sluice: members join, leave and are killed under load.

After each change all queues belong to living members, and in the end every message was seen.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from tests.interop.clients import Clients, SendPlan
from tests.interop.sluice_process import SluiceProcess, make_topic
from tests.interop.watching import Group, Member, Sender

QUEUES = 8
PER_SECOND = 200
STEADY = 200


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SluiceProcess]:
    with SluiceProcess(tmp_path_factory.mktemp("groups")) as process:
        yield process


class Scene:
    """A topic, a sender that goes on all the time, and the groups that read it."""

    def __init__(self, clients: Clients, sluice: SluiceProcess, *modes: str) -> None:
        self.topic = f"Shared-{'-'.join(modes)}-{clients.name}"
        self.queues = [f"{self.topic}/{queue_id}" for queue_id in range(QUEUES)]
        self.groups = {mode: Group(f"{mode}-{self.topic}") for mode in modes}
        self._clients = clients
        self._nameserver = sluice.nameserver_address
        self._running = contextlib.ExitStack()
        make_topic(sluice.broker_address, self.topic, QUEUES)

    def __enter__(self) -> Scene:
        plan = SendPlan(
            *("s", [self.topic], 1_000_000),
            queues=QUEUES,
            per_second=PER_SECOND,
            retry=True,
            brief=True,
        )
        program = self._clients.sending(self._nameserver, plan)
        self.sender = Sender(self._running.enter_context(program))
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def join(self, *modes: str) -> Member:
        """A new member of the groups of these modes."""
        readers = [f"{mode}:{self.groups[mode].name}" for mode in modes]
        program = self._running.enter_context(
            self._clients.receiving(self._nameserver, [self.topic], *readers, brief=True)
        )
        member = Member(program, *(self.groups[mode].name for mode in modes))
        for mode in modes:
            self.groups[mode].members.append(member)
        return member

    def wait_for_shares(self, *modes: str) -> None:
        for mode in modes or set(self.groups) - {"lite"}:  # which does not say what it owns
            self.groups[mode].wait_for_shares(self.queues)


def modes_of(clients: Clients) -> tuple[str, ...]:
    # The Go client gives its queues back before it has committed how far it is.
    return ("push",) if clients.name.startswith("go") else ("push", "lite", "orderly")


def test_members_join_leave_and_are_killed(clients: Clients, sluice: SluiceProcess) -> None:
    modes = modes_of(clients)
    with Scene(clients, sluice, *modes) as scene:
        first = scene.join(*modes)
        scene.wait_for_shares()
        second = scene.join(*modes)
        scene.wait_for_shares()
        # The queues of an ordered member that is killed stay locked for a minute: see below.
        third = scene.join(*(mode for mode in modes if mode != "orderly"))
        scene.wait_for_shares("push")
        scene.sender.wait_for_more(STEADY)
        second.leave()
        scene.wait_for_shares()
        third.kill()
        scene.wait_for_shares()
        scene.sender.look()
        before = len(scene.sender.acknowledged)
        scene.sender.wait_for_more(STEADY)
        scene.sender.stop()
        for group in scene.groups.values():
            group.wait_for_all(scene.sender.acknowledged)
        # On a busy machine an answer may come too late; then the message is sent again.
        assert [reason for reason in scene.sender.failures if "imeout" not in reason] == []
        assert all(member.received[scene.groups["push"].name] for member in (first, second, third))
        check_steady(scene.groups["push"], scene.sender.acknowledged[before:])
        if "orderly" in modes:
            check_order(scene.groups["orderly"], moves=2)


def check_steady(group: Group, ids: list[str]) -> None:
    """Messages sent when nobody came or went any more were seen exactly once."""
    seen = group.seen()
    assert len(ids) >= STEADY
    assert [(name, seen[name]) for name in ids if seen[name] != 1][:3] == []


def check_order(group: Group, *, moves: int) -> None:
    """Each member saw each queue in order and nothing twice.

    The client does not commit a message whose listener runs while the queue is taken away: one
    message of each queue may come again, to the next owner.
    """
    again = Counter[str]()
    offsets_seen: dict[str, set[int]] = defaultdict(set)
    for member in group.members:
        last: dict[str, int] = {}
        for queue, offset, _ in member.received[group.name]:
            assert offset > last.get(queue, -1), (queue, offset, "after", last[queue])
            last[queue] = offset
            again[queue] += offset in offsets_seen[queue]
            offsets_seen[queue].add(offset)
    assert all(count <= moves for count in again.values()), again
    assert len(offsets_seen) == QUEUES


@pytest.mark.soak
def test_an_ordered_group_goes_on_after_a_member_was_killed(
    clients: Clients, sluice: SluiceProcess
) -> None:
    """A lock lives for a minute: its owner may only have lost its connection, and still work."""
    with Scene(clients, sluice, "orderly") as scene:
        first, second = scene.join("orderly"), scene.join("orderly")
        scene.wait_for_shares()
        scene.groups["orderly"].wait_for_reads()  # so the second one has its locks
        second.kill()
        scene.wait_for_shares()
        scene.sender.wait_for_more(STEADY)
        scene.sender.stop()
        scene.groups["orderly"].wait_for_all(scene.sender.acknowledged)
    queues = Counter(row[0] for row in first.received[scene.groups["orderly"].name])
    assert len(queues) == QUEUES
