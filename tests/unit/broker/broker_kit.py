"""This module runs a whole broker on a simulated disk and speaks to it over loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import orjson

from sluice.broker.server import Broker
from sluice.clock import wall_ms
from sluice.config import BrokerConfig, StoreConfig
from sluice.link import RemotingLink
from sluice.protocol import lenient_json
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.storage.memory_files import MemoryFiles

FLAG_SUSPEND = 2
FLAG_SUBSCRIPTION = 4
BROKER = "broker-a"
CLUSTER = "DefaultCluster"


def broker_config(**changes: Any) -> BrokerConfig:
    """Small files, a free port, no nameserver."""
    store = StoreConfig(
        directory="/store",
        segment_bytes=1 << 20,
        queue_file_units=1000,
        key_index_slots=64,
        key_index_entries=256,
        flush="async",
        disk_clean_ratio=1.0,
        disk_force_ratio=1.0,
        disk_refuse_ratio=1.0,
        message_bytes_max=64 * 1024,
    )
    return BrokerConfig(**{"store": store, "listen_port": 0, "broker_name": BROKER, **changes})


class SlowDisk(MemoryFiles):
    """A disk whose syncs wait until the gate is opened, never on the owner's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Nothing becomes durable inside of this, unless the gate is opened before its end."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def _call(self, operation: str, path: str) -> None:
        if operation == "sync" and threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
        super()._call(operation, path)


