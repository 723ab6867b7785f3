"""This module measures what a broker does with a request: microseconds of CPU, without sockets.

    python -m bench.broker_path [ROUNDS]

Frames as Apache's producer and consumer send them go through the door, the services and the store
with asynchronous flush, 64 to a turn, and the answers are counted and dropped. It counts CPU time
of all threads (a turn's share of indexing and checkpoints is in it) and reports the median of the
rounds; the first line tells how fast the machine was meanwhile.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, cast

from bench.remoting_codec import PULL, SEND, UNIQUE_KEY
from sluice.broker.core import BrokerCore
from sluice.broker.remoting_api import RemotingApi
from sluice.broker.topics import TopicSettings
from sluice.clock import wall_ms
from sluice.config import BrokerConfig, StoreConfig
from sluice.net import Connection
from sluice.protocol.message_batches import join_batch
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand, encode
from sluice.protocol.remoting_codes import RequestCode
from sluice.storage.background import Threads
from sluice.storage.files import RealFiles
from sluice.storage.opening import open_store

TURN = 64
TURNS = 300
BATCH = 32
BODY = b"x" * 1024


class Sink:
    """Stands for a connection: takes answers and counts their bytes."""

    def __init__(self) -> None:
        self.attributes: dict[str, object] = {}
        self.sent_bytes = 0
        self.sent_count = 0

    def packed_peer(self) -> bytes:
        return b"\x7f\0\0\1\0\0\x30\x39"

    def send(self, *parts: Any) -> None:
        self.sent_count += 1
        for part in parts:
            self.sent_bytes += len(part)


class Door:
    """A broker without a listener: frames go in, `turn` does what the event loop would."""

    def __init__(self, directory: str) -> None:
        self._soon: list[Callable[[], None]] = []
        config = BrokerConfig(store=StoreConfig(directory=directory, flush="async"))
        self.background = Threads(self._soon.append)
        self.store = open_store(
            config.store, RealFiles(), self.background, wall_ms, b"\x7f\0\0\1\0\0\x2a\x9f"
        )
        self.core = BrokerCore(config, self.store, wall_ms, self._soon.append)
        self.api = RemotingApi(self.core)
        self.core.topics.put([TopicSettings(SEND["b"], 8, 8)])
        self.core.groups.require(PULL["consumerGroup"])
        self.core.end_turn()
        self.sink = Sink()

    def turn(self, frames: list[bytes]) -> None:
        self.api.received(cast(Connection, self.sink), list(frames))
        while self._soon:
            soon, self._soon[:] = list(self._soon), []
            for callback in soon:
                callback()

    def close(self) -> None:
        self.store.shut(lambda _: None)
        self.background.close()


def sends(serialization: int, count: int) -> list[bytes]:
    """Frames of single sends over eight queues."""
    frames = []
    for number in range(count):
        unique = UNIQUE_KEY[:-4] + f"{number:04X}"
        properties = SEND["i"].replace(UNIQUE_KEY, unique)
        fields = SEND | {"e": str(number % 8), "i": properties}
        command = RemotingCommand(
            RequestCode.SEND_MESSAGE_V2, number, 0, fields, BODY, None, "JAVA", 513, serialization
        )
        frames.append(encode(command)[4:])
    return frames


def batches(count: int) -> list[bytes]:
    """Frames of batches of 32."""
    body = join_batch((0, BODY, SEND["i"].encode()) for _ in range(BATCH))
    code = RequestCode.SEND_BATCH_MESSAGE
    return [
        encode(
            RemotingCommand(code, number, 0, SEND | {"m": "true"}, body, None, "JAVA", 513, BINARY)
        )[4:]
        for number in range(count)
    ]


def pulls(offset: int) -> list[bytes]:
    """One pull of 32 for each of eight queues."""
    frames = []
    for queue_id in range(8):
        fields = PULL | {
            "queueId": str(queue_id),
            "queueOffset": str(offset),
            "sysFlag": "5",
            "subscription": "*",
        }
        command = RemotingCommand(
            RequestCode.PULL_MESSAGE, queue_id, 0, fields, b"", None, "JAVA", 513, BINARY
        )
        frames.append(encode(command)[4:])
    return frames


def measure(work: Callable[[], None], per: int, rounds: int) -> float:
    """Microseconds of CPU for one of `per`."""
    work()
    spent = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        spent.append((time.process_time() - begin) / per * 1e6)
    return statistics.median(spent)


def main(arguments: list[str]) -> int:
    rounds = int(arguments[0]) if arguments else 7
    begin = time.process_time()
    for _ in range(1_000_000):
        pass
    out = sys.stdout
    out.write(f"{'calibration, 1M empty turns of a loop':42}{time.process_time() - begin:8.3f} s\n")
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        door = Door(directory)
        for label, frames, per in (
            ("send 1 KiB, binary header", sends(BINARY, TURN), 1),
            ("send 1 KiB, JSON header", sends(JSON, TURN), 1),
            ("send in batches of 32, a message", batches(4), BATCH),
        ):
            turns = TURNS // per + 1

            def work(frames: list[bytes] = frames, turns: int = turns) -> None:
                for _ in range(turns):
                    door.turn(frames)

            cost = measure(work, turns * len(frames) * per, rounds)
            out.write(f"{label:42}{cost:8.2f} us\n")
        offset = 0

        def read() -> None:
            nonlocal offset
            for _ in range(TURNS // 8):
                door.turn(pulls(offset))
                offset += 32

        cost = measure(read, TURNS // 8 * 8 * 32, rounds)
        out.write(f"{'pull of 32, a message':42}{cost:8.2f} us\n")
        door.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
