"""What a stream into a table is refused for: said at once, with the option and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.errors import ConfigError, SluiceError
from sluice.spark.options import write_options
from sluice.tables.delta import quoted
from sluice.tables.rows import check_frame
from sluice.tables.schemas import Shape
from sluice.tables.sinks import (
    Settings,
    check_dead_letters,
    check_origin,
    check_replay,
    dead_options,
    publish_dead_letters,
    refuse_bad,
)

ENDS = {"gifts": {"0": 5, "1": 7}}


def test_a_batch_may_come_again_but_not_an_older_one() -> None:
    check_replay("p", "q", 4, 4)
    check_replay("p", "q", 5, 4)
    with pytest.raises(
        ConfigError, match="option checkpoint: it is older than the table p: batch 3"
    ):
        check_replay("p", "q", 3, 4)


def test_rows_are_new_and_of_the_topics_of_the_table() -> None:
    check_origin("p", ENDS, {"gifts": {"0": (5, 9), "2": (0, 3)}}, is_new=True)
    check_origin("p", ENDS, {"orders": {"0": (0, 9)}}, is_new=False)
    check_origin("p", ENDS, {}, is_new=True)
    check_origin("p", {}, {"orders": {"0": (0, 9)}}, is_new=True)
    with pytest.raises(ConfigError, match="holds topics gifts, and this stream reads orders"):
        check_origin("p", ENDS, {"orders": {"0": (0, 9)}}, is_new=True)
    for is_new in (True, False):
        with pytest.raises(ConfigError, match="partition 1, offset 6; it has all below 7"):
            check_origin("p", ENDS, {"gifts": {"1": (6, 9)}}, is_new=is_new)


def test_dead_letters_do_not_come_again() -> None:
    check_dead_letters("", {"gifts": {"0": (0, 9)}})
    check_dead_letters("gifts-dead", {"gifts": {"0": (0, 9)}})
    with pytest.raises(ConfigError, match="option dead_letter_topic: this stream reads gifts its"):
        check_dead_letters("gifts", {"gifts": {"0": (0, 9)}})


def test_options_for_dead_letters() -> None:
    assert dead_options("", None, None) == {}
    assert dead_options("d", "host:1", {"batchBytes": 2048}) == {
        "batchBytes": "2048",
        "sluice.bootstrap.servers": "host:1",
    }
    with pytest.raises(ConfigError, match="option sink_options: txnAppId is set by the table"):
        dead_options("d", "host:1", {"txnAppId": "x"})
    with pytest.raises(ConfigError, match="option dead_letter_topic: 'd d' is no topic"):
        dead_options("d d", "host:1", None)
    with pytest.raises(ConfigError, match="option subscribe is not known"):
        dead_options("d", "host:1", {"subscribe": "x"})
    with pytest.raises(ConfigError, match="name their topic"):
        dead_options("", "host:1", None)
    with pytest.raises(SluiceError, match="3 rows do not fit the schema, the first is here"):
        refuse_bad(3, "here")


def test_shapes_and_frames() -> None:
    with pytest.raises(ConfigError, match="option schema is empty"):
        Shape(" ", ())
    with pytest.raises(ConfigError, match="names a column twice"):
        Shape(None, ("a", "a"))
    assert Shape("JSON", ()).is_inferred
    with pytest.raises(ConfigError, match="has no column offset"):
        check_frame(["value", "topic", "partition"], has_schema=True, partition_by=())
    check_frame(["x"], has_schema=False, partition_by=("x",))
    with pytest.raises(ConfigError, match="backtick"):
        quoted("a`b")


class FakeWriter:
    """A DataFrame and its writer: takes options and saves nothing."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.saved_count = 0

    @property
    def write(self) -> FakeWriter:
        return self

    def format(self, name: str) -> FakeWriter:
        assert name == "sluice"
        return self

    def options(self, **more: Any) -> FakeWriter:
        self.given |= more
        return self

    def option(self, name: str, value: Any) -> FakeWriter:
        return self.options(**{name: value})

    def mode(self, name: str) -> FakeWriter:
        assert name == "append"
        return self

    def save(self) -> None:
        self.saved_count += 1


@pytest.mark.parametrize("delivery", ["", "exactlyOnce", "atLeastOnce"])
def test_dead_letters_are_named_unless_they_are_sent_at_least_once(delivery: str) -> None:
    frame: Any = FakeWriter()
    sink_options = dead_options("d", "host:1", {"delivery": delivery} if delivery else None)
    settings = Settings("p", Shape(None, ()), "d", sink_options, 1, True)
    publish_dead_letters(frame, settings, "query", 7)
    write_options({name: str(value) for name, value in frame.given.items()})
    assert frame.saved_count == 1
    named = {name: frame.given[name] for name in ("txnAppId", "txnVersion") if name in frame.given}
    is_named = delivery != "atLeastOnce"
    assert named == ({"txnAppId": "table-query", "txnVersion": 7} if is_named else {})
