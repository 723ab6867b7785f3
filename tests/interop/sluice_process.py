"""This module runs Sluice's commands as processes of their own, to be used, killed, started again.

Ports are chosen once, so that what was stopped comes back where clients expect it. What a process
prints stays in its directory, one file for each start.
"""

from __future__ import annotations

import abc
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from peers.process import PeerProcess, free_ports
from peers.rocketmq import BROKER, CLUSTER
from sluice.link import RemotingLink
from sluice.protocol.remoting import RemotingCommand

START_TIMEOUT_S = 180.0
ASK_TIMEOUT_S = 60.0
_UPDATE_TOPIC = 17
_GET_ROUTE = 105
_REPOSITORY = Path(__file__).parents[2]
_PYTHON_PATH = f"{_REPOSITORY / 'src'}{os.pathsep}{_REPOSITORY}"


class _Process(abc.ABC):
    """One `sluice` command on loopback; as a context manager it is started and stopped."""

    name: str
    ready: str  # what it prints when it serves

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: PeerProcess | None = None
        self._starts = 0
        directory.mkdir(parents=True, exist_ok=True)

    @abc.abstractmethod
    def _words(self) -> list[str]:
        """The words after `sluice`."""

    def start(self) -> None:
        """Start it on what is in its directory, and wait until it serves."""
        self._starts += 1
        self._process = PeerProcess(
            f"sluice {self.name}",
            [sys.executable, "-m", "sluice", *self._words()],
            log=self.directory / f"{self.name}.{self._starts}.log",
            environment={"PYTHONPATH": _PYTHON_PATH},
        )
        self._process.wait_ready(self.ready, timeout_s=START_TIMEOUT_S)

    def kill(self) -> None:
        """As kill -9 does: nothing is flushed, nothing is said."""
        assert self._process is not None, "started before it is killed"
        process, self._process = self._process, None
        process.kill()

    def stop(self) -> None:
        """As SIGTERM does; a process that has ended by itself is an error."""
        assert self._process is not None, "started before it is stopped"
        process, self._process = self._process, None
        assert process.running, process.output()[-2_000:]
        process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        if error is None:
            self.stop()
        else:
            self.kill()


class SluiceProcess(_Process):
    """`sluice serve`: a nameserver and a broker in one process."""

    name = "serve"
    ready = "try it:"

    def __init__(self, directory: Path, *flags: str) -> None:
        super().__init__(directory)
        self._flags = flags
        self.nameserver_port, self.broker_port = free_ports(2)

    @property
    def store_directory(self) -> Path:
        return self.directory / "store"

    @property
    def nameserver_address(self) -> str:
        return f"127.0.0.1:{self.nameserver_port}"

    @property
    def broker_address(self) -> str:
        return f"127.0.0.1:{self.broker_port}"

    def _words(self) -> list[str]:
        return [
            *("serve", "--nameserver-port", str(self.nameserver_port)),
            *_broker_flags(self.store_directory, self.broker_port),
            *self._flags,
        ]


class SluiceNameserver(_Process):
    """`sluice nameserver`."""

    name = "nameserver"
    ready = "nameserver listens on"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.address = f"127.0.0.1:{free_ports(1)[0]}"

    def _words(self) -> list[str]:
        port = self.address.rpartition(":")[2]
        return ["nameserver", "--listen-port", port, "--directory", str(self.directory / "kv")]


class SluiceBroker(_Process):
    """`sluice broker`, which registers with nameservers elsewhere."""

    name = "broker"
    ready = "broker      "

    def __init__(self, directory: Path, nameservers: Sequence[str], *flags: str) -> None:
        super().__init__(directory)
        self._flags = flags
        self._nameservers = nameservers
        self._port = free_ports(1)[0]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _words(self) -> list[str]:
        return [
            *("broker", "--nameserver-addresses", ";".join(self._nameservers)),
            *_broker_flags(self.directory / "store", self._port),
            *self._flags,
        ]


def _broker_flags(store: Path, port: int) -> list[str]:
    return [
        *("--directory", str(store), "--listen-port", str(port)),
        *("--cluster-name", CLUSTER, "--broker-name", BROKER),
    ]


class Question(NamedTuple):
    """A request of RocketMQ's protocol."""

    code: int
    ext: dict[str, str]
    body: bytes = b""


def ask(address: str, *questions: Question) -> list[RemotingCommand]:
    """The answers of a broker or a nameserver."""

    async def work() -> list[RemotingCommand]:
        link = await RemotingLink.open(address)
        answers = [
            await link.request(*question, timeout_seconds=ASK_TIMEOUT_S) for question in questions
        ]
        await link.close()
        return answers

    return asyncio.run(work())


def done(address: str, question: Question) -> dict[str, str]:
    """The fields of an answer to a request that has to succeed."""
    (answer,) = ask(address, question)
    assert answer.code == 0, answer.remark
    return dict(answer.ext)


def make_topic(broker_address: str, topic: str, queues: int) -> None:
    """Make a topic, as mqadmin does it; the nameservers know of it when this returns."""
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": str(queues),
        "writeQueueNums": str(queues),
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    done(broker_address, Question(_UPDATE_TOPIC, fields))


def has_route(nameserver_address: str, topic: str) -> bool:
    return ask(nameserver_address, Question(_GET_ROUTE, {"topic": topic}))[0].code == 0


def wait_for_route(nameserver_address: str, topic: str, *, there: bool = True) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while has_route(nameserver_address, topic) != there:
        assert time.monotonic() < deadline, f"{topic}: still the other way round"
        time.sleep(0.1)
