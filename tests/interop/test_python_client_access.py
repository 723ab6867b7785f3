"""Sluice's Python client and a broker of Apache's that wants to know who asks (ACL 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers import Jars, RocketMQ
from sluice import Admin, Message, Producer, PullConsumer, PushConsumer, ReceivedMessage
from sluice.errors import NoPermission, SluiceError
from tests.interop.watching import wait_until
from tests.unit.client.admin_kit import sluice

_AUTH = "org.apache.rocketmq.auth"
CONFIG = {
    "authenticationEnabled": "true",
    "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": (
        f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider"
    ),
    "initAuthenticationUser": '{"username":"sluice","password":"12345678"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"sluice","secretKey":"12345678"}',
    "authorizationEnabled": "true",
    "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": (
        f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider"
    ),
    # The peer's own start changes a setting of its broker, without a signature.
    "authenticationWhitelist": "25",
    "authorizationWhitelist": "25",
    "mappedFileSizeCommitLog": 64 << 20,
}
KEYS: dict[str, Any] = {"access_key": "sluice", "secret_key": "12345678"}

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(rocketmq_jars: Jars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQ]:
    with RocketMQ(tmp_path_factory.mktemp("acl"), config=CONFIG, jars=rocketmq_jars) as peer:
        yield peer


def test_who_has_the_keys_may_do_everything(server: RocketMQ) -> None:
    address = server.nameserver_address
    with Admin(address, **KEYS) as admin:
        admin.create_topic("Secured", queues=4)
        admin.create_group("secured")
        wait_until(lambda: "Secured" in admin.topics(), lambda: str(admin.topics()))
        with Producer(address, group="secured-send", **KEYS) as producer:
            sent = [producer.send(Message("Secured", f"m{i}", keys="näme")) for i in range(20)]
            sent += producer.send_batch([Message("Secured", f"b{i}") for i in range(5)])
            futures = [producer.send_async(Message("Secured", f"a{i}")) for i in range(50)]
            sent += [future.result() for future in futures]
        with Producer(address, group="secured-send", batching=True, **KEYS) as batcher:
            futures = [batcher.send_async(Message("Secured", f"c{i}")) for i in range(50)]
            sent += [future.result() for future in futures]
        assert len({result.offset_id for result in sent}) == 125
        bodies: list[bytes] = []

        def handle(message: ReceivedMessage) -> None:
            bodies.append(message.body)

        options = {"group": "secured", "topics": "Secured", "start_at": "first", **KEYS}
        options["commit_ms"] = 200
        with PushConsumer(address, handler=handle, **options):
            wait_until(lambda: len(set(bodies)) == 125, lambda: f"{len(bodies)} of 125")
            wait_until(
                lambda: admin.lag("secured", "Secured") == 0,
                lambda: str(admin.consume_stats("secured", "Secured")),
            )
        assert admin.message_by_id("Secured", sent[0].message_id).body == b"m0"


@pytest.mark.parametrize(
    "keys",
    [{}, {"access_key": "sluice", "secret_key": "wrong"}, {"access_key": "x", "secret_key": "y"}],
)
def test_who_has_not_is_refused(server: RocketMQ, keys: dict[str, Any]) -> None:
    with (
        Producer(server.nameserver_address, **keys) as producer,
        pytest.raises(NoPermission, match="access_key and secret_key"),
    ):
        producer.send(Message("TBW102", "x"))
    with pytest.raises(SluiceError), Admin(server.nameserver_address, **keys) as admin:
        admin.create_topic("Refused")
    with PullConsumer(server.nameserver_address, group="refused", **keys) as consumer:
        queue = consumer.queues("TBW102")[0]
        with pytest.raises(SluiceError):
            consumer.commit({queue: 1})


def test_record_and_replay_have_their_keys_from_the_environment(
    server: RocketMQ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.nameserver_address
    monkeypatch.chdir(tmp_path)
    with Admin(address, **KEYS) as admin:
        admin.create_topic("Recorded", queues=2)
        wait_until(lambda: "Recorded" in admin.topics(), lambda: str(admin.topics()))
    with Producer(address, group="recorded-send", **KEYS) as producer:
        for number in range(20):
            producer.send(Message("Recorded", f"m{number}"))
    record = ("record", "Recorded", "--to", "kept", "-n", address)
    assert sluice(*record).status == 2, "nobody who has no keys"
    monkeypatch.setenv("SLUICE_CLIENT_ACCESS_KEY", KEYS["access_key"])
    monkeypatch.setenv("SLUICE_CLIENT_SECRET_KEY", KEYS["secret_key"])
    done = sluice(*record)
    assert done.status == 0, done
    assert done.out.startswith("recorded 20 messages")
    done = sluice("replay", "kept", "--speed", "max", "--no-report", "-n", address)
    assert done.status == 0, done
    assert done.out.startswith("sent 20 of 20 messages")
