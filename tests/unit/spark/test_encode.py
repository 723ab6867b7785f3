"""Rows become batches of messages: what each holds, where it goes, what is refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sluice.errors import MessageIllegal
from sluice.protocol import kafka_views, records
from sluice.protocol.message_batches import split_batch
from sluice.protocol.record_images import read_images
from sluice.spark import layout
from sluice.spark.encode import Portion, check_columns, portions
from tests.unit.spark.test_decode import message, stored
from tests.unit.spark.test_decode import rows as decoded

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def joined(portion: Portion) -> bytes:
    return b"".join(portion.parts)


def sent(
    columns: dict[str, Any], topic: str = "t", bytes_max: int = 1 << 20
) -> list[tuple[str, int, list[tuple[bytes, dict[str, str]]]]]:
    batch = pa.record_batch(columns)
    return [
        (
            portion.topic,
            portion.partition,
            [(bytes(b), records.parse_properties(p)) for _, b, p in split_batch(joined(portion))],
        )
        for portion in portions(batch, topic, lambda _: 4, bytes_max)
    ]


def bodies(found: list[tuple[str, int, list[tuple[bytes, dict[str, str]]]]]) -> list[bytes]:
    return [body for _, _, messages in found for body, _ in messages]


def test_every_column_has_its_place_in_the_message() -> None:
    found = sent(
        {
            "value": pa.array([b"a", b"b"]),
            "tag": pa.array(["T", None]),
            "keys": pa.array([["k1", "k2"], None], pa.list_(pa.string())),
            "headers": pa.array([[{"key": "h", "value": b"1"}, {"key": "g", "value": b"2"}], None],
                                HEADERS),
            "partition": pa.array([2, 2], pa.int32()),
            "offset": pa.array([1, 2]),
        }
    )  # fmt: skip
    assert found == [
        ("t", 2, [(b"a", {"KEYS": "k1 k2", "TAGS": "T", "h": "1", "g": "2"}), (b"b", {})])
    ]


def test_text_is_taken_for_bytes() -> None:
    found = sent({"value": pa.array(["größe"]), "key": pa.array(["k"])})
    assert found[0][2] == [("größe".encode(), {"KEYS": "k"})]


def shown(columns: dict[str, Any]) -> list[tuple[bytes | None, list[tuple[str, bytes | None]]]]:
    """Key and headers of every row, as readers understand the messages."""
    messages = [message for _, _, own in sent(columns) for message in own]
    messages.sort()
    return [
        (kafka_views.key_of(properties), list(kafka_views.headers_of(properties)))
        for _, properties in messages
    ]


def test_keys_that_are_no_text_are_kept() -> None:
    keys = [b"k", b"\xff\x00", None, b"", (1).to_bytes(8, "big"), b"a\x02b", b"\xff\x00", b"k"]
    values = pa.array([b"%d" % n for n in range(8)])
    assert [key for key, _ in shown({"value": values, "key": pa.array(keys)})] == keys
    (_, _, own), *_ = sent({"value": pa.array([b"a"]), "key": pa.array([b"k"])})
    assert own == [(b"a", {"KEYS": "k"})], "text stays a property that everybody reads"


@pytest.mark.parametrize(
    "odd",
    [
        ("h", b"\xff"),
        ("h", b"a\x01b"),
        ("h", b""),
        ("h", None),
        ("__h", b"1"),
        ("_SYS_h", b"1"),
        ("%h", b"1"),
        ("SHARDING_KEY", b"1"),
        ("a\x01", b"1"),
        ("", b"1"),
    ],
)
def test_headers_that_are_no_properties_are_kept(odd: tuple[str, bytes | None]) -> None:
    rows: list[list[tuple[str, bytes | None]]] = [
        [("g", b"1")],
        [("g", b"2"), odd, ("i", b"3")],
        [],
        [odd],
    ]
    columns = {
        "value": pa.array([b"%d" % n for n in range(4)]),
        "headers": pa.array([[{"key": k, "value": v} for k, v in row] for row in rows], HEADERS),
    }
    assert [headers for _, headers in shown(columns)] == rows
    ((_, _, own),) = sent(columns)
    assert own[0][1] == {"g": "1"}, "rows beside it stay as they are"
    assert {**own[1][1], "g": "2", "i": "3"} == own[1][1], "what can be a property is one too"
    assert odd[0] not in own[1][1]


def test_headers_of_one_name_are_all_kept() -> None:
    """Kafka's records may have a name twice, properties may not."""
    rows: list[list[tuple[str, bytes | None]]] = [
        [("g", b"1")],
        [("h", b"1"), ("g", b"2"), ("h", b"3")],
        [("g", b"1"), ("h", b"1")],
        [("h", b"1"), ("h", b"1")],
    ]
    columns = {
        "value": pa.array([b"%d" % n for n in range(4)]),
        "headers": pa.array([[{"key": k, "value": v} for k, v in row] for row in rows], HEADERS),
    }
    assert [headers for _, headers in shown(columns)] == rows
    ((_, _, own),) = sent(columns)
    assert own[0][1] == {"g": "1"}, "rows beside it stay as they are"
    assert own[2][1] == {"g": "1", "h": "1"}


