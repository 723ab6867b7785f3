"""Priorities: which queue a message goes to, as RocketMQ 5.5's broker decides it."""

from __future__ import annotations

import pytest

from sluice.broker.priorities import routed
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import running, send_fields
from tests.unit.loops import run_once

NAME = "_SYS_MSG_PRIORITY_"


@pytest.mark.parametrize(
    ("priority", "queue_id"),
    [("0", 0), ("1", 1), ("3", 3), ("4", 3), ("2147483647", 3), ("+2", 2)],
)
def test_the_priority_is_the_queue(priority: str, queue_id: int) -> None:
    properties = f"{NAME}\x01{priority}\x02UNIQ_KEY\x01A\x02".encode()
    assert routed(properties, 1, 4) == (properties, queue_id)


@pytest.mark.parametrize(
    "value", ["-1", "high", "", "2147483648", "1.5", " 2", "99999999999", "--2"]
)
def test_what_is_no_priority_changes_nothing(value: str) -> None:
    properties = f"{NAME}\x01{value}\x02".encode()
    assert routed(properties, 1, 4) == (properties, 1)


@pytest.mark.parametrize(
    "other",
    [
        *("DELAY\x013", "TIMER_DELIVER_MS\x0199", "TIMER_DELAY_SEC\x019", "TIMER_DELAY_MS\x019"),
        *("__SHARDINGKEY\x01a", "TRAN_MSG\x01true", "TRAN_MSG\x01TRUE"),
    ],
)
def test_messages_of_other_kinds_have_no_priority(other: str) -> None:
    properties = f"A\x01b\x02{NAME}\x013\x02{other}\x02".encode()
    assert routed(properties, 1, 4) == (f"A\x01b\x02{other}\x02".encode(), 1)


def test_a_send_with_a_priority_goes_to_its_queue_and_is_told_so() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("plain", 4)
            await rig.make_topic("urgent", 4, attributes="+message.type=PRIORITY")
            for topic in ("plain", "urgent"):  # the property counts, as with RocketMQ
                for priority, queue_id in (("0", 0), ("2", 2), ("9", 3)):
                    answer = await rig.send(topic, b"p" + priority.encode(), 1, **{NAME: priority})
                    assert answer["queueId"] == str(queue_id)
                    pulled = await rig.pull(topic, 0, queue_id)
                    assert b"p" + priority.encode() in bytes(pulled.body)
                answer = await rig.send(topic, b"none", 1, **{NAME: "-5"})
                assert answer["queueId"] == "1"

    run_once(work())


def test_a_batch_stays_together_whatever_the_priorities() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("urgent", 4, attributes="+message.type=PRIORITY")
            properties = f"{NAME}\x013\x02UNIQ_KEY\x01A\x02".encode()
            part = b"".join(
                (
                    (4 * 4 + 4 + 1 + 2 + len(properties)).to_bytes(4, "big"),
                    bytes(12),
                    (1).to_bytes(4, "big") + b"x",
                    len(properties).to_bytes(2, "big") + properties,
                )
            )
            answer = await rig.done(Request.SEND_BATCH_MESSAGE, send_fields("urgent", 1), part)
            assert answer.ext["queueId"] == "1"

    run_once(work())
