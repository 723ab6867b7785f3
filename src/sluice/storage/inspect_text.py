"""This module makes an inspection readable: aligned tables, human sizes, local times.

Texts that come out of a store (topics, properties, bodies) may hold anything, also codes that a
terminal would obey: they are printed only where every character is printable, else escaped or as a
hex dump. Lists are bounded; `--json` has all of it. This module reads no files, it returns text.
"""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from sluice.model import message_id
from sluice.protocol import kafka_entries, records
from sluice.storage.inspection import FirstBad, Inspection, QueueInfo

ROWS_MAX: Final = 100
BODY_TEXT_MAX: Final = 4096
BODY_HEX_MAX: Final = 512
INFLATED_BYTES_MAX: Final = 1 << 20
_TIME_MS_MAX: Final = 253_402_300_799_000  # the year 9999: what datetime can hold
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BOLD, _RED, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
_FLAG_NAMES: Final = (
    (records.SYS_COMPRESSED, "compressed"),
    (records.SYS_BORN_V6, "born host IPv6"),
    (records.SYS_STORE_V6, "store host IPv6"),
    (records.SYS_NEED_UNWRAP, "need unwrap"),
    (records.SYS_INNER_BATCH, "inner batch"),
    (kafka_entries.SYS_KAFKA, "Kafka"),
)
_TX_NAMES: Final = {0: "", 4: "prepared", 8: "committed", 12: "rolled back"}
_CODEC_NAMES: Final = {0: "zlib", 0x100: "LZ4", 0x200: "Zstandard", 0x300: "zlib"}
_CODEC_MASK: Final = 0x700

Cell = str | int | None


class Style:
    """Colour, or none: only a terminal gets any."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour

    def _wrap(self, code: str, text: str) -> str:
        return f"{code}{text}{_PLAIN}" if self._colour else text

    def title(self, text: str) -> str:
        return self._wrap(_BOLD, text)

    def bad(self, text: str) -> str:
        return self._wrap(_RED, text)

    def warn(self, text: str) -> str:
        return self._wrap(_YELLOW, text)


# ------------------------------------------------------------------------------------ small texts


def human_bytes(count: int) -> str:
    """1536 -> 1.5 KiB."""
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value /= 1024
        unit += 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def local_time(when_ms: int | None) -> str:
    """A store time on the wall clock; the bare number where it is no time."""
    if when_ms is None:
        return "-"
    if not 0 < when_ms <= _TIME_MS_MAX:
        return str(when_ms)
    moment = datetime.fromtimestamp(when_ms / 1000).astimezone()
    return f"{moment:%Y-%m-%d %H:%M:%S}.{when_ms % 1000:03d}"


def safe(text: str) -> str:
    """Text that a terminal takes for text only."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def plural(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], right: str) -> list[str]:
    """Aligned columns; `right` has an "r" for each column of numbers, else an "l"."""
    body = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *body, strict=True)]
    lines = []
    for row in ([str(title) for title in titles], *body):
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, right, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else safe(value)


# ------------------------------------------------------------------------------------------ a store


