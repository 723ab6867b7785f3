"""This module is `confluent-kafka`: Python over librdkafka, a C library with threads of its own."""

from typing import Any

from confluent_kafka import Consumer, Producer

from bench.clients import loads

COUNT = 500


def main() -> None:
    job = loads.read_job()
    if job.kind == "consume":
        consume(job)
        return
    settings: dict[str, Any] = {"bootstrap.servers": job.address, "acks": "all"}
    if job.kind == "sync":
        settings["linger.ms"] = 0  # nothing follows that it could wait for
    producer = Producer(settings)
    if job.kind == "sync":
        loads.one_by_one(job, lambda body: send_one(producer, job.topic, body))
    elif job.kind == "fill":
        fill(job, producer)
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


def fill(job: loads.Job, producer: Any) -> None:
    for _ in range(job.count):
        while True:
            try:
                producer.produce(job.topic, job.body)
                break
            except BufferError:
                producer.poll(0.1)
    left = producer.flush(300)
    if left:
        raise SystemExit(f"{left} messages were not sent")
    loads.report(job.count, 1.0)


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
