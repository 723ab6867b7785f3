"""A program: a member of a group with Sluice's own client; prints events as Java's programs do.

python -m tests.interop.python_member NAMESERVER TOPIC GROUP push|orderly
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

from sluice import MessageQueue, PushConsumer, ReceivedMessage

_lock = threading.Lock()


def say(event: str, **values: Any) -> None:
    line = json.dumps({"event": event, **values}, separators=(",", ":"))
    with _lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def main() -> None:
    nameserver, topic, group, mode = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    periods: dict[MessageQueue, list[object]] = {}

    def handle(message: ReceivedMessage) -> None:
        # Each time that the queue is given to this member, there is a new lane for it.
        lane = consumer._aio.lanes.get(message.queue)
        known = periods.setdefault(message.queue, [])
        if lane is not None and (not known or known[-1] is not lane):
            known.append(lane)
        say(
            "received",
            reader=0,
            topic=message.topic,
            queueId=message.queue_id,
            queueOffset=message.queue_offset,
            id=message.properties["id"],
            period=len(known),
        )

    consumer = PushConsumer(
        nameserver,
        group=group,
        topics=topic,
        handler=handle,
        start_at="first",
        orderly=mode == "orderly",
        rebalance_ms=1000,
        commit_ms=500,
    )
    before = ""
    with consumer:
        while not stop.wait(0.05):
            queues = [queue for queue in consumer.assignment() if queue.topic == topic]
            now = " ".join(f"{queue.topic}/{queue.queue_id}" for queue in queues)
            if now != before:
                before = now
                say("owns", reader=0, group=group, queues=now)
    say("done")


if __name__ == "__main__":
    main()
