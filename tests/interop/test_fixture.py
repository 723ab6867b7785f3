"""Apache's Java client uses the broker of the pytest plugin, and hours fly by."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from peers import Jars, JavaPrograms, PeerUnavailable
from sluice.testing import Clock, LiveBroker
from tests.interop.clients import JAVA_OPTIONS, JAVA_SOURCES, STOP_TIMEOUT_S, kind

WAIT_S = 120.0
# After so many seconds a message comes again that a consumer failed with.
RETRY_SECONDS = [
    *(10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200),
]
TRIES = 1 + len(RETRY_SECONDS)


@pytest.fixture
def programs(rocketmq_jars: Jars, tmp_path: Path) -> JavaPrograms:
    try:
        return JavaPrograms(
            JAVA_SOURCES, rocketmq_jars, home=tmp_path / "java", options=JAVA_OPTIONS
        )
    except PeerUnavailable as error:
        pytest.skip(error.reason)


def test_java_is_given_all_retries_of_five_hours(
    programs: JavaPrograms, sluice_broker: LiveBroker, sluice_clock: Clock
) -> None:
    sluice_broker.create_topic("orders", 1)
    words = ("--namesrv", sluice_broker.nameserver_address, "--broker", sluice_broker.name)
    reader = ("--reader", "push:billing:orders:-1:0")
    message = ("--send", f"orders:broken:times:{TRIES + 1}")
    with programs.started("Failing", *words, *reader, *message) as program:
        program.wait_for("ready", 1, WAIT_S)
        for number in range(1, TRIES):
            program.wait_for("received", number, WAIT_S)
            # What it failed with is on its way back: then it waits for its time.
            due_ms = sluice_broker.wait_until(sluice_clock.next_ms, seconds=WAIT_S, what="a retry")
            assert due_ms is not None
            [member] = sluice_broker.readers().groups["billing"]
            sluice_clock.advance(milliseconds=due_ms - sluice_clock.now_ms())
            assert sluice_broker.readers().groups["billing"] == {member}
        program.wait_for("received", TRIES, WAIT_S)
        sluice_broker.wait_until(
            lambda: sluice_broker.messages("%DLQ%billing"), seconds=WAIT_S, what="a dead letter"
        )
        rows = kind(program.stop(STOP_TIMEOUT_S), "received")
    assert [row["times"] for row in rows] == list(range(TRIES))
    steps = [(after["storeMs"] - row["storeMs"]) // 1000 for row, after in pairwise(rows)]
    assert steps == RETRY_SECONDS
