"""This module holds the store's settings and positions: tables whose every change is an entry of
the log.

A table maps a key to a JSON value: topics, groups, committed offsets, and what later services keep.
A change is appended to the system topic below and takes effect when it is durable. The files under
`config/` are snapshots of the tables in RocketMQ's own form: its broker reads them, and a start
need not read the whole log. Each of our files carries a mark, "sluice": {log position, checksum};
Apache's broker drops it when it writes the file, so a file without the mark was changed by somebody
else and is taken over as it is.

Before retention deletes the oldest entries all tables are written to the log again ("full" bodies,
in parts that count only together), so that the log alone always suffices.

A topic is deleted by one change of the table `deleted`, which holds a position: the topic's entries
below it belong to no queue. The change takes everything with it that other tables say of the topic.

This module is pure but for `read_files`; it does not append, it makes and applies the bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from isal.isal_zlib import crc32

from sluice.errors import MessageIllegal
from sluice.protocol import lenient_json
from sluice.storage.files import Files

STATE_TOPIC: Final = "rmq_sys_sluice_state"
OFFSET_TABLE: Final = "offset"
TOPIC_TABLE: Final = "topic"
GROUP_TABLE: Final = "group"
DELAY_TABLE: Final = "delay"
QUEUE_END_TABLE: Final = "queue_end"
DELETED_TABLE: Final = "deleted"  # topic -> position in the log
SETTING_TABLE: Final = "setting"  # settings that were changed while the broker ran, as text
REQUEST_MODE_TABLE: Final = "request_mode"  # topic -> group -> whether it pulls or pops
MEMORY_TABLE: Final = "memory"  # "topic@queue" of a topic in memory -> offsets below are used up
DEDUP_TABLE: Final = "dedup"  # "topic@..." -> business keys whose messages retention has taken
EXPIRY_TABLE: Final = "expiry"  # topics that have or had messages whose life ends
POP_TABLE: Final = "pop"  # where the events of pop consumption are read from after a start
TIMER_TABLE: Final = "timer"  # how far timed messages were delivered
TRANSACTION_TABLE: Final = "transaction"  # from where on half messages are read at a start
FORBIDDEN_TABLE: Final = "forbidden"  # group -> topic -> bits of what it may not do
LOCK_TABLE: Final = "lock"  # topic@group@queue -> the client that reads it in order
RETRY_TABLE: Final = "retry"  # topic@group@queue -> ranges of offsets that were sent back
STAGED_TABLE: Final = "staged"  # sink -> the batch that it published last, what of it waits
DEAD_TABLE: Final = "dead_letter"  # group@queue -> ranges of dead letters that were sent again
KAFKA_GROUP_TABLE: Final = "kafka_group"  # group of Kafka's clients -> members, generation
KAFKA_OFFSET_TABLE: Final = "kafka_offset"  # topic@partition@group -> offset, epoch, text, time
KAFKA_CONFIG_TABLE: Final = "kafka_config"  # node@name, @name for all -> what Kafka's admins set
KAFKA_PENDING_TABLE: Final = "kafka_pending"  # topic@partition@producer@group -> the same
KAFKA_ID_TABLE: Final = "kafka_id"  # "topic@" -> its UUID
KAFKA_START_TABLE: Final = "kafka_start"  # topic@partition -> offset that it begins at
COMPACTED_TABLE: Final = "compacted"  # topic@partition -> where the rest of its beginning is
KAFKA_PRODUCER_TABLE: Final = "kafka_producer"  # topic@partition -> what producers sent last
KAFKA_TRANSACTION_TABLE: Final = "kafka_transaction"  # transactional id -> its state

# Their keys begin with "topic@": a row goes with its topic.
_TOPIC_TABLES: Final = (
    *(OFFSET_TABLE, QUEUE_END_TABLE, MEMORY_TABLE, DEDUP_TABLE),
    *(KAFKA_OFFSET_TABLE, KAFKA_PENDING_TABLE, KAFKA_ID_TABLE, KAFKA_PRODUCER_TABLE),
    *(KAFKA_START_TABLE, COMPACTED_TABLE),
)

# Topics of the broker's own that hold what compaction has kept of partitions.
COMPACTED_PREFIX: Final = "rmq_sys_compacted_"

_FILE_BYTES_MAX: Final = 1 << 30
_MARK: Final = "sluice"
_MARK_MEMBERS: Final = {"log", "crc"}
# Tables that RocketMQ knows, each with its file and the member that holds the map.
_ROCKETMQ_FILES: Final = {
    TOPIC_TABLE: ("topics.json", "topicConfigTable"),
    GROUP_TABLE: ("subscriptionGroup.json", "subscriptionGroupTable"),
    OFFSET_TABLE: ("consumerOffset.json", "offsetTable"),
    DELAY_TABLE: ("delayOffset.json", "offsetTable"),
    REQUEST_MODE_TABLE: ("messageRequestMode.json", "messageRequestModeMap"),
}
# RocketMQ keeps this one in the file of the groups. Ours is the truth, theirs is written beside it.
_FORBIDDEN_MEMBER: Final = "forbiddenTable"
_OWN_FILE: Final = "sluice.json"  # all tables that RocketMQ does not know

# [table, key, value]; None deletes the key. In the offset table a value is merged into the old one.
Change = tuple[str, str, Any]


@dataclass(slots=True)
class StateTables:
    """The tables and how they change. `version` counts changes; it is RocketMQ's data version
    too.
    """

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 0
    changed_ms: int = 0
    unsaved: set[str] = field(default_factory=set)
    under_way: dict[int, bytes] = field(default_factory=dict)  # staged, not durable; by position
    _parts: list[list[Change]] = field(default_factory=list)

    # ------------------------------------------------------------------------------------- changing

    def body(self, changes: Iterable[Change], bytes_max: int) -> bytes:
        """The body of the log entry that makes these changes together."""
        body = orjson.dumps({"ops": list(changes)}, option=orjson.OPT_NON_STR_KEYS)
        if len(body) > bytes_max:
            raise MessageIllegal(
                f"settings of {len(body)} bytes do not fit into one log entry of {bytes_max} bytes"
            )
        return body

    def bodies(self, changes: Iterable[Change], bytes_max: int) -> list[bytes]:
        """As few bodies as the limit allows; each one is atomic, together they are not."""
        return [orjson.dumps({"ops": group}) for group in _groups(changes, bytes_max)]

    def full_bodies(self, bytes_max: int) -> list[bytes]:
        """All tables, in parts: they replace everything once the last part was applied.

        They hold what is under way too: it comes before them in the log, and must not be undone.
        """
        ahead = StateTables({name: dict(table) for name, table in self.tables.items()})
        for body in self.under_way.values():
            ahead.apply(body, 0)
        everything = (
            (name, key, value)
            for name, table in ahead.tables.items()
            for key, value in table.items()
        )
        groups = list(_groups(everything, bytes_max - 64)) or [[]]
        return [
            orjson.dumps({"full": [part, len(groups)], "ops": group})
            for part, group in enumerate(groups)
        ]

    def apply(self, body: bytes | memoryview, store_ms: int) -> None:
        """An entry of the system topic is durable: its changes hold now."""
        content = orjson.loads(body)
        changes: list[Change] = content["ops"]
        part, parts = content.get("full", (None, None))
        if part is not None:
            if part == 0:
                self._parts = []
            if part != len(self._parts):
                return  # its beginning is gone with the old files; a later one is whole
            self._parts.append(changes)
            if part + 1 < parts:
                return
            self.unsaved.update(self.tables)
            self.tables = {}
            changes = [change for group in self._parts for change in group]
            self._parts = []
        for name, key, value in changes:
            if name == DELETED_TABLE and value is not None and part is None:
                self._forget_topic(key)
            self._change(name, key, value)
        self.version += 1
        self.changed_ms = store_ms

    def _change(self, name: str, key: str, value: Any) -> None:
        table = self.tables.setdefault(name, {})
        if value is None:
            table.pop(key, None)
        elif name == OFFSET_TABLE:
            # A new dict: a checkpoint may be writing the old one.
            table[key] = {**table.get(key, {}), **value}
        else:
            table[key] = value
        self.unsaved.add(name)
        if name == FORBIDDEN_TABLE:
            self.unsaved.add(GROUP_TABLE)

    def _forget_topic(self, topic: str) -> None:
        """A topic was deleted: nobody's offset means anything there, and its queues end nowhere."""
        self._change(TOPIC_TABLE, topic, None)
        for name in _TOPIC_TABLES:
            for key in [k for k in self.tables.get(name, {}) if k.startswith(f"{topic}@")]:
                self._change(name, key, None)

    def newest(self, name: str, key: str) -> Any:
        """A value as it will be when all that is under way is durable; not of the offset table."""
        text = orjson.dumps(key)
        for body in reversed(self.under_way.values()):
            if text not in body:
                continue
            content = orjson.loads(body)
            if "full" in content:
                continue  # it says what the others say
            for table, changed, value in reversed(content["ops"]):
                if changed == key and table == name:
                    return value
                if changed == key and table == DELETED_TABLE and name == TOPIC_TABLE:
                    return None
        return self.tables.get(name, {}).get(key)

    # --------------------------------------------------------------------------------------- topics

    def counts_batches(self, topic: str) -> bool:
        """Whether an entry of this topic may count many offsets."""
        if topic.startswith(COMPACTED_PREFIX):
            return True
        return _counts_batches(self.newest(TOPIC_TABLE, topic))

    def topics_of_new_kind(self, changes: Iterable[Change]) -> list[str]:
        """The topics whose queues would be kept in another way after these changes."""
        return [
            key
            for name, key, value in changes
            if name == TOPIC_TABLE
            and value is not None
            and _counts_batches(value) != self.counts_batches(key)
        ]

    # ---------------------------------------------------------------------------------------- files

    def render(self, names: Iterable[str], log_offset: int) -> dict[str, bytes]:
        """The files that hold these tables, in RocketMQ's form."""
        version = {"counter": self.version, "stateVersion": 0, "timestamp": self.changed_ms}
        result = {}
        for name in names:
            if name in _ROCKETMQ_FILES:
                file_name, member = _ROCKETMQ_FILES[name]
                content = {"dataVersion": version, member: self.tables.get(name, {})}
                if name == GROUP_TABLE:
                    content[_FORBIDDEN_MEMBER] = self.tables.get(FORBIDDEN_TABLE, {})
            else:
                file_name = _OWN_FILE
                member = "tables"
                own = {n: t for n, t in self.tables.items() if n not in _ROCKETMQ_FILES}
                content = {"dataVersion": version, member: own}
            mark = {"log": log_offset, "crc": _checksum(content[member])}
            result[file_name] = orjson.dumps(
                {**content, _MARK: mark}, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
            )
        return result


