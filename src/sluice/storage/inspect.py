"""This module is `sluice inspect`: it prints a store, changes nothing, says whether it is whole.

    sluice inspect DIR                    what is there; reads the part after the last snapshot
    sluice inspect DIR --verify           reads everything, compares every checksum and queue unit
    sluice inspect DIR --message OFFSET   one message, by its position in the log or its message id
    sluice inspect DIR --salvage OUT      a new store in OUT of all that is intact in DIR

Exit codes: 0 the store is whole, 1 damage was found, 2 it could not be done (no store, bad words).
The parts: `inspection` gathers, `inspect_text` makes it readable, `salvage` makes the new store.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Final, TextIO

from sluice.errors import StoreError
from sluice.protocol import records
from sluice.storage import inspect_text
from sluice.storage.files import Files, RealFiles, lock_holder
from sluice.storage.inspection import Inspection, inspect_store, require_store, to_json
from sluice.storage.log_walk import LogFiles, Progress
from sluice.storage.salvage import Salvaged, salvage
from sluice.storage.snapshot import LOCK_NAME

EXIT_WHOLE: Final = 0
EXIT_DAMAGED: Final = 1
EXIT_FAILED: Final = 2

_ID_HEX_DIGITS: Final = (32, 56)  # with an IPv4 and with an IPv6 address
_BAR_CELLS: Final = 30


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice inspect",
        description="Print a store without changing it; a broker may be running on it meanwhile.",
        epilog="Exit codes: 0 whole, 1 damage was found, 2 it could not be done.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "directory", metavar="DIR", help="the store: the directory above commitlog/"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    parser.add_argument(
        "--verify", action="store_true", help="read everything: every entry, every queue unit"
    )
    parser.add_argument(
        "--topic", metavar="T", help="show only the queues and offsets of this topic"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--message",
        metavar="OFFSET",
        help="print the message at this position of the log (or by id)",
    )
    one.add_argument(
        "--salvage", metavar="OUT", help="make a new store in OUT of all that is intact here"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command; what is the world's fault is raised as a SluiceError."""
    arguments = _parser().parse_args(argv)
    files = RealFiles()
    root = arguments.directory.rstrip("/") or "/"
    style = inspect_text.Style(colour=_is_terminal(sys.stdout) and "NO_COLOR" not in os.environ)
    try:
        if arguments.message is not None:
            return _message(files, root, arguments.message, style, as_json=arguments.json)
        if arguments.salvage is not None:
            return _salvage(files, root, arguments.salvage, as_json=arguments.json)
        return _store(files, root, arguments, style)
    except StoreError as error:
        sys.stderr.write(f"sluice inspect: {' '.join(str(error).split())}\n")
        return EXIT_FAILED


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


# ---------------------------------------------------------------------------------------- a store


def _store(
    files: Files, root: str, arguments: argparse.Namespace, style: inspect_text.Style
) -> int:
    with _Bar(sys.stderr) as bar:
        found = inspect_store(
            files,
            root,
            verify=arguments.verify,
            holder_pid=lock_holder(f"{root}/{LOCK_NAME}"),
            progress=bar.progress,
        )
    if arguments.topic is not None:
        _require_topic(found, arguments.topic)
    if arguments.json:
        _print(to_json(_only(found, arguments.topic)) + "\n")
    else:
        _print(inspect_text.render(found, style, arguments.topic))
    return EXIT_WHOLE if found.whole else EXIT_DAMAGED


def _require_topic(found: Inspection, topic: str) -> None:
    known = {queue.topic for queue in found.queues} | set(found.topics)
    if topic not in known:
        raise StoreError(f"{found.root}: no topic {topic!r} in this store")


def _only(found: Inspection, topic: str | None) -> dict[str, object]:
    """The whole inspection as a dict, or what belongs to one topic."""
    values: dict[str, object] = {
        name: getattr(found, name) for name in Inspection.__dataclass_fields__
    }
    if topic is not None:
        values["queues"] = [queue for queue in found.queues if queue.topic == topic]
        values["committed"] = [each for each in found.committed if each.topic == topic]
        values["topics"] = {topic: found.topics[topic]} if topic in found.topics else {}
    return {"version": 1, "whole": found.whole, **values}


