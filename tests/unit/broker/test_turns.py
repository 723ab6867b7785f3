"""When sends are written: with all others of a turn, and at once where there are no others."""

from __future__ import annotations

from typing import Any, cast

from sluice.broker.remoting_api import RemotingApi
from sluice.net import Connection
from sluice.protocol.remoting import BINARY, RemotingCommand, encode
from sluice.protocol.remoting_codes import RequestCode
from tests.unit.broker.broker_kit import send_fields
from tests.unit.broker.transaction_kit import TOPIC, Broker


class Peer:
    """Stands for a connection: keeps what it is sent."""

    def __init__(self) -> None:
        self.attributes: dict[str, object] = {}
        self.answers: list[bytes] = []

    def packed_peer(self) -> bytes:
        return b"\x7f\0\0\1\0\0\x30\x39"

    def send(self, *parts: Any) -> None:
        self.answers.append(b"".join(parts))


def send(api: RemotingApi, peer: Peer, queue_id: int = 0) -> None:
    fields = {k: str(v) for k, v in send_fields(TOPIC, queue_id, UNIQ_KEY="U1").items()}
    command = RemotingCommand(
        RequestCode.SEND_MESSAGE_V2, 1, 0, fields, b"body", None, "JAVA", 513, BINARY
    )
    api.received(cast(Connection, peer), [encode(command)[4:]])


def test_who_sends_alone_is_answered_before_the_turn_ends() -> None:
    broker = Broker()
    api, peer = RemotingApi(broker.core), Peer()
    send(api, peer)  # nobody knows yet whether it is alone
    broker.settle()
    assert len(peer.answers) == 1
    send(api, peer)
    assert len(peer.answers) == 2
    assert broker.core.store.max_offset(TOPIC, 0) == 2


def test_sends_of_several_are_written_together() -> None:
    broker = Broker()
    api, one, other = RemotingApi(broker.core), Peer(), Peer()
    for _ in range(2):
        before = broker.core.store.log.written
        send(api, one)
        send(api, other)
        assert broker.core.store.log.written == before
        broker.settle()
        assert broker.core.store.log.written > before
    assert (len(one.answers), len(other.answers)) == (2, 2)


def test_who_comes_alone_into_a_turn_that_others_began_waits_for_its_end() -> None:
    broker = Broker()
    api, peer = RemotingApi(broker.core), Peer()
    send(api, peer)
    broker.settle()
    broker.core.append(broker.message(topic=TOPIC, TRAN_MSG=""))
    send(api, peer)
    assert len(peer.answers) == 1
    broker.settle()
    assert len(peer.answers) == 2