@dataclass(slots=True)
class ConfigFiles:
    """What was found under `config/`."""

    ours: dict[str, dict[str, Any]] = field(default_factory=dict)  # tables from files with our mark
    foreign: dict[str, dict[str, Any]] = field(default_factory=dict)  # from files without it
    damaged: list[str] = field(default_factory=list)
    version: int = 0
    changed_ms: int = 0


def file_names(tables: Iterable[str]) -> list[str]:
    """The files that these tables are kept in."""
    return sorted({_ROCKETMQ_FILES.get(name, (_OWN_FILE, ""))[0] for name in tables})


def read_files(files: Files, directory: str) -> ConfigFiles:
    """Read the snapshots of the tables; a file that cannot be trusted is named, not used."""
    found = ConfigFiles()
    named = [
        *((*where, name) for name, where in _ROCKETMQ_FILES.items()),
        (_OWN_FILE, "tables", ""),
    ]
    for file_name, member, table in named:
        path = f"{directory}/{file_name}"
        if not files.exists(path):
            continue
        content = _parse(files, path)
        if content is None and files.exists(path + ".bak"):
            content = _parse(files, path + ".bak")  # Apache's habit
        if content is None or not isinstance(content.get(member), dict):
            found.damaged.append(path)
            continue
        value: dict[str, Any] = content[member]
        mark = _find_mark(content)
        ours = isinstance(mark, dict) and mark.get("crc") == _checksum(value)
        if mark is not None and not ours:
            found.damaged.append(path)
            continue
        tables = value if file_name == _OWN_FILE else {table: value}
        (found.ours if ours else found.foreign).update(tables)
        if table == GROUP_TABLE and not ours and isinstance(content.get(_FORBIDDEN_MEMBER), dict):
            found.foreign[FORBIDDEN_TABLE] = content[_FORBIDDEN_MEMBER]
        found.version = max(found.version, _version(content, "counter"))
        found.changed_ms = max(found.changed_ms, _version(content, "timestamp"))
    return found


