"""When the broker can take no more: the answer names what is short, and clients try again."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import pytest

from sluice.broker.admission import Admission
from sluice.broker.core import BrokerCore
from sluice.config import BrokerConfig
from sluice.errors import Busy
from sluice.link import RemotingLink
from sluice.model import Message
from sluice.protocol.remoting import BINARY, JSON
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.background import Steps
from sluice.storage.memory_files import MemoryFiles
from sluice.storage.opening import open_store
from tests.unit.broker.broker_kit import (
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    SlowDisk,
    broker_config,
    running,
    send_fields,
)
from tests.unit.loops import run_once, until

MIB = 1024 * 1024
# What Apache's producers send again, to this broker or another (ROCKETMQ-WIRE: 1, 2, 14, 16, 17).
SENT_AGAIN = {2, 14}


def sync(config: BrokerConfig) -> BrokerConfig:
    return replace(config, store=replace(config.store, flush="sync"))


class Scale:
    """An admission over a store whose disk does nothing until told."""

    def __init__(self, *, bytes_max: int, requests_max: int) -> None:
        self.disk = Steps()
        config = sync(broker_config())
        store = open_store(config.store, MemoryFiles(), self.disk, lambda: 1000, bytes(8))
        self.core = BrokerCore(config, store, lambda: 1000, lambda _: None)
        self.disk.run_all()
        self.admission = Admission(store, bytes_max=bytes_max, requests_max=requests_max)

    def send(self, sender: bytes, size: int = 1000) -> None:
        """As the sending service does it."""
        store = self.core.store
        if store.log.end > self.admission.free_end:
            self.admission.admit(sender, size)
        store.stage(Message("t", 0, bytes(size)), lambda _: None)
        store.write_staged()
        self.admission.end_turn()

    def sends(self, sender: bytes, count: int, size: int = 1000) -> int:
        """How many are taken before one is refused."""
        for taken in range(count):
            try:
                self.send(sender, size)
            except Busy:
                return taken
        return count


def test_nothing_is_refused_while_the_disk_keeps_up() -> None:
    scale = Scale(bytes_max=10_000, requests_max=10)
    for _ in range(100):
        scale.send(b"one", 4000)
        scale.disk.run_all()
    assert scale.admission.waiting_bytes == 0
    assert scale.admission.refused_count == 0


def test_bytes_that_wait_for_the_disk_are_bounded_and_named() -> None:
    scale = Scale(bytes_max=100_000, requests_max=1000)
    senders = [b"%d" % number for number in range(20)]
    assert sum(scale.sends(sender, 100) for sender in senders) < 100
    assert 90_000 < scale.admission.waiting_bytes <= 100_000 + 200
    with pytest.raises(
        Busy, match=r"bytes of messages wait for the disk, the limit is 100000 \("
    ) as e:
        scale.send(b"new")
    assert "inflight_bytes_max" in str(e.value)
    scale.disk.run_all()
    scale.send(b"new")


def test_many_small_sends_are_bounded_by_their_number() -> None:
    scale = Scale(bytes_max=100 * MIB, requests_max=100)
    senders = [b"%d" % number for number in range(20)]
    assert sum(scale.sends(sender, 100, 1) for sender in senders) == 100
    with pytest.raises(Busy, match=r"100 sends wait for the disk, the limit is 100 \(inflight_req"):
        scale.send(b"new", 1)
    scale.disk.run_all()
    scale.send(b"new", 1)
    assert scale.admission.free_end > 0


def test_who_floods_is_refused_before_the_others_are() -> None:
    scale = Scale(bytes_max=100_000, requests_max=1000)
    taken = scale.sends(b"flood", 1000)
    assert taken < 75, "half of the bound and an eighth"
    with pytest.raises(Busy, match=r"sends of this connection .* its share is 12500 of 100000"):
        scale.send(b"flood")
    assert scale.sends(b"other", 5) == 5
    assert scale.sends(b"flood", 1) == 0
    # What waited is safe now: everybody begins anew.
    scale.disk.run_all()
    assert scale.sends(b"flood", 40) == 40


def batch(body: bytes) -> bytes:
    """RocketMQ's form of a batch, with one message."""
    head = struct.pack(">5i", 22 + len(body), 0, 0, 0, len(body))
    return head + body + bytes(2)


