"""This module finds brokers, sends single messages and reads queues: what the command line needs.

No retries, no rebalance and no state of a group: a tool asks once and says what it got. It speaks
to any RocketMQ broker. Errors say what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from sluice.client.core.signing import Credentials, make_credentials
from sluice.errors import (
    BrokerRefused,
    ClientClosed,
    NoNameserver,
    NotFound,
    SluiceError,
    TopicMissing,
)
from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import Route, read_route
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.tls import client_tls

Refused = BrokerRefused  # the other side answered with an error; its own words
TOOLS_GROUP: Final = "TOOLS_CONSUMER"
PRODUCER_GROUP: Final = "SLUICE_TOOLS"
DEFAULT_NAMESERVER: Final = "127.0.0.1:9876"
_AUTO_CREATE_TOPIC: Final = "TBW102"
_NO: Final = ("0", "no", "false", "off")
_FLAG_SUSPEND: Final = 2
_FLAG_SUBSCRIPTION: Final = 4
_NOTHING_NEW: Final = (
    Response.PULL_NOT_FOUND,
    Response.PULL_RETRY_IMMEDIATELY,
    Response.PULL_OFFSET_MOVED,
)


class QueueAt(NamedTuple):
    """A queue and the broker that leads it."""

    address: str
    broker_name: str
    queue_id: int


class SendResult(NamedTuple):
    """Where a message went."""

    message_id: str
    broker_name: str
    queue_id: int
    queue_offset: int


def nameserver_address(given: str | None) -> str:
    """The nameserver to ask: as given, from NAMESRV_ADDR, or the local one."""
    return given or os.environ.get("NAMESRV_ADDR", "") or DEFAULT_NAMESERVER


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `tls_of` reads."""
    group = parser.add_argument_group("TLS", "Any of these means TLS; so do SLUICE_CLIENT_TLS* .")
    group.add_argument("--tls", action="store_true", help="speak TLS to nameserver and brokers")
    group.add_argument("--tls-ca", metavar="FILE", help="certificates (PEM) that sign theirs")
    group.add_argument(
        "--tls-any-name", action="store_true", help="their certificates need not name the address"
    )
    group.add_argument("--tls-certificate", metavar="FILE", help="certificate (PEM) to show them")
    group.add_argument("--tls-key", metavar="FILE", help="its key. Default: in the same file.")


def tls_of(arguments: argparse.Namespace | None = None) -> ssl.SSLContext | None:
    """TLS as flags or, where there is none, SLUICE_CLIENT_TLS* variables want it; None: plain."""

    def wanted(name: str) -> str:
        given = getattr(arguments, name, None)
        return str(given or os.environ.get(f"SLUICE_CLIENT_{name.upper()}", ""))

    names = ("tls", "tls_ca", "tls_any_name", "tls_certificate", "tls_key")
    values = {name: "" if wanted(name) in _NO else wanted(name) for name in names}
    if not any(values.values()):
        return None
    return client_tls(
        values["tls_ca"],
        check_name=not values["tls_any_name"],
        certificate_file=values["tls_certificate"],
        key_file=values["tls_key"],
    )


def credentials_of() -> Credentials | None:
    """Who the command line is to brokers with access control; no secret stands in a command."""
    environ = os.environ
    return make_credentials(
        environ.get("SLUICE_CLIENT_ACCESS_KEY", ""), environ.get("SLUICE_CLIENT_SECRET_KEY", "")
    )


