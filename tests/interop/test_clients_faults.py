"""RocketMQ's own clients on Sluice while its processes come and go: nameservers, and the broker."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from peers import RunningProgram
from peers.process import free_ports
from tests.interop.clients import Clients, SendPlan
from tests.interop.conftest import clients_named
from tests.interop.sluice_process import (
    SluiceBroker,
    SluiceNameserver,
    make_topic,
    wait_for_route,
)
from tests.interop.watching import Group, Ledger, Member, Sender

ENDLESS = 10_000_000
log_lines = logging.getLogger(__name__)


def test_one_of_several_nameservers_may_be_down(clients: Clients, tmp_path: Path) -> None:
    """The first address answers nobody; of the two others one is killed, then the other."""
    first, second = SluiceNameserver(tmp_path / "first"), SluiceNameserver(tmp_path / "second")
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    addresses = [dead, first.address, second.address]
    nameservers = ";".join(addresses)
    early, late = "RoutedEarly", "RoutedLate"
    endless = SendPlan("early", [early], ENDLESS, queues=2, per_second=50, retry=True, brief=True)
    more = SendPlan("late", [late], count=20, queues=2, retry=True)
    group = Group("routed-early")
    with contextlib.ExitStack() as running:
        running.enter_context(first)
        running.enter_context(second)
        broker = running.enter_context(SluiceBroker(tmp_path / "broker", addresses))
        make_topic(broker.address, early, 2)
        sender = Sender(running.enter_context(clients.sending(nameservers, endless)))
        reader = clients.receiving(nameservers, [early], f"push:{group.name}", brief=True)
        group.members.append(Member(running.enter_context(reader), group.name))
        sender.wait_for_more(10)
        first.kill()
        clients.send(nameservers, more)  # to a topic that nobody knew before
        first.start()
        wait_for_route(first.address, late)
        second.kill()
        rows = clients.receive_push(nameservers, [late], count=more.count, group="routed-late")
        sender.wait_for_more(10)
        sender.stop()
        group.wait_for_all(sender.acknowledged)
    assert sorted(row["id"] for row in rows) == sorted(more.ids())
    # A client may fail to ask a nameserver that is gone, once; the broker was there all the time.
    assert [reason for reason in sender.failures if broker.address in reason] == []


# ------------------------------------------------------------------------- a broker that comes back

TOPICS = {"MixedWide": 8, "MixedNarrow": 2, "MixedSingle": 1}
SOAK_SECONDS = int(os.environ.get("SOAK_SECONDS", "600"))
KILL_EVERY_SECONDS = 20
CATCH_UP_SECONDS = 300.0


class Load(NamedTuple):
    """One sender: a client, how it sends, how often a second."""

    client: str
    modes: Sequence[str]
    per_second: int
    body_bytes: int = 200


class Mixed:
    """Senders and readers of all clients on one broker, which may be stopped and killed."""

    def __init__(
        self, directory: Path, loads: Sequence[Load], readers: dict[str, list[str]]
    ) -> None:
        self._running = contextlib.ExitStack()
        self._clients = {name: clients_named(name, directory / name) for name in readers}
        self._loads = loads
        self._readers = readers
        self._nameserver = SluiceNameserver(directory / "nameserver")
        self.broker = SluiceBroker(directory / "broker", [self._nameserver.address])

    def __enter__(self) -> Mixed:
        with contextlib.ExitStack() as running:
            running.enter_context(self._nameserver)
            running.enter_context(self.broker)
            for topic, queues in TOPICS.items():
                make_topic(self.broker.address, topic, queues)
            self.senders = [
                Sender(running.enter_context(self._sending(number, load)))
                for number, load in enumerate(self._loads)
            ]
            members = [
                Member(
                    running.enter_context(
                        self._clients[name].receiving(
                            self._nameserver.address, list(TOPICS), *readers, brief=True
                        )
                    ),
                    *(reader.split(":")[1] for reader in readers),
                )
                for name, readers in self._readers.items()
            ]
            self.ledger = Ledger(self.senders, members)
            self._running = running.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def _sending(
        self, number: int, load: Load
    ) -> contextlib.AbstractContextManager[RunningProgram]:
        plan = SendPlan(
            *(f"{load.client}-{number}", list(TOPICS), ENDLESS),
            queues=0,
            body_bytes=load.body_bytes,
            modes=load.modes,
            per_second=load.per_second,
            retry=True,
            brief=True,
        )
        return self._clients[load.client].sending(self._nameserver.address, plan)

    def finish(self, timeout_s: float) -> None:
        """No more sends; everything that was acknowledged is seen by every group."""
        for sender in self.senders:
            sender.stop()
        self.ledger.wait_for_all(timeout_s)


ALL_MODES = ("sync", "async", "batch")
READERS = {
    "java-5": ["push:mixed-push-5", "lite:mixed-lite-5"],
    "java-4": ["push:mixed-push-4", "orderly:mixed-orderly-4"],
    "go-2": ["push:mixed-push-go"],
}


@pytest.mark.slow
def test_a_broker_restarts_under_its_clients(tmp_path: Path) -> None:
    loads = [Load(name, ALL_MODES, per_second=30) for name in READERS]
    with Mixed(tmp_path, loads, READERS) as mixed:
        mixed.ledger.wait_for_more(1_000)
        mixed.broker.stop()
        mixed.broker.start()
        mixed.ledger.wait_for_more(1_000)
        mixed.broker.kill()
        mixed.broker.start()
        mixed.ledger.wait_for_more(1_000)
        mixed.finish(CATCH_UP_SECONDS)
    # The broker was away while all of them were sending.
    assert all(sender.failures for sender in mixed.senders)


@pytest.mark.soak
def test_nothing_is_lost_when_the_broker_is_killed_again_and_again(tmp_path: Path) -> None:
    """SOAK_SECONDS sets how long; the time between two kills stays the same."""
    loads = [
        Load("java-5", ("sync",), per_second=200),
        Load("java-5", ("async", "batch"), per_second=80, body_bytes=1_000),
        Load("java-4", ALL_MODES, per_second=80),
        Load("go-2", ALL_MODES, per_second=80),
    ]
    end = time.monotonic() + SOAK_SECONDS
    kills = 0
    with Mixed(tmp_path, loads, READERS) as mixed:
        while time.monotonic() < end:
            kill_at = time.monotonic() + KILL_EVERY_SECONDS
            while time.monotonic() < min(kill_at, end):
                time.sleep(0.5)
                mixed.ledger.look()
            mixed.broker.kill()
            mixed.broker.start()
            kills += 1
            mixed.ledger.wait_for_more(1)
        mixed.finish(CATCH_UP_SECONDS)
    assert kills >= SOAK_SECONDS // (2 * KILL_EVERY_SECONDS)
    assert mixed.ledger.acknowledged > 0
    log_lines.info(  # shown by -o log_cli=true -o log_cli_level=INFO
        "%d kills, %d acknowledged, none lost; seen: %s; failed sends, tried again: %s",
        kills,
        mixed.ledger.acknowledged,
        dict(mixed.ledger.seen),
        [len(sender.failures) for sender in mixed.senders],
    )
    shutil.rmtree(tmp_path)  # most of a gigabyte, and nothing to be learnt from it
