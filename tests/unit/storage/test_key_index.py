"""The key index: Apache's bytes, every key found again, and what a start makes of the files."""

from __future__ import annotations

from pathlib import Path
from struct import unpack_from

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.records import java_hash
from sluice.storage.files import RealFiles
from sluice.storage.key_batches import KeyBatch, key_hashes
from sluice.storage.key_index import KeyIndex
from sluice.storage.memory_files import KeepNothing, MemoryFiles
from tests.unit.storage.key_index_kit import (
    ASIDE,
    BEGIN_MS,
    DIRECTORY,
    FOREVER_MS,
    KEYS,
    SLOTS,
    TOPIC,
    Reference,
    Sent,
    batch_of,
    contents,
    expected,
    find,
    message_lists,
    numbered,
    open_index,
    split,
    store_with,
)


def test_reference_is_right_about_the_first_entries() -> None:
    first = Sent(300, BEGIN_MS, (b"key1", b"key2"))
    second = Sent(400, BEGIN_MS + 2500, (b"key1",))
    reference = Reference(slots=10).put_all([first, second])
    (file,) = reference.files
    assert unpack_from(">qqqqii", file, 0) == (BEGIN_MS, BEGIN_MS + 2500, 300, 400, 2, 4)
    # The hashes are -91726381 and -91726380, made positive: slots 1 and 0 of 10.
    assert unpack_from(">4i", file, 40) == (2, 3, 0, 0)
    assert unpack_from(">iqii", file, 40 + 40) == (0, 0, 0, 0)
    assert unpack_from(">iqii", file, 40 + 40 + 20) == (91726381, 300, 0, 0)
    assert unpack_from(">iqii", file, 40 + 40 + 60) == (91726381, 400, 2, 1)


# ------------------------------------------------------------------------------------- keys, hashes


def test_hashes_of_the_wire_document() -> None:
    keys = [b"TagA", b"TagB", b"LabTopic", "中文".encode(), b"LabTopic#key1", b"LabTopic#T#TagA"]
    assert key_hashes(keys).tolist() == [2598919, 2598920, 1910206526, 646394, 91726381, 1324785335]


def test_the_hash_without_a_positive_twin_is_zero() -> None:
    assert java_hash(b"polygenelubricants") == -(1 << 31)
    assert key_hashes([b"polygenelubricants"]).tolist() == [0]
    assert key_hashes([]).tolist() == []


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40) | st.text(min_size=1).map(str.encode)))
def test_hashes_are_javas(keys: list[bytes]) -> None:
    assert key_hashes(keys).tolist() == [abs(java_hash(key)) % (1 << 31) for key in keys]


def test_hashes_of_more_text_than_one_part() -> None:
    keys = [b"%d" % number * (number % 97 + 1) for number in range(3000)] + [b"x" * 300_000, b"y"]
    assert key_hashes(keys).tolist() == [abs(java_hash(key)) for key in keys]


def test_keys_of_a_message_are_apaches_in_its_order() -> None:
    batch = KeyBatch()
    properties = (
        b"uk\x01uv\x02UNIQ_KEY\x01FD00\x02CLUSTER\x01DefaultCluster\x02TAGS\x01TagA\x02"
        b"KEYS\x01 key1  key2 \x02WAIT\x01true\x02"
    )
    batch.add(TOPIC, properties, 2941, BEGIN_MS, 278)
    assert batch.spread()[0] == [
        b"LabTopic#FD00",
        b"LabTopic#key1",
        b"LabTopic#key2",
        b"LabTopic#T#TagA",
    ]
    batch.add(TOPIC, b"KEYS\x01key3\x02", 3219, BEGIN_MS + 1)
    keys, positions, times = batch.spread()
    assert positions.tolist() == [2941] * 4 + [3219]
    assert times.tolist() == [BEGIN_MS] * 4 + [BEGIN_MS + 1]
    assert len(keys) == 5


def test_messages_with_a_unique_key_alone_are_spread_as_all_others() -> None:
    batch = KeyBatch()
    for number in range(4):
        batch.add(b"t%d" % (number % 2), b"UNIQ_KEY\x01K%d\x02" % number, 100 * number, BEGIN_MS)
    keys, positions, times = batch.spread()
    assert keys == [b"t0#K0", b"t1#K1", b"t0#K2", b"t1#K3"]
    assert positions.tolist() == [0, 100, 200, 300]
    assert times.tolist() == [BEGIN_MS] * 4


def test_a_batch_knows_its_range_also_without_keys() -> None:
    batch = KeyBatch()
    assert (batch.first_position, batch.end_position) == (-1, -1)
    batch.add(TOPIC, b"", 100, 5, 50)
    batch.add(TOPIC, b"UNIQ_KEY\x01\x02KEYS\x01 \x02TAGS\x01", 150, 6, 50)
    assert batch.spread()[0] == []
    assert batch.message_count == 2
    assert (batch.first_position, batch.end_position) == (100, 200)


