"""This module is `sluice send` and `sluice tail`: one message in, or messages as they come.

It prints what it did in one line each, or one JSON object each with --json. It works against any
RocketMQ broker, and knows nothing of how brokers are made.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from datetime import datetime
from itertools import chain, cycle

import orjson
import uvloop

from sluice.client.core.messages import unpacked
from sluice.client.simple import (
    QueueAt,
    SimpleClient,
    add_tls_flags,
    nameserver_address,
    tls_of,
)
from sluice.errors import ConfigError, ProtocolError
from sluice.protocol import records
from sluice.protocol.remoting_codes import RequestCode as Request

_WAIT_MS = 15_000
_LINES_WAITING_MAX = 100_000  # of standard input: then whoever writes there waits for the broker


def send(argv: list[str]) -> int:
    """`sluice send TOPIC [BODY]`."""
    parser = _parser(
        "send", "Sends messages to a topic, which is made by it where that is allowed."
    )
    parser.add_argument(
        "body", nargs="?", help="the message; without it, one message per line of stdin"
    )
    parser.add_argument("-t", "--tag", help="tag that consumers filter by")
    parser.add_argument("-k", "--key", help="keys to find it by, separated by blanks")
    parser.add_argument(
        "-p", "--property", action="append", default=[], metavar="NAME=VALUE", help="may repeat"
    )
    parser.add_argument("--count", type=int, default=1, help="send it so many times. Default: 1.")
    arguments = parser.parse_args(argv)
    if arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: at least 1")
    return _run(_send(arguments))


def tail(argv: list[str]) -> int:
    """`sluice tail TOPIC`."""
    parser = _parser("tail", "Prints the messages of a topic as they come, until stopped.")
    parser.add_argument(
        "--from-beginning", action="store_true", help="first all that are there, then the new ones"
    )
    parser.add_argument("--tag", default="*", help="only these tags, as in `TagA || TagB`")
    parser.add_argument("--count", type=int, default=0, help="stop after so many. Default: never.")
    arguments = parser.parse_args(argv)
    if arguments.count < 0:
        raise ConfigError(f"--count {arguments.count}: at least 1, or 0 for no end")
    return _run(_tail(arguments))


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sluice {name}", description=description, allow_abbrev=False
    )
    parser.add_argument("topic", help="name of the topic")
    parser.add_argument(
        "-n", "--nameserver", help="host:port, several with ;. Default: $NAMESRV_ADDR, then local."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_tls_flags(parser)
    return parser


def _run(work: Coroutine[None, None, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _send(arguments: argparse.Namespace) -> int:
    properties = {}
    for item in arguments.property:
        name, mark, value = item.partition("=")
        if not mark or not name:
            raise ConfigError(f"-p {item}: write NAME=VALUE")
        properties[name] = value
    if arguments.tag:
        properties["TAGS"] = arguments.tag
    if arguments.key:
        properties["KEYS"] = arguments.key
    nameservers = nameserver_address(arguments.nameserver)
    async with SimpleClient(nameservers, tls_of(arguments)) as client:
        queues = cycle(await client.send_queues(arguments.topic))
        async for body in _bodies(arguments):
            result = await client.send(arguments.topic, next(queues), body, properties)
            if arguments.json:
                _line(orjson.dumps(result._asdict()).decode())
            else:
                _line(
                    f"sent {arguments.topic}/{result.queue_id} offset {result.queue_offset} "
                    f"id {result.message_id}"
                )
    return 0


async def _bodies(arguments: argparse.Namespace) -> AsyncIterator[bytes]:
    if arguments.body is not None:
        for _ in range(arguments.count):
            yield arguments.body.encode()
        return
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    places = threading.Semaphore(_LINES_WAITING_MAX)
    where = (sys.stdin.fileno(), asyncio.get_running_loop(), lines, places)
    threading.Thread(target=_read_lines, args=where, name="sluice-stdin", daemon=True).start()
    while line := await lines.get():
        places.release()
        if line != b"\n":
            yield line.removesuffix(b"\n")


def _read_lines(
    file: int,
    loop: asyncio.AbstractEventLoop,
    lines: asyncio.Queue[bytes],
    places: threading.Semaphore,
) -> None:
    """On a thread: lines as they come, nothing at the end. The loop sees to connections meanwhile.

    With a reader of its own: the interpreter could not end while a thread waits in sys.stdin's.
    """
    try:
        with open(file, "rb", closefd=False) as stream:
            for line in chain(stream, (b"",)):
                places.acquire()
                loop.call_soon_threadsafe(lines.put_nowait, line)
    except RuntimeError:
        pass  # the loop has ended, with an error that was told


async def _tail(arguments: argparse.Namespace) -> int:
    nameservers = nameserver_address(arguments.nameserver)
    async with SimpleClient(nameservers, tls_of(arguments)) as client:
        queues = await client.queues(arguments.topic, writing=False)
        left = [arguments.count or -1]
        enough = asyncio.Event()
        tasks = [
            asyncio.ensure_future(_follow(client, arguments, queue, left, enough))
            for queue in queues
        ]
        stopper = asyncio.ensure_future(enough.wait())
        every = [*tasks, stopper]
        try:
            done, _ = await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        finally:  # Ctrl-C too: no task is left that complains of a connection that is closed
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)
        for task in done:
            task.result()
    return 0


async def _follow(
    client: SimpleClient,
    arguments: argparse.Namespace,
    queue: QueueAt,
    left: list[int],
    enough: asyncio.Event,
) -> None:
    code = Request.GET_MIN_OFFSET if arguments.from_beginning else Request.GET_MAX_OFFSET
    offset = await client.offset(arguments.topic, queue, code)
    while not enough.is_set():
        entries, offset = await client.pull(
            arguments.topic, queue, offset, expression=arguments.tag, wait_ms=_WAIT_MS
        )
        for entry in entries:
            if left[0] == 0:
                return
            _line(_as_json(entry) if arguments.json else _as_text(entry))
            left[0] -= 1
            if left[0] == 0:
                enough.set()


def _body(entry: records.Entry) -> bytes:
    """The body as its producer gave it, or as it lies there where it cannot be unpacked here."""
    body = bytes(entry.body)
    try:
        return unpacked(body, entry.sys_flag)
    except ProtocolError:
        return body


def _as_text(entry: records.Entry) -> str:
    properties = records.parse_properties(entry.properties)
    when = datetime.fromtimestamp(entry.store_ms / 1000).strftime("%H:%M:%S.%f")[:-3]
    tag = f" [{properties['TAGS']}]" if "TAGS" in properties else ""
    body = _body(entry)[:2000].decode("utf-8", "replace")
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in body)
    return f"{when} {entry.topic}/{entry.queue_id} {entry.queue_offset}{tag} {shown}"


def _as_json(entry: records.Entry) -> str:
    return orjson.dumps(
        {
            "topic": entry.topic,
            "queue_id": entry.queue_id,
            "queue_offset": entry.queue_offset,
            "store_ms": entry.store_ms,
            "born_ms": entry.born_ms,
            "properties": records.parse_properties(entry.properties),
            "body": _body(entry).decode("utf-8", "replace"),
        }
    ).decode()


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
