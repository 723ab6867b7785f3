"""This module runs `sluice serve` as a process of its own, to be used, killed and started again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from peers.process import PeerProcess, free_ports
from peers.rocketmq import BROKER

START_TIMEOUT_S = 60.0


class SluiceProcess:
    """A nameserver and a broker in one process, on free loopback ports and a store of their own."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self._flags = flags
        self.nameserver_port, self.broker_port = free_ports(2)
        self._process: PeerProcess | None = None
        self._starts = 0
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def store_directory(self) -> Path:
        return self.directory / "store"

    @property
    def nameserver_address(self) -> str:
        return f"127.0.0.1:{self.nameserver_port}"

    def start(self) -> None:
        """Start it on the store that is there, and wait until it serves."""
        self._starts += 1
        command = [
            *(sys.executable, "-m", "sluice", "serve"),
            *("--directory", str(self.store_directory), "--broker-name", BROKER),
            *("--listen-port", str(self.broker_port)),
            *("--nameserver-port", str(self.nameserver_port)),
            *self._flags,
        ]
        log = self.directory / f"sluice.{self._starts}.log"
        self._process = PeerProcess("sluice", command, log=log)
        self._process.wait_ready("try it:", timeout_s=START_TIMEOUT_S)

    def kill(self) -> None:
        """As kill -9 does: nothing is flushed, nothing is said."""
        assert self._process is not None, "started before it is killed"
        self._process.kill()

    def stop(self) -> None:
        assert self._process is not None, "started before it is stopped"
        self._process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
