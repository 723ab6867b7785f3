"""This module is the package `rocketmq-python-client`: gRPC, so it speaks to RocketMQ's proxy.

It has no batches.
"""

import contextlib
import importlib
import os
import sys
import time
import traceback
from concurrent.futures import Future
from typing import Any

from bench.clients import loads

FIRST_TRIES_S = 30.0
COUNT = 32
INVISIBLE_S = 60
ERRORS_MAX = 20


def main() -> None:
    job = loads.read_job()
    client: Any = importlib.import_module("rocketmq")
    configuration = client.ClientConfiguration(job.address, client.Credentials())
    code = 0
    try:
        if job.kind == "consume":
            consume(job, client, configuration)
        else:
            producer = client.Producer(configuration, (job.topic,))
            producer.startup()
            send(job, client, producer)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # its threads would not let go for a while, and everything is said


def send(job: loads.Job, client: Any, producer: Any) -> None:
    def message(body: bytes) -> Any:
        made = client.Message()
        made.topic = job.topic
        made.body = body
        return made

    deadline = time.monotonic() + FIRST_TRIES_S
    while time.monotonic() < deadline:  # the first ones may come before its session is there
        with contextlib.suppress(Exception):
            producer.send(message(job.body))
            break
    if job.kind == "sync":
        loads.one_by_one(job, lambda body: producer.send(message(body)))
        return
    window = loads.Window(job.window)

    def told(sent: Future[Any]) -> None:
        error = sent.exception()
        if error is None:
            window.ended()
        else:
            window.failed(error)

    window.flood(job, lambda body: producer.send_async(message(body)).add_done_callback(told))


def consume(job: loads.Job, client: Any, configuration: Any) -> None:
    """Its simple consumer: receives up to 32 and acknowledges each by a request of its own.

    Its push consumer waited for settings that did not come, with the proxy before our broker.
    """
    consumer = client.SimpleConsumer(configuration, job.group)
    consumer.startup()
    consumer.subscribe(job.topic, client.FilterExpression("*"))
    reading, count = loads.Reading(job), 0
    errors: list[Exception] = []
    while not reading.is_over(count):
        try:
            messages = consumer.receive(COUNT, INVISIBLE_S)
        except Exception as error:  # the first ones may come before its session is there
            errors.append(error)
            if len(errors) > ERRORS_MAX:
                raise
            time.sleep(0.5)
            continue
        for message in messages:
            assert len(message.body) == job.body_bytes
            consumer.ack(message)
            count += 1


if __name__ == "__main__":
    main()
