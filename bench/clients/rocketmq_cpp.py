"""This module is the package `rocketmq`: Python over RocketMQ's C++ client, which comes with it.

It has no automatic batching; `batched` gives it lists of messages, made by hand.
"""

import importlib
from typing import Any

from bench.clients import loads

LIST = 100


def main() -> None:
    job = loads.read_job()
    client: Any = importlib.import_module("rocketmq.client")
    if job.kind == "consume":
        consume(job, client)
        return
    producer = client.Producer(job.group)
    producer.set_namesrv_addr(job.address)
    producer.start()
    try:
        send(job, client, producer)
    finally:
        producer.shutdown()


def send(job: loads.Job, client: Any, producer: Any) -> None:
    def message(body: bytes) -> Any:
        made = client.Message(job.topic)
        made.set_body(body)
        return made

    def start(body: bytes) -> None:
        producer.send_async(message(body), lambda _: window.ended(), window.failed)

    if job.kind == "sync":
        loads.one_by_one(job, lambda body: producer.send_sync(message(body)))
    elif job.kind == "async":
        window = loads.Window(job.window)
        window.flood(job, start)
    else:

        def send_list(body: bytes) -> None:
            producer.send_batch([message(body) for _ in range(LIST)])

        loads.one_by_one(job, send_list, each=LIST)


def consume(job: loads.Job, client: Any) -> None:
    seen = loads.Window(1)

    def handle(message: Any) -> None:  # no word of failure means success
        assert len(message.body) == job.body_bytes
        seen.ended()

    consumer = client.PushConsumer(job.group)
    consumer.set_namesrv_addr(job.address)
    consumer.subscribe(job.topic, handle)
    consumer.start()
    try:
        loads.Reading(job).watch(lambda: seen.done)
    finally:
        consumer.shutdown()


if __name__ == "__main__":
    main()
