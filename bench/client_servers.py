"""This module starts what clients need beside Sluice: a Kafka, and RocketMQ's proxy for gRPC.

Each has a process of its own, loopback ports, a small heap, and is stopped while others have their
turn.
"""

import json
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path

from peers.artifacts import KAFKA, ROCKETMQ_PROXY
from peers.errors import PeerFailed
from peers.fetch import fetch
from peers.java import OPEN_MODULES, java_command
from peers.process import PeerProcess, free_ports, log_tail, run_tool

PARTITIONS = 8
START_TIMEOUT_S = 90.0
FORMAT_TIMEOUT_S = 60.0
KAFKA_HEAP_MB = 1024
PROXY_HEAP_MB = 512
POLL_INTERVAL_S = 0.1


class JavaServer(ABC):
    """A Java program that listens on a port."""

    def __init__(self, name: str, port: int, directory: Path) -> None:
        self.name = name
        self.address = f"127.0.0.1:{port}"
        self.directory = directory
        self._port = port
        self._process: PeerProcess | None = None

    @abstractmethod
    def start(self) -> None: ...

    def _start(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        log = self.directory / "output"
        self._process = PeerProcess(self.name, command, log=log, environment=environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._listens():
            if not self._process.running or time.monotonic() > deadline:
                tail = log_tail(log)
                self.kill()  # its output goes with it
                raise PeerFailed(f"{self.name} does not start:\n{tail}")
            time.sleep(POLL_INTERVAL_S)

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return True
        except OSError:
            return False

    def pause(self) -> None:
        if self._process is not None:
            self._process.pause()

    def resume(self) -> None:
        if self._process is not None:
            self._process.resume()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)


class Kafka(JavaServer):
    """One Kafka 4.3.0, broker and controller in one, with its defaults and 8 partitions a topic."""

    def __init__(self, directory: Path) -> None:
        self._ports = free_ports(2)
        super().__init__("Kafka", self._ports[0], directory)

    def start(self) -> None:
        jars = fetch(KAFKA)
        java = [java_command(), f"-Xmx{KAFKA_HEAP_MB}m", "-cp", jars.class_path]
        self.directory.mkdir(parents=True)
        settings = self.directory / "server.properties"
        settings.write_text(self._properties(), encoding="utf-8")
        tool = [*java, "kafka.tools.StorageTool"]
        cluster = _output([*tool, "random-uuid"]).split()[-1]
        _output([*tool, "format", "--standalone", "-t", cluster, "-c", str(settings)])
        self._start([*java, "kafka.Kafka", str(settings)])

    def _properties(self) -> str:
        port, controller = self._ports
        lines = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self.directory / "data",
            "num.partitions": PARTITIONS,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            # It is stopped between its turns, and must not take itself for dead after them.
            "broker.session.timeout.ms": 3_600_000,
        }
        return "".join(f"{name}={value}\n" for name, value in lines.items())


class Proxy(JavaServer):
    """RocketMQ's proxy in cluster mode: gRPC on one side, on the other our broker's remoting."""

    def __init__(self, directory: Path, nameserver: str) -> None:
        self._ports = free_ports(2)
        super().__init__("RocketMQ's proxy", self._ports[0], directory)
        self._nameserver = nameserver

    def start(self) -> None:
        jars = fetch(ROCKETMQ_PROXY)
        self.directory.mkdir(parents=True)
        grpc, remoting = self._ports
        settings = self.directory / "proxy.json"
        document = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": self._nameserver,
            "grpcServerPort": grpc,
            "remotingListenPort": remoting,
            "proxyMode": "CLUSTER",
        }
        settings.write_text(json.dumps(document), encoding="utf-8")
        command = [
            java_command(),
            f"-Xmx{PROXY_HEAP_MB}m",
            *OPEN_MODULES,
            f"-Duser.home={self.directory}",
            *("-cp", jars.class_path, "org.apache.rocketmq.proxy.ProxyStartup"),
            *("-pm", "cluster", "-n", self._nameserver, "-pc", str(settings)),
        ]
        self._start(command, {"ROCKETMQ_HOME": str(self.directory)})


def _output(command: list[str]) -> str:
    """What a tool prints; PeerFailed where it fails or does not come to an end."""
    try:
        done = run_tool(command, timeout_s=FORMAT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        text = f"{command[-1]}: it did not end within {FORMAT_TIMEOUT_S:.0f} s"
        raise PeerFailed(text) from error
    if done.returncode != 0:
        raise PeerFailed(f"{command[-1]}: {done.stdout[-2000:]}")
    return done.stdout