def test_a_unique_key_that_is_also_a_key_is_indexed_twice_and_found_once() -> None:
    files = MemoryFiles()
    index = open_index(files)
    batch = KeyBatch()
    batch.add(TOPIC, b"UNIQ_KEY\x01same\x02KEYS\x01same\x02", 100, BEGIN_MS)
    assert batch.spread()[0] == [b"LabTopic#same"] * 2
    index.write(batch)
    assert index.sync()[0].entries == 2
    assert find(index, b"same") == [100]


def test_tags_are_found_under_their_prefix() -> None:
    index = open_index(MemoryFiles())
    batch = KeyBatch()
    batch.add(TOPIC, b"TAGS\x01TagA\x02", 100, BEGIN_MS)
    index.write(batch)
    assert find(index, b"T#TagA") == [100]
    assert find(index, b"TagA") == []


# ------------------------------------------------------------------------------ writing and finding


@settings(deadline=None)
@given(st.data())
def test_any_split_into_batches_gives_apaches_bytes_and_every_key(data: st.DataObject) -> None:
    messages = data.draw(message_lists())
    files = MemoryFiles()
    index = open_index(files)
    assert index.load([], clean=True) == 0
    for part in data.draw(split(messages)):
        index.write(batch_of(part))
    reference = Reference().put_all(messages)
    if reference.files:
        assert contents(files) == reference.files
    for key in KEYS:
        assert find(index, key) == expected(messages, key)
        assert find(index, key, max_count=2) == expected(messages, key)[:2]
    assert find(index, b"never sent") == []


def test_slots_near_and_far_are_written_where_they_belong() -> None:
    # Enough slots that a batch has single slots, spans, and spans that end at a span's limit.
    slots, entries_max = 700_001, 5000
    messages = numbered(3000)
    files = MemoryFiles()
    index = open_index(files, slots=slots, entries_max=entries_max)
    for part in (messages[:5], messages[5:1500], messages[1500:]):
        index.write(batch_of(part))
    assert contents(files) == Reference(slots, entries_max).put_all(messages).files


def test_zero_results_are_asked_for_and_given() -> None:
    index = open_index(MemoryFiles())
    assert find(index, b"k1") == []
    index.write(batch_of(numbered(3)))
    assert find(index, b"k1", max_count=0) == []


def test_a_real_disk_does_as_the_simulated_one(tmp_path: Path) -> None:
    messages = numbered(40)
    files = RealFiles()
    index = open_index(files, directory=f"{tmp_path}/index")
    assert index.load([], clean=True) == 0
    index.write(batch_of(messages[:30]))
    marks = index.sync()
    index.write(batch_of(messages[30:]))
    index.close()
    again = open_index(files, directory=f"{tmp_path}/index")
    assert again.load(marks, clean=False) == 3000
    again.write(batch_of(messages[30:]))
    for message in messages:
        assert find(again, message.keys[0]) == [message.position]
    again.close()
    names = sorted(path.name for path in (tmp_path / "index").iterdir())
    read = [(tmp_path / "index" / name).read_bytes() for name in names]
    assert read == Reference().put_all(messages).files


def test_time_range_is_inclusive_and_known_to_the_second() -> None:
    index = open_index(MemoryFiles())
    times = [BEGIN_MS, BEGIN_MS + 1500, BEGIN_MS + 3000]
    index.write(batch_of([Sent(at * 100, ms, (b"k",)) for at, ms in enumerate(times)]))

    def between(begin_ms: int, end_ms: int) -> list[int]:
        return index.query(TOPIC, b"k", begin_ms, end_ms, 10)

    assert between(BEGIN_MS, BEGIN_MS + 3000) == [200, 100, 0]
    assert between(0, BEGIN_MS) == [0]
    assert between(0, BEGIN_MS - 1) == []
    assert between(BEGIN_MS + 3000, FOREVER_MS) == [200]
    assert between(BEGIN_MS + 3001, FOREVER_MS) == []
    # 1500 is stored as "1 second": it may be anywhere from 1000 to 1999.
    assert between(BEGIN_MS + 1500, BEGIN_MS + 1500) == [100]
    assert between(BEGIN_MS + 2000, BEGIN_MS + 2500) == []