class SimpleClient:
    """Connections to a nameserver and to the brokers it names."""

    def __init__(
        self,
        nameservers: str,
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`tls`: as flags want it; without it, as the environment does. So with `credentials`."""
        self._tls = tls if tls is not None else tls_of()
        self._credentials = credentials if credentials is not None else credentials_of()
        self._nameservers = [part.strip() for part in nameservers.split(";") if part.strip()]
        self._links: dict[str, RemotingLink] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            await link.close()

    async def ask(
        self,
        address: str,
        code: int,
        ext: Mapping[str, str],
        body: bytes = b"",
        timeout_seconds: float = 5.0,
    ) -> RemotingCommand:
        """One request to one address."""
        link = self._links.get(address)
        if link is None or not link.is_open:
            link = await self._open(address)
        return await link.request(code, ext, body, timeout_seconds)

    async def _open(self, address: str) -> RemotingLink:
        """A connection, one for all who want it at the same time: nobody would close a second."""
        async with self._opening.setdefault(address, asyncio.Lock()):
            link = self._links.get(address)
            if link is None or not link.is_open:
                sign = self._credentials.sign if self._credentials is not None else None
                link = await RemotingLink.open(address, tls=self._tls, sign=sign)
                self._links[address] = link
        return link

    async def ask_nameserver(
        self, code: int, ext: Mapping[str, str], body: bytes = b""
    ) -> RemotingCommand:
        """One request to the first nameserver that answers."""
        failure: SluiceError | None = None
        for address in self._nameservers:
            try:
                return await self.ask(address, code, ext, body)
            except ClientClosed:
                raise
            except SluiceError as error:
                failure = error
        raise NoNameserver(
            f"no nameserver answers ({failure}); start one with `sluice serve`, or name it with "
            "-n host:port or NAMESRV_ADDR"
        )

    async def route(self, topic: str) -> Route:
        """Where a topic is; raises TopicMissing."""
        answer = await self.ask_nameserver(
            Request.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, "acceptStandardJsonOnly": "true"}
        )
        if answer.code == Response.TOPIC_NOT_EXIST:
            raise TopicMissing(f"topic {topic} is not known; a first `sluice send` makes it")
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"the route of {topic}")
        return read_route(answer.body)

    async def queues(self, topic: str, *, writing: bool) -> list[QueueAt]:
        """The queues of a topic that can be read or written now."""
        route = await self.route(topic)
        masters = {broker.name: broker.addresses.get(0) for broker in route.brokers}
        wanted = 2 if writing else 4
        result: list[QueueAt] = []
        for queue in route.queues:
            address = masters.get(queue.broker_name)
            if address is None or not queue.perm & wanted:
                continue
            count = queue.write_queue_count if writing else queue.read_queue_count
            result.extend(QueueAt(address, queue.broker_name, number) for number in range(count))
        if not result:
            raise NotFound(
                f"topic {topic} has no queue that can be {'written' if writing else 'read'}"
            )
        return result

    async def send(
        self, topic: str, queue: QueueAt, body: bytes, properties: dict[str, str]
    ) -> SendResult:
        """Send one message and wait for the answer."""
        ext = {
            "a": PRODUCER_GROUP,
            "b": topic,
            "c": _AUTO_CREATE_TOPIC,
            "d": "4",
            "e": str(queue.queue_id),
            "f": "0",
            "g": str(time.time_ns() // 1_000_000),
            "h": "0",
            "i": records.format_properties(properties).decode(),
            "j": "0",
            "k": "false",
            "m": "false",
        }
        answer = await self.ask(queue.address, Request.SEND_MESSAGE_V2, ext, body)
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"sending to {topic}")
        return SendResult(
            answer.ext["msgId"],
            queue.broker_name,
            int(answer.ext["queueId"]),
            int(answer.ext["queueOffset"]),
        )

    async def send_queues(self, topic: str) -> list[QueueAt]:
        """Where to send to: the topic's queues, or those of a topic that is made by sending."""
        try:
            return await self.queues(topic, writing=True)
        except TopicMissing:
            pass
        try:
            queues = await self.queues(_AUTO_CREATE_TOPIC, writing=True)
        except TopicMissing:
            raise TopicMissing(
                f"topic {topic} is not known, and no broker makes it (auto_create_topics is off); "
                "make it with `sluice admin updateTopic`"
            ) from None
        return [queue for queue in queues if queue.queue_id < 4]

    async def offset(self, topic: str, queue: QueueAt, code: int) -> int:
        """The lowest or highest offset of a queue (GET_MIN_OFFSET, GET_MAX_OFFSET)."""
        answer = await self.ask(
            queue.address, code, {"topic": topic, "queueId": str(queue.queue_id)}
        )
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"the offsets of {topic}")
        return int(answer.ext["offset"])

    async def pull(
        self, topic: str, queue: QueueAt, offset: int, *, expression: str, wait_ms: int
    ) -> tuple[list[records.Entry], int]:
        """Messages from an offset on, and where to go on; waits where there is none."""
        ext = {
            "consumerGroup": TOOLS_GROUP,
            "topic": topic,
            "queueId": str(queue.queue_id),
            "queueOffset": str(offset),
            "maxMsgNums": "32",
            "sysFlag": str(_FLAG_SUBSCRIPTION | (_FLAG_SUSPEND if wait_ms else 0)),
            "commitOffset": "0",
            "suspendTimeoutMillis": str(wait_ms),
            "subscription": expression,
            "subVersion": "0",
            "expressionType": "TAG",
        }
        answer = await self.ask(
            queue.address, Request.PULL_MESSAGE, ext, timeout_seconds=wait_ms / 1000 + 10
        )
        if answer.code in _NOTHING_NEW:
            return [], int(answer.ext["nextBeginOffset"])
        if answer.code != Response.SUCCESS:
            raise Refused(answer.code, answer.remark, f"reading {topic}")
        entries = []
        at = 0
        while at < len(answer.body):
            entry = records.decode(answer.body, at)
            entries.append(entry)
            at += entry.size
        return entries, int(answer.ext["nextBeginOffset"])
