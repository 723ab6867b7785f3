"""Messages whose life ends: what is handed out, what is passed over, what is refused."""

from __future__ import annotations

import pytest

from sluice.broker.expiry import TTL_NAME
from sluice.broker.half_messages import Ending
from sluice.errors import MessageIllegal
from sluice.protocol import lifetimes, records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.protocol.records import java_hash
from sluice.storage.memory_files import KeepAll
from sluice.storage.store import ReadStatus
from tests.unit.broker.broker_kit import running
from tests.unit.broker.topic_kit import BEGIN_MS, TopicBroker
from tests.unit.loops import run_once

TTL = TTL_NAME.decode()
EXPIRES = EXPIRES_NAME.decode()


# -------------------------------------------------------------------------------- the queue's field


@pytest.mark.parametrize("tag", [b"", b"TagA", b"polygenelubricants"])  # the last: below zero
def test_the_lower_half_is_the_tags_hash_as_always(tag: bytes) -> None:
    text = b"TAGS\x01" + tag + b"\x02" if tag else b""
    plain = records.tags_code(b"t", text, 0, ())
    code = records.tags_code(b"t", text + EXPIRES_NAME + b"\x01%d\x02" % BEGIN_MS, 0, ())
    assert plain == (java_hash(tag) if tag else 0)
    assert lifetimes.without_end(code) == plain
    assert code >= lifetimes.LEAST > plain


@pytest.mark.parametrize("value", [b"", b"soon", b"-1", b"1" * 17])
def test_what_is_no_time_is_no_end(value: bytes) -> None:
    assert records.tags_code(b"t", EXPIRES_NAME + b"\x01" + value + b"\x02", 0, ()) == 0


@pytest.mark.parametrize("when_ms", [0, 1_577_836_800_000, BEGIN_MS, 10**16 - 1])
def test_any_time_fits_into_the_field(when_ms: int) -> None:
    assert lifetimes.LEAST <= lifetimes.code_of(when_ms) < 1 << 63


# ----------------------------------------------------------------------------------------- delivery


def test_a_message_is_handed_out_until_its_time_is_over() -> None:
    broker = TopicBroker()
    broker.make()
    broker.send(body=b"short", properties={TTL: "5000"})
    broker.send(body=b"long", properties={TTL: "60000"})
    broker.send(body=b"ever")
    assert broker.bodies() == [b"short", b"long", b"ever"]
    broker.run(4_999)
    assert broker.bodies() == [b"short", b"long", b"ever"]
    assert broker.core.expiry.passed_over["orders"] == 0
    broker.run(1)
    assert broker.bodies() == [b"long", b"ever"]
    assert broker.core.expiry.passed_over["orders"] == 1
    broker.run(60_000)
    assert broker.bodies() == [b"ever"]
    assert broker.core.expiry.passed_over["orders"] == 3


def test_offsets_move_on_over_what_is_over() -> None:
    broker = TopicBroker()
    broker.make()
    for number in range(5):
        broker.send(body=b"%d" % number, properties={TTL: "1000"})
    broker.run(2_000)
    result = broker.pull()
    assert (result.status, result.count) == (ReadStatus.NO_MATCHED_MESSAGE, 0)
    assert (result.next_offset, result.min_offset, result.max_offset) == (5, 0, 5)
    broker.send(body=b"new")
    result = broker.pull(offset=2)
    assert (result.status, result.count, result.next_offset) == (ReadStatus.FOUND, 1, 6)


def test_the_topics_time_holds_for_messages_that_have_none() -> None:
    broker = TopicBroker()
    broker.make(message_ttl_ms="10000")
    broker.send(body=b"topic's")
    broker.send(body=b"shorter", properties={TTL: "2000"})
    broker.send(body=b"longer", properties={TTL: "20000"})
    broker.run(2_000)
    assert broker.bodies() == [b"topic's", b"longer"]
    broker.run(8_000)
    assert broker.bodies() == [b"longer"]


def test_tags_are_compared_as_ever() -> None:
    broker = TopicBroker()
    broker.make()
    broker.send(body=b"1", properties={TTL: "1000"}, TAGS="polygenelubricants")
    broker.send(body=b"2", properties={TTL: "9000"}, TAGS="polygenelubricants")
    broker.send(body=b"3", properties={TTL: "9000"}, TAGS="other")
    assert broker.bodies(expression="polygenelubricants") == [b"1", b"2"]
    broker.run(1_000)
    assert broker.bodies(expression="polygenelubricants") == [b"2"]
    assert broker.bodies(expression="other") == [b"3"]


def test_messages_of_a_batch_have_their_own_times() -> None:
    broker = TopicBroker()
    broker.make()
    broker.make("timed", message_ttl_ms="5000")
    for topic in ("orders", "timed"):
        parts = [(b"a", {TTL: "1000"}), (b"b", {"TAGS": "x"}), (b"c", {TTL: "3000"})]
        assert broker.send_batch(topic, parts).run.queue_offset == 0
    broker.run(1_000)
    assert (broker.bodies("orders"), broker.bodies("timed")) == ([b"b", b"c"], [b"b", b"c"])
    broker.run(4_000)
    assert (broker.bodies("orders"), broker.bodies("timed")) == ([b"b"], [])