def test_time_range_picks_the_right_files_also_after_a_long_pause() -> None:
    hour_ms = 3_600_000
    index = open_index(MemoryFiles(), entries_max=3)
    messages = [Sent(at * 100, BEGIN_MS + at * hour_ms, (b"k",)) for at in range(6)]
    index.write(batch_of(messages))
    assert len(index.sync()) == 3
    for message in messages:
        # The first entry of a file says "an hour after the begin"; it was at the begin.
        at_ms = message.store_ms
        assert index.query(TOPIC, b"k", at_ms, at_ms, 10) == [message.position]
        newer = index.query(TOPIC, b"k", at_ms, FOREVER_MS, 10)
        assert newer == expected(messages, b"k")[: len(newer)]
        assert newer[-1] == message.position


# ------------------------------------------------------------------------------------- files, names


def test_files_are_named_by_the_clock_and_stay_in_order_when_it_stands_or_goes_back() -> None:
    files = MemoryFiles()
    clock = [BEGIN_MS, BEGIN_MS, BEGIN_MS - 5, BEGIN_MS + 2000]
    index = KeyIndex(files, DIRECTORY, slots=SLOTS, entries_max=3, now_ms=lambda: clock.pop(0))
    index.write(batch_of(numbered(8)))
    names = files.names(DIRECTORY)
    first = int(names[0])
    assert [len(name) for name in names] == [17] * 4
    assert [int(name) - first for name in names[:3]] == [0, 1, 2]
    assert names[0][-3:] == "000"
    assert int(names[3]) > first + 2
    assert [mark.name for mark in index.sync()] == names


def test_a_name_that_is_taken_is_left_alone() -> None:
    files, _ = store_with(numbered(1))
    (name,) = files.names(DIRECTORY)
    files.remove(f"{DIRECTORY}/{name}")
    files.make_directory(f"{DIRECTORY}/{name}")
    index = open_index(files)
    assert index.load([], clean=True) == 0
    index.write(batch_of(numbered(1)))
    assert files.names(DIRECTORY) == [name, str(int(name) + 1)]


def test_retention_removes_whole_files_and_never_the_newest() -> None:
    files = MemoryFiles()
    index = open_index(files)
    index.write(batch_of(numbered(30)))  # 11 entries a file: 0..10, 11..21, 22..29
    names = files.names(DIRECTORY)
    assert index.delete_before(1000) == []
    assert index.delete_before(1001) == names[:1]
    assert find(index, b"k10") == []
    assert find(index, b"k11") == [1100]
    assert index.delete_before(1 << 60) == names[1:2]
    assert files.names(DIRECTORY) == names[2:]
    assert [mark.name for mark in index.sync()] == names[2:]
    assert find(index, b"k29") == [2900]


# ------------------------------------------------------------------------------------------ loading


def test_a_clean_stop_is_gone_on_from() -> None:
    messages = numbered(30)
    files, marks = store_with(messages[:20])
    assert [mark.entries for mark in marks] == [11, 9]
    assert marks[-1].end_position == 2000
    index = open_index(files)
    assert index.load(marks, clean=True) == 2000
    index.write(batch_of(messages[20:]))
    assert contents(files) == Reference().put_all(messages).files
    again = index.sync()
    assert again[0] == marks[0]
    # The checksum was carried over and goes on: a crash after this is cut at the new mark.
    index = open_index(files.crash(KeepNothing()))
    assert index.load(again, clean=False) == 3000
    assert find(index, b"k29") == [2900]


def test_messages_without_keys_are_not_looked_at_again() -> None:
    files = MemoryFiles()
    index = open_index(files)
    assert index.load([], clean=True) == 0
    index.write(KeyBatch())
    assert index.sync() == []
    index.write(batch_of([Sent(100, BEGIN_MS, ())]))
    marks = index.sync()
    assert [(mark.entries, mark.end_position) for mark in marks] == [(0, 200)]
    for clean in (True, False):
        index = open_index(files)
        assert index.load(marks, clean=clean) == 200
    index.write(batch_of([Sent(200, BEGIN_MS, (b"k",))]))
    assert find(index, b"k") == [100 * 2]
    assert contents(files) == Reference().put_all([Sent(200, BEGIN_MS, (b"k",))]).files


@pytest.mark.parametrize("message_count", [1, 9, 11, 12, 25])
def test_a_foreign_index_is_taken_as_it_is_and_gone_on_from(message_count: int) -> None:
    messages = [Sent(at * 100, BEGIN_MS + at, (b"a", b"k%d" % at)) for at in range(40)]
    files = MemoryFiles()
    files.make_directory(DIRECTORY)
    foreign = Reference().put_all(messages[:message_count])
    for number, content in enumerate(foreign.files):
        files.replace(f"{DIRECTORY}/{20200101000000000 + number}", bytes(content))
    index = open_index(files)
    start = index.load([], clean=True)
    # The place of the last indexed message: it is added again and not indexed again.
    assert start == messages[message_count - 1].position
    index.write(batch_of([message for message in messages if message.position >= start]))
    assert contents(files) == foreign.put_all(messages[message_count:]).files
    assert find(index, b"a") == expected(messages, b"a")
    # Nothing is known about bytes that others wrote: marks without a checksum, which hold.
    marks = index.sync()
    assert marks[0].crc == 0
    index.close()
    index = open_index(files)
    assert index.load(marks, clean=False) == 4000
    assert find(index, b"a") == expected(messages, b"a")


