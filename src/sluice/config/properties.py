r"""This module reads and writes Java's properties syntax, the form of RocketMQ's broker.conf.

    # comment            ! comment
    key = value          key: value          key value
    key = first \
          second         a backslash at the end of a line joins the next one to it
    \t \n \r \f \\ \uXXXX and a backslash before any other character, which stands for itself

Of a key that comes twice, the last counts, as in Java. Unlike Java, blanks at the end of a value
are cut off: nobody means them. This module knows no setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

_KEY: Final = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
_LETTERS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class Entry(NamedTuple):
    """What a key was last set to, and in which line (from 1)."""

    value: str
    line: int


def parse(text: str) -> dict[str, Entry]:
    """All entries by key. Raises ValueError("LINE: reason") for a broken escape."""
    entries: dict[str, Entry] = {}
    for line, logical in _logical_lines(text):
        match = _KEY.match(logical)
        assert match is not None  # the pattern matches the empty string too
        key = _unescape(match[1], line)
        entries.pop(key, None)  # the last one counts, also for the order
        entries[key] = Entry(_unescape(logical[match.end() :].rstrip(" \t\f"), line), line)
    return entries


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    joined, start = "", 0
    for number, raw in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        part = raw.lstrip(" \t\f")
        if not start:
            if not part or part[0] in "#!":
                continue
            start = number
        ending = len(part) - len(part.rstrip("\\"))
        if ending % 2:  # an odd number of backslashes: the last one escapes the end of the line
            joined += part[:-1]
            continue
        yield start, joined + part
        joined, start = "", 0
    if start:
        yield start, joined


def _unescape(text: str, line: int) -> str:
    def character(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        if match[2] == "u":
            raise ValueError(f"{line}: \\u needs four hexadecimal digits")
        return _LETTERS.get(match[2], match[2])

    plain = _ESCAPE.sub(character, text)
    # Two \\u escapes can be one character: Java counts in UTF-16.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def render(values: Mapping[str, str]) -> str:
    """The inverse of `parse`, in ASCII; blanks at the end of a value are lost."""
    return "".join(f"{_escape(k, key=True)}={_escape(v)}\n" for k, v in values.items())


def _escape(text: str, *, key: bool = False) -> str:
    special = "\\=:#! \t" if key else "\\"
    out = []
    for index, char in enumerate(text):
        if char in special or (char == " " and index == 0):
            out.append("\\" + char)
        elif char in "\n\r\t\f":
            out.append({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}[char])
        elif " " <= char <= "~":
            out.append(char)
        else:  # UTF-16, as Java counts characters
            units = char.encode("utf-16-be", "surrogatepass").hex()
            out.extend(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
    return "".join(out)