class Rig:
    """A running broker and one connection to it."""

    def __init__(self, broker: Broker, link: RemotingLink) -> None:
        self.broker = broker
        self.link = link
        self._others: list[RemotingLink] = []

    async def connect(
        self, on_request: Callable[[RemotingLink, RemotingCommand], None] | None = None
    ) -> RemotingLink:
        """Another connection; it is closed with the rig."""
        link = await RemotingLink.open(self.broker.address, on_request=on_request)
        self._others.append(link)
        return link

    async def close(self) -> None:
        for link in (self.link, *self._others):
            await link.close()

    # ------------------------------------------------------------------------------------- requests

    async def ask(
        self,
        code: int,
        ext: Mapping[str, object] | None = None,
        body: bytes = b"",
        link: RemotingLink | None = None,
    ) -> RemotingCommand:
        fields = {name: str(value) for name, value in (ext or {}).items()}
        return await (link or self.link).request(code, fields, body, timeout_seconds=30)

    async def done(
        self, code: int, ext: Mapping[str, object] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Ask for something that has to succeed."""
        answer = await self.ask(code, ext, body)
        assert answer.code == Response.SUCCESS, answer.remark
        return answer

    async def json(
        self, code: int, ext: Mapping[str, object] | None = None, body: bytes = b""
    ) -> Any:
        """The body of an answer that has to succeed."""
        return lenient_json.loads(bytes((await self.done(code, ext, body)).body))

    async def refused(
        self, code: int, ext: Mapping[str, object] | None = None, body: bytes = b""
    ) -> tuple[int, str]:
        """Code and remark of an answer that must not succeed; the connection stays."""
        answer = await self.ask(code, ext, body)
        assert answer.code != Response.SUCCESS
        assert self.link.is_open
        return answer.code, answer.remark or ""

    # ---------------------------------------------------------------------------------- short forms

    async def make_topic(self, name: str, queues: int = 2, **changes: object) -> None:
        await self.done(Request.UPDATE_AND_CREATE_TOPIC, topic_fields(name, queues, **changes))

    async def make_group(self, name: str, **members: object) -> None:
        body = orjson.dumps({"groupName": name, **members})
        await self.done(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)

    async def send(
        self, topic: str, body: bytes = b"hello", queue_id: int = 0, **properties: str
    ) -> dict[str, str]:
        """Send one message; the answer's fields."""
        answer = await self.done(
            Request.SEND_MESSAGE_V2, send_fields(topic, queue_id, **properties), body
        )
        return answer.ext

    async def refused_send(self, topic: str, **properties: str) -> tuple[int, str]:
        """Code and remark of a send that must not succeed."""
        return await self.refused(
            Request.SEND_MESSAGE_V2, send_fields(topic, 0, **properties), b"x"
        )

    async def refused_topic(self, name: str, **changes: object) -> tuple[int, str]:
        """Code and remark of a topic that must not be made."""
        fields = topic_fields(name, **changes)  # type: ignore[arg-type]
        return await self.refused(Request.UPDATE_AND_CREATE_TOPIC, fields)

    async def pull(
        self,
        topic: str,
        offset: int,
        queue_id: int = 0,
        *,
        group: str = "readers",
        flags: int = FLAG_SUBSCRIPTION,
        link: RemotingLink | None = None,
        **changes: object,
    ) -> RemotingCommand:
        fields = {**pull_fields(topic, queue_id, offset, group, flags), **changes}
        return await self.ask(Request.PULL_MESSAGE, fields, link=link)

    async def commit(
        self, group: str, topic: str, offset: int, queue_id: int = 0
    ) -> RemotingCommand:
        fields = offset_fields(group, topic, queue_id)
        return await self.ask(Request.UPDATE_CONSUMER_OFFSET, {**fields, "commitOffset": offset})

    async def committed(self, group: str, topic: str, queue_id: int = 0) -> int:
        answer = await self.done(
            Request.QUERY_CONSUMER_OFFSET, offset_fields(group, topic, queue_id)
        )
        return int(answer.ext["offset"])

    async def join(
        self,
        group: str,
        wanted: Mapping[str, str],
        *,
        client_id: str = "client-1",
        link: RemotingLink | None = None,
        producer_groups: tuple[str, ...] = (),
    ) -> None:
        """A heartbeat of a consumer that subscribes to topics with tags."""
        subscriptions = tuple(
            bodies.Subscription(topic, expression, 1) for topic, expression in wanted.items()
        )
        consumer = bodies.ConsumerData(
            group, "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET", subscriptions
        )
        heartbeat = bodies.Heartbeat(client_id, producer_groups, (consumer,))
        answer = await self.ask(
            Request.HEART_BEAT, body=bodies.write_heartbeat(heartbeat), link=link
        )
        assert answer.code == Response.SUCCESS, answer.remark


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Rig]:
    """A broker that is stopped in order at the end."""
    files = changes.pop("files", None)
    pinned = changes.pop("pinned", ())
    now_ms = changes.pop("now_ms", wall_ms)
    broker = Broker(
        broker_config(**changes),
        files=files if files is not None else MemoryFiles(),
        now_ms=now_ms,
        pinned=pinned,
    )
    await broker.start()
    try:
        rig = Rig(broker, await RemotingLink.open(broker.address))
        try:
            yield rig
        finally:
            await rig.close()
    finally:
        await broker.stop()


def topic_fields(name: str, queues: int = 2, **changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "topic": name,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": "false",
    }
    return {**fields, **changes}


def send_fields(topic: str, queue_id: int = 0, **properties: str) -> dict[str, object]:
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    return {
        "a": "senders",
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": queue_id,
        "f": 0,
        "g": time.time_ns() // 1_000_000,
        "h": 0,
        "i": text,
    }


def pull_fields(
    topic: str, queue_id: int, offset: int, group: str, flags: int
) -> dict[str, object]:
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": flags,
        "commitOffset": 0,
        "suspendTimeoutMillis": 15_000,
        "subscription": "*",
        "subVersion": 0,
    }


def offset_fields(group: str, topic: str, queue_id: int) -> dict[str, object]:
    return {"consumerGroup": group, "topic": topic, "queueId": queue_id}


def queue_table(value: Any, name: str = "offsetTable") -> dict[int, Any]:
    """A map of queues of one topic, by queue id: its keys are the texts of queue objects."""
    return {int(orjson.loads(key)["queueId"]): row for key, row in value[name].items()}


async def settle() -> None:
    """Let everything happen that is due now."""
    for _ in range(3):
        await asyncio.sleep(0)
