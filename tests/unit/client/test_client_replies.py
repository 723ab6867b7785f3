"""Replies to requests as other clients write them."""

from __future__ import annotations

import zlib

import pytest

from sluice import Message, Producer, ReceivedMessage
from sluice.client.aio import requests
from sluice.client.core.messages import COMPRESSED_ZLIB
from sluice.errors import ProtocolError
from sluice.protocol.client_frames import SEND_REPLY
from sluice.protocol.json_members import MessageQueue
from sluice.testing import LiveBroker


async def reply_packed(
    producer: requests.Producer, request: ReceivedMessage, body: bytes, sys_flag: int
) -> None:
    """As Java's client does with what has 4 KiB and more."""
    names = ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")
    extra = {name: request.properties[name] for name in names}
    topic = f"{request.properties['CLUSTER']}_REPLY_TOPIC"
    reply = Message(topic, body).with_extra(MSG_TYPE="reply", **extra)
    queue = MessageQueue(topic, request.broker_name, 0)
    await producer.send_as(reply, SEND_REPLY, queue, sys_flag)


@pytest.mark.parametrize("is_known", [True, False], ids=["zlib", "zstd"])
def test_a_packed_reply(sluice_broker: LiveBroker, is_known: bool) -> None:
    address, answer = sluice_broker.nameserver_address, b"a long answer " * 1000
    sys_flag = COMPRESSED_ZLIB if is_known else COMPRESSED_ZLIB & ~0x700 | 0x200

    with Producer(address, compress_bytes_min=0) as producer:

        def handle(message: ReceivedMessage) -> None:
            packed = zlib.compress(answer)
            producer._thread.run(reply_packed(producer._aio, message, packed, sys_flag))

        sluice_broker.consumer("price", handle)
        if is_known:
            assert producer.ask(Message("price", "a book"), timeout_seconds=30).body == answer
        else:
            with pytest.raises(ProtocolError, match=r"cannot be read.*ZSTD"):
                producer.ask(Message("price", "a book"), timeout_seconds=30)