@pytest.mark.parametrize("by_crash", [False, True])
def test_ends_hold_after_a_start(by_crash: bool) -> None:
    broker = TopicBroker()
    broker.make()
    broker.send(body=b"ends", properties={TTL: "5000"})
    broker.send(body=b"stays")
    if by_crash:
        broker = broker.crashed()
    else:
        closed: list[object] = []
        broker.core.store.shut(closed.append)
        assert closed == [None]
        broker = broker.crashed(KeepAll())
    assert broker.bodies() == [b"ends", b"stays"]
    broker.run(5_000)
    assert broker.bodies() == [b"stays"]


def test_a_topic_without_ends_is_read_without_a_test() -> None:
    broker = TopicBroker()
    broker.make()
    broker.make("other")
    broker.send()
    assert broker.core.expiry.watch("orders") is None
    broker.send("other", properties={TTL: "5000"})
    assert broker.core.expiry.watch("orders") is None
    assert broker.core.expiry.watch("other") is not None
    assert broker.core.expiry.watch("%RETRY%readers") is not None  # copies of any may be there
    assert broker.core.expiry.watch("%DLQ%readers") is None


def test_copies_keep_the_end_of_the_first_and_dead_letters_have_none() -> None:
    broker = TopicBroker()
    broker.make()
    broker.core.groups.require("readers")
    broker.send(properties={TTL: "5000"})
    (entry,) = broker.stored()
    text = records.parse_properties(records.without_checksum(entry.properties))
    assert text[EXPIRES] == str(BEGIN_MS + 5_000)
    broker.run(4_000)
    for topic in ("%RETRY%readers", "%DLQ%readers"):
        broker.core.topics.create_inner(topic, 1)
        broker.send(topic, body=b"again", properties=text)
    broker.run(1_000)
    assert broker.bodies("%RETRY%readers") == []
    assert broker.bodies("%DLQ%readers") == [b"again"]


def test_a_message_that_is_sent_on_begins_a_new_life() -> None:
    broker = TopicBroker()
    broker.make()
    broker.make("next")
    broker.send("next", properties={EXPIRES: str(BEGIN_MS + 1), TTL: "5000"})
    (entry,) = broker.stored("next")
    assert entry.properties.count(EXPIRES_NAME) == 1
    assert records.property_value(entry.properties, EXPIRES_NAME) == b"%d" % (BEGIN_MS + 5_000)


@pytest.mark.parametrize("delay", [{"DELAY": "2"}, {"TIMER_DELAY_SEC": "5"}])  # both: 5 s
def test_a_delayed_message_lives_from_when_it_was_sent(delay: dict[str, str]) -> None:
    broker = TopicBroker()
    broker.make()
    broker.send(body=b"late", properties={**delay, TTL: "9000"})
    broker.send(body=b"early", properties={TTL: "9000"})
    for _ in range(8):
        broker.run(1_000)
    assert sorted(broker.bodies()) == [b"early", b"late"]
    broker.run(1_000)
    assert broker.bodies() == []


@pytest.mark.parametrize("delay", [{"DELAY": "2"}, {"TIMER_DELAY_SEC": "5"}])
def test_a_message_that_ends_before_it_comes_is_refused(delay: dict[str, str]) -> None:
    broker = TopicBroker()
    broker.make(message_ttl_ms="2000")
    for properties in (delay, {**delay, TTL: "4000"}):
        with pytest.raises(MessageIllegal, match="make MSG_TTL_MS longer than the delay"):
            broker.send(properties=properties)
    broker.send(properties={**delay, TTL: "6000"})


def test_a_committed_message_keeps_its_end() -> None:
    broker = TopicBroker()
    broker.make()
    properties = {TTL: "5000", "TRAN_MSG": "true", "PGROUP": "senders"}
    half = broker.send(properties=properties).first
    broker.run(3_000)
    ending = Ending("senders", half.queue_offset, half.position, 8, from_check=False)
    broker.core.transactions.end(ending, lambda error: None)
    broker.settle()
    assert broker.bodies() == [b"body"]
    broker.run(2_000)
    assert broker.bodies() == []


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1e3", "31536000001", "9" * 40, "1.5"])
def test_a_time_to_live_that_is_none_is_refused(value: str) -> None:
    broker = TopicBroker()
    broker.make()
    with pytest.raises(MessageIllegal, match=r"MSG_TTL_MS is .* allowed: 1 to 31536000000"):
        broker.send(properties={TTL: value})
    with pytest.raises(MessageIllegal, match="MSG_TTL_MS"):
        broker.send_batch("orders", [(b"a", {}), (b"b", {TTL: value})])
    assert broker.stored() == []


def test_a_forged_end_that_is_no_time_is_refused() -> None:
    broker = TopicBroker()
    broker.make()
    with pytest.raises(MessageIllegal, match="is the broker's own"):
        broker.send(properties={EXPIRES: "never"})
    assert broker.stored() == []


def test_the_wire_says_why_and_stores_nothing() -> None:
    async def work() -> None:
        async with running() as rig:
            await rig.make_topic("orders")
            code, remark = await rig.refused_send("orders", **{TTL: "never"})
            assert (code, "MSG_TTL_MS" in remark) == (13, True)
            answer = await rig.send("orders", b"kept", 0, **{TTL: "60000"})
            assert answer["queueOffset"] == "0"
            pulled = await rig.pull("orders", 0)
            assert b"kept" in bytes(pulled.body)
            for value, remark in (
                ("0", "allowed: 1 to 31536000000"),
                ("x", "is no whole number"),
                ("31536000001", "allowed: 1 to 31536000000"),
            ):
                refused = await rig.refused_topic("t", attributes=f"+message.ttl.ms={value}")
                assert refused[0] == 1
                assert remark in refused[1]

    run_once(work())
