"""Tables for people, documents for scripts, and a line of progress for who waits."""

from __future__ import annotations

import io
import json

from sluice.client.printing import Printer, Progress, Table, cell_text, safe, time_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned_and_numbers_stand_to_the_right() -> None:
    table = Table(("Name", "Count", "Mixed"), [("a", 5, 1), ("longer", 1000, "x"), ("b", None, 2)])
    assert table.lines() == [
        "Name    Count  Mixed",
        "a           5  1",
        "longer   1000  x",
        "b              2",
    ]


def test_a_table_without_rows_is_its_names() -> None:
    assert Table(("A", "B"), []).lines() == ["A  B"]


def test_wide_and_combining_characters_take_their_room() -> None:
    table = Table(("N", "V"), [("订单", "x"), ("e\u0301", "y"), ("abcd", "z")])
    assert table.lines()[1:] == ["订单  x", "e\u0301     y", "abcd  z"]


def test_cells() -> None:
    cells = (None, True, False, 1.239, 7, "a\nb")
    assert [cell_text(cell) for cell in cells] == ["", "true", "false", "1.24", "7", "a b"]
    assert safe("a\x1b[0m\tb\nc") == "a\ufffd[0m\ufffdb\nc"


def test_times() -> None:
    assert time_text(0) == ""
    assert time_text(-1) == ""
    assert time_text(1_700_000_000_123).endswith(".123")
    assert time_text(1 << 62) == str(1 << 62)  # no calendar has it


def test_a_document_or_blocks_but_never_both() -> None:
    for as_json, expected in ((True, '{"a":1}\n'), (False, "first\n\nA\n1\nlast\n")):
        out = io.StringIO()
        Printer(out, as_json=as_json).show({"a": 1}, "first", Table(("A",), [(1,)]), "last")
        assert out.getvalue() == expected


def test_a_list_is_one_document_however_long() -> None:
    for count in (0, 1, 3):
        out = io.StringIO()
        printer = Printer(out, as_json=True)
        printer.begin_list("messages")
        for number in range(count):
            printer.item({"n": number}, f"line {number}")
        printer.end_list({"tags": [1]})
        printer.end_list()  # only once
        assert json.loads(out.getvalue()) == {
            "messages": [{"n": number} for number in range(count)],
            "tags": [1],
        }


def test_a_list_for_people_is_lines() -> None:
    out = io.StringIO()
    printer = Printer(out, as_json=False)
    printer.begin_list("messages")
    printer.item({}, "one\x07")
    printer.end_list({"tags": []}, "after")
    assert out.getvalue() == "one\ufffd\nafter\n"


def test_progress_shows_on_a_terminal_only_and_leaves_no_trace() -> None:
    now = [0.0]
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        now[0] = 100.0
        progress = Progress(out, "messages", 500, lambda: now[0])
        progress.at(1)
        progress.at(2)  # too early for another one
        now[0] += 1.0
        progress.at(300)
        progress.end()
    assert file.getvalue() == ""
    assert terminal.getvalue() == ("\rmessages: 1 of 500\x1b[K\rmessages: 300 of 500\x1b[K\r\x1b[K")
