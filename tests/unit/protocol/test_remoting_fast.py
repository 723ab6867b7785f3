"""The fast readers and writers of sends and pulls do what the table says, no more and no less."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.errors import RequestInvalid
from sluice.protocol.remoting import BINARY, FLAG_ANSWER, JSON, RemotingCommand, decode, encode
from sluice.protocol.remoting_codes import RequestCode
from sluice.protocol.remoting_fast import (
    PullRequest,
    SendRequest,
    pull_answer_head,
    read_pull,
    read_send,
    send_answer,
)

LETTERS = {"a": "G", "b": "T", "c": "TBW102", "d": "4", "e": "3", "f": "0", "g": "1794772393024"}
LETTERS |= {"h": "0", "i": "KEYS\x01k\x02", "j": "0", "k": "false", "m": "true", "n": "broker-a"}
EXPECTED = SendRequest(
    "G", "T", "TBW102", 4, 3, 0, 1794772393024, 0, "KEYS\x01k\x02", 0, False, None, True
)
NAMES = {
    "producerGroup": "G",
    "topic": "T",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "3",
    "sysFlag": "0",
    "bornTimestamp": "1794772393024",
    "flag": "0",
    "properties": "KEYS\x01k\x02",
    "batch": "true",
}


@pytest.mark.parametrize("serialization", [JSON, BINARY])
@pytest.mark.parametrize("code", [310, 320, 325, 10, 324])
def test_a_send_of_either_spelling(code: int, serialization: int) -> None:
    ext = NAMES if code in (10, 324) else LETTERS
    command = RemotingCommand(code, 1, 0, dict(ext), b"body", serialization=serialization)
    assert read_send(decode(encode(command)[4:])) == EXPECTED


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"e": "-1"}, {"queue_id": -1}),
        ({"e": "5000"}, {"queue_id": 5000}),
        ({"f": "4"}, {"sys_flag": 4}),
        ({"g": "5"}, {"born_ms": 5}),
        ({"g": "-5"}, {"born_ms": -5}),
        ({"h": "-2147483648"}, {"flag": -(1 << 31)}),
        ({"i": None}, {"properties": ""}),
        ({"j": "3", "l": "16"}, {"reconsume_times": 3, "max_reconsume_times": 16}),
        ({"j": None, "k": "TRUE"}, {"reconsume_times": 0, "unit_mode": True}),
        ({"k": "nonsense", "m": None}, {"unit_mode": False, "batch": False}),
        ({"l": "0"}, {"max_reconsume_times": 0}),
    ],
    ids=str,
)
def test_unusual_sends(change: dict[str, str | None], expected: dict[str, Any]) -> None:
    ext = {name: value for name, value in (LETTERS | change).items() if value is not None}
    assert read_send(RemotingCommand(310, 1, 0, ext)) == EXPECTED._replace(**expected)


@pytest.mark.parametrize("letter", "abcdefgh")
def test_a_send_without_a_needed_field(letter: str) -> None:
    ext = {name: value for name, value in LETTERS.items() if name != letter}
    with pytest.raises(RequestInvalid, match=f"<{letter}> is null"):
        read_send(RemotingCommand(310, 1, 0, ext))


@pytest.mark.parametrize("letter", "defghjl")
def test_a_send_with_a_field_that_is_no_number(letter: str) -> None:
    with pytest.raises(RequestInvalid, match=f"<{letter}> is no int"):
        read_send(RemotingCommand(310, 1, 0, LETTERS | {letter: "x" * 13}))


PULL = {
    "consumerGroup": "G",
    "topic": "T",
    "queueId": "3",
    "queueOffset": "500",
    "maxMsgNums": "32",
    "sysFlag": "3",
    "commitOffset": "400",
    "suspendTimeoutMillis": "15000",
    "subVersion": "1794772393024",
    "expressionType": "TAG",
}
PULL_EXPECTED = PullRequest("G", "T", 3, 500, 32, 3, 400, 15000, None, 1794772393024, "TAG")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"subscription": ""}, {"subscription": ""}),
        ({"subscription": "A || B", "expressionType": None}, {"expression_type": None}),
        ({"queueOffset": "-1"}, {"queue_offset": -1}),
        ({"queueOffset": str((1 << 63) - 1)}, {"queue_offset": (1 << 63) - 1}),
        ({"maxMsgNums": "2147483647"}, {"message_count_max": (1 << 31) - 1}),
        ({"queueId": "1024"}, {"queue_id": 1024}),
    ],
    ids=str,
)
@pytest.mark.parametrize("code", [RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE])
def test_pulls(code: int, change: dict[str, str | None], expected: dict[str, Any]) -> None:
    ext = {name: value for name, value in (PULL | change).items() if value is not None}
    wanted = PULL_EXPECTED._replace(**expected)
    if "subscription" in ext:
        wanted = wanted._replace(subscription=ext["subscription"])
    assert read_pull(RemotingCommand(code, 1, 0, ext)) == wanted


@pytest.mark.parametrize("name", sorted(set(PULL) - {"expressionType"}))
def test_a_pull_without_a_needed_field(name: str) -> None:
    ext = {key: value for key, value in PULL.items() if key != name}
    with pytest.raises(RequestInvalid, match=f"<{name}> is null"):
        read_pull(RemotingCommand(11, 1, 0, ext))


ID = "7F000001000078BF0000000000000B7D"


@pytest.mark.parametrize("serialization", [JSON, BINARY])
@pytest.mark.parametrize(
    ("ids", "queue_id", "offset", "transaction_id"),
    [
        (ID, 3, 1234, "FD0000000000000000000000000000021B2830946E094C671ED60000"),
        (ID, 0, 0, "x" * 127),
        (ID, 0, 0, "x" * 128),
        (ID, 0, 0, 'quote " and \\ and \x01'),
        (ID, 0, 0, "schlüssel"),
        (",".join([ID] * 32), 12, (1 << 63) - 1, "key"),
    ],
)
def test_send_answers(
    serialization: int, ids: str, queue_id: int, offset: int, transaction_id: str
) -> None:
    frame = send_answer(serialization, -5, ids, queue_id, offset, transaction_id)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    ext = {
        "msgId": ids,
        "queueId": str(queue_id),
        "queueOffset": str(offset),
        "transactionId": transaction_id,
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }
    expected = RemotingCommand(0, -5, FLAG_ANSWER, ext, serialization=serialization)
    assert decode(frame[4:]) == expected
    assert frame == encode(expected)


@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_a_pull_answer_has_all_four_numbers(serialization: int) -> None:
    request = RemotingCommand(11, 77, serialization=serialization)
    head = pull_answer_head(request, 0, "FOUND", 510, 0, 600, 5)
    reply = decode((head + b"bytes")[4:])
    assert reply == RemotingCommand(
        0,
        77,
        FLAG_ANSWER,
        {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": "510",
            "minOffset": "0",
            "maxOffset": "600",
            "topicSysFlag": "0",
            "groupSysFlag": "0",
        },
        b"bytes",
        "FOUND",
        serialization=serialization,
    )
