"""What is measured of duplicates, ended messages and topics in memory, against what was sent."""

from __future__ import annotations

from sluice.telemetry import Page
from tests.unit.broker.broker_kit import Rig, running
from tests.unit.loops import run_once
from tests.unit.prometheus_text import Read, read_page


async def page_of(rig: Rig) -> Read:
    page = Page()
    await rig.broker.metrics.collect(page)
    return read_page(page.text())


def test_numbers_are_those_of_what_happened() -> None:
    async def work() -> None:
        clock = [1_800_000_000_000]
        async with running(dedup_keys_max=50, now_ms=lambda: clock[0]) as rig:
            await rig.make_topic("once", attributes="+dedup.window.ms=60000")
            await rig.make_topic("timed", attributes="+message.ttl.ms=1000")
            bound = "+storage=memory,+memory.bytes.max=65536"
            await rig.make_topic("drops", 1, attributes=bound)
            await rig.make_topic("refuses", 1, attributes=f"{bound},+memory.when.full=refuse")
            for key in ("a", "a", "b", "a"):
                await rig.send("once", KEYS=key)
            for _ in range(4):
                await rig.send("drops", bytes(30_000))
            for _ in range(2):
                await rig.send("refuses", bytes(30_000))
            await rig.refused_send("refuses", filler="x" * 10_000)
            await rig.send("timed")
            await rig.send("timed")
            await rig.pull("timed", 0)
            clock[0] += 1_000
            await rig.pull("timed", 0)
            page = await page_of(rig)
            assert page.value("sluice_duplicates_suppressed_total", topic="once") == 2
            assert page.value("sluice_dedup_keys") == 2
            assert page.value("sluice_dedup_keys_max") == 50
            assert page.value("sluice_expired_messages_total", topic="timed") == 2
            assert page.value("sluice_memory_topics_dropped_messages_total", topic="drops") == 2
            assert page.value("sluice_memory_topics_refused_messages_total", topic="refuses") == 1
            assert 120_000 < page.value("sluice_memory_topics_bytes") < 131_072
            assert page.value("sluice_memory_topics_bytes_max") == 512 << 20

    run_once(work())
