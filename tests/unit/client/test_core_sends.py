"""Where sends go, and whether they go again; settings; batches; trace lines."""

from __future__ import annotations

import re
from dataclasses import MISSING
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sluice.client.core import tracing
from sluice.client.core.batches import Accumulator
from sluice.client.core.faults import FaultTable
from sluice.client.core.messages import Message
from sluice.client.core.refusals import is_worth_another_try, refusal
from sluice.client.core.routes import Publishing, read_address, read_queues, write_queues
from sluice.client.core.sends import Tries, check_size, choose_queue, fixed_queue
from sluice.client.core.settings import (
    ClientSettings,
    ConsumerSettings,
    ProducerSettings,
    PullSettings,
    PushSettings,
    make_settings,
    split_nameservers,
)
from sluice.client.core.subscriptions import make_subscription, wanted_of
from sluice.client.core.transactions import TransactionState, place_of, state_of
from sluice.errors import (
    BrokerRefused,
    Busy,
    ConfigError,
    LinkLost,
    MessageIllegal,
    MessageInvalid,
    MessageTooLarge,
    NoPermission,
    ProtocolError,
    RequestTimedOut,
    SendFailed,
    SluiceError,
    TopicMissing,
)
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting_bodies import BrokerData, QueueData, Route

ROUTE = Route(
    (
        BrokerData("C", "b", {0: "b:1"}),
        BrokerData("C", "a", {0: "a:1", 1: "a:2"}),
        BrokerData("C", "headless", {1: "c:2"}),
    ),
    (
        QueueData("b", 2, 3, 6),
        QueueData("a", 2, 2, 6),
        QueueData("headless", 2, 2, 6),
    ),
)


def publishing(route: Route = ROUTE) -> Publishing:
    return Publishing("t", route, write_queues(route, "t"))


def test_queues_that_can_be_written_have_a_master_and_the_permission() -> None:
    assert [f"{q.broker_name}{q.queue_id}" for q in write_queues(ROUTE, "t")] == [
        *("a0", "a1", "b0", "b1", "b2"),
    ]
    assert len(write_queues(ROUTE, "t", 1)) == 2
    assert len(read_queues(ROUTE, "t")) == 6
    read_only = ROUTE._replace(queues=(QueueData("a", 2, 2, 4),))
    assert write_queues(read_only, "t") == ()
    assert len(read_queues(read_only, "t")) == 2
    assert read_queues(ROUTE._replace(queues=(QueueData("a", 2, 2, 2),)), "t") == ()


def test_where_to_read() -> None:
    assert read_address({0: "m", 1: "s"}) == "m"
    assert read_address({0: "m", 1: "s"}, 1) == "s"
    assert read_address({2: "s"}) == "s"
    assert read_address({}) is None


def test_queues_in_turn() -> None:
    topic = publishing()
    faults = FaultTable()
    chosen = [choose_queue(topic, faults, "", 0.0) for _ in range(10)]
    assert chosen[:5] == list(topic.queues)
    assert chosen[5:] == list(topic.queues)


def test_a_broker_that_failed_is_left_alone_for_a_while() -> None:
    topic, faults = publishing(), FaultTable()
    faults.failed("a", 1000.0)
    names = {choose_queue(topic, faults, "", 2000.0).broker_name for _ in range(10)}
    assert names == {"b"}
    names = {choose_queue(topic, faults, "", 1000.0 + 10_001).broker_name for _ in range(10)}
    assert names == {"a", "b"}


def test_where_all_failed_the_first_to_come_back_is_taken() -> None:
    topic, faults = publishing(), FaultTable()
    faults.failed("b", 1000.0)
    faults.failed("a", 5000.0)
    assert {choose_queue(topic, faults, "", 6000.0).broker_name for _ in range(5)} == {"b"}


def test_the_slower_the_longer() -> None:
    faults = FaultTable()
    for took_ms, rest_ms in [(10, 0), (549, 0), (550, 2000), (3000, 6000), (15_000, 30_000)]:
        faults.answered("a", took_ms, 0.0)
        assert faults.is_available("a", rest_ms)
        assert not rest_ms or not faults.is_available("a", rest_ms - 1)
    faults.answered("a", 5, 0.0)
    assert faults.is_empty