@pytest.mark.parametrize(
    ("code", "serialization"),
    [
        (Request.SEND_MESSAGE_V2, JSON),
        (Request.SEND_MESSAGE_V2, BINARY),
        (Request.SEND_BATCH_MESSAGE, JSON),
    ],
    ids=["json", "binary", "batch"],
)
def test_sends_beyond_the_bound_are_refused_by_name_and_the_others_are_stored(
    code: int, serialization: int
) -> None:
    async def work() -> None:
        disk = SlowDisk()
        store = replace(broker_config().store, flush="sync")
        async with running(files=disk, store=store, inflight_bytes_max=MIB) as rig:
            await rig.make_topic("orders")
            address = rig.broker.address
            links = [
                await RemotingLink.open(address, serialization=serialization) for _ in range(20)
            ]
            body = bytes(20_000)
            fields = send_fields("orders", UNIQ_KEY="0123456789ABCDEF")
            with disk.hanging():
                sends = [
                    asyncio.create_task(
                        rig.ask(
                            code,
                            fields,
                            batch(body) if code == Request.SEND_BATCH_MESSAGE else body,
                            link,
                        )
                    )
                    for link in links
                    for _ in range(10)
                ]
                admission = rig.broker.core.admission
                await until(lambda: admission.refused_count > 50)
                # The rest of a log file that is too short for one more counts too.
                assert admission.waiting_bytes <= MIB + len(body) + 4096
            answers = await asyncio.gather(*sends)
            refused = [answer for answer in answers if answer.code]
            assert {answer.code for answer in refused} == {2}
            assert SENT_AGAIN.issuperset(answer.code for answer in refused)
            assert all("inflight_bytes_max" in str(answer.remark) for answer in refused)
            stored = {int(a.ext["queueOffset"]) for a in answers if not a.code}
            assert stored == set(range(len(answers) - len(refused)))
            await rig.send("orders")
            for link in links:
                await link.close()

    run_once(work())


def test_a_full_disk_is_named_with_its_ratio_and_setting() -> None:
    async def work() -> None:
        disk = MemoryFiles(capacity_bytes=32 * MIB)
        store = replace(
            broker_config().store,
            disk_refuse_ratio=0.5,
            disk_clean_ratio=0.5,
            disk_force_ratio=0.5,
        )
        async with running(files=disk, store=store) as rig:
            await rig.make_topic("orders")
            body = bytes(60_000)
            answer = await rig.ask(Request.SEND_MESSAGE_V2, send_fields("orders"), body)
            while not answer.code:
                rig.broker.store.housekeeping._look_at_disk()
                answer = await rig.ask(Request.SEND_MESSAGE_V2, send_fields("orders"), body)
            assert answer.code in SENT_AGAIN
            remark = str(answer.remark)
            assert remark.startswith("the disk of /store is ")
            assert "the limit is 50% (disk_refuse_ratio)" in remark
            # Reading goes on, and so does deleting.
            assert (await rig.pull("orders", 0)).code == 0
            await rig.make_topic("more")

    run_once(work())


def test_pulls_beyond_the_bound_are_refused_by_name_and_wait_again_later() -> None:
    async def work() -> None:
        async with running(held_polls_max=5, held_polls_per_connection_max=3) as rig:
            await rig.make_topic("orders")
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            first, second = await rig.connect(), await rig.connect()
            polls = rig.broker.core.polls

            def pull(link: Any) -> asyncio.Task[Any]:
                return asyncio.create_task(rig.pull("orders", 0, flags=flags, link=link))

            waiting = [pull(first) for _ in range(3)]
            await until(lambda: polls.held_count == 3)
            refused = await pull(first)
            assert refused.code == 2
            assert "3 (held_polls_per_connection_max)" in refused.remark
            waiting += [pull(second) for _ in range(2)]
            await until(lambda: polls.held_count == 5)
            refused = await pull(second)
            assert "5 pulls wait for messages, the limit is 5 (held_polls_max)" in refused.remark
            await rig.send("orders")
            assert [answer.code for answer in await asyncio.gather(*waiting)] == [0] * 5
            assert polls.held_count == 0

    run_once(work())
