"""This module is `aiokafka`: Kafka's protocol in Python, on asyncio, with parts in C."""

import asyncio
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from bench.clients import loads


async def main() -> None:
    job = loads.read_job()
    if job.kind == "consume":
        await consume(job)
        return
    options: dict[str, Any] = {"linger_ms": 5, "max_batch_size": 60 * 1024}
    producer = AIOKafkaProducer(
        bootstrap_servers=job.address, acks="all", **(options if job.kind == "batched" else {})
    )
    await producer.start()
    if job.kind == "sync":
        await one_by_one(job, producer)
    else:
        await flood(job, producer)
    await producer.stop()


async def one_by_one(job: loads.Job, producer: Any) -> None:
    clock = asyncio.get_running_loop().time
    begin, count = 0.0, 0
    for seconds in (job.warm_s, job.seconds):
        begin, count = clock(), 0
        while clock() < begin + seconds:
            await producer.send_and_wait(job.topic, job.body)
            count += 1
    loads.report(count, clock() - begin)


async def flood(job: loads.Job, producer: Any) -> None:
    """Its `send` is a coroutine that puts the message into a batch and returns a future."""
    clock = asyncio.get_running_loop().time
    waiting: list[Any] = []
    body = job.body
    took, count = 0.0, 0
    for seconds in (job.warm_s, job.seconds):
        begin, count = clock(), 0
        while clock() < begin + seconds:
            waiting.append(await producer.send(job.topic, body))
            if len(waiting) >= job.window:
                half = len(waiting) // 2
                for each in waiting[:half]:
                    await each
                del waiting[:half]
                count += half
        took = clock() - begin
    loads.report(count, took)
    for each in waiting:
        await each


async def consume(job: loads.Job) -> None:
    consumer = AIOKafkaConsumer(
        job.topic,
        bootstrap_servers=job.address,
        group_id=job.group,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    reading, count = loads.Reading(job), 0
    while not reading.is_over(count):
        for messages in (await consumer.getmany(timeout_ms=100)).values():
            for message in messages:
                assert len(message.value) == job.body_bytes
                count += 1
    await consumer.stop()


if __name__ == "__main__":
    asyncio.run(main())
