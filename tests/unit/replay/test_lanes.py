"""This module tests where messages go and what becomes of their keys."""

from __future__ import annotations

import pytest

from sluice.errors import ConfigError
from sluice.replay.blocks import Row
from sluice.replay.lanes import KeyTemplate, Shape, key_template, lane_topics


def row(**changes: object) -> Row:
    plain = Row(0, 7, 20, (), "k1 k2", "A", 0, b"body")
    return plain._replace(**changes)  # type: ignore[arg-type]


def test_lanes() -> None:
    topics = ["orders", "pays"]
    assert lane_topics(None, topics, into_original=False) == {
        "orders": "orders-replay",
        "pays": "pays-replay",
    }
    assert lane_topics("shadow", topics, into_original=False)["orders"] == "orders-shadow"
    assert lane_topics("stage_{topic}-2", ["a"], into_original=False) == {"a": "stage_a-2"}
    assert lane_topics(None, topics, into_original=True) == {"orders": "orders", "pays": "pays"}


@pytest.mark.parametrize(
    ("lane", "topics", "problem"),
    [
        ("", ["a"], "a lane is letters"),
        ("a b", ["a"], "a lane is letters"),
        ("x.y", ["a"], "a lane is letters"),
        ("{topic}{topic}", ["a"], "a lane is letters"),
        ("{name}", ["a"], "a lane is letters"),
        ("%RETRY%", ["a"], "a lane is letters"),
        ("{topic}", ["a"], "say --into-original"),
        ("two", ["a", "a-two"], "would go into a-two, a topic that was recorded"),
        ("x" * 127, ["a"], "1 to 127 letters"),
    ],
)
def test_lanes_that_make_no_sense(lane: str, topics: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        lane_topics(lane, topics, into_original=False)


def test_a_lane_and_the_original_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="leave --to out"):
        lane_topics("shadow", ["a"], into_original=True)


def test_keys_are_rewritten_one_by_one() -> None:
    template = KeyTemplate("load:{key}/{copy}@{topic}-{offset}")
    found = template.fill("k1 k2", 3, "orders", row())
    assert found == "load:k1/3@orders-7 load:k2/3@orders-7"
    assert KeyTemplate("same").fill("k1", 0, "orders", row()) == "same"


def test_a_template_is_no_program() -> None:
    for text in ("{key.__class__}", "{key!r}", "{0}", "{}", "{key:>9}", "{", "a}", "", "a b", "\n"):
        with pytest.raises(ConfigError, match="--rewrite-key"):
            KeyTemplate(text)
    # What stands in a key is not read as a template again.
    assert KeyTemplate("x{key}").fill("{offset}", 0, "orders", row()) == "x{offset}"


def test_copies_have_keys_of_their_own() -> None:
    assert key_template(None, 1) is None
    template = key_template(None, 3)
    assert template is not None
    assert [template.fill("k", copy, "t", row()) for copy in range(3)] == ["k-0", "k-1", "k-2"]
    with pytest.raises(ConfigError, match=r"needs \{copy\}"):
        key_template("load:{key}", 2)
    for copies in (0, -1, 1001):
        with pytest.raises(ConfigError, match="--copies"):
            key_template(None, copies)


def test_a_message_is_what_it_was() -> None:
    given = row(properties=[("color", "red"), ("__SHARDINGKEY", "s")], flag=3)
    message = Shape(None, {"test": "7"}).message("orders", "orders-replay", given, 0)
    assert (message.topic, message.body, message.flag) == ("orders-replay", b"body", 3)
    assert (message.keys, message.tags, message.sharding_key) == ("k1 k2", "A", "s")
    assert message.properties == {"color": "red", "test": "7"}
    assert message.is_plain


def test_keys_of_a_message_are_rewritten_with_its_sharding_key() -> None:
    shape = Shape(KeyTemplate("load:{key}"), {})
    message = shape.message("orders", "lane", row(properties=[("__SHARDINGKEY", "s")]), 0)
    assert (message.keys, message.sharding_key) == ("load:k1 load:k2", "load:s")
    plain = shape.message("orders", "lane", row(key=None, tags=None), 0)
    assert (plain.keys, plain.tags, plain.properties) == ("", "", None)


def test_properties_that_no_message_may_have() -> None:
    with pytest.raises(ConfigError, match="TAGS"):
        Shape(None, {"TAGS": "x"})
