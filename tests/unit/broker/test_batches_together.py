"""Batches that come together: stored and answered as each would be that comes by itself."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.broker.remoting_api import RemotingApi
from sluice.errors import StoreReadOnly
from sluice.log_share import LogShare
from sluice.net import Connection
from sluice.protocol.message_batches import join_batch
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand, decode, encode
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.lanes import Lane
from tests.unit.broker.broker_kit import send_fields
from tests.unit.broker.transaction_kit import TOPIC, Broker

HOST = b"\x0a\0\0\1\0\0\x30\x39"


class Peer:
    """Stands for a connection, and takes the answers."""

    def __init__(self) -> None:
        self.attributes: dict[str, object] = {}
        self.data = b""
        self.log_share = LogShare()

    def packed_peer(self) -> bytes:
        return HOST

    def send(self, *parts: Any) -> None:
        self.data += b"".join(parts)

    @property
    def answers(self) -> list[RemotingCommand]:
        """In the order of their requests."""
        found, at = [], 0
        while at < len(self.data):
            size = int.from_bytes(self.data[at : at + 4], "big")
            found.append(decode(self.data[at + 4 : at + 4 + size]))
            at += 4 + size
        return sorted(found, key=lambda answer: answer.opaque)


class Door:
    """A broker without a listener."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.api = RemotingApi(self.broker.core)
        self.peer = Peer()

    def receive(self, frames: list[bytes]) -> None:
        self.api.received(cast(Connection, self.peer), [*frames])
        self.broker.settle()

    @property
    def log(self) -> bytes:
        log = self.broker.core.store.log
        return bytes(log.view(0, log.written))


def batch(
    count: int, body_bytes: int, before: str = "", topic: str = TOPIC, queue_id: int = 0
) -> Any:
    """What makes a frame of it, by its number."""

    def frame(number: int) -> bytes:
        body = join_batch(
            (
                0,
                bytes([number, *range(1, body_bytes)]),
                f"{before}UNIQ_KEY\x01{number:04}{at:04}\x02".encode(),
            )
            for at in range(count)
        )
        fields = send_fields(topic, queue_id, WAIT="true") | {"m": "true"}
        return framed(Request.SEND_BATCH_MESSAGE, number, fields, body)

    return frame


def single(number: int) -> bytes:
    fields = send_fields(TOPIC, 1, UNIQ_KEY=f"{number:08}")
    return framed(Request.SEND_MESSAGE_V2, number, fields, b"one")


def framed(
    code: int, number: int, fields: dict[str, Any], body: bytes, kind: int = BINARY
) -> bytes:
    texts = {name: str(value) for name, value in fields.items()}
    return encode(RemotingCommand(code, number, 0, texts, body, None, "JAVA", 513, kind))[4:]


def json_batch(number: int) -> bytes:
    fields = send_fields(TOPIC, 2) | {"m": "true"}
    body = join_batch([(0, b"in words", b"UNIQ_KEY\x01%08d\x02" % number)] * 9)
    return framed(Request.SEND_BATCH_MESSAGE, number, fields, body, JSON)


USUAL = [batch(8, 40, queue_id=queue_id) for queue_id in range(4)]
OTHERS = [
    batch(9, 40),
    batch(8, 41, queue_id=1),
    batch(8, 40, topic="other"),
    batch(3, 40),
    batch(8, 40, "TAGS\x01a\x02", queue_id=2),
    batch(8, 40, "DELAY\x013\x02"),
    batch(8, 40, topic="bad topic!"),
    single,
    json_batch,
]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(USUAL * 3 + OTHERS), min_size=1, max_size=12))
def test_the_same_as_each_by_itself(made: list[Any]) -> None:
    frames = [frame(number) for number, frame in enumerate(made)]
    together, alone = Door(), Door()
    together.receive(frames)
    for frame in frames:
        alone.receive([frame])
    assert together.peer.answers == alone.peer.answers
    assert len(together.peer.answers) == len(frames)
    assert together.log == alone.log
    stats, other_stats = together.broker.core.stats, alone.broker.core.stats
    assert stats.put == other_stats.put
    assert together.broker.core.admission.grouped_count == 0


def test_those_of_one_form_are_placed_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    plain = Lane.place_alike

    def counted(lane: Lane, batches: Any, *others: Any) -> Any:
        counts.append(len(batches))
        return plain(lane, batches, *others)

    monkeypatch.setattr(Lane, "place_alike", counted)
    door = Door()
    door.receive([frame(0) for frame in USUAL])
    assert counts == [1, 1, 1, 1]  # their queues were not known yet
    made = [USUAL[number % 4](number) for number in range(6)]
    door.receive([*made, single(6), USUAL[0](7), USUAL[0](8), batch(9, 40)(9)])
    assert counts[4:] == [4, 2, 2, 1]


def test_each_is_told_why_it_is_refused() -> None:
    door = Door()
    door.receive([USUAL[0](0), USUAL[1](1)])
    end = door.broker.core.store.log.end
    door.broker.core.store.refuse(StoreReadOnly("the disk is gone"))
    door.receive([USUAL[0](2), USUAL[1](3), USUAL[2](4)])
    first, second, *refused = door.peer.answers
    assert first.code == second.code == 0
    assert len(refused) == 3
    assert all("the disk is gone" in str(answer.remark) for answer in refused)
    assert door.broker.core.store.log.end == end
