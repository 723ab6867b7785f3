"""This module measures the RocketMQ codec: nanoseconds of CPU a frame, in both serializations.

    python -m bench.remoting_codec

It counts CPU time, and reports the best of many short rounds: what the code costs where nothing
else disturbs it. The first line is a loop that does nothing but take fields apart one by one; it
tells how fast the machine was at that moment.
"""

import sys
import time
import timeit
from collections.abc import Callable
from struct import Struct

from sluice.protocol.framing import FrameReader
from sluice.protocol.message_batches import join_batch, split_batch
from sluice.protocol.remoting import BINARY, JSON, RemotingCommand, answer, decode, encode
from sluice.protocol.remoting_codes import RequestCode
from sluice.protocol.remoting_fast import pull_answer_head, read_pull, read_send, send_answer

ROUNDS = 60
CALLS = 1000
BODY = b"x" * 1024
UNIQUE_KEY = "FD0000000000000000000000000000021B2830946E094C671ED60000"
MESSAGE_ID = "7F000001000078BF0000000000000B7D"
SEND = {
    "a": "benchmark_producer",
    "b": "BenchmarkTest",
    "c": "TBW102",
    "d": "4",
    "e": "3",
    "f": "0",
    "g": "1794772393024",
    "h": "0",
    "i": f"KEYS\x0142\x02UNIQ_KEY\x01{UNIQUE_KEY}\x02WAIT\x01true\x02TAGS\x01TagA\x02",
    "j": "0",
    "k": "false",
    "m": "false",
    "n": "broker-a",
}
PULL = {
    "consumerGroup": "benchmark_consumer",
    "topic": "BenchmarkTest",
    "queueId": "3",
    "queueOffset": "1234567",
    "maxMsgNums": "32",
    "sysFlag": "3",
    "commitOffset": "1234000",
    "suspendTimeoutMillis": "15000",
    "subVersion": "1794772393024",
    "expressionType": "TAG",
    "maxMsgBytes": "262144",
    "bname": "broker-a",
}
_U32 = Struct(">I")


def plain_walk(data: bytes) -> dict[str, str]:
    """Fields of a binary header, without checks."""
    fields = {}
    at = 21
    while at < len(data):
        key_end = at + 2 + (data[at] << 8 | data[at + 1])
        (size,) = _U32.unpack_from(data, key_end)
        key = data[at + 2 : key_end].decode()
        at = key_end + 4 + size
        fields[key] = data[key_end + 4 : at].decode()
    return fields


def best_ns(call: Callable[[], object]) -> float:
    rounds = timeit.repeat(call, number=CALLS, repeat=ROUNDS, timer=time.process_time)
    return min(rounds) / CALLS * 1e9


def cases() -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    header = encode(RemotingCommand(310, 1, 0, SEND, serialization=BINARY))[8:]
    calls["(plain walk over a binary send's fields)"] = lambda: plain_walk(header)
    for name, serialization in (("JSON", JSON), ("binary", BINARY)):
        send = RemotingCommand(310, 7, 0, SEND, BODY, serialization=serialization)
        pull = RemotingCommand(11, 8, 0, PULL, serialization=serialization)
        _add(calls, name, send, pull)
    batch = join_batch([(0, BODY, b"UNIQ_KEY\x01key\x02")] * 32)
    calls["split a batch of 32 messages"] = lambda: split_batch(batch)
    wire = encode(RemotingCommand(310, 7, 0, SEND, BODY, serialization=BINARY)) * 32
    reader = FrameReader()
    calls["cut 32 sends of 1 KiB out of one chunk"] = lambda: reader.feed(wire)
    return calls


def _add(
    calls: dict[str, Callable[[], object]], name: str, send: RemotingCommand, pull: RemotingCommand
) -> None:
    send_frame, pull_frame = encode(send)[4:], encode(pull)[4:]
    kind = send.serialization
    calls[f"{name}: decode SEND_MESSAGE_V2, 1 KiB"] = lambda: decode(send_frame)
    calls[f"{name}: its fields, typed"] = lambda: read_send(send)
    calls[f"{name}: encode its answer"] = lambda: send_answer(
        kind, 7, MESSAGE_ID, 3, 1234567, UNIQUE_KEY
    )
    calls[f"{name}: decode PULL_MESSAGE"] = lambda: decode(pull_frame)
    calls[f"{name}: its fields, typed "] = lambda: read_pull(pull)
    calls[f"{name}: encode its answer's head"] = lambda: pull_answer_head(
        pull, 0, "FOUND", 1234599, 0, 2345678, 36000
    )
    calls[f"{name}: encode an empty answer"] = lambda: answer(pull, RequestCode.SEND_MESSAGE)


def main() -> int:
    for name, call in cases().items():
        print(f"{name:44} {best_ns(call):8.0f} ns")
    return 0


if __name__ == "__main__":
    sys.exit(main())
