"""This module runs Apache Kafka: one broker that is its own controller, on free loopback ports.

Its log lives in `<directory>/log`. Who leaves its block kills it: its clean end takes a while.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from peers.artifacts import KAFKA
from peers.errors import PeerFailed
from peers.fetch import Jars, fetch
from peers.java import java_command
from peers.process import PeerProcess, free_ports

# On a busy machine a start has taken more than a minute.
START_TIMEOUT_S = 300.0
FORMAT_TIMEOUT_S = 300.0
# A server that lives for a test is not worth the second compiler or a parallel collector.
TEST_JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_UUID = "MkU3OEVBNTcwNTJENDM2Qg"


class Kafka:
    """A broker of Apache Kafka 4.3.0; a context manager that starts it."""

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, object] | None = None,
        heap_mb: int = 512,
        java_options: tuple[str, ...] = TEST_JAVA_OPTIONS,
        jars: Jars | None = None,
    ) -> None:
        self.directory = directory.resolve()
        self.jars = jars if jars is not None else fetch(KAFKA)
        self._heap_mb = heap_mb
        self._java_options = java_options
        self._config = {key: str(value) for key, value in (config or {}).items()}
        self._java = java_command()
        self.port, self._controller_port = free_ports(2)
        self._process: PeerProcess | None = None
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _properties(self) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{self._controller_port}",
            "listeners": (
                f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller_port}"
            ),
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.directory / "log"),
            "num.partitions": "8",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            **self._config,
        }

    def _command(self, heap_mb: int, *words: str) -> list[str]:
        return [
            *(self._java, f"-Xmx{heap_mb}m", *self._java_options),
            f"-Duser.home={self.directory}",
            *("-cp", self.jars.class_path, *words),
        ]

    def start(self) -> None:
        """Start it on what is in its directory, and wait until it serves."""
        settings = self.directory / "server.properties"
        settings.write_text("".join(f"{k}={v}\n" for k, v in self._properties().items()))
        if not (self.directory / "log").is_dir():
            self._format(settings)
        self._process = PeerProcess(
            "kafka",
            self._command(self._heap_mb, "kafka.Kafka", str(settings)),
            log=self.directory / "kafka.log",
        )
        self._process.wait_ready("Kafka Server started", timeout_s=START_TIMEOUT_S)

    def _format(self, settings: Path) -> None:
        words = ("kafka.tools.StorageTool", "format", "--standalone", "-t", _UUID, "-c")
        done = subprocess.run(
            self._command(256, *words, str(settings)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=FORMAT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise PeerFailed(f"Kafka's storage could not be made:\n{done.stdout[-2000:]}")

    def kill(self) -> None:
        assert self._process is not None, "started before it is killed"
        process, self._process = self._process, None
        process.kill()

    def __enter__(self) -> "Kafka":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.kill()
