"""This module writes docs/settings.md out of the declarations; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sluice.config.processes import BrokerConfig, NameserverConfig
from sluice.config.rocketmq import BROKER_INERT, COMMIT_LOG_PATH, FIXED, NAMESERVER_INERT
from sluice.config.settings import Setting, settings_of
from sluice.config.store import StoreConfig
from sluice.config.views import variable_name

_TOP: Final = """\
<!-- Written by `script/check --fix` from src/sluice/config/. Edits here are lost. -->
# Settings

One typed object per process holds all of these. Four views of it can be mixed:

| View | `retention_hours` in it |
|---|---|
| flag | `--retention-hours 3d` |
| environment variable | `SLUICE_RETENTION_HOURS=72` |
| TOML file (`*.toml`) | `retention_hours = "72h"`, at the top or in its table, here `[store]` |
| RocketMQ's file (`*.conf`, `*.properties`) | `fileReservedTime=72` |

A flag overrides the environment, the environment overrides the file, the file overrides the
default. What was changed while a broker ran (*live*, below) is kept in its store and comes between:
it overrides the file, and is overridden by flags and variables. The nameserver's variables begin
with `SLUICE_NAMESERVER_`. An unknown name is an error that names the nearest known one.

* **Sizes**: plain bytes, or `64KiB`, `16MiB`, `1GiB`.
* **Times**: `500ms`, `10s`, `5m`, `72h`, `3d`, or a plain number in the unit that the name ends in.
* **Flags**: `--name` and `--no-name`; elsewhere `true` or `false` (also `yes`, `no`, `on`, `off`).
* **RocketMQ's file** has RocketMQ's units: plain numbers only.

*Live* means that the setting can be changed while the process runs, with mqadmin's
`updateBrokerConfig` or `updateNamesrvConfig`; any other takes effect at the next start only. The
broker keeps such a change until it is changed again, the nameserver until it stops.
"""

_INERT: Final = """
## RocketMQ's names that have no effect here

A file that holds these is accepted; they are listed once as a warning.
"""

_FIXED: Final = """
## RocketMQ's names that are checked

These are accepted only with the value shown, which is what Sluice does anyway. Another value asks
for data safety or protection that this version does not have, so it is an error.

| Name | Accepted | Why |
|---|---|---|
"""


def settings_markdown() -> str:
    """The whole page."""
    parts = [_TOP]
    parts += _section("Store", BrokerConfig, "store")
    limit = StoreConfig.properties_bytes_max
    parts.append(
        f"\nThe properties of a message take at most {limit} bytes: a limit of the format.\n"
    )
    parts += _section("Broker", BrokerConfig, "")
    parts += _section("Nameserver", NameserverConfig, "")
    parts.append(_FIXED)
    for name, fixed in FIXED.items():
        values = ", ".join(f"`{value}`" if value else "empty" for value in fixed.values)
        parts.append(f"| `{name}` | {values} | {fixed.reason} |\n")
    place = "`<storePathRootDir>/commitlog`"
    parts.append(f"| `{COMMIT_LOG_PATH}` | {place} | the log lies under the store's directory |\n")
    parts.append(_INERT)
    parts += _inert("broker.conf", BROKER_INERT)
    parts += _inert("namesrv.conf", NAMESERVER_INERT)
    return "".join(parts)


def _section(title: str, kind: type[Any], section: str) -> Iterator[str]:
    yield f"\n## {title}\n\n"
    yield "| Setting | Default | Allowed | Live | RocketMQ | What it does |\n"
    yield "|---|---|---|---|---|---|\n"
    for name, setting in settings_of(kind).items():
        if setting.section == section:
            yield _row(name, setting)
    example = next(n for n, s in settings_of(kind).items() if s.section == section)
    yield f"\nVariables: `{variable_name(kind, example)}` and so on.\n"


def _row(name: str, setting: Setting) -> str:
    default = setting.kind.render(setting.default)
    names = ", ".join(
        f"`{foreign.name}`" + (f" ({foreign.note})" if foreign.note else "")
        for foreign in setting.foreign
    )
    cells = (
        f"`{name}`",
        f"`{default}`" if default else "empty",
        setting.allowed,
        "yes" if setting.dynamic else "",
        names,
        setting.doc.replace("|", "\\|"),
    )
    return "| " + " | ".join(cells) + " |\n"


def _inert(title: str, table: dict[str, str]) -> Iterator[str]:
    yield f"\n### {title}\n\n"
    by_reason: dict[str, list[str]] = {}
    for name, reason in table.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield f"* {reason}: {', '.join(f'`{name}`' for name in names)}\n"
