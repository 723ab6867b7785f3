"""This module tests the values of a nameserver: their bounds, and the file that Apache writes."""

from __future__ import annotations

import pytest

from sluice.errors import Busy, RequestInvalid
from sluice.nameserver.kv import KvTable


def test_the_number_of_values_is_bounded_and_namespaces_count() -> None:
    table = KvTable(items_max=3)
    table.put("n", "a", "1")
    table.put("n", "b", "1")
    table.put("n", "a", "2")  # no new one
    with pytest.raises(Busy, match="3 values are set, 3 may be"):
        table.put("n", "c", "1")
    table.delete("n", "b")
    table.delete("n", "b")
    table.put("n", "c", "1")
    assert table.namespace("n") == {"a": "2", "c": "1"}
    for key in "ac":
        table.delete("n", key)
    table.put("m", "a", "1")  # n is empty, and still takes a place
    with pytest.raises(Busy):
        table.put("m", "b", "1")


def test_the_size_of_all_values_is_bounded() -> None:
    table = KvTable(bytes_max=10)
    table.put("n", "k", "12345678")
    with pytest.raises(Busy, match="values take 10 bytes, 10 are allowed"):
        table.put("n", "k", "123456789")
    table.put("n", "k", "1234567")
    with pytest.raises(Busy):
        table.put("n", "l", "1")
    table.delete("n", "k")
    table.put("n", "l", "12345678")


def test_what_is_returned_is_a_copy() -> None:
    table = KvTable()
    table.put("n", "k", "v")
    copy = table.namespace("n")
    assert copy == {"k": "v"}
    copy["x"] = "y"
    assert table.namespace("n") == {"k": "v"}


def test_apaches_file_is_taken_over() -> None:
    table = KvTable()
    table.decode(b'{"configTable":{"ORDER_TOPIC_CONFIG":{"T":"a:4;b:4"},"n":{"k":"v"},"m":{}}}')
    assert table.get("ORDER_TOPIC_CONFIG", "T") == "a:4;b:4"
    again = KvTable()
    again.decode(table.encode())
    assert again.encode() == table.encode()


@pytest.mark.parametrize(
    "data", [b"", b"junk", b"[]", b'{"configTable":[]}', b'{"configTable":{"n":{"k":1}}}']
)
def test_a_file_that_is_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(RequestInvalid):
        KvTable().decode(data)
