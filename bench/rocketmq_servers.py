"""This module holds the two sides: Apache's name server and broker, and `sluice serve`.

Both are asked with the same few requests, written apart from Sluice's own code. A side that is not
being measured is stopped in its tracks: even an idle broker takes processor time.
"""

import itertools
import json
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from bench.harness import Failed
from bench.processes import cpu_seconds, private_bytes
from peers import remoting
from peers.errors import PeerFailed
from peers.fetch import Jars
from peers.process import PeerProcess, free_ports
from peers.rocketmq import RocketMQ

QUEUES = 8
HEAP_MB = 4096
START_TIMEOUT_S = 90.0
ROUTE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.01
READ_AND_WRITE = 6
ANY_NEW_TOPIC = "TBW102"
TIMER_TOPIC = "rmq_sys_wheel_timer"

# What RocketMQ's own start script gives its broker, but for the heap's size, and but for touching
# all of it at the start: that would make both its start and its memory look worse.
BROKER_JAVA_OPTIONS = (
    "-XX:+UseG1GC",
    "-XX:G1HeapRegionSize=16m",
    "-XX:G1ReservePercent=25",
    "-XX:InitiatingHeapOccupancyPercent=30",
    "-XX:SoftRefLRUPolicyMSPerMB=0",
    "-XX:-OmitStackTraceInFastThrow",
    "-XX:-UseLargePages",
)
# RocketMQ's own defaults, where the ones of our tests are smaller.
BROKER_SIZES = {
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
    "mappedFileSizeTimerLog": 100 * 1024 * 1024,
}


class Server(ABC):
    """A name server and a broker of one side, on an empty store of their own."""

    name: str
    is_peer = False
    nameserver_port: int
    broker_port: int

    def __init__(self) -> None:
        self._groups = itertools.count(1)

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def pids(self) -> list[int]: ...

    @property
    def nameserver(self) -> str:
        return f"127.0.0.1:{self.nameserver_port}"

    def start_until_first_send(self) -> float:
        """Seconds from starting the processes until a client has sent its first message."""
        begin = time.perf_counter()
        self.start()
        deadline = begin + START_TIMEOUT_S
        while not self._sends():
            if time.perf_counter() > deadline:
                raise Failed(f"{self.name} takes no message after {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)
        return time.perf_counter() - begin

    def _sends(self) -> bool:
        """Do as a client does with a topic that does not exist yet."""
        header = {
            "a": "first",
            "b": "first",
            "c": ANY_NEW_TOPIC,
            "d": 4,
            "e": 0,
            "f": 0,
            "g": time.time_ns() // 1_000_000,
            "h": 0,
            "i": "WAIT\x01true\x02",
            "j": 0,
            "k": "false",
            "m": "false",
        }
        try:
            remoting.ask(self.nameserver_port, remoting.GET_ROUTE, {"topic": ANY_NEW_TOPIC})
            remoting.ask(self.broker_port, remoting.SEND_MESSAGE_V2, header, b"first")
        except (OSError, PeerFailed):
            return False
        return True

    def create_topic(self, topic: str) -> None:
        """Make it, or find it as it was made, and wait until clients are told of it."""
        settings = {
            "topic": topic,
            "defaultTopic": ANY_NEW_TOPIC,
            "perm": READ_AND_WRITE,
            "readQueueNums": QUEUES,
            "writeQueueNums": QUEUES,
            "order": "false",
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
        }
        self._ask(remoting.UPDATE_TOPIC, settings)
        deadline = time.monotonic() + ROUTE_TIMEOUT_S
        while True:
            try:
                remoting.ask(self.nameserver_port, remoting.GET_ROUTE, {"topic": topic})
            except (OSError, PeerFailed) as error:
                if time.monotonic() > deadline:
                    raise Failed(f"{self.name} hides its topic {topic}: {error!r}") from error
                time.sleep(POLL_INTERVAL_S)
            else:
                return

    def create_group(self, topic: str) -> str:
        """A fresh group that stands at the first message of every queue of the topic."""
        group = f"readers-{next(self._groups)}"
        body = json.dumps({"groupName": group, "consumeEnable": True}).encode()
        self._ask(remoting.UPDATE_GROUP, {}, body)
        for queue_id in range(QUEUES):
            place = {"consumerGroup": group, "topic": topic, "queueId": queue_id}
            self._ask(remoting.UPDATE_CONSUMER_OFFSET, {**place, "commitOffset": 0})
        return group

    def stored_count(self, topic: str) -> int:
        """Messages that the topic holds."""
        return sum(
            self._offset(remoting.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id})
            for queue_id in range(QUEUES)
        )

    def consumed_count(self, topic: str, group: str) -> int:
        """Messages that a group has done with: a consumer tells it with every pull."""
        return sum(
            self._offset(
                remoting.QUERY_CONSUMER_OFFSET,
                {"consumerGroup": group, "topic": topic, "queueId": queue_id},
            )
            for queue_id in range(QUEUES)
        )

    def timer_count(self) -> int:
        """Timers that were ever sent to it: they wait in a topic of the broker's own."""
        return self._offset(remoting.GET_MAX_OFFSET, {"topic": TIMER_TOPIC, "queueId": 0})

    def timers_behind(self) -> int:
        """Timers that were sent but are not yet sorted in by their time."""
        table = json.loads(self._ask(remoting.GET_RUNTIME_INFO, {}).body)["table"]
        return int(table.get("timerOffsetBehind", "0"))

    def broker_name(self, topic: str) -> str:
        """What clients call the broker of a topic."""
        route = remoting.ask(self.nameserver_port, remoting.GET_ROUTE, {"topic": topic}).body
        found = re.search(rb'"brokerName":"([^"]+)"', route)
        if found is None:
            raise Failed(f"{self.name} has no route of {topic}")
        return found[1].decode()

    def _offset(self, code: int, fields: Mapping[str, object]) -> int:
        return int(self._ask(code, fields).fields["offset"])

    def _ask(self, code: int, fields: Mapping[str, object], body: bytes = b"") -> remoting.Answer:
        """One request to the broker, which must do it."""
        try:
            return remoting.ask(self.broker_port, code, fields, body)
        except (OSError, PeerFailed) as error:
            raise Failed(f"{self.name} does not do as asked: {error!r}") from error

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pids())

    def private_bytes(self) -> int:
        return private_bytes(self.pids())


