"""This module is what the business benchmark asks of a broker itself, the same of both sides.

Where RocketMQ has no benchmark program, or one that would keep a client busier than the broker,
the requests are sent from here: as Java clients send them, and many at a time.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.harness import Failed
from bench.raw_client import (
    ACK_MESSAGE,
    END_TRANSACTION,
    POLLING_TIMEOUT,
    POP_MESSAGE,
    PULL_MESSAGE,
    PULL_NOT_FOUND,
    PULL_RETRY,
    SEND_BACK,
    SEND_MESSAGE_V2,
    SUCCESS,
    Answer,
    Line,
    Template,
    decode,
    encode,
    pump,
)
from bench.rocketmq_servers import ANY_NEW_TOPIC, QUEUES

WINDOW = 512  # requests under way where the broker is to be kept busy
SEND_BACK_WINDOW = 64
BODY_BYTES = 128
BATCH = 32  # messages of a pull or a pop: the most that Apache's broker gives
FIRST_RECORD_BYTES = 36
SUSPEND_MS = 15_000
INVISIBLE_MS = 300_000
TWO_HOURS_LEVEL = 18
HALF_MESSAGE = 4  # in a message's flags
ROLLBACK = 12
WITH_SUBSCRIPTION = 4  # in a pull's flags
MAY_WAIT = 2

# One of a hundred messages passes.
AMOUNTS = range(10_000, 20_000)
SQL = "amount >= 19900 AND region IN ('eu', 'us')"
SQL_SHARE = 0.01
REGIONS = ("eu", "us")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def send_fields(topic: str, queue_id: int, properties: str, *, sys_flag: int = 0) -> dict[str, str]:
    """The header of a send, as short as Java clients make it."""
    return {
        "a": "bench",
        "b": topic,
        "c": ANY_NEW_TOPIC,
        "d": str(QUEUES),
        "e": str(queue_id),
        "f": str(sys_flag),
        "g": str(now_ms()),
        "h": "0",
        "i": properties,
        "j": "0",
        "k": "false",
        "m": "false",
    }


def as_properties(**values: object) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in values.items())


# ------------------------------------------------------------------------------------------- sends


def send_timed(port: int, topic: str, count: int, due_ms: Callable[[int], int]) -> None:
    """So many messages, spread over the queues; the i-th is due at `due_ms(i)`."""
    text = str(due_ms(0))
    _send(port, topic, count, {"TIMER_DELIVER_MS": text}, lambda i: (b"%d" % due_ms(i),))


def send_offers(port: int, topic: str, count: int) -> None:
    """Messages that `SQL` can be asked about: the amounts go round, so that 1 % pass."""

    def texts(i: int) -> tuple[bytes, bytes]:
        # 7919 has no divisor in common with the number of amounts, so each of them has its turn.
        return b"%d" % AMOUNTS[i * 7919 % len(AMOUNTS)], REGIONS[i % 2].encode()

    _send(port, topic, count, {"amount": "00000", "region": "RG"}, texts)


def _send(
    port: int,
    topic: str,
    count: int,
    properties: dict[str, str],
    texts: Callable[[int], tuple[bytes, ...]],
) -> None:
    unique = "U" * 32
    words = as_properties(**properties, UNIQ_KEY=unique, WAIT="true")
    marks = [*(f"{name}\x01{value}".encode() for name, value in properties.items())]
    heads = [mark.partition(b"\x01")[0] + b"\x01" for mark in marks]
    templates = [
        Template(
            encode(SEND_MESSAGE_V2, 0, send_fields(topic, queue_id, words), b"b" * BODY_BYTES),
            [*marks, unique.encode()],
        )
        for queue_id in range(QUEUES)
    ]
    prefix = os.urandom(8).hex().upper().encode()

    def frames() -> Iterator[bytes]:
        for i in range(count):
            filled = [head + text for head, text in zip(heads, texts(i), strict=True)]
            yield templates[i % QUEUES].frame(i, *filled, prefix + b"%016d" % i)

    with Line(port) as line:
        pump(line, frames(), window=WINDOW)


# -------------------------------------------------------------------------------------- what works


def try_transaction(port: int, topic: str) -> None:
    """Begin one and roll it back; Refused where there are none."""
    unique = os.urandom(16).hex().upper()
    words = as_properties(TRAN_MSG="true", PGROUP="bench", UNIQ_KEY=unique, WAIT="true")
    with Line(port) as line:
        fields = send_fields(topic, 0, words, sys_flag=HALF_MESSAGE)
        placed = line.ask(SEND_MESSAGE_V2, fields, b"half").wanted().fields
        end = {
            "topic": topic,
            "producerGroup": "bench",
            "tranStateTableOffset": placed["queueOffset"],
            # The last half of the message's id is its position in the log.
            "commitLogOffset": int(placed["msgId"][16:], 16),
            "commitOrRollback": ROLLBACK,
            "fromTransactionCheck": "false",
            "msgId": unique,
            "transactionId": placed.get("transactionId", unique),
        }
        line.ask(END_TRANSACTION, end).wanted()


# ------------------------------------------------------------------------------------------- pulls


def pull_fields(
    group: str, topic: str, queue_id: int, offset: int, *, sql: str | None, suspend: bool
) -> dict[str, object]:
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": offset,
        "maxMsgNums": BATCH,
        "sysFlag": WITH_SUBSCRIPTION | (MAY_WAIT if suspend else 0),
        "commitOffset": 0,
        "suspendTimeoutMillis": SUSPEND_MS,
        "subscription": sql or "*",
        "subVersion": 1,
        "expressionType": "SQL92" if sql else "TAG",
    }


class Pulls:
    """One pull of each queue under way, again and again."""

    def __init__(self, line: Line, group: str, topic: str, *, sql: str | None, suspend: bool):
        self._line = line
        self._group = group
        self._topic = topic
        self._sql = sql
        self._suspend = suspend
        self.offsets = [0] * QUEUES
        for queue_id in range(QUEUES):
            self.ask(queue_id)

    def ask(self, queue_id: int) -> None:
        place = self._group, self._topic, queue_id, self.offsets[queue_id]
        fields = pull_fields(*place, sql=self._sql, suspend=self._suspend)
        self._line.send(encode(PULL_MESSAGE, queue_id, fields))

    def answers(self) -> Iterator[tuple[int, int, Answer]]:
        """Queue, how many messages were gone through, and what came; those that came by now."""
        for frame in self._line.receive():
            answer = decode(frame).wanted(SUCCESS, PULL_NOT_FOUND, PULL_RETRY)
            queue_id = answer.opaque
            count = 0
            if answer.code != PULL_NOT_FOUND:
                next_offset = int(answer.fields["nextBeginOffset"])
                count = next_offset - self.offsets[queue_id]
                self.offsets[queue_id] = next_offset
            yield queue_id, count, answer


@dataclass(frozen=True, slots=True)
class Scanned:
    """Messages that a subscription went through, and those that it let pass."""

    count: int
    passed: int
    seconds: float


def scan(port: int, group: str, topic: str, *, sql: str | None, seconds: float) -> Scanned:
    """Go through all queues again and again for so long."""
    count = passed = 0
    with Line(port) as line:
        begin = time.perf_counter()
        pulls = Pulls(line, group, topic, sql=sql, suspend=False)
        while (spent := time.perf_counter() - begin) < seconds:
            for queue_id, gone_through, answer in pulls.answers():
                count += gone_through
                if sql is None:
                    passed += gone_through
                elif answer.code == SUCCESS:
                    passed += sum(1 for _ in record_starts(answer.body))
                if gone_through == 0:
                    pulls.offsets[queue_id] = 0  # the end of the queue: once more
                pulls.ask(queue_id)
    return Scanned(count, passed, spent)


def record_starts(body: bytes) -> Iterator[int]:
    """Where the records of an answer begin: each starts with its size."""
    at = 0
    while at < len(body):
        yield at
        size = int.from_bytes(body[at : at + 4], "big")
        if size < FIRST_RECORD_BYTES:
            raise Failed(f"a record of {size} bytes")
        at += size


def log_positions(port: int, group: str, topic: str, count: int) -> list[int]:
    """Positions in the log of so many messages of a topic, as a consumer learns them."""
    positions: list[int] = []
    with Line(port) as line:
        for queue_id in range(QUEUES):
            offset = 0
            while len(positions) < count:
                fields = pull_fields(group, topic, queue_id, offset, sql=None, suspend=False)
                answer = line.ask(PULL_MESSAGE, fields).wanted(SUCCESS, PULL_NOT_FOUND, PULL_RETRY)
                if answer.code == PULL_NOT_FOUND:
                    break
                offset = int(answer.fields["nextBeginOffset"])
                body = answer.body
                starts = record_starts(body)
                positions += [int.from_bytes(body[at + 28 : at + 36], "big") for at in starts]
    return positions[:count]


@dataclass(frozen=True, slots=True)
class Delivered:
    """When the messages of a burst came to a consumer."""

    count: int
    first_ms: int
    last_ms: int

    @property
    def rate(self) -> float:
        return self.count / max(self.last_ms - self.first_ms, 1) * 1000


def receive_burst(port: int, group: str, topic: str, count: int, *, timeout_s: float) -> Delivered:
    """Wait at all queues of a topic until so many messages have come."""
    deadline = time.monotonic() + timeout_s
    came = first_ms = 0
    with Line(port) as line:
        pulls = Pulls(line, group, topic, sql=None, suspend=True)
        while came < count:
            if time.monotonic() > deadline:
                raise Failed(f"{came:,} of {count:,} messages came within {timeout_s:.0f} s")
            for queue_id, gone_through, _ in pulls.answers():
                if gone_through and not came:
                    first_ms = now_ms()
                came += gone_through
                pulls.ask(queue_id)
    if came > count:
        raise Failed(f"{came:,} messages came of {count:,}")
    return Delivered(came, first_ms, now_ms())


# ------------------------------------------------------------------------------ retries and popping


@dataclass(frozen=True, slots=True)
class Done:
    """How many were done, in which time."""

    count: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


def send_back(
    port: int, group: str, topic: str, positions: Iterator[int], *, seconds: float
) -> Done:
    """Send messages back to be had again two hours later, each once, for so long."""
    begin = time.perf_counter()

    def frames() -> Iterator[bytes]:
        for opaque in itertools.count():
            position = next(positions, None)
            if position is None or time.perf_counter() - begin > seconds:
                return
            fields = {
                "offset": position,
                "group": group,
                "delayLevel": TWO_HOURS_LEVEL,
                "originTopic": topic,
                "unitMode": "false",
                "maxReconsumeTimes": 16,
            }
            yield encode(SEND_BACK, opaque, fields)

    with Line(port) as line:
        count = pump(line, frames(), window=SEND_BACK_WINDOW)
    return Done(count, time.perf_counter() - begin)


def pop_and_acknowledge(port: int, group: str, topic: str, *, broker: str, seconds: float) -> Done:
    """Pop from each queue, acknowledge each message, and pop again, for so long or to the end."""
    acknowledged = 0
    unacknowledged: Counter[int] = Counter()
    with Line(port) as line:
        begin = time.perf_counter()
        busy = set(range(QUEUES))
        for queue_id in busy:
            line.send(_pop(group, topic, queue_id))
        while busy:
            for frame in line.receive():
                answer = decode(frame)
                queue_id = answer.opaque & 0xFF
                if answer.opaque == queue_id:
                    acks = _acks(group, topic, broker, answer)
                    unacknowledged[queue_id] = len(acks)
                    line.send(b"".join(acks))
                else:
                    answer.wanted()
                    acknowledged += 1
                    unacknowledged[queue_id] -= 1
                if not unacknowledged[queue_id]:
                    at_end = answer.opaque == queue_id
                    if at_end or time.perf_counter() - begin > seconds:
                        busy.discard(queue_id)
                    else:
                        line.send(_pop(group, topic, queue_id))
        return Done(acknowledged, time.perf_counter() - begin)


def _pop(group: str, topic: str, queue_id: int) -> bytes:
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "maxMsgNums": BATCH,
        "invisibleTime": INVISIBLE_MS,
        "pollTime": 1000,
        "bornTime": now_ms(),
        "initMode": 0,  # a new group begins with the first message
        "expType": "TAG",
        "exp": "*",
        "order": "false",
    }
    return encode(POP_MESSAGE, queue_id, fields)


def _acks(group: str, topic: str, broker: str, popped: Answer) -> list[bytes]:
    """An acknowledgement of each message of an answer, none where there was nothing to pop."""
    if popped.wanted(SUCCESS, PULL_NOT_FOUND, POLLING_TIMEOUT).code != SUCCESS:
        return []
    return [
        encode(
            ACK_MESSAGE,
            popped.opaque | 0x100,
            {
                "consumerGroup": group,
                "topic": topic,
                "queueId": queue_id,
                "extraInfo": handle,
                "offset": offset,
            },
        )
        for queue_id, offset, handle in handles(popped.fields, broker)
    ]


def handles(said: dict[str, str], broker: str) -> Iterator[tuple[int, int, str]]:
    """Queue, offset and handle of each message popped, made as RocketMQ's clients make it.

    The infos are "retry queue first" and "retry queue offset,offset" for each queue, between
    semicolons.
    """
    firsts = {}
    for info in said["startOffsetInfo"].split(";"):
        retry, queue, first = info.split()
        firsts[retry, queue] = first
    times = f"{said['popTime']} {said['invisibleTime']} {said['reviveQid']}"
    for info in said["msgOffsetInfo"].split(";"):
        retry, queue, offsets = info.split()
        for offset in offsets.split(","):
            handle = f"{firsts[retry, queue]} {times} {retry} {broker} {queue} {offset}"
            yield int(queue), int(offset), handle
