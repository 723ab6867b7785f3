"""What a pull consumer commits, and what it is asked for in a wrong way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.aio import Producer, PullConsumer
from sluice.client.aio.offset_file import OffsetFile
from sluice.client.core.messages import Message
from sluice.errors import ParameterInvalid
from sluice.protocol.json_members import MessageQueue
from tests.unit.client.admin_kit import Site
from tests.unit.loops import run_once, until


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    site.start()
    yield site
    site.stop()


async def fill(site: Site, topic: str) -> MessageQueue:
    async with Producer(site.nameserver.address) as producer:
        sent = await producer.send_batch([Message(topic, f"m{i}") for i in range(10)])
    return sent[0].queue


@pytest.mark.parametrize("auto_commit", [False, True])
@pytest.mark.parametrize("how", ["rebalance", "unsubscribe"])
def test_who_commits_by_hand_has_committed_nothing_else(
    site: Site, how: str, auto_commit: bool
) -> None:
    """Also where a queue is taken away: the next owner begins behind the last commit."""

    async def work() -> None:
        topic = f"Given-up-{how}-{auto_commit}"
        queue = await fill(site, topic)
        async with PullConsumer(
            site.nameserver.address,
            group=f"g-{topic}",
            topics=topic,
            start_at="first",
            auto_commit=auto_commit,
        ) as consumer:
            await until(lambda: queue in consumer.lanes)
            assert len(await consumer.poll(count=3)) == 3
            await consumer.commit()
            assert len(await consumer.poll(count=3)) == 3
            assert len(await consumer.poll(count=1)) == 1  # the three before it count as handled
            assert consumer.position(queue) == 6
            if how == "rebalance":
                await consumer._apply(topic, [])
            else:
                await consumer.unsubscribe(topic)
            assert await consumer.committed(queue) == (6 if auto_commit else 3)

    run_once(work())


def test_an_offset_that_was_committed_by_hand_is_left_by_the_next_commit(site: Site) -> None:
    async def work() -> None:
        queue = await fill(site, "Back-and-forth")
        async with PullConsumer(
            site.nameserver.address,
            group="back",
            topics="Back-and-forth",
            start_at="first",
            auto_commit=False,
        ) as consumer:
            await until(lambda: queue in consumer.lanes)
            await consumer.poll(count=4)
            await consumer.commit()
            await consumer.commit({queue: 1})
            assert await consumer.committed(queue) == 1
            await consumer.commit()
            assert await consumer.committed(queue) == 4

    run_once(work())


def test_what_is_no_queue_and_no_offset(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        queue = await fill(site, "Wrongly")
        wrong: Any
        async with PullConsumer(site.nameserver.address, group="wrongly") as consumer:
            for wrong in ("Wrongly", [("Wrongly", "broker-a", 0)]):
                with pytest.raises(ParameterInvalid, match="is no queue; take some of"):
                    await consumer.assign(wrong)
            with caplog.at_level(logging.WARNING):
                await consumer.assign([queue, queue._replace(queue_id=77)])
            assert consumer.assignment() == [queue]
            assert "queue_id=77) is assigned and cannot be read now" in caplog.text
            for wrong in ("5", 1.5, True, None):
                with pytest.raises(ParameterInvalid, match="is no number"):
                    consumer.seek(queue, wrong)
                with pytest.raises(ParameterInvalid, match="is no number"):
                    await consumer.commit({queue: wrong})
            for wrong in ([queue], 5):
                with pytest.raises(ParameterInvalid, match="a table of queues and offsets"):
                    await consumer.commit(wrong)
            with pytest.raises(ParameterInvalid, match="assignment"):
                consumer.pause([queue._replace(queue_id=78)])
            await consumer.assign([queue, queue._replace(queue_id=78)])
            assert consumer.assignment() == [queue]

    run_once(work())


def test_several_writers_of_one_offset_file(tmp_path: Path) -> None:
    """Broadcasting consumers of one group and machine share it: none finds half of a file."""
    queue = MessageQueue("t", "b", 0)
    files = [OffsetFile(str(tmp_path), "me", "g") for _ in range(4)]

    async def work() -> None:
        def write(file: OffsetFile, number: int) -> None:
            for offset in range(50):
                file.write({queue: number * 100 + offset})
                assert queue in file.read()

        await asyncio.gather(
            *(asyncio.to_thread(write, file, number) for number, file in enumerate(files))
        )

    run_once(work())
    assert [path.name for path in (tmp_path / "me" / "g").iterdir()] == ["offsets.json"]