class _Bar:
    """A progress bar on a terminal; silent everywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if _is_terminal(stream) else None
        self._shown = -1

    @property
    def progress(self) -> Progress | None:
        return self._show if self._stream is not None else None

    def _show(self, done: int, total: int) -> None:
        assert self._stream is not None
        percent = min(100, 100 * done // max(1, total))
        if percent == self._shown:
            return
        self._shown = percent
        cells = percent * _BAR_CELLS // 100
        amount = f"{inspect_text.human_bytes(done)} of {inspect_text.human_bytes(total)}"
        bar = "#" * cells + "." * (_BAR_CELLS - cells)
        self._stream.write(f"\r[{bar}] {percent:3d} %  {amount}\x1b[K")
        self._stream.flush()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None and self._shown >= 0:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


# -------------------------------------------------------------------------------------- a message


def _message(
    files: Files, root: str, text: str, style: inspect_text.Style, *, as_json: bool
) -> int:
    require_store(files, root)
    position = _position(text)
    log = LogFiles(files, f"{root}/commitlog")
    try:
        size = log.segment_bytes
        segment = log.segments.get(position - position % size) if size else None
        if segment is None or segment.file is None:
            raise StoreError(
                f"{root}: position {position} is not in the log ({log.start} .. {log.stop})"
            )
        path, at = log.path_of(position)
        entry_bytes, magic = records.peek(log.read(segment, at, records.BLANK_BYTES), 0)
        is_message = magic in (records.MAGIC_V1, records.MAGIC_V2)
        data = log.read(segment, at, max(0, min(entry_bytes, size - at))) if is_message else b""
    finally:
        log.close()
    if not is_message:
        raise StoreError(f"{path}: no message starts at byte {at} (position {position})")
    try:
        entry = records.decode(data, 0, position)
    except records.BadRecord as error:
        return _damaged_message(path, at, str(error), data, as_json=as_json)
    if as_json:
        _print(to_json({"path": path, "offset": at, **inspect_text.message_values(entry)}) + "\n")
    else:
        _print(inspect_text.render_message(entry, path, at, style))
    return EXIT_WHOLE


def _damaged_message(path: str, at: int, reason: str, data: bytes, *, as_json: bool) -> int:
    if as_json:
        head = data[: inspect_text.BODY_HEX_MAX].hex()
        _print(to_json({"path": path, "offset": at, "damaged": reason, "hex": head}) + "\n")
    else:
        lines = [f"{path}: at byte {at}: {reason}", *inspect_text.hex_dump(data)]
        _print("\n".join(lines) + "\n")
    return EXIT_DAMAGED


def _position(text: str) -> int:
    """A position, or the one at the end of a message id."""
    if text.isascii() and text.isdigit() and len(text) < _ID_HEX_DIGITS[0]:
        return int(text)
    if len(text) in _ID_HEX_DIGITS:
        try:
            return int.from_bytes(bytes.fromhex(text)[-8:], "big")
        except ValueError:
            pass
    raise StoreError(f"--message {text}: neither a position in the log nor a message id")


# ---------------------------------------------------------------------------------------- salvage


def _salvage(files: Files, root: str, out: str, *, as_json: bool) -> int:
    holder_pid = lock_holder(f"{root}/{LOCK_NAME}")
    if holder_pid is not None:
        raise StoreError(f"{root}: in use by process {holder_pid}; stop it, then salvage")
    with _Bar(sys.stderr) as bar:
        done = salvage(files, root, out, progress=bar.progress)
    _print((to_json(done) + "\n") if as_json else _salvaged_text(done))
    return EXIT_DAMAGED if done.gaps else EXIT_WHOLE


def _salvaged_text(done: Salvaged) -> str:
    plural = inspect_text.plural
    lines = [
        f"copied    {plural(done.entry_count, 'entry')} "
        f"({inspect_text.human_bytes(done.copied_bytes)}) to {done.out}, each at its position",
        f"lost      {inspect_text.human_bytes(done.lost_bytes)} in {plural(len(done.gaps), 'gap')}",
    ]
    lines += [
        f"          {gap.start} .. {gap.stop}: {inspect_text.safe(gap.reason)}"
        for gap in done.gaps[: inspect_text.ROWS_MAX]
    ]
    if done.skipped_queue_count:
        lines.append(
            f"offsets   {plural(done.skipped_queue_count, 'queue')} go on behind what may have "
            "been lost, so that no offset is given away twice"
        )
    lines += [f"note      {inspect_text.safe(note)}" for note in done.notes]
    lines.append(
        f"next      `sluice inspect {done.out} --verify`; open it with segment_bytes = "
        f"{done.segment_bytes}"
    )
    return "\n".join(lines) + "\n"


def _print(text: str) -> None:
    sys.stdout.write(text)
