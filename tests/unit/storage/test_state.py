"""Settings and positions: every change an entry of the log, files in RocketMQ's form beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import MessageIllegal, SluiceError
from sluice.storage.background import Steps
from sluice.storage.memory_files import KeepNothing, MemoryFiles
from sluice.storage.state import (
    GROUP_TABLE,
    OFFSET_TABLE,
    STATE_TOPIC,
    TOPIC_TABLE,
    Change,
    StateTables,
    difference,
    file_names,
    read_files,
)
from tests.unit.storage.store_kit import SEGMENT_BYTES, Disk

CONFIG = "/store/config"

KEYS = st.sampled_from(["a", "b@g", "c"])
OFFSETS = st.dictionaries(st.sampled_from("012"), st.integers(0, 99), min_size=1)
VALUES = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 99), max_size=2)
CHANGES: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(st.just(OFFSET_TABLE), KEYS, st.none() | OFFSETS)
    | st.tuples(st.sampled_from([TOPIC_TABLE, GROUP_TABLE, "own"]), KEYS, st.none() | VALUES),
    max_size=8,
)


class Reference:
    """The tables as plainly as can be."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {}

    def apply(self, group: list[Change]) -> None:
        for name, key, value in group:
            table = self.tables.setdefault(name, {})
            if value is None:
                table.pop(key, None)
            elif name == OFFSET_TABLE:
                table[key] = {**table.get(key, {}), **value}
            else:
                table[key] = value

    def filled(self) -> dict[str, dict[str, Any]]:
        return {name: table for name, table in self.tables.items() if table}


def filled(tables: StateTables) -> dict[str, dict[str, Any]]:
    return {name: table for name, table in tables.tables.items() if table}


# ------------------------------------------------------------------------------------------- bodies


@given(st.lists(CHANGES, max_size=6), st.integers(120, 400))
def test_bodies_and_full_bodies_make_the_same_tables(
    groups: list[list[Change]], bytes_max: int
) -> None:
    reference, tables = Reference(), StateTables()
    for number, group in enumerate(groups):
        reference.apply(group)
        for body in tables.bodies(group, bytes_max):
            assert len(body) <= bytes_max
            tables.apply(body, number)
    assert filled(tables) == reference.filled()
    copy = StateTables({"old": {"gone": 1}})
    for body in tables.full_bodies(bytes_max):
        copy.apply(body, 0)
    assert filled(copy) == reference.filled()
    assert "old" in copy.unsaved, "its file must lose what the table lost"


def test_a_full_body_counts_only_when_all_its_parts_are_there() -> None:
    tables = StateTables({"own": {str(n): "x" * 50 for n in range(10)}})
    bodies = tables.full_bodies(200)
    assert len(bodies) > 2
    other = StateTables({"own": {"old": 1}})
    for body in bodies[1:]:  # retention took the first part
        other.apply(body, 0)
    assert other.tables == {"own": {"old": 1}}
    for body in (bodies[0], bodies[0], *bodies[1:]):  # a crash, then once more from the start
        other.apply(body, 0)
    assert other.tables == tables.tables


def test_a_change_that_does_not_fit_into_one_entry_is_refused() -> None:
    with pytest.raises(MessageIllegal, match="do not fit into one log entry of 100 bytes"):
        StateTables().body([("own", "a", "x" * 100)], 100)


def test_offsets_are_merged_other_tables_replaced_none_deletes() -> None:
    tables = StateTables()
    tables.apply(
        tables.body([(OFFSET_TABLE, "t@g", {"0": 1, "1": 2}), ("own", "a", {"x": 1})], 999), 5
    )
    tables.apply(tables.body([(OFFSET_TABLE, "t@g", {"1": 3}), ("own", "a", {"y": 2})], 999), 6)
    assert tables.tables == {OFFSET_TABLE: {"t@g": {"0": 1, "1": 3}}, "own": {"a": {"y": 2}}}
    tables.apply(tables.body([("own", "a", None), ("own", "nobody", None)], 999), 7)
    assert tables.tables["own"] == {}
    assert (tables.version, tables.changed_ms) == (3, 7)


@given(CHANGES, CHANGES)
def test_differences_turn_one_table_into_another(old: list[Change], new: list[Change]) -> None:
    before, after = Reference(), Reference()
    before.apply(old)
    after.apply(new)
    for name in (TOPIC_TABLE, "own"):
        result = dict(before.tables.get(name, {}))
        wanted = after.tables.get(name, {})
        for _, key, value in list(difference(result, wanted, name)):
            if value is None:
                result.pop(key)
            else:
                result[key] = value
        assert result == wanted


