"""This module runs Apache RocketMQ: one name server and one broker on free loopback ports.

With the address of another name server only the broker is started, and registers there. The store
lives in `<directory>/store`, so a test can hand the same folder to Sluice and back. The object can
be stopped (or killed) and started again: ports, names and store stay the same. Who leaves its block
kills it: its clean end takes ten seconds and more, so it is asked for where it matters.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from peers import remoting
from peers.archives import Lesson, archive_options
from peers.artifacts import ROCKETMQ
from peers.errors import PeerFailed
from peers.fetch import Jars, fetch
from peers.java import OPEN_MODULES, SHORT_LIVED, client_archive_options, java_command
from peers.process import POLL_INTERVAL_S, PeerProcess, free_ports, without_chatter

CLUSTER = "SluiceTests"
BROKER = "broker-a"
# On a busy machine a start has taken more than a minute.
START_TIMEOUT_S = 300.0
ADMIN_TIMEOUT_S = 300.0


def _as_properties(values: Mapping[str, object]) -> str:
    return "".join(f"{key}={value}\n" for key, value in values.items())


# Small and quick, but nothing that changes what is written: only sizes, threads and cleaning.
TEST_DEFAULTS: Mapping[str, str] = {
    "brokerClusterName": CLUSTER,
    "brokerName": BROKER,
    "brokerId": "0",
    "brokerIP1": "127.0.0.1",
    "bindAddress": "127.0.0.1",
    "brokerRole": "ASYNC_MASTER",
    "flushDiskType": "SYNC_FLUSH",
    "deleteWhen": "04",
    "fileReservedTime": "72",
    # A test machine's disk may be fuller than a production broker would accept.
    "diskMaxUsedSpaceRatio": "95",
    "autoCreateTopicEnable": "true",
    "autoCreateSubscriptionGroup": "true",
    "timerWheelEnable": "true",
    "warmMapedFileEnable": "false",
    # A cold broker on a busy machine would refuse its first sends, which waited over 200 ms.
    "waitTimeMillsInSendQueue": "10000",
    # The default index file is 400 MB; a test's queries need a fraction of that.
    "maxHashSlotNum": "50000",
    "maxIndexNum": "200000",
    "mappedFileSizeTimerLog": str(1024 * 1024),
}
TEST_SETTINGS: Mapping[str, str] = {
    # Every second it would compare 40 MB of timers with the disk.
    "timerFlushIntervalMs": "10000",
    # A slow disk is no error.
    "syncFlushTimeout": "60000",
}
# A server that lives for a test is not worth the second compiler or a parallel collector, nor the
# key and the certificate that it would make for itself at each start.
TEST_JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dtls.server.mode=disabled")
_BROKER_MAIN = "org.apache.rocketmq.broker.BrokerStartup"
_SERVER_LESSON = Lesson(
    "server",
    (_BROKER_MAIN, "-c", "{directory}/settings"),
    settings=_as_properties(
        {
            **TEST_DEFAULTS,
            "listenPort": "{port}",
            "storePathRootDir": "{directory}/store",
            "storePathCommitLog": "{directory}/store/commitlog",
            "mappedFileSizeCommitLog": 1024 * 1024,
        }
    ),
    ready="boot success",
)


class RocketMQ:
    """A name server and a broker of Apache RocketMQ 5.5.0; a context manager that starts both."""

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, object] | None = None,
        heap_mb: int = 1024,
        java_options: Sequence[str] | None = None,
        jars: Jars | None = None,
        nameserver: str | None = None,
    ) -> None:
        """`java_options` are those of the broker's Java, beside its heap.

        Without any the servers start as quickly as they can, and are slow for whoever measures.
        """
        self.directory = directory.resolve()
        self.jars = jars if jars is not None else fetch(ROCKETMQ)
        self.heap_mb = heap_mb
        self.config: dict[str, str] = {key: str(value) for key, value in (config or {}).items()}
        self._java = java_command()
        if java_options is None:
            options = (*TEST_JAVA_OPTIONS, *OPEN_MODULES)
            archive = archive_options(self._java, self.jars, _SERVER_LESSON, options)
            self._nameserver_options = [*TEST_JAVA_OPTIONS, *archive]
            self._broker_options = self._nameserver_options
            self.config = {**TEST_SETTINGS, **self.config}
        else:
            self._nameserver_options, self._broker_options = [], list(java_options)
        # The broker also listens two below its port, and for followers on a port of its own.
        self.broker_port = free_ports(1, also=(-2, 1))[0]
        self._other_nameserver = nameserver
        self.nameserver_port = free_ports(1)[0]
        self._nameserver: PeerProcess | None = None
        self._broker: PeerProcess | None = None
        self.store_directory.mkdir(parents=True, exist_ok=True)

    @property
    def store_directory(self) -> Path:
        """The folder that holds commitlog/, consumequeue/, index/ and config/."""
        return self.directory / "store"

    @property
    def nameserver_address(self) -> str:
        """Where clients ask: the name server of this object, or the other one it was given."""
        return self._other_nameserver or f"127.0.0.1:{self.nameserver_port}"

    @property
    def broker_address(self) -> str:
        return f"127.0.0.1:{self.broker_port}"

    @property
    def broker_pid(self) -> int:
        assert self._broker is not None
        return self._broker.pid

    @property
    def pids(self) -> list[int]:
        """The processes that run now: the broker's, and the name server's if it is ours."""
        return [process.pid for process in (self._broker, self._nameserver) if process is not None]

    def broker_config(self) -> dict[str, str]:
        """What broker.conf says: the test defaults, this object's addresses, the caller's keys."""
        store = self.store_directory
        return {
            **TEST_DEFAULTS,
            "namesrvAddr": self.nameserver_address,
            "listenPort": str(self.broker_port),
            "haListenPort": str(self.broker_port + 1),
            "storePathRootDir": str(store),
            "storePathCommitLog": str(store / "commitlog"),
            **self.config,
        }

    def start(self) -> None:
        """Start what does not run; the broker is known to the name server when this returns."""
        if self._nameserver is None and self._other_nameserver is None:
            self._start_nameserver()
        if self._broker is None:
            self._start_broker()

    def stop(self) -> None:
        """Stop both cleanly, the broker first, as an operator would."""
        broker, self._broker = self._broker, None
        nameserver, self._nameserver = self._nameserver, None
        try:
            if broker is not None:
                broker.stop()
        finally:
            if nameserver is not None:
                nameserver.stop()

    def stop_broker(self) -> None:
        """Stop the broker cleanly (SIGTERM, shutdown hooks run) and keep the name server."""
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.stop()

    def kill(self) -> None:
        """SIGKILL the broker, as a crash of its process; the name server stays."""
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.kill()

    def pause(self) -> None:
        """Take the processor from both, so that somebody else can be measured beside them."""
        for process in (self._broker, self._nameserver):
            if process is not None:
                process.pause()

    def resume(self) -> None:
        """Let both go on after `pause`, the name server first."""
        for process in (self._nameserver, self._broker):
            if process is not None:
                process.resume()

    def mqadmin(
        self, *arguments: str, nameserver: str | None = None, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run an mqadmin command; the name server's address is added. PeerFailed on a bad code."""
        options = [*SHORT_LIVED, *client_archive_options(self._java, self.jars)]
        command = [
            *self._java_start("admin", heap_mb=256, more=options),
            "org.apache.rocketmq.tools.command.MQAdminStartup",
            *arguments,
            "-n",
            nameserver or self.nameserver_address,
        ]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **self._environment()},
            check=False,
        )
        done.stdout = without_chatter(done.stdout)
        if done.returncode != 0:
            raise PeerFailed(f"mqadmin {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done

    def _start_nameserver(self) -> None:
        properties = {"listenPort": self.nameserver_port, "bindAddress": "127.0.0.1"}
        path = self.directory / "namesrv.conf"
        path.write_text(_as_properties(properties), encoding="utf-8")
        main = "org.apache.rocketmq.namesrv.NamesrvStartup"
        self._nameserver = self._launch(
            "namesrv", main, path, heap_mb=128, more=self._nameserver_options
        )
        self._nameserver.wait_ready("The Name Server boot success", START_TIMEOUT_S)

    def _start_broker(self) -> None:
        path = self.directory / "broker.conf"
        path.write_text(_as_properties(self.broker_config()), encoding="utf-8")
        options = self._broker_options
        broker = self._launch("broker", _BROKER_MAIN, path, heap_mb=self.heap_mb, more=options)
        broker.wait_ready("boot success", START_TIMEOUT_S)
        self._broker = broker
        self._register()

    def _register(self) -> None:
        """Make the broker tell the name server of itself and its topics now.

        At its start it does so only if it has already connected to the name server by then, else
        10 s later. A change of its permission, to what it is anyway, makes it try again.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        name = self.broker_config()["brokerName"].encode()
        port = int(self.nameserver_address.rpartition(":")[2])
        while name not in remoting.call(port, remoting.GET_CLUSTER_INFO):
            if time.monotonic() > deadline:
                raise PeerFailed(f"the name server does not know {name.decode()}")
            remoting.call(self.broker_port, remoting.UPDATE_BROKER_CONFIG, b"brokerPermission=6")
            time.sleep(POLL_INTERVAL_S)

    def _launch(
        self, name: str, main: str, properties: Path, *, heap_mb: int, more: Sequence[str] = ()
    ) -> PeerProcess:
        command = [*self._java_start(name, heap_mb=heap_mb, more=more), main, "-c", str(properties)]
        return PeerProcess(
            f"RocketMQ's {name}",
            command,
            log=self.directory / f"{name}.out",
            environment=self._environment(),
        )

    def _java_start(self, name: str, *, heap_mb: int, more: Sequence[str] = ()) -> list[str]:
        home = self.directory / f"home-{name}"
        home.mkdir(parents=True, exist_ok=True)
        return [
            self._java,
            f"-Xms{heap_mb}m",
            f"-Xmx{heap_mb}m",
            "-XX:MaxDirectMemorySize=2g",
            *more,
            *OPEN_MODULES,
            f"-Duser.home={home}",
            "-cp",
            self.jars.class_path,
        ]

    def _environment(self) -> dict[str, str]:
        return {"ROCKETMQ_HOME": str(self.directory)}

    def __enter__(self) -> "RocketMQ":
        try:
            self.start()
        except BaseException:
            self.abandon()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Kill both: nobody is interested in what they leave."""
        self.kill()
        nameserver, self._nameserver = self._nameserver, None
        if nameserver is not None:
            nameserver.kill()