def test_lists_that_cannot_hold_nulls_are_lists_too() -> None:
    """What Spark's split() and array() make."""
    element = pa.field("element", pa.string(), nullable=False)
    keys = pa.array([["k1", "k2"], None, []], pa.list_(element))
    found = sent({"value": pa.array([b"a", b"b", b"c"]), "keys": keys})
    assert [properties for _, properties in found[0][2]] == [{"KEYS": "k1 k2"}, {}, {}]
    header = pa.struct([pa.field("key", pa.string(), nullable=False),
                        pa.field("value", pa.binary(), nullable=False)])  # fmt: skip
    headers = pa.array([[("h", b"1")]], pa.list_(pa.field("element", header, nullable=False)))
    found = sent({"value": pa.array([b"a"]), "headers": headers})
    assert [properties for _, properties in found[0][2]] == [{"h": "1"}]


def test_nulls_in_lists_are_passed_over() -> None:
    keys = [["k1", None, "k2"], [None], None, ["k3"]]
    headers: list[list[dict[str, Any] | None] | None] = [
        [None, {"key": "h", "value": b"1"}, None],
        [None],
        None,
        [{"key": "g", "value": b"2"}],
    ]
    found = sent(
        {
            "value": pa.array([b"a", b"b", b"c", b"d"]),
            "keys": pa.array(keys, pa.list_(pa.string())),
            "headers": pa.array(headers, HEADERS),
        }
    )
    assert [properties for _, _, own in found for _, properties in own] == [
        {"KEYS": "k1 k2", "h": "1"},
        {},
        {},
        {"KEYS": "k3", "g": "2"},
    ]
    nothing = {"key": pa.nulls(1, pa.binary()), "headers": pa.nulls(1, HEADERS)}
    assert sent({"value": pa.array([b"a"]), **nothing}) == [("t", -1, [(b"a", {})])]


def test_equal_keys_go_to_one_queue_and_rows_without_one_anywhere() -> None:
    keys = ["a", "b", None, "a", "c", None, "b"]
    found = sent({"value": pa.array([b"%d" % n for n in range(7)]), "key": pa.array(keys)})
    assert sorted(bodies(found)) == [b"%d" % n for n in range(7)]
    where = {body: partition for _, partition, messages in found for body, _ in messages}
    assert where[b"2"] == where[b"5"] == -1
    assert where[b"0"] == where[b"3"] >= 0
    assert where[b"1"] == where[b"6"] >= 0
    (own,) = [messages for _, partition, messages in found if partition == where[b"0"]]
    assert [body for body, _ in own if body in (b"0", b"3")] == [b"0", b"3"], "in their order"


def test_portions_are_cut_by_their_bytes_and_slices_are_understood() -> None:
    value = pa.array([b"x" * 100] * 50)
    batch = pa.record_batch({"value": value}).slice(10, 30)
    cut = list(portions(batch, "t", lambda _: 4, 1000))
    assert [len(portion.sizes) for portion in cut] == [7, 7, 6, 5, 5], "about alike"
    assert all(len(b"".join(portion.with_sizes())) == portion.byte_count for portion in cut)
    assert all(portion.byte_count <= 1000 for portion in cut)
    large = list(portions(batch, "t", lambda _: 4, 10))
    assert [len(portion.sizes) for portion in large] == [1] * 30


