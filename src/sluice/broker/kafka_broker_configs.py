"""This module knows the configurations of the broker itself as Kafka's administrators see them, and
changes those that Kafka's brokers change while they run.

    settings    say what a setting of ours says: to change one is to change the setting
    tuning      how Kafka's threads and its cleaner work: kept and shown, because tools set them;
                they mean nothing here
    fixed       shown; who wants them otherwise starts the broker so

A value can be for this broker or for all of them; there is one, so both hold here, and the first of
them before the second. What was set is a row of a table, for a setting of ours, too: so it is known
where a value comes from, and what goes back to its default when it is taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from sluice.broker import runtime_settings
from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Node
from sluice.config import BrokerConfig, flatten
from sluice.errors import SluiceError
from sluice.storage.state import KAFKA_CONFIG_TABLE

BOOLEAN, STRING, INT, _, LONG, DOUBLE, LIST = range(1, 8)  # in Kafka's numbers
FOR_THIS: Final = 2  # where a value comes from
FOR_ALL: Final = 3
FROM_FILE: Final = 4
DEFAULT: Final = 5
SET: Final = 0
DELETE: Final = 1
ADD: Final = 2
TAKE: Final = 3
_INT_MAX: Final = 2**31 - 1
_LONG_MAX: Final = 2**63 - 1
_HOUR_MS: Final = 3_600_000
_NAME_CHARS: Final = 100
_ORIGIN: Final = "a Kafka administrator"
_VALUE_CHARS: Final = 1000

Done = Callable[[SluiceError | None], None]


class _Tuning(NamedTuple):
    kind: int
    default: str
    low: float
    high: float = _INT_MAX


class _Setting(NamedTuple):
    """`ours` is the name of the setting; one of its unit are `unit` of Kafka's."""

    ours: str
    kind: int
    low: int
    unit: int = 1


_TUNING: Final = {
    "background.threads": _Tuning(INT, "10", 1),
    "follower.replication.throttled.rate": _Tuning(LONG, str(_LONG_MAX), 0, _LONG_MAX),
    "leader.replication.throttled.rate": _Tuning(LONG, str(_LONG_MAX), 0, _LONG_MAX),
    "log.cleaner.backoff.ms": _Tuning(LONG, "15000", 0, _LONG_MAX),
    "log.cleaner.dedupe.buffer.size": _Tuning(LONG, "134217728", 1, _LONG_MAX),
    "log.cleaner.io.buffer.load.factor": _Tuning(DOUBLE, "0.9", 0, 1),
    "log.cleaner.io.buffer.size": _Tuning(INT, "524288", 0),
    "log.cleaner.io.max.bytes.per.second": _Tuning(
        DOUBLE, "1.7976931348623157E308", 0, float("inf")
    ),
    "log.cleaner.threads": _Tuning(INT, "1", 0),
    "num.io.threads": _Tuning(INT, "8", 1),
    "num.network.threads": _Tuning(INT, "3", 1),
    "num.recovery.threads.per.data.dir": _Tuning(INT, "2", 1),
    "num.replica.fetchers": _Tuning(INT, "1", 1),
    "replica.alter.log.dirs.io.max.bytes.per.second": _Tuning(LONG, str(_LONG_MAX), 0, _LONG_MAX),
    "sasl.kerberos.min.time.before.relogin": _Tuning(LONG, "60000", 0, _LONG_MAX),
}

_SETTINGS: Final = {
    "log.message.timestamp.after.max.ms": _Setting("kafka_timestamp_ahead_ms_max", LONG, 0),
    # Our files are kept for whole hours; part of one counts as one, so that nothing goes early.
    "log.retention.ms": _Setting("retention_hours", LONG, 1, _HOUR_MS),
    "message.max.bytes": _Setting("kafka_batch_bytes_max", INT, 0),
    "producer.id.expiration.ms": _Setting("kafka_producer_expiry_ms", INT, 1),
}

_FIXED: Final = {
    "advertised.listeners": LIST,
    "auto.create.topics.enable": BOOLEAN,
    "broker.id": INT,
    "default.replication.factor": INT,
    "log.cleanup.policy": LIST,
    "log.message.timestamp.type": STRING,
    "min.insync.replicas": INT,
    "num.partitions": INT,
    "offsets.retention.minutes": INT,
    "socket.request.max.bytes": INT,
}