def test_a_second_try_goes_to_another_broker() -> None:
    tries = Tries(3)
    assert tries.pause_ms(LinkLost("gone"), "a", 2, 1000.0) == 0
    assert tries.avoided == "a"
    names = {choose_queue(publishing(), FaultTable(), "a", 0.0).broker_name for _ in range(9)}
    assert names == {"b"}


def test_with_one_broker_it_waits_and_gives_up_in_time() -> None:
    tries = Tries(10)
    pauses = []
    left_ms = 1000.0
    while (pause := tries.pause_ms(LinkLost("gone"), "a", 1, left_ms)) is not None:
        pauses.append(pause)
        left_ms -= pause
    assert pauses == sorted(pauses)
    assert len(pauses) > 1
    assert left_ms > 0


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (RequestTimedOut("late"), True),
        (refusal(2, "busy", "w"), True),
        (refusal(14, "full", "w"), True),
        (refusal(16, "no", "w"), True),
        (refusal(17, "none", "w"), True),
        (refusal(1500, "bye", "w"), True),
        (refusal(13, "length", "w"), False),
        (refusal(29, "queue", "w"), False),
        (refusal(604, "late", "w"), False),
        (MessageInvalid("x"), False),
    ],
)
def test_what_is_tried_again(error: SluiceError, again: bool) -> None:
    assert is_worth_another_try(error) is again
    tries = Tries(2)
    assert (tries.pause_ms(error, "a", 2, 1000.0) is not None) is again
    assert tries.pause_ms(error, "b", 2, 1000.0) is None
    verdict = tries.verdict(error, "t")
    is_final = not again or isinstance(error, NoPermission | TopicMissing)
    assert (type(verdict) is SendFailed) is not is_final
    assert not is_final or verdict is error


def test_a_refusal_after_a_lost_answer_does_not_hide_that_it_may_be_stored() -> None:
    tries = Tries(2)
    assert tries.pause_ms(LinkLost("gone"), "a", 2, 1000.0) is not None
    refused = refusal(16, "forbidden", "w")
    assert tries.pause_ms(refused, "b", 2, 1000.0) is None
    verdict = tries.verdict(refused, "t")
    assert type(verdict) is SendFailed
    assert verdict.__cause__ is refused


@pytest.mark.parametrize(
    ("code", "remark", "kind", "words"),
    [
        (2, "busy", Busy, "send less"),
        (13, "body length", MessageTooLarge, "never take"),
        (13, "delay in a batch", MessageIllegal, "never take"),
        (16, "forbidden", NoPermission, "topicRoute"),
        (17, "no topic", TopicMissing, "updateTopic"),
        (604, None, BrokerRefused, "no reason given"),
    ],
)
def test_refusals_say_what_to_do(
    code: int, remark: str | None, kind: type[SluiceError], words: str
) -> None:
    error = refusal(code, remark, "sending to t")
    assert type(error) is kind
    assert words in str(error)
    assert f"code {code}" in str(error)


def test_sizes() -> None:
    message = Message("t", b"x" * 11)
    check_size(message, 0, 11)
    with pytest.raises(MessageTooLarge, match="message_bytes_max"):
        check_size(message, 0, 10)
    with pytest.raises(MessageTooLarge, match="32767"):
        check_size(message, 32768, 100)


