"""Requests about delayed messages: sends, taking one back, the list of what waits."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from sluice.clock import wall_ms
from sluice.link import RemotingLink
from sluice.protocol.remoting import BINARY
from sluice.protocol.remoting_codes import RequestCode as Request
from tests.unit.broker.broker_kit import BROKER, Rig, running, send_fields
from tests.unit.loops import run_once, until

HOUR_MS = 3_600_000


class Clock:
    """The machine's time and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> int:
        return wall_ms() + self.ahead_ms


def handle_text(*parts: object) -> str:
    return base64.urlsafe_b64encode(" ".join(map(str, parts)).encode()).decode()


async def recall(rig: Rig, handle: str, topic: str = "orders") -> tuple[int, str]:
    fields = {"producerGroup": "senders", "topic": topic, "recallHandle": handle}
    answer = await rig.ask(Request.RECALL_MESSAGE, fields)
    return answer.code, answer.ext.get("msgId", "") if answer.code == 0 else answer.remark or ""


async def waiting(rig: Rig, **fields: object) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after = ""
    while True:
        answer = await rig.done(Request.SLUICE_LIST_DELAYED, {"after": after, **fields})
        rows += orjson.loads(answer.body)["messages"]
        after = answer.ext.get("after", "")
        if not after:
            return rows


def test_the_answer_of_a_timed_send_has_a_handle_and_the_others_have_none() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            timed = await rig.send("orders", b"x", 1, TIMER_DELAY_SEC="60", UNIQ_KEY="U1")
            version, topic, broker, time_text, unique = (
                base64.urlsafe_b64decode(timed["recallHandle"]).decode().split(" ")
            )
            assert (version, topic, broker, unique) == ("v1", "orders", BROKER, "U1")
            assert 0 < int(time_text) - 1 - wall_ms() <= 60_000
            assert (timed["queueId"], timed["queueOffset"]) == ("1", "0"), "the queue it asked for"
            assert "recallHandle" not in await rig.send("orders", DELAY="3")
            assert "recallHandle" not in await rig.send("orders")
            assert "recallHandle" not in await rig.send("orders", TIMER_DELIVER_MS="5")

    run_once(work())


def test_a_message_that_was_taken_back_is_never_delivered() -> None:
    async def work() -> None:
        clock = Clock()
        async with running(now_ms=clock) as rig:
            await rig.make_topic("orders")
            delays = rig.broker.core.delays
            first = await rig.send("orders", b"back", TIMER_DELAY_SEC="3600", UNIQ_KEY="U1")
            await rig.send("orders", b"stays", TIMER_DELAY_SEC="3600", UNIQ_KEY="U2")
            assert await recall(rig, first["recallHandle"]) == (0, "U1")
            assert await recall(rig, first["recallHandle"]) == (0, "U1"), "once more is once"
            assert [row["uniqueKey"] for row in await waiting(rig)] == ["U2"]
            assert (delays.recalled, delays.waiting_timers) == (1, 1)
            clock.ahead_ms = HOUR_MS + 1
            await until(lambda: delays.fired == 1)
            answer = await rig.pull("orders", 0)
            assert b"stays" in answer.body
            assert b"back" not in answer.body

    run_once(work())


def test_one_that_was_sent_twice_is_taken_back_twice() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            due = {"TIMER_DELIVER_MS": str(wall_ms() + HOUR_MS), "UNIQ_KEY": "U1"}
            handles = {(await rig.send("orders", b"x", 0, **due))["recallHandle"] for _ in range(2)}
            assert len(handles) == 1
            assert await recall(rig, handles.pop()) == (0, "U1")
            assert await waiting(rig) == []

    run_once(work())


def test_handles_that_name_nothing_are_refused_in_apaches_words() -> None:
    async def work() -> None:
        clock = Clock()
        async with running(now_ms=clock) as rig:
            await rig.make_topic("orders")
            await rig.make_topic("other")
            sent = await rig.send("orders", TIMER_DELAY_SEC="3600", UNIQ_KEY="U1")
            due = clock() + HOUR_MS - 60_000
            for topic, handle, code, words in (
                ("nowhere", sent["recallHandle"], 17, "the topic[nowhere] not exist"),
                ("other", sent["recallHandle"], 604, "topic not match"),
                ("orders", "*", 604, "recall handle is invalid"),
                ("orders", "\u4e2d", 604, "recall handle is invalid"),
                (
                    "orders",
                    handle_text("v2", "orders", BROKER, due, "U1"),
                    604,
                    "handle is invalid",
                ),
                ("orders", handle_text("v1", "orders", BROKER, due), 604, "handle is invalid"),
                ("orders", handle_text("v1", "orders", "b2", due, "U1"), 604, "not available"),
                (
                    "orders",
                    handle_text("v1", "orders", BROKER, "soon", "U1"),
                    604,
                    "timestamp invalid",
                ),
                ("orders", handle_text("v1", "orders", BROKER, "9" * 30, "U1"), 604, "timestamp"),
                ("orders", handle_text("v1", "orders", BROKER, 5, "U1"), 604, "timestamp invalid"),
            ):
                answered = await recall(rig, handle, topic)
                assert answered[0] == code, handle
                assert words in answered[1], handle
            assert len(await waiting(rig)) == 1
            clock.ahead_ms = HOUR_MS + 1
            await until(lambda: rig.broker.core.delays.fired == 1)
            assert await recall(rig, sent["recallHandle"]) == (
                604,
                "recall failed, timestamp invalid",
            )

    run_once(work())


