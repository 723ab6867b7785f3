"""Requests that are signed, for brokers with access control; and that no secret is ever shown."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from typing import Any

import pytest

from sluice import Producer as BlockingProducer
from sluice.aio import Admin, Producer, PullConsumer
from sluice.client.core.messages import Message
from sluice.client.core.settings import ProducerSettings
from sluice.client.core.signing import Credentials, make_credentials
from sluice.errors import ConfigError, NoPermission, SluiceError
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from tests.unit.client.admin_kit import sluice
from tests.unit.client.client_kit import SENDS, SENT, Answer, FakeCluster, fake_cluster

SECRET = "12345678-do-not-show"
KEYS: dict[str, Any] = {
    "access_key": "shop",
    "secret_key": SECRET,
    "security_token": "token-do-not-show",
}
FIELDS = {"a": "shop", "b": "orders", "e": "3", "i": "KEYS\x01é\x02WAIT\x01true\x02"}


# Made with AclClientRPCHook of RocketMQ 5.5.0's Java client.
@pytest.mark.parametrize(
    ("credentials", "fields", "body", "signature"),
    [
        (("rocketmq2", "12345678", ""), FIELDS, b"hello", "D8LJXYpNtf7mZDN0cwyTu2zpL+U="),
        (("user", "päss wörd", "tok"), FIELDS, b"", "5axiddEje8WWiD6DWJ2NHED6nXo="),
        (("k", "s", ""), {}, b"\x00\x01\xff", "LB38g/cpF083LnA5ogrZGlvRMxs="),
    ],
)
def test_signatures_are_javas(
    credentials: tuple[str, str, str], fields: dict[str, str], body: bytes, signature: str
) -> None:
    signed = dict(fields)
    Credentials(*credentials).sign(signed, body)
    assert signed.pop("Signature") == signature
    assert signed.pop("AccessKey") == credentials[0]
    assert signed.pop("SecurityToken", "") == credentials[2]
    assert signed == fields


def test_a_request_that_is_sent_again_is_signed_anew() -> None:
    fields = {"a": "x"}
    credentials = Credentials("k", "s")
    credentials.sign(fields, b"")
    first = dict(fields)
    credentials.sign(fields, b"")
    assert fields == first


def test_keys_go_together() -> None:
    assert make_credentials("", "") is None
    with pytest.raises(ConfigError, match="secret_key is missing"):
        Producer("h:1", access_key="shop")
    with pytest.raises(ConfigError, match="access_key is missing") as caught:
        Producer("h:1", secret_key=SECRET)
    assert SECRET not in str(caught.value)


def is_signed(command: RemotingCommand) -> bool:
    """By the rule, written once more."""
    fields = dict(command.ext)
    signature = fields.pop("Signature", "")
    assert fields["AccessKey"] == "shop"
    assert fields["SecurityToken"] == KEYS["security_token"]
    text = "".join(value for _, value in sorted(fields.items()))
    content = text.encode() + bytes(command.body)
    digest = hmac.new(SECRET.encode(), content, hashlib.sha1).digest()
    return base64.b64decode(signature) == digest


def strict(command: RemotingCommand) -> Answer:
    """A broker that takes nothing without a signature."""
    if "Signature" not in command.ext:
        return 16, {}, "no signature"
    return 0, SENT, None


async def send_in_every_way(cluster: FakeCluster) -> None:
    async with Producer(cluster.nameserver, **KEYS) as producer:
        await producer.send(Message("orders", "one", keys="é"))
        await producer.send_batch([Message("orders", "two"), Message("orders", "three")])
        await producer.send_oneway(Message("orders", "four"))
        await producer.send(Message("orders", b"five" * 2000))  # packed

    def blocking() -> None:
        with BlockingProducer(cluster.nameserver, **KEYS) as producer:
            for _ in range(3):
                producer.send(Message("orders", "six"))

    await asyncio.to_thread(blocking)


def test_every_request_of_a_producer_is_signed() -> None:
    async def work() -> None:
        async with fake_cluster(a=strict) as cluster:
            await send_in_every_way(cluster)
            asked = cluster.brokers["a"].asked
            assert sum(command.code in SENDS for command in asked) == 7
            assert [command for command in asked if not is_signed(command)] == []

    asyncio.run(work())


def test_what_a_consumer_and_an_administrator_ask_is_signed() -> None:
    async def work() -> None:
        async with fake_cluster(a=strict) as cluster:
            consumer = PullConsumer(cluster.nameserver, group="g", **KEYS)
            await consumer.start()
            await consumer.commit({MessageQueue("orders", "a", 0): 1})
            await consumer.close()
            async with Admin(cluster.nameserver, **KEYS) as admin:
                with pytest.raises(SluiceError):
                    await admin.topic_configs("orders")
            asked = cluster.brokers["a"].asked
            assert len(asked) >= 3
            assert [command for command in asked if not is_signed(command)] == []

    asyncio.run(work())


def test_the_command_line_has_its_keys_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with fake_cluster(a=strict) as cluster:
            arguments = ["admin", "topicStatus", "-t", "orders", "-n", cluster.nameserver]
            await asyncio.to_thread(sluice, *arguments)
            assert "Signature" not in cluster.brokers["a"].asked[-1].ext
            monkeypatch.setenv("SLUICE_CLIENT_ACCESS_KEY", "shop")
            monkeypatch.setenv("SLUICE_CLIENT_SECRET_KEY", SECRET)
            done = await asyncio.to_thread(sluice, *arguments)
            assert SECRET not in done.out + done.err
            fields = dict(cluster.brokers["a"].asked[-1].ext)
            signature = fields.pop("Signature")
            Credentials("shop", SECRET).sign(fields, b"")
            assert fields["Signature"] == signature
            monkeypatch.delenv("SLUICE_CLIENT_SECRET_KEY")
            done = await asyncio.to_thread(sluice, *arguments)
            assert (done.status, "secret_key is missing" in done.err) == (2, True)

    asyncio.run(work())


def test_without_keys_nothing_is_signed_and_the_error_says_what_to_do() -> None:
    async def work() -> None:
        async with fake_cluster(a=strict) as cluster:
            async with Producer(cluster.nameserver, tries_max=1) as producer:
                with pytest.raises(NoPermission, match="access_key and secret_key"):
                    await producer.send(Message("orders", "one"))
            assert not any("AccessKey" in command.ext for command in cluster.brokers["a"].asked)

    asyncio.run(work())


def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = ProducerSettings(nameservers=("h:1",), **KEYS)
    assert settings.credentials is not None
    shown = [repr(settings), repr(settings.credentials), str(settings.credentials)]

    def refuse(command: RemotingCommand) -> Answer:
        return 16, {}, "the signature is wrong"

    async def work() -> None:
        async with (
            fake_cluster(a=refuse) as cluster,
            Producer(cluster.nameserver, tries_max=2, send_ms=500, **KEYS) as producer,
        ):
            with pytest.raises(NoPermission) as caught:
                await producer.send(Message("orders", "one"))
            shown.append(f"{caught.value!r} {caught.value.__cause__!r}")
            shown.append(repr(vars(producer)))
            cluster.brokers["a"].cut_next = True
            with pytest.raises(SluiceError):
                await producer.send(Message("orders", "one"))

    asyncio.run(work())
    shown += [record.getMessage() for record in caplog.records]
    shown += [str(record.exc_text) for record in caplog.records]
    assert len(shown) > 5
    for text in shown:
        assert "do-not-show" not in text
