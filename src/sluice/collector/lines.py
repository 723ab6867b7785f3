"""This module cuts the bytes of a file into what is sent: lines, or events of several lines.

It is given a chunk that begins where a line begins, and says how much of it is used up; what is
left is given to it again with more behind it. So nothing is remembered between two chunks but the
number of the next part of a line that is too long for one message. It does no IO.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

# How much of a line is looked at for the start of an event: an expression may be slow.
_LOOKED_BYTES: Final = 4096


class Rules(NamedTuple):
    """What a line is. With `start` a message has all lines up to the next one that it matches.

    `start` is compiled with re.MULTILINE, so that ^ means the beginning of the line.
    """

    line_bytes_max: int = 1024 * 1024
    start: re.Pattern[bytes] | None = None
    event_lines_max: int = 500


class Line(NamedTuple):
    """What becomes one message. `part` counts from 1 where one was too long, and is 0 elsewhere."""

    offset: int
    body: bytes
    part: int = 0


class Cut(NamedTuple):
    """The lines of a chunk, how many of its bytes they used up, and the part that comes next."""

    lines: list[Line]
    used_bytes: int
    part: int


class _Piece(NamedTuple):
    """A line or an event, or a part of one, by its bytes in the chunk."""

    body_end: int
    end: int
    is_whole: bool  # its end is the end of the line or the event


def cut(
    chunk: bytes,
    offset: int,
    part: int,
    rules: Rules,
    *,
    bytes_max: int,
    count_max: int,
    is_quiet: bool = False,
    is_final: bool = False,
) -> Cut:
    """Lines of a chunk that begins at `offset` of its file; at most so many bytes and lines.

    `is_quiet`: nothing was added for a while, so an event whose lines are whole is whole.
    `is_final`: nothing will be added, so the last line is whole without its newline.
    """
    find = _line_at if rules.start is None else _event_at
    lines: list[Line] = []
    at = total_bytes = 0
    while at < len(chunk) and len(lines) < count_max:
        if part and _is_start(chunk, at, rules):
            part = 0  # the event before it was cut by its bounds, and is over
        piece = find(chunk, at, rules, is_quiet, is_final)
        if piece is None:
            break
        body = _stripped(chunk[at : piece.body_end])
        if lines and total_bytes + len(body) > bytes_max:
            break
        here = part + 1 if part or not piece.is_whole else 0
        if body:
            lines.append(Line(offset + at, body, here))
            total_bytes += len(body)
        part = 0 if piece.is_whole else here
        at = piece.end
    return Cut(lines, at, part)


def _stripped(body: bytes) -> bytes:
    """Without the end of a line, and without the zeros of a hole.

    A writer that does not append goes on at its old place after its file was truncated; before it
    is a hole that reads as zeros.
    """
    if body.startswith(b"\0"):
        body = body.lstrip(b"\0")
    return body.removesuffix(b"\r")


def _line_at(chunk: bytes, at: int, rules: Rules, is_quiet: bool, is_final: bool) -> _Piece | None:
    longest = at + rules.line_bytes_max
    newline = chunk.find(b"\n", at, longest + 1)
    if newline >= 0:
        return _Piece(newline, newline + 1, is_whole=True)
    if len(chunk) > longest:
        return _Piece(longest, longest, is_whole=False)
    if is_final:
        return _Piece(len(chunk), len(chunk), is_whole=True)
    return None


def _is_start(chunk: bytes, at: int, rules: Rules) -> bool:
    """Whether the line there begins an event; of an unfinished line, by what is there."""
    if rules.start is None:
        return False
    newline = chunk.find(b"\n", at, at + _LOOKED_BYTES)
    end = newline if newline >= 0 else min(at + _LOOKED_BYTES, len(chunk))
    return rules.start.match(chunk, at, end) is not None


def _event_at(chunk: bytes, at: int, rules: Rules, is_quiet: bool, is_final: bool) -> _Piece | None:
    piece = _line_at(chunk, at, rules, is_quiet, is_final)
    if piece is None or not piece.is_whole:
        return piece
    line_count = 1
    while True:
        following = _line_at(chunk, piece.end, rules, is_quiet, is_final)
        if piece.end == len(chunk) or following is None:
            # The next line is not there yet: it may belong to this event.
            if is_final or is_quiet:
                return piece
            if len(chunk) - at <= rules.line_bytes_max:
                return None
            return piece._replace(is_whole=_is_start(chunk, piece.end, rules))
        if _is_start(chunk, piece.end, rules):
            return piece
        if following.body_end - at > rules.line_bytes_max or line_count >= rules.event_lines_max:
            return piece._replace(is_whole=False)
        piece = following
        line_count += 1