def test_images_hold_what_batches_do() -> None:
    """And they are what a broker takes for images."""
    columns = {
        "value": pa.array([b"a" * n for n in range(1, 31)]),
        "key": pa.array([None if n % 5 == 0 else f"k{n}" for n in range(30)]),
        "tag": pa.array(["t", None] * 15),
        "topic": pa.array(["x", "a-topic-of-a-name-" + 12 * "of-ten-by-" + "long"] * 15),
    }
    batch = pa.record_batch(columns)
    plain = list(portions(batch, "", lambda _: 4, 500))
    images = list(portions(batch, "", lambda _: 4, 1 << 20, str.encode))
    found: dict[tuple[str, int], list[tuple[int, bytes, bytes]]] = {}
    for portion in plain:
        place = (portion.topic, portion.partition)
        parts = split_batch(joined(portion))
        found.setdefault(place, []).extend((f, bytes(b), p) for f, b, p in parts)
    assert len(found) == 10
    for portion in images:
        body = b"".join(portion.with_sizes())
        read = read_images(body, len(portion.sizes), portion.topic.encode())
        place = (portion.topic, portion.partition)
        assert [(f, bytes(b), p) for f, b, p in read.parts()] == found.pop(place)
    assert not found


@pytest.mark.parametrize("lengths_max", [0, 4])
def test_images_may_have_no_value_and_batches_may_not(
    lengths_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kafka's tombstones: the key is there, the value is null."""
    monkeypatch.setattr(layout, "_VALUE_LENGTHS_MAX", lengths_max)
    columns = {"value": pa.array([b"a", None, b""]), "key": pa.array([b"k", b"k", b"k"])}
    (portion,) = portions(pa.record_batch(columns), "t", lambda _: 1, 1000, str.encode)
    read = read_images(b"".join(portion.with_sizes()), 3, b"t")
    found = [(bytes(body), records.parse_properties(own)) for _, body, own in read.parts()]
    assert [kafka_views.value_of(*each) for each in found] == [b"a", None, b""]
    assert [kafka_views.key_of(own) for _, own in found] == [b"k", b"k", b"k"]
    assert found[0][1] == {"KEYS": "k"}
    rows = decoded(*stored([message(bytes(body), own) for _, body, own in read.parts()]))
    assert [row["value"] for row in rows] == [b"a", None, b""]
    with pytest.raises(MessageIllegal, match="2 rows have a value that is null or empty"):
        sent(columns)


@pytest.mark.parametrize("value_lengths", [1, 4, 30])
@pytest.mark.parametrize("with_keys", [False, True])
def test_images_that_are_laid_out_are_those_that_are_joined(
    value_lengths: int, with_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: dict[str, Any] = {
        "value": pa.array([b"%03d" % n + b"x" * (n % value_lengths) for n in range(200)])
    }
    if with_keys:
        columns["key"] = pa.array([None if n % 5 == 0 else f"k{n % 40}" for n in range(200)])
    batch = pa.record_batch(columns)
    both = []
    for lengths_max in (0, 4):  # none, or few lengths are few
        monkeypatch.setattr(layout, "_VALUE_LENGTHS_MAX", lengths_max)
        for rows in (batch, batch.slice(7, 90)):
            found = portions(rows, "t", lambda _: 4, 1000, str.encode)
            both.append([(p.partition, p.sizes.tolist(), joined(p)) for p in found])
    assert both[:2] == both[2:]
    assert len(both[0]) > 10


def test_more_partitions_than_small_numbers() -> None:
    columns = {
        "value": pa.array([b"a", b"b", b"c"]),
        "partition": pa.array([70_000, 2, 70_000], pa.int32()),
    }
    found = list(portions(pa.record_batch(columns), "t", lambda _: 100_000, 1000, str.encode))
    assert [(p.partition, len(p.sizes)) for p in found] == [(2, 1), (70_000, 2)]


def test_what_is_kept_for_later_keeps_no_record_batch() -> None:
    columns = {"value": pa.array([b"a", b"b"]), "partition": pa.array([0, 1], pa.int32())}
    portion, _ = portions(pa.record_batch(columns), "t", lambda _: 4, 1000, str.encode)
    kept = portion.apart()
    assert joined(kept) == joined(portion)
    assert [len(part) for part in kept.parts] == [portion.sizes[0]]
    assert all(type(part) is bytes for part in kept.parts)


def test_portions_for_one_queue_are_joined() -> None:
    batch = pa.record_batch({"value": pa.array([b"%d" % n for n in range(20)])})
    first, *rest = portions(batch, "t", lambda _: 4, 100, str.encode)
    assert len(rest) > 2
    whole = first
    for portion in rest:
        assert whole.has_room(portion, 1 << 20)
        assert not whole.has_room(portion, whole.byte_count + portion.byte_count - 1)
        whole = whole.joined(portion)
    read = read_images(b"".join(whole.with_sizes()), 20, b"t")
    assert [bytes(body) for _, body, _ in read.parts()] == [b"%d" % n for n in range(20)]


def test_the_column_says_the_topic_where_no_option_does() -> None:
    columns = {"value": pa.array([b"a", b"b", b"c"]), "topic": pa.array(["x", "y", "x"])}
    assert [(t, bodies([(t, p, m)])) for t, p, m in sent(columns, "")] == [
        ("x", [b"a", b"c"]),
        ("y", [b"b"]),
    ]
    assert [t for t, _, _ in sent(columns, "option")] == ["option"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"value": pa.array([b"a", None])}, "1 rows have a value that is null or empty"),
        ({"value": pa.array([b""])}, "null or empty"),
        ({"value": pa.array([b"a"]), "keys": pa.array([["a\x02b"]])}, "separate properties"),
        ({"value": pa.array([b"a"]), "tag": pa.array(["\x01"])}, "column tag"),
        ({"value": pa.array([b"a"]), "keys": pa.array([["a b"]])}, "blank"),
        ({"value": pa.array([b"a"]), "partition": pa.array([4], pa.int32())}, "partition 4"),
        ({"value": pa.array([b"a"]), "partition": pa.array([-2], pa.int32())}, "partition -2"),
        ({"value": pa.array([b"a", b"b"]), "partition": pa.array([None, -1], pa.int32())},
         "partition -1"),
        ({"value": pa.array([b"a"]), "tag": pa.array(["x" * 40_000])}, "40006 bytes"),
        (
            {"value": pa.array([b"a"]), "headers": pa.array([[{"key": "TAGS", "value": b""}]],
                                                            HEADERS)},
            "header TAGS is RocketMQ's own",
        ),
        (
            {"value": pa.array([b"a"]), "headers": pa.array([[{"key": None, "value": b""}]],
                                                            HEADERS)},
            "a header without a key",
        ),
        (
            {"value": pa.array([b"a"]), "headers": pa.array([[{"key": "a", "value": bytes(30000)}]],
                                                            HEADERS)},
            "bytes; 32747 at most",
        ),
    ],
)  # fmt: skip
def test_rows_that_are_no_messages(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageIllegal, match=words):
        sent(columns)
    with pytest.raises(MessageIllegal, match="1 rows name no topic"):
        sent({"value": pa.array([b"a"]), "topic": pa.array([None], pa.string())}, "")