def render(found: Inspection, style: Style, topic: str | None = None) -> str:
    """The whole report."""
    parts = [
        _summary(found, style),
        _problems(found, style),
        _segments(found, style),
        _queues(found.queues, style, topic),
        _topics(found, style, topic),
        _groups(found, style) if topic is None else [],
        _committed(found, style, topic),
        _index(found, style),
        _cut(found, style),
        _disk(found, style),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _summary(found: Inspection, style: Style) -> list[str]:
    rows = [("store", safe(found.root)), ("state", _state(found)), ("log", _log(found))]
    rows.append(("durable", f"up to {found.durable}" if found.durable else "no mark"))
    rows.append(("snapshot", _snapshot(found)))
    used = sum(part.disk_bytes for part in found.disk)
    rows.append(
        ("disk", f"{human_bytes(used)} taken; the disk is {found.disk_used_ratio:.0%} full")
    )
    if found.whole:
        verdict = "whole" if found.verified else "whole, as far as was looked (--verify reads all)"
    else:
        verdict = style.bad(f"DAMAGED: {plural(len(found.problems), 'problem')}")
    rows.append(("verdict", verdict))
    return [f"{style.title(name.ljust(9))} {text}" for name, text in rows]


def _state(found: Inspection) -> str:
    if found.holder_pid is not None:
        return f"in use by process {found.holder_pid}: this is what it looked like just now"
    if found.abort is not None:
        return "not in use, and not closed in order (abort is there): the next start recovers"
    return "closed in order, not in use"


def _log(found: Inspection) -> str:
    files = plural(len(found.segments), "file")
    size = human_bytes(found.segment_bytes)
    length = human_bytes(found.log_end - found.log_start)
    return f"{found.log_start} .. {found.log_end} ({length} in {files} of {size})"


def _snapshot(found: Inspection) -> str:
    scanned = plural(found.scanned_entry_count, "entry")
    if found.snapshot is None:
        return f"none; {scanned} read from {found.scanned_from} on"
    text = f"at {found.snapshot.log_offset}"
    if not found.snapshot.usable:
        text += f", not usable: {safe(found.snapshot.why_not)}"
    return f"{text}; {scanned} read from {found.scanned_from} on"


def _problems(found: Inspection, style: Style) -> list[str]:
    lines = []
    if found.problems:
        lines.append(style.title("problems"))
        for problem in found.problems[:ROWS_MAX]:
            where = f"{safe(problem.path)}: at byte {problem.offset}"
            lines.append(f"  {style.bad(where)}: {safe(problem.reason)}")
        lines += _more(len(found.problems))
    if found.first_bad is not None:
        lines += _first_bad(found.first_bad, style, salvage=bool(found.problems))
    lines += [f"  {style.warn('note')}: {safe(note)}" for note in found.notes]
    return lines


def _first_bad(bad: FirstBad, style: Style, *, salvage: bool) -> list[str]:
    lines = [
        style.title("first bad byte"),
        f"  {safe(bad.path)}: byte {bad.offset}, position {bad.position} ({bad.kind})",
        f"  {safe(bad.reason)}",
    ]
    if bad.intact_after_count:
        lines.append(
            f"  {plural(bad.intact_after_count, 'intact entry')} found behind it; "
            f"{human_bytes(bad.gap_bytes)} in {plural(bad.gap_count, 'gap')} are lost"
        )
    elif bad.data_end > bad.position:
        lines.append(f"  no intact entry behind it; data up to position {bad.data_end}")
    else:
        lines.append("  nothing but zeros behind it")
    if salvage:
        lines.append("  `sluice inspect DIR --salvage OUT` makes a new store of what is intact")
    return lines


def _segments(found: Inspection, style: Style) -> list[str]:
    shown = found.segments
    if len(shown) > ROWS_MAX:
        shown = shown[: ROWS_MAX // 2] + shown[-(ROWS_MAX // 2) :]
    rows = [
        (
            each.name,
            each.start,
            each.end,
            human_bytes(each.used_bytes) if each.used_bytes is not None else None,
            each.entry_count,
            local_time(each.first_ms),
            local_time(each.last_ms),
            each.state,
        )
        for each in shown
    ]
    titles = ("file", "start", "end", "used", "entries", "first stored", "last stored", "state")
    return [style.title("commitlog"), *table(titles, rows, "lrrrrlll"), *_more(len(found.segments))]


def _queues(queues: list[QueueInfo], style: Style, topic: str | None) -> list[str]:
    chosen = [each for each in queues if topic in (None, each.topic)]
    rows = [
        (e.topic, e.queue_id, e.kind, e.min_offset, e.max_offset, e.entry_count)
        for e in chosen[:ROWS_MAX]
    ]
    titles = ("topic", "queue", "kind", "min", "max", "entries")
    if not rows:
        return [style.title("queues"), "  none"]
    return [style.title("queues"), *table(titles, rows, "lrlrrr"), *_more(len(chosen))]


def _topics(found: Inspection, style: Style, topic: str | None) -> list[str]:
    chosen = [(name, each) for name, each in found.topics.items() if topic in (None, name)]
    if not chosen:
        return []
    rows = [
        (
            name,
            _number(each, "readQueueNums"),
            _number(each, "writeQueueNums"),
            _number(each, "perm"),
            _attributes(each),
        )
        for name, each in chosen[:ROWS_MAX]
    ]
    titles = ("topic", "read queues", "write queues", "perm", "attributes")
    return [style.title("topic settings"), *table(titles, rows, "lrrrl"), *_more(len(chosen))]


def _groups(found: Inspection, style: Style) -> list[str]:
    if not found.groups:
        return []
    rows = [
        (name, "yes" if each.get("consumeEnable", True) else "no", _number(each, "retryMaxTimes"))
        for name, each in list(found.groups.items())[:ROWS_MAX]
        if isinstance(each, dict)
    ]
    titles = ("group", "may consume", "retries")
    return [style.title("group settings"), *table(titles, rows, "llr"), *_more(len(found.groups))]


def _number(settings: Any, name: str) -> Cell:
    value = settings.get(name) if isinstance(settings, dict) else None
    return value if isinstance(value, int | str) else None


def _attributes(settings: Any) -> str:
    attributes = settings.get("attributes") if isinstance(settings, dict) else None
    if not isinstance(attributes, dict):
        return ""
    return " ".join(f"{name}={value}" for name, value in attributes.items())


def _committed(found: Inspection, style: Style, topic: str | None) -> list[str]:
    chosen = [each for each in found.committed if topic in (None, each.topic)]
    if not chosen:
        return []
    rows = [(e.group, e.topic, e.queue_id, e.offset, e.lag) for e in chosen[:ROWS_MAX]]
    titles = ("group", "topic", "queue", "committed", "lag")
    return [style.title("committed offsets"), *table(titles, rows, "llrrr"), *_more(len(chosen))]


def _index(found: Inspection, style: Style) -> list[str]:
    if not found.index:
        return []
    rows = [
        (
            each.name,
            each.entry_count,
            each.begin_position,
            each.end_position,
            local_time(each.begin_ms),
            local_time(each.end_ms),
        )
        for each in found.index[:ROWS_MAX]
    ]
    titles = ("file", "keys", "first position", "last position", "first stored", "last stored")
    return [style.title("key index"), *table(titles, rows, "lrrrll"), *_more(len(found.index))]


def _cut(found: Inspection, style: Style) -> list[str]:
    if not found.cut:
        return []
    rows = [(each.name, human_bytes(each.byte_count)) for each in found.cut[:ROWS_MAX]]
    title = style.title("sluice/cut (taken off by recovery, never deleted by Sluice)")
    return [title, *table(("position.number", "bytes"), rows, "lr"), *_more(len(found.cut))]


def _disk(found: Inspection, style: Style) -> list[str]:
    rows = [
        (each.name, each.file_count, human_bytes(each.file_bytes), human_bytes(each.disk_bytes))
        for each in found.disk
    ]
    return [style.title("disk use"), *table(("name", "files", "length", "on disk"), rows, "lrrr")]


def _more(count: int) -> list[str]:
    return [f"  ... and {count - ROWS_MAX} more (--json has all)"] if count > ROWS_MAX else []


# ---------------------------------------------------------------------------------------- a message


def message_values(entry: records.Entry) -> dict[str, Any]:
    """One message as plain values, for --json; a body that is no text is given in hex."""
    body = bytes(entry.body)
    text = printable(body)
    return {
        "position": entry.position,
        "size": entry.size,
        "layout": "v2" if entry.magic == records.MAGIC_V2 else "v1",
        "topic": entry.topic,
        "queue_id": entry.queue_id,
        "queue_offset": entry.queue_offset,
        "message_id": message_id(entry.store_host, entry.position),
        "flag": entry.flag,
        "sys_flag": entry.sys_flag,
        "sys_flag_names": flag_names(entry.sys_flag),
        "born_ms": entry.born_ms,
        "born_host": host(entry.born_host),
        "store_ms": entry.store_ms,
        "store_host": host(entry.store_host),
        "reconsume_times": entry.reconsume_times,
        "prepared_offset": entry.prepared_offset,
        "body_crc": entry.body_crc,
        "properties": records.parse_properties(entry.properties),
        "body_bytes": len(body),
        "body_text": text,
        "body_hex": body.hex() if text is None else None,
    }


def render_message(entry: records.Entry, path: str, at: int, style: Style) -> str:
    """One message for people: every field of its head, its properties, its body."""
    properties = records.parse_properties(entry.properties)
    version = "v2" if entry.magic == records.MAGIC_V2 else "v1"
    names = flag_names(entry.sys_flag)
    rows = [
        ("message", message_id(entry.store_host, entry.position)),
        ("place", f"{safe(path)}: byte {at}, position {entry.position}, {entry.size} bytes"),
        ("layout", f"{version} ({entry.magic:08x})"),
        ("queue", f"{safe(entry.topic)}/{entry.queue_id} offset {entry.queue_offset}"),
        ("tags", safe(properties.get("TAGS", "-"))),
        ("keys", safe(properties.get("KEYS", "-"))),
        ("born", f"{local_time(entry.born_ms)} at {host(entry.born_host)}"),
        ("stored", f"{local_time(entry.store_ms)} at {host(entry.store_host)}"),
        ("flag", str(entry.flag)),
        ("sys flag", f"0x{entry.sys_flag:x}" + (f" ({', '.join(names)})" if names else "")),
        ("reconsumed", plural(entry.reconsume_times, "time")),
        ("prepared", f"at {entry.prepared_offset}"),
        ("body CRC", f"{entry.body_crc:08x}"),
    ]
    lines = [f"{style.title(name.ljust(10))} {text}" for name, text in rows]
    lines.append(style.title("properties"))
    lines += [f"  {safe(name)} = {safe(value)}" for name, value in properties.items()]
    if not properties:
        lines.append("  none")
    lines += _body(entry, style)
    return "\n".join(lines) + "\n"


def _body(entry: records.Entry, style: Style) -> list[str]:
    body = bytes(entry.body)
    title = f"body, {len(body)} bytes"
    if entry.sys_flag & records.SYS_COMPRESSED:
        codec = _CODEC_NAMES.get(entry.sys_flag & _CODEC_MASK, "unknown codec")
        title += f", {codec}"
        inflated = _inflate(body) if codec == "zlib" else None
        if inflated is not None:
            title += f", {len(inflated)} bytes inflated"
            body = inflated
    text = printable(body)
    if text is None:
        return [style.title(title), *hex_dump(body)]
    lines = [style.title(title), *(f"  {line}" for line in text[:BODY_TEXT_MAX].split("\n"))]
    if len(text) > BODY_TEXT_MAX:
        lines.append(f"  ... and {len(text) - BODY_TEXT_MAX} more characters (--json has all)")
    return lines


def _inflate(body: bytes) -> bytes | None:
    """What a zlib body holds, up to a limit: a small body may inflate to gigabytes."""
    try:
        return zlib.decompressobj().decompress(body, INFLATED_BYTES_MAX)
    except zlib.error:
        return None


def printable(body: bytes) -> str | None:
    """The body as text, None where it is not text that can be shown as it is."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        return None
    rest = text.replace("\n", "").replace("\t", "").replace("\r\n", "")
    return text if rest.isprintable() else None


def hex_dump(data: bytes) -> list[str]:
    """16 bytes a line, bounded."""
    lines = []
    for at in range(0, min(len(data), BODY_HEX_MAX), 16):
        part = data[at : at + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"  {at:08x}  {part.hex(' '):<47}  {shown}")
    if len(data) > BODY_HEX_MAX:
        lines.append(f"  ... and {len(data) - BODY_HEX_MAX} more bytes (--json has all)")
    return lines


def flag_names(sys_flag: int) -> list[str]:
    names = [name for bit, name in _FLAG_NAMES if sys_flag & bit]
    transaction = _TX_NAMES[sys_flag & records.SYS_TX_MASK]
    return [*names, f"transaction {transaction}"] if transaction else names


def host(packed: bytes) -> str:
    """127.0.0.1:10911, [::1]:10911."""
    address = ipaddress.ip_address(packed[:-4])
    port = int.from_bytes(packed[-4:], "big")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
