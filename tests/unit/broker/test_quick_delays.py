"""Delayed sends of the usual form: the same bytes, units and handles as the plain way gives."""

from __future__ import annotations

import pytest

from sluice.broker.delay_forms import handle_of
from sluice.broker.quick_delays import QuickDelays, Sent
from sluice.broker.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from sluice.model import Message
from sluice.protocol import records
from sluice.protocol.remoting import decode
from sluice.protocol.remoting_fast import quick_send_answer, with_field
from tests.unit.broker.delay_kit import TOPIC, Box
from tests.unit.storage.store_kit import BEGIN_MS

HOST = b"\x0a\x00\x00\x01\x00\x00\x20\x00"
DAYS_MS = 40 * 86_400_000


def sent(properties: bytes) -> Sent:
    return Sent(TOPIC, 1, 0x301, 55, HOST, properties, b"body")


def quickly(properties: bytes) -> tuple[Box, str] | None:
    box = Box()
    box.make_topic()
    keys = records.message_keys(properties)
    placed = QuickDelays(box.core, box.sending).place(sent(properties), keys)
    if placed is None:
        assert box.core.store.staged == [], "nothing is done by halves"
        return None
    box.core.end_turn()
    return box, placed[1]


def plainly(properties: bytes) -> tuple[Box, str]:
    box = Box()
    box.make_topic()
    completed = box.sending.completed(properties)
    message = Message(TOPIC, 1, b"body", completed, 0, 0x301, 55, HOST)
    stored = box.core.delays.requested_form(message)
    box.core.append(stored)
    box.core.end_turn()
    unique = records.message_keys(properties)[0].decode()
    return box, handle_of(stored, box.core.config.broker_name, unique)


def log_of(box: Box) -> bytes:
    log = box.core.store.log
    return bytes(log.view(0, log.written))


@pytest.mark.parametrize(
    "asked",
    [
        b"TIMER_DELAY_SEC\x0190\x02",
        b"TIMER_DELAY_MS\x011\x02",
        b"TIMER_DELIVER_MS\x01%d\x02" % (BEGIN_MS + 77),
        b"TIMER_DELAY_MS\x01%d\x02" % DAYS_MS,
        b"DELAY\x011\x02",
        b"DELAY\x0118\x02",
    ],
)
@pytest.mark.parametrize(
    "around", [b"%bUNIQ_KEY\x01u1\x02", b"KEYS\x01a b\x02UNIQ_KEY\x01u1\x02%bTAGS\x01t\x02"]
)
def test_the_two_ways_give_the_same(asked: bytes, around: bytes) -> None:
    properties = around % asked
    quick = quickly(properties)
    assert quick is not None
    plain = plainly(properties)
    assert log_of(quick[0]) == log_of(plain[0])
    assert quick[1] == plain[1]
    for queue in ((TIMER_TOPIC, 0), (SCHEDULE_TOPIC, 0), (SCHEDULE_TOPIC, 17)):
        units = [
            store.queues[queue].units(0, 1, store.queue_files, wait=True) if queue in store.queues
            else None
            for store in (quick[0].core.store, plain[0].core.store)
        ]  # fmt: skip
        assert units[0] == units[1]
    for box, _ in (quick, plain):
        box.disk.now_ms += DAYS_MS
        box.tick()
        assert box.bodies(queue_id=1) == [b"body"]


@pytest.mark.parametrize(
    "properties",
    [
        b"UNIQ_KEY\x01u\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x010\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x0101\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x0119\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x01-1\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x01x\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x011\x02DELAY\x012\x02",
        b"UNIQ_KEY\x01u\x02MYDELAY\x011\x02",
        b"UNIQ_KEY\x01u\x02XTIMER_DELAY_SEC\x011\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x01-1\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x019999999\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x01" + b"9" * 30 + b"\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x015",
        b"UNIQ_KEY\x01u\x02TIMER_DELIVER_MS\x015\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x015\x02TIMER_DELAY_MS\x015000\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x015\x02DELAY\x011\x02",
        b"UNIQ_KEY\x01u\x02TIMER_OUT_MS\x015\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x015\x02TIMER_DEL_UNIQKEY\x01x\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x015\x02REAL_TOPIC\x01x\x02",
        b"UNIQ_KEY\x01u\x02TIMER_DELAY_SEC\x015\x02MSG_TTL_MS\x015\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x011\x02TRAN_MSG\x01true\x02",
        b"UNIQ_KEY\x01u v\x02TIMER_DELAY_SEC\x015\x02",
        b"UNIQ_KEY\x01u\x02DELAY\x011\x02big\x01" + b"x" * 32_500 + b"\x02",
    ],
)
def test_what_is_unusual_is_left_to_the_plain_way(properties: bytes) -> None:
    assert quickly(properties) is None


def test_an_answer_gets_one_more_field() -> None:
    answer = quick_send_answer(7, b"0A000001", 9, 3, 4, b"u1")
    command = decode(with_field(answer, b"recallHandle", b"h" * 300)[4:])
    plain = decode(answer[4:])
    assert command.ext == {**plain.ext, "recallHandle": "h" * 300}
    assert (command.code, command.opaque, command.flag) == (0, 7, plain.flag)
