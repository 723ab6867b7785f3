"""What a stream into a table is refused for: said at once, with the option and what to do."""

from __future__ import annotations

import pytest

from sluice.errors import ConfigError, SluiceError
from sluice.tables.delta import quoted
from sluice.tables.rows import check_frame
from sluice.tables.schemas import Shape
from sluice.tables.sinks import check_origin, check_replay, dead_options, refuse_bad

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


def test_options_for_dead_letters() -> None:
    assert dead_options("", None, None) == {}
    assert dead_options("d", "host:1", {"batchBytes": 2048}) == {
        "batchBytes": "2048",
        "sluice.bootstrap.servers": "host:1",
    }
    with pytest.raises(ConfigError, match="option sink_options: txnAppId is set by the table"):
        dead_options("d", "host:1", {"txnAppId": "x"})
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