def test_a_dataframe_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    good = [("value", "binary"), ("key", "string"), ("offset", "bigint")]
    check_columns(good, "t")
    assert not caplog.text
    check_columns([*good, ("amount", "int"), ("tags", "string")], "t")
    assert "columns amount, tags are not written" in caplog.text, "as Kafka's sink leaves them out"
    check_columns([*good, ("topic", "string")], "")
    for fields, topic, words in (
        ([("key", "string")], "t", "no column value"),
        ([("value", "bigint")], "t", "column value is bigint"),
        ([("value", "binary")], "", "name the topic"),
    ):
        with pytest.raises(MessageIllegal, match=words):
            check_columns(fields, topic)


def test_what_a_row_was_written_with_is_read_again() -> None:
    """Keys and headers of any kind, as the columns of the source show them."""
    keys = [b"k", b"\xff", None, b"", b"k2"]
    headers: list[list[dict[str, Any]] | None] = [
        [{"key": "h", "value": b"1"}],
        [{"key": "__h", "value": b"\xff"}, {"key": "h", "value": None}],
        None,
        [{"key": "h", "value": b""}],
        None,
    ]
    columns = {
        "value": pa.array([b"%d" % n for n in range(5)]),
        "key": pa.array(keys),
        "headers": pa.array(headers, HEADERS),
    }
    messages = [
        message(bytes(body), properties)
        for portion in portions(pa.record_batch(columns), "t", lambda _: 1, 1 << 20)
        for _, body, properties in split_batch(joined(portion))
    ]
    messages.sort(key=lambda each: bytes(each.body))
    found = decoded(*stored(messages))
    assert [row["key"] for row in found] == keys
    assert [row["headers"] for row in found] == headers
