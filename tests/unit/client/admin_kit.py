"""This module runs a nameserver and a broker on a thread, so that commands can be run as a person
runs them, and consumers that answer what administrators ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import orjson
import uvloop

from sluice import cli
from sluice.broker.server import Broker
from sluice.config import NameserverConfig
from sluice.link import RemotingLink
from sluice.nameserver.server import Nameserver
from sluice.protocol import remoting_bodies
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.json_members import MessageQueue, queue_keys
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.memory_files import MemoryFiles
from tests.unit.broker.broker_kit import BROKER, CLUSTER, broker_config, send_fields

WAIT_SECONDS = 60.0
T = TypeVar("T")


class Done(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


def sluice(*arguments: str) -> Done:
    """Run the `sluice` command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(list(arguments))
        except SystemExit as stopped:  # --help
            status = int(stopped.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


class Site:
    """A small cluster; `admin` runs a command against it."""

    def __init__(self, nameserver: Mapping[str, Any] | None = None, **changes: Any) -> None:
        self._changes = changes
        self._nameserver_changes = nameserver or {}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._links: list[RemotingLink] = []
        self.nameserver: Nameserver
        self.broker: Broker

    def start(self) -> None:
        self._thread.start()
        self.call(self._start())

    async def _start(self) -> None:
        nameserver = NameserverConfig(listen_port=0, **self._nameserver_changes)
        self.nameserver = Nameserver(nameserver, files=MemoryFiles())
        await self.nameserver.start()
        addresses = (self.nameserver.address,)
        config = broker_config(nameserver_addresses=addresses, **self._changes)
        self.broker = Broker(config, files=MemoryFiles())
        await self.broker.start()
        await self.broker.registrar.registered()

    def stop(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    async def _stop(self) -> None:
        for link in self._links:
            await link.close()
        await self.broker.stop()
        await self.nameserver.stop()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the thread of the cluster."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    # ------------------------------------------------------------------------------------- commands

    def admin(self, *arguments: str) -> Done:
        return sluice("admin", *arguments, "-n", self.nameserver.address)

    def ok(self, *arguments: str) -> str:
        """The output of a command that has to succeed."""
        done = self.admin(*arguments)
        assert done.status == 0, done
        assert done.err == ""
        return done.out

    def lines(self, *arguments: str) -> list[str]:
        """The same, with one blank between words."""
        return [" ".join(line.split()) for line in self.ok(*arguments).splitlines()]

    def json(self, *arguments: str) -> Any:
        """What a command says to scripts: exactly one document."""
        return json.loads(self.ok(*arguments, "--json"))

    def refused(self, *arguments: str) -> str:
        """The one line of a command that the cluster says no to."""
        return one_line(self.admin(*arguments), 1)

    def wrong(self, *arguments: str) -> str:
        """The one line of a command that could not be done."""
        return one_line(self.admin(*arguments), 2)

    def send(self, topic: str, body: str, queue_id: int = 0, *more: str) -> Any:
        place = ("-b", BROKER, "-i", str(queue_id))
        return self.json("sendMessage", "-t", topic, "-p", body, *place, *more)

    def begin(self, topic: str, group: str, unique_key: str) -> dict[str, str]:
        """A producer begins a transaction; the fields of the answer."""

        async def ask() -> dict[str, str]:
            link = await RemotingLink.open(self.broker.address)
            properties = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": unique_key}
            fields = {**send_fields(topic, 0, **properties), "f": 4}
            ext = {name: str(value) for name, value in fields.items()}
            answer = await link.request(Request.SEND_MESSAGE_V2, ext, b"body")
            assert answer.code == 0, answer.remark
            await link.close()
            return answer.ext

        return self.call(ask())

    # ------------------------------------------------------------------------------------ consumers

    def join(
        self,
        group: str,
        wanted: Mapping[str, str],
        *,
        client_id: str = "10.0.0.1@1",
        queues: Mapping[MessageQueue, Mapping[str, Any]] | None = None,
        properties: Mapping[str, Any] | None = None,
        answers: bool = True,
        consume_type: str = "CONSUME_PASSIVELY",
        model: str = "CLUSTERING",
        producer_groups: tuple[str, ...] = (),
    ) -> RemotingLink:
        """Connect a consumer that says what it does when it is asked."""
        subscriptions = tuple(
            bodies.Subscription(topic, expression, 1, _tags(expression))
            for topic, expression in wanted.items()
        )
        info = {
            "jstack": "main thread",
            "mqPopTable": {},
            "mqTable": queue_keys((queue, dict(row)) for queue, row in (queues or {}).items()),
            "properties": {
                "PROP_CONSUME_TYPE": consume_type,
                "PROP_CONSUMEORDERLY": False,
                **(properties or {}),
            },
            "statusTable": {topic: {"pullTPS": 1.5, "consumeFailedMsgs": 0} for topic in wanted},
            "subscriptionSet": [one.members() for one in subscriptions],
            "userConsumerInfo": {"colour": "blue"},
        }

        def asked(link: RemotingLink, request: RemotingCommand) -> None:
            if request.code == Request.GET_CONSUMER_RUNNING_INFO and answers:
                link.answer(request, 0, body=orjson.dumps(info))
            elif request.code == Request.GET_CONSUMER_RUNNING_INFO:
                link.answer(request, 1, remark="does not say")
            elif request.code == Request.CONSUME_MESSAGE_DIRECTLY:
                body = {"consumeResult": "CR_SUCCESS", "remark": "fine", "spentTimeMills": 7}
                link.answer(request, 0, body=orjson.dumps(body))

        async def connect() -> RemotingLink:
            link = await RemotingLink.open(self.broker.address, on_request=asked)
            consumer = bodies.ConsumerData(
                group, consume_type, model, "CONSUME_FROM_FIRST_OFFSET", subscriptions
            )
            heartbeat = bodies.Heartbeat(client_id, producer_groups, (consumer,))
            answer = await link.request(
                Request.HEART_BEAT, {}, bodies.write_heartbeat(heartbeat), timeout_seconds=30
            )
            assert answer.code == 0, answer.remark
            # Its retry topic is known to the nameserver when this returns.
            await self.broker.registrar.registered()
            return link

        link = self.call(connect())
        self._links.append(link)
        return link

    def give_up(self, group: str, position: int) -> None:
        """A consumer of the group makes a dead letter of the message at a position of the log."""

        async def send_back() -> None:
            link = await RemotingLink.open(self.broker.address)
            fields = {"group": group, "offset": str(position), "delayLevel": "-1"}
            answer = await link.request(Request.CONSUMER_SEND_MSG_BACK, fields)
            assert answer.code == 0, answer.remark
            await link.close()
            await self.broker.registrar.registered()

        self.call(send_back())

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """A consumer's progress."""

        async def commit() -> None:
            self.broker.core.offsets.commit(group, topic, queue_id, offset)

        self.call(commit())

    def register_elsewhere(self, name: str, cluster: str, address: str) -> None:
        """Tell the nameserver of a broker that is not there."""

        async def register() -> None:
            link = await RemotingLink.open(self.nameserver.address)
            ext = {
                "brokerName": name,
                "brokerAddr": address,
                "clusterName": cluster,
                "haServerAddr": address,
                "brokerId": "0",
            }
            names = ("ghostly", "haunted")
            topics = {name: remoting_bodies.TopicConfig(name, 1, 1) for name in names}
            body = remoting_bodies.write_registration(remoting_bodies.Registration(topics))
            answer = await link.request(Request.REGISTER_BROKER, ext, body)
            assert answer.code == 0, answer.remark
            self._links.append(link)

        self.call(register())


def _tags(expression: str) -> tuple[str, ...]:
    return () if expression == "*" else tuple(part.strip() for part in expression.split("||"))


def one_line(done: Done, status: int) -> str:
    assert done.status == status, done
    assert done.out == ""
    assert done.err.startswith("sluice: ")
    assert done.err.count("\n") == 1
    return done.err.removeprefix("sluice: ").rstrip("\n")


@contextmanager
def cluster(**changes: Any) -> Iterator[Site]:
    """A cluster for a test, or for a file of tests."""
    site = Site(**changes)
    site.start()
    try:
        yield site
    finally:
        site.stop()


__all__ = ["BROKER", "CLUSTER", "Done", "Site", "cluster", "one_line", "sluice"]
