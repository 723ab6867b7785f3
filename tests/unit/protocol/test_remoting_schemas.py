"""The table of requests is complete, typed reading names what is wrong, and the page is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.errors import RequestInvalid
from sluice.protocol.remoting_codes import RequestCode, ResponseCode
from sluice.protocol.remoting_schemas import (
    REQUESTS,
    RESPONSES,
    Field,
    ext_of,
    parse_fields,
    protocols_markdown,
    read_fields,
    request_name,
)

ROOT = Path(__file__).resolve().parents[3]


def codes_of(names: type[object]) -> dict[str, int]:
    return {name: code for name, code in vars(names).items() if isinstance(code, int)}


def test_the_table_has_a_row_for_every_code_and_no_other() -> None:
    assert {row.name: code for code, row in REQUESTS.items()} == codes_of(RequestCode)
    assert {row.name: code for code, row in RESPONSES.items()} == codes_of(ResponseCode)
    own = [row for row in REQUESTS.values() if row.name.startswith("SLUICE_")]
    assert len(REQUESTS) - len(own) == 169
    assert all(row.code > 700_000 for row in own), "RocketMQ's own codes must stay free"
    sentences = [row.sentence for row in REQUESTS.values()]
    sentences += [row.sentence for row in RESPONSES.values()]
    assert all(sentence.endswith(".") for sentence in sentences)
    for schema in REQUESTS.values():
        for fields in (schema.request, schema.response):
            names = [field.name for field in fields]
            assert len(names) == len(set(names)), schema.name


def test_the_page_is_what_the_table_says() -> None:
    page = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
    assert page == protocols_markdown(), (
        "docs/protocols.md is old: python -m sluice.pages protocols docs/protocols.md"
    )


PULL = {
    "consumerGroup": "G",
    "topic": "T",
    "queueId": "3",
    "queueOffset": "9223372036854775807",
    "maxMsgNums": "32",
    "sysFlag": "-2",
    "commitOffset": "+0",
    "suspendTimeoutMillis": "15000",
    "subVersion": "0",
    "bname": "broker-a",
}


def test_fields_get_their_types() -> None:
    values = parse_fields(REQUESTS[RequestCode.PULL_MESSAGE], PULL)
    assert values["queueOffset"] == (1 << 63) - 1
    assert values["sysFlag"] == -2
    assert values["commitOffset"] == 0
    assert values["topic"] == "T"
    assert values["subscription"] is None
    assert "bname" not in values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queueId": None}, "the custom field <queueId> is null"),
        ({"topic": None}, "the custom field <topic> is null"),
        ({"queueId": ""}, "the custom field <queueId> is null"),
        ({"queueId": "x"}, "the custom field <queueId> is no int32: 'x'"),
        ({"queueId": "2147483648"}, "<queueId> is no int32"),
        ({"queueId": "-2147483649"}, "<queueId> is no int32"),
        ({"queueOffset": "9223372036854775808"}, "<queueOffset> is no int64"),
        ({"queueId": "1_0"}, "<queueId> is no int32"),
        ({"queueId": " 1"}, "<queueId> is no int32"),
        ({"queueId": "1.0"}, "<queueId> is no int32"),
        ({"queueId": "1\n"}, "<queueId> is no int32"),
        ({"queueId": "--1"}, "<queueId> is no int32"),
        ({"queueOffset": "9" * 100_000}, "<queueOffset> is no int64: '999"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, str | None], message: str) -> None:
    ext = {name: value for name, value in (PULL | change).items() if value is not None}
    with pytest.raises(RequestInvalid) as caught:
        parse_fields(REQUESTS[RequestCode.PULL_MESSAGE], ext)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200, "a remark does not carry the whole of a bad value"
    assert caught.value.rocketmq_code == 1
    assert not caught.value.closes_connection


def test_booleans_are_read_as_java_does() -> None:
    fields = (Field("x", "b", False),)
    texts = {"true": True, "TRUE": True, "false": False, "yes": False, "1": False}
    assert {text: read_fields(fields, {"x": text})["x"] for text in texts} == texts
    assert read_fields(fields, {}) == {"x": None}
    assert read_fields(fields, {"x": ""}) == {"x": None}


def test_values_become_fields() -> None:
    values = {"a": 1, "b": True, "c": None, "d": "", "e": -5, "f": False}
    assert ext_of(values) == {"a": "1", "b": "true", "d": "", "e": "-5", "f": "false"}


def test_codes_have_names_for_logs() -> None:
    assert request_name(310) == "SEND_MESSAGE_V2"
    assert request_name(99999) == "99999"