# -------------------------------------------------------------------------------------------- files


@given(CHANGES)
def test_files_there_and_back(group: list[Change]) -> None:
    tables = StateTables()
    tables.apply(tables.body(group, 1 << 20), 42)
    files = MemoryFiles()
    files.make_directory(CONFIG)
    for name, data in tables.render(tables.tables, 1234).items():
        files.replace(f"{CONFIG}/{name}", data)
    found = read_files(files, CONFIG)
    assert {name: table for name, table in found.ours.items() if table} == filled(tables)
    assert (found.foreign, found.damaged) == ({}, [])
    assert sorted(files.names(CONFIG)) == file_names(tables.tables)


def put_file(name: str, text: str) -> MemoryFiles:
    files = MemoryFiles()
    files.make_directory(CONFIG)
    files.replace(f"{CONFIG}/{name}", text.encode())
    return files


def test_the_form_is_rocketmqs() -> None:
    tables = StateTables({TOPIC_TABLE: {"t": {"perm": 6}}, GROUP_TABLE: {"g": {}}}, 7, 99)
    files = {name: json.loads(data) for name, data in tables.render(tables.tables, 5).items()}
    topics, groups = files["topics.json"], files["subscriptionGroup.json"]
    assert topics["topicConfigTable"] == {"t": {"perm": 6}}
    assert topics["dataVersion"] == {"counter": 7, "stateVersion": 0, "timestamp": 99}
    assert (groups["subscriptionGroupTable"], groups["forbiddenTable"]) == ({"g": {}}, {})


def test_a_file_that_apache_wrote_is_foreign() -> None:
    text = (
        '{\n\t"dataVersion":{"counter":3,"timestamp":17},'
        '"offsetTable":{"t@g":{0:5,1:7},"odd \\"{0:1}\\"@g":{0:1}}\n}'
    )
    found = read_files(put_file("consumerOffset.json", text), CONFIG)
    assert found.foreign == {OFFSET_TABLE: {"t@g": {"0": 5, "1": 7}, 'odd "{0:1}"@g': {"0": 1}}}
    assert (found.version, found.changed_ms, found.damaged) == (3, 17, [])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"topicConfigTable":[]}', "{}", '{"topicConfigTable":{},"sluice":{"crc":1}}'],
)
def test_a_file_that_cannot_be_trusted_is_named(text: str) -> None:
    found = read_files(put_file("topics.json", text), CONFIG)
    assert found.damaged == [f"{CONFIG}/topics.json"]
    assert (found.ours, found.foreign) == ({}, {})


def test_apaches_backup_is_taken_where_the_file_is_broken() -> None:
    files = put_file("topics.json", "{")
    files.replace(f"{CONFIG}/topics.json.bak", b'{"topicConfigTable":{"t":{}}}')
    found = read_files(files, CONFIG)
    assert (found.foreign, found.damaged) == ({TOPIC_TABLE: {"t": {}}}, [])


@pytest.mark.parametrize(
    "text", ['"sluice":5', '"dataVersion":5', '"dataVersion":{"counter":"x","timestamp":[]}']
)
def test_odd_types_in_a_file_are_no_crash(text: str) -> None:
    content = '{"topicConfigTable":{"t":{}},' + text + "}"
    found = read_files(put_file("topics.json", content), CONFIG)
    assert found.foreign or found.damaged
    assert found.version == 0


# --------------------------------------------------------------------------------- in a real store


def change(disk: Disk, *wanted: Change) -> None:
    outcome: list[SluiceError | None] = []
    disk.store.change(wanted, outcome.append)
    disk.store.write_staged()
    assert outcome == [None]


def test_changes_survive_a_power_cut_and_the_loss_of_config() -> None:
    disk = Disk()
    disk.open()
    change(disk, (TOPIC_TABLE, "t", {"perm": 6}), ("own", "k", 1))
    disk.crash(KeepNothing())
    disk.open()
    assert disk.store.table(TOPIC_TABLE) == {"t": {"perm": 6}}
    disk.close()
    for path in list(disk.paths(CONFIG)):
        disk.files.remove(path)
    assert disk.open().table("own") == {"k": 1}
    disk.close()
    assert disk.files.names(CONFIG) == ["sluice.json", "topics.json"], "made again"


