"""Apache's Java client 5.5.0 against a broker that can take no more: it tries again by itself."""

from __future__ import annotations

from pathlib import Path

from tests.interop.clients import JavaClients, SendPlan, received
from tests.interop.sluice_process import SluiceProcess

TOPICS = ("Crowded",)
TIMEOUT_S = 120.0


def test_a_push_consumer_gets_everything_though_most_of_its_pulls_are_refused(
    java_clients: JavaClients, tmp_path: Path
) -> None:
    with SluiceProcess(tmp_path / "sluice", "--held-polls-max", "1") as sluice:
        nameserver = sluice.nameserver_address
        sent = java_clients.send(nameserver, SendPlan("a", TOPICS, count=8, queues=4))
        with java_clients.receiving(nameserver, TOPICS, "push:crowd") as consumer:
            consumer.wait_for("received", 8, TIMEOUT_S)
            # All queues are empty now: one pull is held, the others are refused.
            sent += java_clients.send(nameserver, SendPlan("b", TOPICS, count=40, queues=4))
            consumer.wait_for("received", 48, TIMEOUT_S)
            rows = received(consumer.stop(TIMEOUT_S))
    assert {row["properties"]["id"] for row in rows} == {row["id"] for row in sent}
    log = "".join(file.read_text() for file in (tmp_path / "sluice").glob("*.log"))
    assert "1 pulls wait for messages, the limit is 1 (held_polls_max)" in log
