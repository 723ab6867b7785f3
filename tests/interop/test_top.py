"""`sluice top` against Apache's own broker: it asks nothing that only Sluice answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import Jars, RocketMQ
from peers.rocketmq import BROKER, CLUSTER

WAIT_SECONDS = 120


def sluice(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_topics_groups_and_brokers_of_apache_are_shown(rocketmq_jars: Jars, tmp_path: Path) -> None:
    with RocketMQ(tmp_path / "apache", jars=rocketmq_jars, heap_mb=512) as apache:
        address = ("-n", apache.nameserver_address)
        sluice(
            "admin", "updateTopic", "-c", CLUSTER, "-t", "Orders", "-r", "2", "-w", "2", *address
        )
        sluice("admin", "updateSubGroup", "-c", CLUSTER, "-g", "readers", *address)
        sluice("send", "Orders", "hello", "--count", "5", *address)
        sluice(
            *("admin", "skipAccumulatedMessage", "-g", "readers", "-t", "Orders", "-f", "true"),
            *address,
        )
        sluice("send", "Orders", "hello", "--count", "3", *address)

        view: Any = json.loads(sluice("top", "--once", "--json", *address))
        assert view["problems"] == []
        (broker,) = view["brokers"]
        assert (broker["name"], broker["address"]) == (BROKER, apache.broker_address)
        assert broker["version"] == "V5_5_0"
        assert 0 < broker["disk_ratio"] < 1
        assert broker["held_pulls"] is None
        (topic,) = [row for row in view["topics"] if row["name"] == "Orders"]
        assert (topic["queues"], topic["messages"]) == (2, 8)
        assert "TBW102" not in [row["name"] for row in view["topics"]]
        (group,) = [row for row in view["groups"] if row["group"] == "readers"]
        assert (group["topic"], group["lag"]) == ("Orders", 3)

        text = sluice("top", "--once", *address)
        assert "Orders" in text
        assert BROKER in text
