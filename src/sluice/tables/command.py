"""This module is `sluice table`: it looks at Parquet tables and keeps their files in shape.

    sluice table show DIR       what is there: rows, files, offsets
    sluice table files DIR      the files of the table, a line each, for other tools
    sluice table compact DIR    join small files to large ones, beside a running stream
    sluice table sweep DIR      delete files that are no part of the table any more

Exit codes: 0 done, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from typing import Any, Final

import orjson

from sluice.errors import ConfigError
from sluice.tables import api
from sluice.tables.compaction import KEEP_HOURS
from sluice.tables.log import TableLog

_UNITS: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def main(argv: list[str]) -> int:
    """`sluice table WHAT DIR`."""
    arguments = _parser().parse_args(argv)
    found = arguments.run(arguments)
    if arguments.json:
        sys.stdout.write(orjson.dumps(found).decode() + "\n")
    else:
        sys.stdout.write(arguments.words(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice table",
        description="Look at Parquet tables that streams write, and keep their files in shape.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    for name, run, words, text in (
        ("show", _show, _show_words, "what is there: rows, files, offsets"),
        ("files", _files, _files_words, "the files of the table, a line each, for other tools"),
        ("compact", _compact, _compact_words, "join small files, also beside a running stream"),
        ("sweep", _sweep, _sweep_words, "delete files that are no part of the table any more"),
    ):
        kind = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        kind.add_argument("directory", metavar="DIR", help="the table: its path")
        kind.add_argument("--json", action="store_true", help="one JSON object, for scripts")
        kind.set_defaults(run=run, words=words)
        if name == "compact":
            kind.add_argument(
                "--target", default="128m", metavar="SIZE", help="of the new files. Default: 128m."
            )
        if name == "sweep":
            kind.add_argument(
                "--keep-hours",
                type=float,
                default=KEEP_HOURS,
                metavar="HOURS",
                help="leave what readers may still be reading. Default: 24.",
            )
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12})([kmg]?)", text.lower())
    if match is None or not int(match[1]):
        raise ConfigError(f"--target: {text!r} is no size, for example 128m")
    return int(match[1]) * _UNITS[match[2]]


def _show(arguments: argparse.Namespace) -> dict[str, Any]:
    log = TableLog(arguments.directory)
    table = log.require()
    state = log.refresh()
    return {
        "directory": str(log.directory),
        "id": table.table_id,
        "columns": {each["name"]: _kind(each["type"]) for each in table.schema["fields"]},
        "partition_by": table.partition_by,
        "version": state.version,
        "files": len(state.files),
        "rows": sum(file.rows for file in state.files.values()),
        "bytes": sum(file.size for file in state.files.values()),
        "ends": state.ends,
        "queries": {query: last.batch for query, last in state.queries.items()},
    }


def _kind(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind["type"])


def _show_words(found: dict[str, Any]) -> str:
    lines = [
        f"table      {found['directory']}",
        f"columns    {', '.join(f'{name} {kind}' for name, kind in found['columns'].items())}",
        f"divided by {', '.join(found['partition_by']) or 'nothing'}",
        f"version    {found['version']}",
        f"rows       {found['rows']}",
        f"files      {found['files']}, {found['bytes']} bytes",
    ]
    for topic, parts in sorted(found["ends"].items()):
        ends = ", ".join(f"{part}: {parts[part]}" for part in sorted(parts, key=_number))
        lines.append(f"offsets    {topic} up to {ends}")
    return "\n".join(lines) + "\n"


def _number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (0, text)


def _files(arguments: argparse.Namespace) -> list[str]:
    return [str(path) for path in api.files(arguments.directory)]


def _files_words(found: list[str]) -> str:
    return "".join(f"{path}\n" for path in found)


def _compact(arguments: argparse.Namespace) -> dict[str, Any]:
    return asdict(api.compact(arguments.directory, target_file_bytes=_size(arguments.target)))


def _compact_words(found: dict[str, Any]) -> str:
    if not found["rows"]:
        return f"nothing to join: {found['files_after']} files\n"
    return (
        f"{found['files_before']} files became {found['files_after']}: {found['rows']} rows in "
        f"{found['size_after']} bytes, which took {found['size_before']} before\n"
    )


def _sweep(arguments: argparse.Namespace) -> dict[str, int]:
    return {"files": len(api.sweep(arguments.directory, keep_hours=arguments.keep_hours))}


def _sweep_words(found: dict[str, int]) -> str:
    return f"{found['files']} files deleted\n"
