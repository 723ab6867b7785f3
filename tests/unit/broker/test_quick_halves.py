"""Half messages of the usual form: the same bytes as the plain way gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.broker.half_messages import begun
from sluice.broker.quick_delays import Sent
from sluice.broker.quick_halves import QuickHalves
from sluice.model import Message
from sluice.protocol import records
from tests.unit.broker.delay_kit import TOPIC, Box

HOST = b"\x0a\x00\x00\x01\x00\x00\x20\x00"
USUAL = b"TRAN_MSG\x01true\x02UNIQ_KEY\x01FD00\x02PGROUP\x01payers\x02"


def quickly(properties: bytes, flags: int = 0x304) -> Box | None:
    box = Box()
    box.make_topic()
    sent = Sent(TOPIC, 1, flags, 55, HOST, properties, b"body")
    place = QuickHalves(box.core, box.sending).place(sent, records.message_keys(properties))
    if place is None:
        assert box.core.store.staged == [], "nothing is done by halves"
        return None
    box.core.end_turn()
    return box


def plainly(properties: bytes, flags: int = 0x304) -> Box:
    box = Box()
    box.make_topic()
    message = Message(TOPIC, 1, b"body", box.sending.completed(properties), 0, flags, 55, HOST)
    box.core.append(begun(message, rejected=False))
    box.core.end_turn()
    return box


def log_of(box: Box) -> bytes:
    log = box.core.store.log
    return bytes(log.view(0, log.written))


@pytest.mark.parametrize(
    "added",
    [
        b"",
        b"TAGS\x01TagA\x02KEYS\x01a b\x02",
        b"CHECK_IMMUNITY_TIME_IN_SECONDS\x0160\x02",
        b"own\x01word",
    ],
)
def test_the_same_as_the_plain_way(added: bytes) -> None:
    quick = quickly(USUAL + added)
    assert quick is not None
    assert log_of(quick) == log_of(plainly(USUAL + added))


@pytest.mark.parametrize(
    "properties",
    [
        USUAL.replace(b"true", b"false"),
        USUAL.replace(b"TRAN_MSG", b"xTRAN_MSG"),
        USUAL.replace(b"PGROUP", b"GROUP"),
        USUAL.replace(b"payers", b"p" * 300),
        USUAL + b"TRAN_MSG\x01false\x02",
        USUAL + b"DELAY\x013\x02",
        USUAL + b"TIMER_DELAY_SEC\x013\x02",
        USUAL + b"REAL_TOPIC\x01other\x02",
        USUAL + b"__transactionId__\x01x\x02",
        USUAL + b"TRANSACTION_CHECK_TIMES\x013\x02",
        USUAL + b"TRAN_PREPARED_QUEUE_OFFSET\x013\x02",
        USUAL + b"SLUICE_HALF_SINCE_MS\x013\x02",
        USUAL + b"MSG_TTL_MS\x013\x02",
        USUAL + b"a\x01" + b"b" * 32_600 + b"\x02",
    ],
)
def test_what_is_unusual_is_left_to_the_plain_way(properties: bytes) -> None:
    assert quickly(properties) is None


def test_flags_of_another_kind_and_a_broker_that_takes_none() -> None:
    for flags in (0, 8, 12):
        assert quickly(USUAL, flags) is None
    box = Box()
    box.make_topic()
    box.core.reconfigure(replace(box.core.config, reject_transactions=True))
    sent = Sent(TOPIC, 1, 4, 55, HOST, USUAL, b"body")
    keys = records.message_keys(USUAL)
    assert QuickHalves(box.core, box.sending).place(sent, keys) is None