def _find_mark(content: dict[str, Any]) -> Any:
    """Our mark, or what was it: a file whose mark has lost its name is damaged, not foreign."""
    shaped = [m for m in content.values() if isinstance(m, dict) and m.keys() == _MARK_MEMBERS]
    if shaped and _MARK not in content:
        return {}
    return content.get(_MARK)


def deleted_topics(body: bytes | memoryview) -> dict[str, int]:
    """The topics that an entry of the system topic deletes, with the positions of that."""
    content = orjson.loads(body) if b'"deleted"' in bytes(body) else {"ops": ()}
    if "full" in content:
        return {}  # it repeats what was deleted long ago
    return {k: at for name, k, at in content["ops"] if name == DELETED_TABLE and at is not None}


def _counts_batches(settings: dict[str, Any] | None) -> bool:
    """A topic's attribute queue.type=BatchCQ, in RocketMQ's form of its settings."""
    attributes = (settings or {}).get("attributes") or {}
    return bool(attributes.get("queue.type") == "BatchCQ")


def _version(content: dict[str, Any], name: str) -> int:
    version = content.get("dataVersion")
    value = version.get(name) if isinstance(version, dict) else None
    return value if isinstance(value, int) else 0


def difference(old: dict[str, Any], new: dict[str, Any], name: str) -> Iterator[Change]:
    """The changes that turn one table into another."""
    for key in old:
        if key not in new:
            yield name, key, None
    for key, value in new.items():
        if old.get(key) != value:
            yield name, key, value


def _parse(files: Files, path: str) -> dict[str, Any] | None:
    try:
        content = lenient_json.loads(files.read(path, _FILE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _checksum(value: Any) -> int:
    return crc32(orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))


def _groups(changes: Iterable[Change], bytes_max: int) -> Iterator[list[Change]]:
    group: list[Change] = []
    room = bytes_max - 32
    for change in changes:
        size = len(orjson.dumps(change, option=orjson.OPT_NON_STR_KEYS)) + 1
        if group and size > room:
            yield group
            group, room = [], bytes_max - 32
        group.append(change)
        room -= size
    if group:
        yield group