class Apache(Server):
    """Apache RocketMQ 5.5.0 with its defaults, but for `config`, and a heap of 4 GiB."""

    is_peer = True

    def __init__(
        self, directory: Path, jars: Jars, *, flush: str, config: Mapping[str, object]
    ) -> None:
        super().__init__()
        self.name = f"Apache RocketMQ, {flush} flush"
        config = {**BROKER_SIZES, "flushDiskType": f"{flush.upper()}_FLUSH", **config}
        self._peer = RocketMQ(
            directory,
            config=config,
            heap_mb=HEAP_MB,
            java_options=BROKER_JAVA_OPTIONS,
            jars=jars,
        )
        self.nameserver_port = self._peer.nameserver_port
        self.broker_port = self._peer.broker_port

    def start(self) -> None:
        self._peer.start()

    def pause(self) -> None:
        self._peer.pause()

    def resume(self) -> None:
        self._peer.resume()

    def kill(self) -> None:
        self._peer.abandon()

    def pids(self) -> list[int]:
        return self._peer.pids


class Sluice(Server):
    """`sluice serve` with its defaults."""

    def __init__(self, directory: Path, *, flush: str) -> None:
        super().__init__()
        self.name = f"Sluice, {flush} flush"
        self.nameserver_port, self.broker_port = free_ports(2)
        self._command = [
            *(sys.executable, "-m", "sluice", "serve"),
            *("--directory", str(directory / "store"), "--flush", flush),
            *("--listen-port", str(self.broker_port)),
            *("--metrics-port", "0"),  # two of them run at a time
            *("--nameserver-port", str(self.nameserver_port)),
            # As for the other side: only a full disk may refuse.
            *("--disk-clean-ratio", "0.95", "--disk-force-ratio", "0.98"),
            *("--disk-refuse-ratio", "0.99"),
        ]
        self._log = directory / "sluice.out"
        directory.mkdir(parents=True)
        self._process: PeerProcess | None = None

    def start(self) -> None:
        self._process = PeerProcess(self.name, self._command, log=self._log)
        self._process.wait_ready("try it:", START_TIMEOUT_S)

    def pause(self) -> None:
        self._started().pause()

    def resume(self) -> None:
        self._started().resume()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def pids(self) -> list[int]:
        return [self._started().pid]

    def _started(self) -> PeerProcess:
        assert self._process is not None, "started before it is used"
        return self._process