def test_what_another_broker_added_after_the_marks_is_kept() -> None:
    messages = numbered(30)
    files, marks = store_with(messages[:5])
    (name,) = files.names(DIRECTORY)
    both = Reference().put_all(messages[:20])
    files.replace(f"{DIRECTORY}/{name}", bytes(both.files[0]))
    files.replace(f"{DIRECTORY}/{int(name) + 1}", bytes(both.files[1]))
    index = open_index(files)
    assert index.load(marks, clean=True) == 1900
    index.write(batch_of(messages[19:]))
    assert contents(files) == both.put_all(messages[20:]).files


def test_after_a_crash_files_that_no_mark_names_are_deleted() -> None:
    files, marks = store_with(numbered(30))
    index = open_index(files)
    assert index.load(marks[:1], clean=False) == 1000
    assert files.names(DIRECTORY) == [marks[0].name]
    index.close()
    assert open_index(files).load([], clean=False) == 0
    assert files.names(DIRECTORY) == []
    assert files.names(ASIDE) == []


def test_files_of_another_length_are_moved_aside() -> None:
    files, marks = store_with(numbered(30))
    names = files.names(DIRECTORY)
    before = contents(files)
    files.create(f"{DIRECTORY}/20200101000000000", 0)
    files.replace(f"{DIRECTORY}/notes.txt", b"not an index")
    index = open_index(files, slots=SLOTS + 1)
    assert index.load(marks, clean=True) == 0
    assert files.names(DIRECTORY) == ["notes.txt"]
    assert files.names(ASIDE) == names
    assert [files.read(f"{ASIDE}/{name}", 1 << 20) for name in names] == before
    index.write(batch_of(numbered(1)))
    index.close()
    # The same name again: nothing that was moved before is overwritten.
    assert open_index(files).load([], clean=False) == 0
    assert files.names(ASIDE) == sorted([*names, f"{names[0]}.1"])


def test_a_hole_between_marked_files_ends_the_index_but_missing_old_files_do_not() -> None:
    files, marks = store_with(numbered(40))
    assert len(marks) == 4
    files.remove(f"{DIRECTORY}/{marks[0].name}")
    index = open_index(files)
    assert index.load(marks, clean=False) == 4000
    assert find(index, b"k11") == [1100]
    assert index.sync() == marks[1:]
    index.close()
    files.remove(f"{DIRECTORY}/{marks[2].name}")
    index = open_index(files)
    assert index.load(marks, clean=False) == marks[1].end_position == 2100
    assert files.names(DIRECTORY) == [marks[1].name]


@pytest.mark.parametrize("clean", [True, False])
def test_a_file_that_holds_less_than_its_mark_ends_the_index(clean: bool) -> None:
    messages = numbered(30)
    files, marks = store_with(messages)
    shorter = Reference().put_all(messages[:25])
    files.replace(f"{DIRECTORY}/{marks[2].name}", bytes(shorter.files[2]))
    index = open_index(files)
    start = index.load(marks, clean=clean)
    assert start == marks[1].end_position == 2100
    assert files.names(ASIDE) == ([marks[2].name] if clean else [])
    index.write(batch_of([message for message in messages if message.position >= start]))
    assert contents(files) == Reference().put_all(messages).files


def test_keys_of_one_message_on_both_sides_of_a_lost_file() -> None:
    keys = tuple(b"part%d" % number for number in range(30))
    messages = [Sent(0, BEGIN_MS, (b"first",)), Sent(100, BEGIN_MS + 5, keys)]
    files, marks = store_with(messages)
    assert [mark.entries for mark in marks] == [11, 11, 9]
    files.remove(f"{DIRECTORY}/{marks[2].name}")
    index = open_index(files)
    assert index.load(marks, clean=False) == 100
    index.write(batch_of(messages[1:]))
    assert contents(files) == Reference().put_all(messages).files


def test_a_position_that_the_log_gives_anew_is_indexed_anew() -> None:
    # A follower whose log is cut writes other messages at places that are indexed already.
    files, marks = store_with(numbered(3))
    index = open_index(files)
    index.load(marks, clean=True)
    index.write(batch_of(numbered(2, start=3)))
    index.write(batch_of([Sent(100, BEGIN_MS, (b"other",)), Sent(200, BEGIN_MS, (b"new",))]))
    assert find(index, b"other") == [100]
    assert find(index, b"new") == [200]