def test_a_handle_that_no_waiting_message_has_is_done_with_and_takes_nothing_back() -> None:
    async def work() -> None:
        clock = Clock()
        async with running(now_ms=clock) as rig:
            for name in ("orders", "other"):
                await rig.make_topic(name)
            await rig.send("orders", TIMER_DELAY_SEC="3600", UNIQ_KEY="U1")
            due = clock() + HOUR_MS
            for topic, when_ms, key in (
                ("orders", due - 60_000, "U1"),
                ("orders", due, "U9"),
                ("other", due, "U1"),
            ):
                handle = handle_text("v1", topic, BROKER, when_ms, key)
                fields = {"topic": topic, "recallHandle": handle}
                answer = await rig.done(Request.RECALL_MESSAGE, fields)
                assert answer.ext["msgId"] == key
                assert answer.remark == "no message of this handle waits here"
            assert len(await waiting(rig)) == 1

    run_once(work())


def test_taking_back_can_be_switched_off() -> None:
    async def work() -> None:
        async with running(recall_messages=False) as rig:
            await rig.make_topic("orders")
            sent = await rig.send("orders", TIMER_DELAY_SEC="3600", UNIQ_KEY="U1")
            refused = (16, "recall failed, operation is forbidden")
            assert await recall(rig, sent["recallHandle"]) == refused

    run_once(work())


def test_what_waits_is_listed_in_order_of_time_page_by_page() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            await rig.make_topic("other")
            for number in range(300):
                kind = (
                    {"DELAY": "5"}
                    if number % 3 == 0
                    else {"TIMER_DELAY_SEC": str(100 - number % 9)}
                )
                await rig.send("orders" if number % 2 else "other", b"12345", 1, **kind)
            await rig.send("orders", b"1", 0, DELAY="1", KEYS="k", UNIQ_KEY="u")
            rows = await waiting(rig)
            assert len(rows) == 301
            times = [row["dueTimestamp"] for row in rows]
            assert times == sorted(times)
            first = rows[0]
            assert (first["delayLevel"], first["topic"], first["queueId"]) == (1, "orders", 0)
            assert (first["keys"], first["uniqueKey"], first["bodySize"]) == ("k", "u", 1)
            assert [row["topic"] for row in await waiting(rig, topic="other")] == ["other"] * 150
            _, words = await rig.refused(Request.SLUICE_LIST_DELAYED, {"after": "x"})
            assert "not what a page ended with" in words

    run_once(work())


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"TIMER_DELAY_SEC": "-1"}, "is not a time"),
        ({"TIMER_OUT_MS": "5"}, "TIMER_OUT_MS is the broker's own"),
        ({"DELAY": "x"}, "is not a number"),
        ({"TIMER_DELAY_SEC": str(41 * 86_400)}, "the limit is 3456000 s (timer_max_delay_ms)"),
    ],
)
def test_bad_delays_are_answered_with_13(properties: dict[str, str], words: str) -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            fields = send_fields("orders", 0, **properties)
            code, remark = await rig.refused(Request.SEND_MESSAGE_V2, fields, b"x")
            assert code == 13
            assert words in remark

    run_once(work())


def test_a_batch_with_a_delayed_message_is_refused_whole() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            parts = b""
            for properties in (b"a\x01b\x02", b"DELAY\x013\x02"):
                part = b"\0" * 12 + (1).to_bytes(4, "big") + b"x"
                part += len(properties).to_bytes(2, "big") + properties
                parts += (len(part) + 4).to_bytes(4, "big") + part
            fields = {**send_fields("orders"), "m": "true"}
            code, remark = await rig.refused(Request.SEND_BATCH_MESSAGE, fields, parts)
            assert (code, "one by one" in remark) == (13, True)
            assert rig.broker.store.max_offset("orders", 0) == 0

    run_once(work())


def test_the_limit_of_timers_follows_its_setting() -> None:
    async def work() -> None:
        async with running(timer_max_delay_ms=5_000) as rig:
            await rig.make_topic("orders")
            fields = send_fields("orders", 0, TIMER_DELAY_SEC="6")
            assert (await rig.refused(Request.SEND_MESSAGE_V2, fields, b"x"))[0] == 13
            body = b"timerMaxDelaySec=7\n"
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=body)
            await rig.done(Request.SEND_MESSAGE_V2, fields, b"x")

    run_once(work())


def test_sends_with_binary_headers_are_answered_as_those_with_json() -> None:
    async def work() -> None:
        clock = Clock()
        async with running(now_ms=clock) as rig:
            await rig.make_topic("orders")
            quick = await RemotingLink.open(rig.broker.address, serialization=BINARY)
            kinds: tuple[dict[str, str], ...] = ({"TIMER_DELAY_SEC": "60"}, {"DELAY": "2"}, {})
            for number, asked in enumerate(kinds):
                answers = []
                for link in (rig.link, quick):
                    fields = send_fields("orders", 1, **asked, UNIQ_KEY=f"U{number}", WAIT="true")
                    answers.append(await rig.ask(Request.SEND_MESSAGE_V2, fields, b"x", link=link))
                assert [answer.code for answer in answers] == [0, 0]
                first, second = (answer.ext for answer in answers)
                assert first.keys() == second.keys()
                assert ("recallHandle" in second) == ("TIMER_DELAY_SEC" in asked)
                assert int(second["queueOffset"]) == int(first["queueOffset"]) + 1
                assert second["queueId"] == "1"
            delays = rig.broker.core.delays
            await until(lambda: (delays.waiting_timers, delays.waiting_levels) == (2, 2))
            clock.ahead_ms = 60_000
            await until(lambda: delays.fired == 4)
            assert rig.broker.store.max_offset("orders", 1) == 6
            await quick.close()

    run_once(work())
