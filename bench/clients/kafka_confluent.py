"""This module is `confluent-kafka`: Python over librdkafka, a C library with threads of its own."""

import time
from typing import Any

from confluent_kafka import Consumer, Producer

from bench.clients import loads

COUNT = 500
FULL_WAIT_S = 0.005  # the library's queue is full: much of it has left after this time


def main() -> None:
    job = loads.read_job()
    if job.kind == "consume":
        consume(job)
        return
    settings: dict[str, Any] = {"bootstrap.servers": job.address, "acks": "all"}
    if job.kind == "fill":
        fill(job, settings)
        return
    if job.kind == "sync":
        settings["linger.ms"] = 0  # nothing follows that it could wait for
    producer = Producer(settings)
    if job.kind == "sync":
        loads.one_by_one(job, lambda body: send_one(producer, job.topic, body))
    else:
        flood(job, producer)
        producer.purge()


def send_one(producer: Any, topic: str, body: bytes) -> None:
    told: list[object] = []
    producer.produce(topic, body, on_delivery=lambda error, _: told.append(error))
    while not told:
        producer.poll(1)
    if told[0] is not None:
        raise SystemExit(f"a send failed: {told[0]}")


def flood(job: loads.Job, producer: Any) -> None:
    """Its callbacks come when it is polled, on this thread."""
    window = loads.Window(job.window)
    under_way = [0]

    def told(error: object, _: object) -> None:
        under_way[0] -= 1
        if error is not None:
            window.failed(error)
        else:
            window.ended()

    def start(body: bytes) -> None:
        producer.produce(job.topic, body, on_delivery=told)
        under_way[0] += 1
        producer.poll(0)
        while under_way[0] >= job.window:
            producer.poll(0.1)

    window.flood(job, start)


def fill(job: loads.Job, settings: dict[str, Any]) -> None:
    """Send so many, as quickly as it goes: Python hears of those only that fail."""
    failures: list[object] = []
    settings["delivery.report.only.error"] = True
    settings["on_delivery"] = lambda error, _: failures.append(error)
    producer: Any = Producer(settings)
    topic, body = job.topic, job.body
    begin = time.perf_counter()
    for _ in range(job.count):
        while True:
            try:
                producer.produce(topic, body)
                break
            except BufferError:
                producer.poll(FULL_WAIT_S)
    left = producer.flush(300)
    seconds = time.perf_counter() - begin
    if left or failures:
        raise SystemExit(f"{left + len(failures)} messages were not sent: {failures[:1]}")
    loads.report(job.count, seconds)


def consume(job: loads.Job) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": job.address,
            "group.id": job.group,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([job.topic])
    reading, count = loads.Reading(job), 0
    while not reading.is_over(count):
        for message in consumer.consume(COUNT, 0.1):
            if message.error() is not None:
                raise SystemExit(str(message.error()))
            assert len(message.value() or b"") == job.body_bytes
            count += 1
    consumer.close()


if __name__ == "__main__":
    main()