def test_the_queue_that_a_message_has_to_go_to() -> None:
    queues = publishing().queues
    plain, keyed = Message("t", b"x"), Message("t", b"x", sharding_key="k")
    assert fixed_queue(plain, queues, None, None, None) is None
    assert fixed_queue(plain, queues, queues[1], None, None) == queues[1]
    assert fixed_queue(keyed, queues, None, None, None) == fixed_queue(
        keyed, queues, None, None, None
    )
    assert fixed_queue(plain, queues, None, lambda q, m, a: q[a], 2) == queues[2]
    no_queue: Any = lambda queues, message, argument: 5  # noqa: E731
    with pytest.raises(MessageInvalid, match="no queue"):
        fixed_queue(plain, queues, None, no_queue, None)
    with pytest.raises(MessageInvalid, match="no queue of topic t"):
        fixed_queue(plain, queues, MessageQueue("other", "a", 0), None, None)
    with pytest.raises(MessageInvalid, match="the selector raised IndexError"):
        fixed_queue(plain, queues, None, lambda q, m, a: q[a], 99)


# --------------------------------------------------------------------------------------- settings


def test_nameservers_in_order_of_precedence() -> None:
    def found(argument: str | None, **sources: dict[str, str]) -> tuple[str, ...]:
        properties, environ = sources.get("properties", {}), sources.get("environ", {})
        return make_settings(ProducerSettings, argument, properties, environ, {}).nameservers

    by_property = {"rocketmq.namesrv.addr": "p:1"}
    environ = {"NAMESRV_ADDR": "e:1;f:1"}
    assert found("a:1", properties=by_property, environ=environ) == ("a:1",)
    assert found(None, properties=by_property, environ=environ) == ("p:1",)
    assert found(None, environ=environ) == ("e:1", "f:1")
    assert found(None) == ()
    assert split_nameservers([" a:1 ", "b:1;c:1", ""]) == ("a:1", "b:1", "c:1")
    url = {"rocketmq.namesrv.url": "http://h/x"}
    assert make_settings(ProducerSettings, None, url, {}, {}).nameserver_url == "http://h/x"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grup": "x"}, "no setting is called grup"),
        ({"group": "a b"}, "group 'a b'"),
        ({"group": ""}, "group ''"),
        ({"group": "g", "concurrency": 0}, "concurrency"),
        ({"group": "g", "start_at": "now"}, "start_at"),
        ({"group": "g", "queue_span_max": 0}, "queue_span_max"),
        ({"group": "g", "close_ms": 0}, "close_ms"),
        ({}, "a consumer needs the name of its group"),
        ({"group": 7}, "group: str, not int"),
        ({"group": "g", "consume_ms": "1000"}, "consume_ms: int, not str"),
        ({"group": "g", "concurrency": True}, "concurrency: int, not bool"),
        ({"group": "g", "orderly": 1}, "orderly: bool, not int"),
        ({"group": "g", "start_timestamp": "today"}, "start_timestamp: int or float or datetime"),
        ({"group": "g", "secret_key": 12345, "access_key": "k"}, "secret_key: str, not int"),
        ({"group": "g", "start_timestamp": 1.5}, "counts with start_at='timestamp' only"),
        ({"group": "g", "start_timestamp": datetime.now(), "start_at": "first"}, "give both"),
        ({"group": "g", "pull_wait_ms": 0}, "pull_wait_ms"),
        ({"group": "g", "nameserver_url": "https://h/x"}, "nameserver_url 'https://h/x': http://"),
        ({"group": "g", "nameserver_url": "http://h:x/y"}, "nameserver_url"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_settings(PushSettings, "h:1", None, {}, options)


@pytest.mark.parametrize("name", ["waiting_max", "default_queue_count", "compress_bytes_min"])
def test_settings_of_a_producer_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_settings(ProducerSettings, "h:1", None, {}, {name: -1})


@pytest.mark.parametrize(
    ("title", "kind", "base"),
    [
        ("Every client", ClientSettings, None),
        ("Producers", ProducerSettings, ClientSettings),
        ("Consumers", ConsumerSettings, ClientSettings),
        ("Push consumers", PushSettings, ConsumerSettings),
        ("Pull consumers", PullSettings, ConsumerSettings),
    ],
)
def test_the_page_lists_every_setting_with_its_default(
    title: str, kind: type[ClientSettings], base: type[ClientSettings] | None
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
    table = page.partition(f"| {title} | Default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.+?`) \| (\S.*?) \|", table, re.MULTILINE)
    shown = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    own = kind.__dataclass_fields__.keys() - (base.__dataclass_fields__ if base else {}).keys()
    assert shown.keys() == own - {"nameservers"}
    for name, text in shown.items():
        default = kind.__dataclass_fields__[name].default
        wanted = "needed" if default is MISSING else f"`{default!r}`".replace("'", '"')
        assert text == wanted, name


def test_nameservers_and_topics_of_a_wrong_type() -> None:
    for wrong in (9876, [9876], {"h:1": 1}.values()):
        with pytest.raises(ConfigError, match="nameservers: a text as host:port"):
            split_nameservers(wrong)  # type: ignore[arg-type]
    assert wanted_of("a") == wanted_of(["a"]) == {"a": "*"}
    assert wanted_of({"a": ["x", "y"]}) == {"a": ["x", "y"]}
    assert wanted_of("") == {}
    with pytest.raises(ConfigError, match="topics: a name, a list of names"):
        wanted_of(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tags as a text or a list, or an Sql"):
        make_subscription("t", 5, 1)  # type: ignore[arg-type]


# ------------------------------------------------------------------------- batches, transactions


def test_batches_are_full_by_size_or_count_and_due_by_time() -> None:
    batches: Accumulator[str] = Accumulator(100, 3, 0.5)
    assert batches.find("t", 0) is None
    batch = batches.begin("t", 0, 10.0, "future")
    assert batch.add(b"x" * 40, b"", 0, 40) == 0
    assert batches.find("t", 0) is batch
    assert batches.find("t", 1) is None
    assert batches.has_room(batch, 60)
    assert not batches.has_room(batch, 61)
    assert not batches.is_full(batch)
    batch.add(b"y", b"", 7, 1)
    batch.add(b"z", b"", 0, 1)
    assert batches.is_full(batch)
    assert batch.flags == {1: 7}
    assert batches.next_due() == 10.5
    assert batches.due(10.4) == []
    assert batches.due(10.5) == [batch]
    assert batches.next_due() is None
    other = batches.begin("t", 0, 11.0, "future")
    assert batches.has_room(other, 10**9)  # a message that is too large alone goes alone


def test_states_of_a_transaction() -> None:
    assert state_of(True) is TransactionState.COMMIT
    assert state_of(False) is TransactionState.ROLLBACK
    assert state_of(None) is TransactionState.UNKNOWN
    assert state_of(TransactionState.COMMIT) is TransactionState.COMMIT
    with pytest.raises(MessageInvalid, match="yes"):
        state_of("yes")
    assert place_of("7F00000100002A9F00000000000004D2", 5) == (5, 1234)
    with pytest.raises(ProtocolError, match="no message id"):
        place_of("?", 5)


def test_trace_lines_have_rocketmqs_parts() -> None:
    line = tracing.published(1, "g", "t", "U", "A", "k", "h:1", 5, 3, tracing.NORMAL, "O", True)
    assert line.endswith("\x02")
    assert line.rstrip("\x02").split("\x01") == [
        *("Pub", "1", "DefaultRegion", "g", "t", "U", "A", "k"),
        *("h:1", "5", "3", "0", "O", "true"),
    ]
    line = tracing.consuming(1, "g", "R", "U", 2, "k")
    assert line.rstrip("\x02").split("\x01") == [
        *("SubBefore", "1", "DefaultRegion", "g", "R", "U", "2", "k"),
    ]
    line = tracing.consumed("R", "U", 7, False, "k", tracing.EXCEPTION, 9, "g")
    assert line.rstrip("\x02").split("\x01") == [
        *("SubAfter", "R", "U", "7", "false", "k", "2", "9", "g"),
    ]
    line = tracing.ended_transaction(1, "g", "t", "U", "A", "k", "h:1", "X", "COMMIT", True)
    assert len(line.split("\x01")) == 13


def test_a_queue_shows_itself() -> None:
    assert str(MessageQueue("t", "a", 1)) == "MessageQueue(topic='t', broker_name='a', queue_id=1)"