class BrokerConfigs:
    """The configurations of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def shown(self, node: Node, names: list[str] | None, *, synonyms: bool) -> list[dict[str, Any]]:
        """The configurations that hold, as answers list them."""
        result = []
        fixed = self._fixed(node)
        for name in sorted({*_FIXED, *_SETTINGS, *_TUNING}):
            if names is not None and name not in names:
                continue
            kind, value, below = self._known(name, fixed)
            found = [
                {"name": name, "value": text, "source": source}
                for level, source in ((str(node.node_id), FOR_THIS), ("", FOR_ALL))
                if (text := self._rows().get(_key(level, name))) is not None
            ]
            if found and name in _SETTINGS:
                # What the file said is not known any more: this is what comes without a value.
                default = int(_our_value(name, None)) * _SETTINGS[name].unit
                found.append({"name": name, "value": str(default), "source": DEFAULT})
            else:
                found.append({"name": name, "value": value, "source": below})
            result.append(
                {
                    "name": name,
                    "value": value if name in _SETTINGS else found[0]["value"],
                    "read_only": name in _FIXED,
                    "config_source": found[0]["source"],
                    "config_type": kind,
                    "synonyms": found if synonyms else [],
                }
            )
        return result

    def set_for_all(self, names: list[str] | None) -> list[dict[str, Any]]:
        """What was set for all brokers at once."""
        return [
            {
                "name": name,
                "value": value,
                "read_only": False,
                "config_source": FOR_ALL,
                "config_type": _kind(name),
            }
            for key, value in sorted(self._rows().items())
            for level, _, name in (key.partition("@"),)
            if not level and (names is None or name in names)
        ]

    def _rows(self) -> Mapping[str, str]:
        return self._core.store.table(KAFKA_CONFIG_TABLE)

    def _known(self, name: str, fixed: Mapping[str, str]) -> tuple[int, str, int]:
        """Kind, value and source of a configuration, as if nobody had set it here."""
        if name in _TUNING:
            return _TUNING[name].kind, _TUNING[name].default, DEFAULT
        if name in _SETTINGS:
            return _SETTINGS[name].kind, self._setting(name), FROM_FILE
        return _FIXED[name], fixed[name], FROM_FILE

    def _setting(self, name: str) -> str:
        config, setting = self._core.config, _SETTINGS[name]
        at = config.store if setting.ours == "retention_hours" else config
        return str(getattr(at, setting.ours) * setting.unit)

    def _fixed(self, node: Node) -> dict[str, str]:
        config = self._core.config
        return {
            "advertised.listeners": f"PLAINTEXT://{node.host}:{node.port}",
            "auto.create.topics.enable": str(config.creates_topics).lower(),
            "broker.id": str(config.kafka_node_id),
            "default.replication.factor": "1",
            "log.cleanup.policy": "delete",
            "log.message.timestamp.type": "CreateTime",
            "min.insync.replicas": "1",
            "num.partitions": str(config.default_queue_count),
            "offsets.retention.minutes": str(config.kafka_offsets_retention_ms // 60_000),
            "socket.request.max.bytes": str(config.kafka_request_bytes_max),
        }

    # ------------------------------------------------------------------------------------- changing

    def wanted(self, level: str, asked: Any, *, is_whole: bool) -> dict[str, str | None] | str:
        """The changes that a request makes, None for what is to have its default; or what is wrong
        with it. `level` is a node's number, or empty: for all. `is_whole`: what is not named has
        its default again.
        """
        changes: dict[str, str | None] = {}
        for each in asked.configs:
            operation = SET if is_whole else each.config_operation
            wrong = _wrong(each.name, operation, each.value)
            if wrong:
                return wrong
            changes[each.name] = None if operation == DELETE else each.value.strip()
        if is_whole:
            kept = (key.partition("@") for key in self._rows())
            changes.update({name: None for at, _, name in kept if at == level} | changes)
        return changes

    def change(
        self, level: str, changes: Mapping[str, str | None], *, only_check: bool, done: Done
    ) -> None:
        """Make them all, or none. Raises ConfigError for what our settings do not take."""
        rows = dict(self._rows())
        for name, value in changes.items():
            rows.pop(_key(level, name), None)
            if value is not None:
                rows[_key(level, name)] = value
        this, settings = str(self._core.config.kafka_node_id), {}
        for name in changes:
            if name in _SETTINGS:
                own = rows.get(_key(this, name), rows.get(_key("", name)))
                settings[_SETTINGS[name].ours] = _our_value(name, own)
        if only_check:
            runtime_settings.checked(self._core, settings, _ORIGIN)
            done(None)
            return

        changed = [
            (KAFKA_CONFIG_TABLE, _key(level, name), value) for name, value in changes.items()
        ]
        runtime_settings.change(self._core, settings, _ORIGIN, done, with_it=changed)


def _key(level: str, name: str) -> str:
    return f"{level}@{name}"


def _kind(name: str) -> int:
    return _TUNING[name].kind if name in _TUNING else _SETTINGS[name].kind


def _our_value(name: str, value: str | None) -> str:
    """What a setting of ours is to be: what Kafka's says, or what it is by default."""
    setting = _SETTINGS[name]
    if value is None:
        return str(flatten(BrokerConfig())[setting.ours])
    return str(-(-int(value) // setting.unit))


def _wrong(name: str, operation: int, value: str | None) -> str:
    """What is wrong with a change; empty where nothing is."""
    if name in _FIXED:
        return f"Cannot update these configs dynamically: [{name}]"
    if name not in _TUNING and name not in _SETTINGS:
        return f"{name[:_NAME_CHARS]} is not a configuration that changes here while a broker runs"
    if operation in (ADD, TAKE):
        return f"{name} is no list"
    if operation == DELETE:
        return ""
    if operation != SET:
        return f"unknown operation {operation}"
    value = (value or "").strip()
    low: float
    high: float
    if name in _TUNING:
        kind, _, low, high = _TUNING[name]
    else:
        kind, low, high = _SETTINGS[name].kind, _SETTINGS[name].low, _LONG_MAX
    try:
        number = float(value) if kind == DOUBLE else int(value[:_VALUE_CHARS])
    except ValueError:
        return f"Invalid value {value[:_NAME_CHARS]} for configuration {name}: not a number"
    if not low <= number <= high:
        return f"Invalid value {number} for configuration {name}: it is from {low} to {high}"
    return ""
