"""Pulls with SQL filters: what comes, who is woken, and what is refused without harm to others."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import orjson
import pytest

from sluice.broker.filters import Subscription, parse, parse_or_keep
from sluice.errors import SubscriptionIllegal
from sluice.protocol import remoting_clients as bodies
from sluice.protocol.message_batches import join_batch
from sluice.protocol.records import java_hash
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from tests.unit.broker.broker_kit import (
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    Rig,
    pull_fields,
    running,
    send_fields,
)
from tests.unit.loops import run_once, until

SQL: dict[str, Any] = {"expressionType": "SQL92"}


def numbers(answer: RemotingCommand) -> list[int]:
    """The property n of all messages of an answer."""
    return [int(n) for n in re.findall(rb"\x02?n\x01(\d+)\x02", bytes(answer.body))]


def heartbeat(group: str, *wanted: bodies.Subscription, client_id: str = "client-1") -> bytes:
    consumer = bodies.ConsumerData(
        group, "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET", wanted
    )
    return bodies.write_heartbeat(bodies.Heartbeat(client_id, (), (consumer,)))


def check_body(expression: str, kind: str = "SQL92") -> bytes:
    wanted = bodies.Subscription("orders", expression, 1, expression_type=kind)
    return orjson.dumps({"clientId": "c", "group": "g", "subscriptionData": wanted.members()})


def sql(topic: str, expression: str, version: int = 1) -> bodies.Subscription:
    return bodies.Subscription(topic, expression, version, expression_type="SQL92")


async def fill(rig: Rig, count: int = 10) -> None:
    await rig.make_topic("orders")
    await rig.make_group("readers")
    for number in range(count):
        await rig.send("orders", n=str(number), TAGS="TagA" if number % 2 else "TagB")


def test_a_pull_says_itself_what_it_wants() -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig)
            wanted = "n BETWEEN 3 AND 5 OR TAGS = 'TagB'"
            fields = pull_fields("orders", 0, 0, "readers", FLAG_SUBSCRIPTION)
            for code in (Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE):
                answer = await rig.done(code, {**fields, "subscription": wanted, **SQL})
                assert numbers(answer) == [0, 2, 3, 4, 5, 6, 8]
                assert answer.ext["nextBeginOffset"] == "10"
            nothing = await rig.pull("orders", 4, subscription="n > 100", **SQL)
            assert (nothing.code, nothing.ext["nextBeginOffset"]) == (
                Response.PULL_RETRY_IMMEDIATELY,
                "10",
            )

    run_once(work())


def test_a_heartbeat_says_what_the_group_wants() -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig)
            body = heartbeat(
                "readers", sql("orders", "n < 2"), bodies.Subscription("%RETRY%readers")
            )
            await rig.done(Request.HEART_BEAT, body=body)
            assert numbers(await rig.pull("orders", 0, flags=0, subVersion=1)) == [0, 1]
            body = heartbeat("readers", sql("orders", "n > 7", 2))
            await rig.done(Request.HEART_BEAT, body=body)
            assert numbers(await rig.pull("orders", 0, flags=0, subVersion=2)) == [8, 9]
            shown = await rig.json(
                Request.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "readers"}
            )
            (wanted,) = shown["subscriptionTable"].values()
            assert (wanted["expressionType"], wanted["subString"]) == ("SQL92", "n > 7")

    run_once(work())


def test_messages_of_a_batch_are_wanted_one_by_one() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            parts = [(0, b"x", b"n\x01%d\x02TAGS\x01T%d\x02" % (n, n % 2)) for n in range(6)]
            fields = {**send_fields("orders"), "m": "true"}
            await rig.done(Request.SEND_BATCH_MESSAGE, fields, join_batch(parts))
            assert numbers(await rig.pull("orders", 0, subscription="n > 3", **SQL)) == [4, 5]
            assert numbers(await rig.pull("orders", 0, subscription="T1")) == [1, 3, 5]

    run_once(work())


def test_only_a_message_that_is_wanted_ends_the_wait() -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig, 1)
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            link = await rig.connect()
            waits = asyncio.create_task(
                rig.pull("orders", 1, flags=flags, subscription="n = 7", link=link, **SQL)
            )
            polls = rig.broker.core.polls
            await until(lambda: polls.held_count == 1)
            for number in range(1, 5):
                await rig.send("orders", n=str(number))
                await until(lambda: polls.held_count == 1)
                assert not waits.done()
            await rig.send("orders", n="7")
            answer = await waits
            assert (answer.code, numbers(answer)) == (0, [7])
            assert answer.ext["nextBeginOffset"] == "6"

    run_once(work())


def test_who_waited_for_nothing_goes_on_behind_what_came() -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig, 1)
            flags = FLAG_SUBSCRIPTION | FLAG_SUSPEND
            waits = asyncio.create_task(
                rig.pull("orders", 1, flags=flags, subscription="n = 7", **SQL)
            )
            core = rig.broker.core
            await until(lambda: core.polls.held_count == 1)
            other = await rig.connect()
            await rig.ask(Request.SEND_MESSAGE_V2, send_fields("orders", n="3"), b"x", link=other)
            await until(lambda: core.polls.held_count == 1)
            core.polls.tick(core.now_ms() + 60_000)
            answer = await waits
            assert (answer.code, answer.ext["nextBeginOffset"]) == (
                Response.PULL_RETRY_IMMEDIATELY,
                "2",
            )

    run_once(work())


def test_a_wrong_filter_is_refused_where_it_is_asked_for() -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig)
            where = "the SQL filter is wrong at character 5: "
            code, remark = await rig.refused(
                Request.CHECK_CLIENT_CONFIG, body=check_body("n > 'x'")
            )
            assert (code, remark[:37]) == (23, "the SQL filter is wrong at character ")
            code, remark = await rig.refused(Request.CHECK_CLIENT_CONFIG, body=check_body("n = "))
            assert (code, remark.startswith(where)) == (23, True)
            code, remark = await rig.refused(
                Request.CHECK_CLIENT_CONFIG, body=check_body("n = 1" + " " * 10_000)
            )
            assert (code, remark) == (23, "the SQL filter has 10005 characters, 8192 at most")
            answer = await rig.pull("orders", 0, subscription="n = ", **SQL)
            assert (answer.code, (answer.remark or "").startswith(where)) == (23, True)
            await rig.done(Request.CHECK_CLIENT_CONFIG, body=check_body("n = 1"))
            await rig.done(Request.CHECK_CLIENT_CONFIG, body=check_body("TagA || TagB", "TAG"))

    run_once(work())


def test_a_wrong_filter_in_a_heartbeat_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig)
            body = heartbeat("readers", sql("orders", "n = = 1"), bodies.Subscription("others"))
            with caplog.at_level(logging.WARNING, "sluice.broker"):
                await rig.done(Request.HEART_BEAT, body=body)
                await rig.done(Request.HEART_BEAT, body=body)
            assert [r.getMessage() for r in caplog.records if "character 5" in r.getMessage()] == [
                "consumer client-1 of group readers, subscription to orders: the SQL filter is "
                "wrong at character 5: a property or a value is expected, found '= 1'"
            ]
            await rig.make_topic("others")
            await rig.send("others", n="1")
            assert numbers(await rig.pull("others", 0, flags=0)) == [1]
            answer = await rig.pull("orders", 0, flags=0)
            assert (answer.code, "wrong at character 5" in (answer.remark or "")) == (23, True)
            # Nothing was lost: the next heartbeat is right, and everything is there.
            await rig.done(Request.HEART_BEAT, body=heartbeat("readers", sql("orders", "n > 7", 2)))
            assert numbers(await rig.pull("orders", 0, flags=0)) == [8, 9]

    run_once(work())


def test_what_is_ignored_of_a_filter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig)
            body = heartbeat("readers", sql("orders", "n > 7 n < 9"))
            with caplog.at_level(logging.WARNING, "sluice.broker"):
                await rig.done(Request.HEART_BEAT, body=body)
            assert "what follows is ignored, as RocketMQ does: 'n < 9'" in caplog.text
            assert numbers(await rig.pull("orders", 0, flags=0)) == [8, 9]

    run_once(work())


def test_filters_can_be_switched_off_and_on() -> None:
    async def work() -> None:
        async with running(sql_filter=False) as rig:
            await fill(rig)
            remark = "The broker does not support consumer to filter message by SQL92"
            for body in (check_body("n = 1"), check_body("n = ")):
                found = await rig.refused(Request.CHECK_CLIENT_CONFIG, body=body)
                assert (found[0], found[1].startswith(remark)) == (1, True)
            answer = await rig.pull("orders", 0, subscription="n = 1", **SQL)
            assert (answer.code, (answer.remark or "").startswith(remark)) == (1, True)
            assert (await rig.pull("orders", 0, subscription="TagA")).code == 0
            await rig.done(Request.UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=true")
            assert numbers(await rig.pull("orders", 0, subscription="n = 1", **SQL)) == [1]

    run_once(work())


def test_members_that_filter_differently_are_told_apart() -> None:
    async def work() -> None:
        async with running() as rig:
            await fill(rig, 1)
            one, two = sql("orders", "n = 1"), bodies.Subscription("orders", "n = 1", 1)
            await rig.done(Request.HEART_BEAT, body=heartbeat("readers", one, client_id="a"))
            link = await rig.connect()
            body = heartbeat("readers", two, client_id="b")
            assert (await rig.ask(Request.HEART_BEAT, body=body, link=link)).code == 0
            assert rig.broker.core.clients.disagreements() == {
                "readers": ["orders: 'SQL92 n = 1' by a; 'n = 1' by b"]
            }

    run_once(work())


@pytest.mark.parametrize(
    ("kind", "expression", "wanted"),
    [
        *((None, "*", True), ("TAG", "TagA", True), ("TAG", "TagB || TagC", False)),
        *(("SQL92", "n = 1", True), ("SQL92", "n = 2", False), ("SQL92", "n = ", False)),
    ],
)
def test_one_message_can_be_asked_about(kind: Any, expression: str, wanted: bool) -> None:
    subscription = parse_or_keep("orders", expression, kind)
    assert subscription.matches_record(java_hash(b"TagA"), b"TAGS\x01TagA\x02n\x011\x02") is wanted


def test_subscriptions_are_the_same_by_kind_and_words() -> None:
    assert parse("t", "n = 1", "SQL92").same_as(parse("t", "n = 1", "SQL92", 7))
    assert not parse("t", "n", "SQL92").same_as(parse("t", "n", "TAG"))
    assert parse("t", "n = 1", "SQL92") == parse("t", "n = 1", "SQL92")
    assert parse("t", None, None) == Subscription("t")
    with pytest.raises(SubscriptionIllegal, match="wrong at character 1"):
        parse("t", None, "SQL92")