def test_a_file_that_another_broker_changed_is_taken_over_into_the_log() -> None:
    disk = Disk()
    disk.open()
    change(disk, (TOPIC_TABLE, "t", {"perm": 6}), (TOPIC_TABLE, "u", {"perm": 6}))
    disk.close()
    disk.files.replace(f"{CONFIG}/topics.json", b'{"topicConfigTable":{"t":{"perm":4},"v":{}}}')
    disk.open()
    expected = {"t": {"perm": 4}, "v": {}}
    assert disk.store.table(TOPIC_TABLE) == expected
    disk.close()
    for path in [*disk.paths(CONFIG), *disk.paths("/store/sluice")]:
        disk.files.remove(path)
    assert disk.open().table(TOPIC_TABLE) == expected


def test_a_damaged_file_is_made_again_from_the_log() -> None:
    disk = Disk()
    disk.open()
    change(disk, (TOPIC_TABLE, "t", {"perm": 6}))
    disk.close()
    path = f"{CONFIG}/topics.json"
    good = disk.files.read(path, 1 << 20)
    disk.files.flip(path, good.index(b"perm") * 8)
    assert disk.open().table(TOPIC_TABLE) == {"t": {"perm": 6}}
    disk.fill(1)
    disk.close()
    assert read_files(disk.files, CONFIG).ours[TOPIC_TABLE] == {"t": {"perm": 6}}


def test_committed_offsets_are_seen_at_once_and_gathered() -> None:
    disk = Disk(state_batch_ms=1000)
    store = disk.open()
    store.tick()
    for offset in range(100):
        store.commit_offset("g", "t", 0, offset)
    store.commit_offset("g", "t", 1, 7)
    assert store.committed_offset("g", "t", 0) == 99
    assert store.committed_offset("g", "t", 2) is None
    assert store.max_offset(STATE_TOPIC, 0) == 0
    disk.now_ms += 1000
    store.tick()
    assert store.max_offset(STATE_TOPIC, 0) == 1, "one entry for all of them"
    disk.crash(KeepNothing())
    assert disk.open().committed_offset("g", "t", 0) == 99


def test_offsets_that_could_not_be_written_are_not_forgotten() -> None:
    disk = Disk(state_batch_ms=0)
    store = disk.open()
    disk.files.capacity_bytes = 0
    store.commit_offset("g", "t", 0, 5)
    store.commit_offset("g", "t", 1, 6)
    for _ in range(3):
        disk.now_ms += 1
        store.tick()
    store.commit_offset("g", "t", 0, 8)
    assert store.committed_offset("g", "t", 0) == 8
    disk.files.capacity_bytes = None
    disk.now_ms += 2000
    store.tick()
    store.tick()
    disk.crash(KeepNothing())
    disk.open()
    assert disk.store.table(OFFSET_TABLE) == {"t@g": {"0": 8, "1": 6}}


def test_more_settings_than_one_entry_holds() -> None:
    disk = Disk(segment_bytes=SEGMENT_BYTES)
    disk.open()
    for number in range(100):
        change(disk, ("own", f"key {number}", "x" * 100))
    expected = {f"key {number}": "x" * 100 for number in range(100)}
    assert len(disk.store.state.full_bodies(disk.store.state_bytes_max)) > 2
    disk.store.housekeeping.delete_before(disk.store.log.written // SEGMENT_BYTES * SEGMENT_BYTES)
    disk.close()
    assert disk.files.names("/store/commitlog")[0] != f"{0:020d}"
    for path in [*disk.paths(CONFIG), *disk.paths("/store/sluice")]:
        disk.files.remove(path)
    assert disk.open().table("own") == expected


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_what_somebody_else_wrote_holds_before_the_disk_has_answered(has_snapshot: bool) -> None:
    disk = Disk()
    store = disk.open()
    store.commit_offset("g", "t", 0, 5)
    disk.close()
    if not has_snapshot:  # nor does one hold in whose directory Apache's broker has been
        for name in disk.files.names("/store/sluice"):
            disk.files.remove(f"/store/sluice/{name}")
    content = json.loads(disk.files.read(f"{CONFIG}/consumerOffset.json", 1 << 20))
    del content["sluice"]
    content["offsetTable"] = {"t@g": {"0": 9}, "t@h": {"0": 1}}
    disk.files.replace(f"{CONFIG}/consumerOffset.json", json.dumps(content).encode())
    steps = disk.background = Steps()
    store = disk.open()
    assert store.table(OFFSET_TABLE) == {"t@g": {"0": 9}, "t@h": {"0": 1}}
    steps.run_all()
    assert store.table(OFFSET_TABLE) == {"t@g": {"0": 9}, "t@h": {"0": 1}}
    disk.close()
