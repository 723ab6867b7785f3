"""One directory with waiting messages, two brokers: each goes on where the other one stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peers import Jars, RocketMQ
from sluice.protocol import records
from tests.interop.sluice_process import Question, SluiceProcess, ask, make_topic
from tests.interop.store_load import APACHE_SIZES, INDEX_ENTRIES, INDEX_SLOTS, SEGMENT_BYTES
from tests.interop.watching import wait_until
from tests.unit.broker.broker_kit import pull_fields, send_fields

TOPIC = "Later"
_SEND, _PULL, _RECALL, _MAX_OFFSET = 310, 11, 370, 30
_SUBSCRIPTION = 4  # a pull brings its own


def question(code: int, fields: dict[str, object], body: bytes = b"") -> Question:
    return Question(code, {name: str(value) for name, value in fields.items()}, body)


def send(address: str, body: str, **properties: str) -> str:
    """Send to queue 0; the handle to take it back with, if there is one."""
    fields = send_fields(TOPIC, 0, UNIQ_KEY=f"unique-{body}", **properties)
    answer = ask(address, question(_SEND, fields, body.encode()))[0]
    assert answer.code == 0, answer.remark
    return answer.ext.get("recallHandle", "")


def received(address: str) -> list[str]:
    """All bodies of queue 0, in order."""
    end = ask(address, question(_MAX_OFFSET, {"topic": TOPIC, "queueId": 0}))[0]
    bodies: list[str] = []
    while len(bodies) < int(end.ext["offset"]):
        fields = pull_fields(TOPIC, 0, len(bodies), "readers", _SUBSCRIPTION)
        answer = ask(address, question(_PULL, fields))[0]
        assert answer.code == 0, answer.remark
        view, at = memoryview(answer.body), 0
        while at < len(view):
            entry = records.decode(view, at)
            bodies.append(bytes(entry.body).decode())
            at += entry.size
    return bodies


def until(address: str, holds: Callable[[list[str]], bool]) -> list[str]:
    wait_until(lambda: holds(received(address)), lambda: str(received(address)))
    return received(address)


def test_waiting_messages_go_from_apache_to_sluice_and_back(
    rocketmq_jars: Jars, tmp_path: Path
) -> None:
    config = {**APACHE_SIZES, "recallMessageEnable": "true"}
    apache = RocketMQ(tmp_path, config=config, jars=rocketmq_jars)
    sluice = SluiceProcess(
        tmp_path,
        *("--segment-bytes", str(SEGMENT_BYTES)),
        *("--key-index-slots", str(INDEX_SLOTS), "--key-index-entries", str(INDEX_ENTRIES)),
    )
    with apache:
        make_topic(apache.broker_address, TOPIC, 1)
        send(apache.broker_address, "second", DELAY="2")
        send(apache.broker_address, "third", TIMER_DELAY_SEC="6")
        send(apache.broker_address, "days", TIMER_DELAY_SEC="100000")
        handle = send(apache.broker_address, "back", TIMER_DELAY_SEC="6")
        fields: dict[str, object] = {"topic": TOPIC, "recallHandle": handle}
        assert ask(apache.broker_address, question(_RECALL, fields))[0].code == 0
        apache.kill()
        with sluice:
            found = until(sluice.broker_address, lambda bodies: len(bodies) >= 2)
            assert found == ["second", "third"]
            send(sluice.broker_address, "fourth", DELAY="1")
            until(sluice.broker_address, lambda bodies: len(bodies) == 3)
            send(sluice.broker_address, "fifth", DELAY="2")
        apache.start()
        # It has timer files of its own, of the time before: what was timed it may send again, and
        # also what was taken back, if it was killed before it had written that down.
        found = until(apache.broker_address, lambda bodies: "fifth" in bodies)
        apache.kill()  # stopping takes it long
    rest = [body for body in found if body not in ("third", "back")]
    assert rest == ["second", "fourth", "fifth"]
