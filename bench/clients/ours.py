"""This module is Sluice's own client: blocking for `sync`, on asyncio for everything else."""

import asyncio
from typing import Any

import uvloop

from bench.clients import loads
from sluice import Message, Producer, ReceivedMessage, aio


def main() -> None:
    job = loads.read_job()
    if job.kind == "sync":
        with Producer(job.address, group=job.group) as producer:
            loads.one_by_one(job, lambda body: producer.send(Message(job.topic, body)))
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_consume(job) if job.kind == "consume" else _send(job))


async def _send(job: loads.Job) -> None:
    async with aio.Producer(job.address, group=job.group, batching=job.kind != "async") as producer:

        def start(body: bytes) -> Any:
            return producer.send_async(Message(job.topic, body))

        await (loads.fill if job.kind == "fill" else loads.flood)(job, start)


async def _consume(job: loads.Job) -> None:
    async def handle(message: ReceivedMessage) -> None:
        assert len(message.body) == job.body_bytes

    async with aio.PushConsumer(
        job.address, group=job.group, topics=job.topic, handler=handle, start_at="first"
    ) as consumer:
        await loads.Reading(job).watch_soon(lambda: consumer.consumed_count)


if __name__ == "__main__":
    main()
