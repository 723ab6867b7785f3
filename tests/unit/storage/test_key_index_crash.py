"""The key index when the power goes, the disk fails or fills up, and bits rot."""

from __future__ import annotations

import errno
from contextlib import suppress
from random import Random
from struct import pack_into, unpack_from

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import StoreCorrupt, StoreReadOnly
from sluice.storage import key_index_file
from sluice.storage.key_batches import key_hashes
from sluice.storage.key_index import IndexMark
from sluice.storage.memory_files import (
    KeepAll,
    KeepNothing,
    KeepPolicy,
    KeepPrefix,
    KeepRandom,
    MemoryFiles,
)
from tests.unit.storage.key_index_kit import (
    ASIDE,
    BEGIN_MS,
    DIRECTORY,
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

# ---------------------------------------------------------------------------------- crashes, faults


def crash_policies(draw: st.DrawFn, unsynced_bytes: int) -> KeepPolicy:
    kind = draw(st.sampled_from(["nothing", "all", "prefix", "random", "random", "random"]))
    if kind == "prefix":
        return KeepPrefix(draw(st.integers(0, unsynced_bytes)))
    if kind == "random":
        return KeepRandom(Random(draw(st.integers(0, 1 << 32))))
    return KeepAll() if kind == "all" else KeepNothing()


@st.composite
def crashes(draw: st.DrawFn) -> tuple[list[Sent], list[IndexMark], int, MemoryFiles]:
    """Messages; the marks of the last sync and how many messages they cover; the disk after."""
    messages = draw(message_lists())
    with_sizes = draw(st.booleans())
    parts = draw(split(messages))
    sync_after = draw(st.integers(-1, len(parts) - 1))
    files = MemoryFiles()
    index = open_index(files)
    index.load([], clean=True)
    marks: list[IndexMark] = []
    marked_count = 0
    written_count = 0
    for number, part in enumerate(parts):
        index.write(batch_of(part, with_sizes=with_sizes))
        written_count += len(part)
        if number == sync_after or (number < sync_after and draw(st.booleans())):
            marks = index.sync()
            marked_count = written_count
    return messages, marks, marked_count, files.crash(crash_policies(draw, files.unsynced_bytes()))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(crashes())
def test_after_a_crash_marked_keys_are_there_and_the_log_brings_the_rest(
    crash: tuple[list[Sent], list[IndexMark], int, MemoryFiles],
) -> None:
    messages, marks, marked_count, files = crash
    index = open_index(files)
    start = index.load(marks, clean=False)
    for key in KEYS:
        assert find(index, key) == expected(messages[:marked_count], key)
    # Entries before `start` are not given again, those from there on are.
    assert all(message.position >= start for message in messages[marked_count:])
    again = [message for message in messages if message.position >= start]
    index.write(batch_of(again))
    for key in KEYS:
        assert find(index, key) == expected(messages, key)
    reference = Reference().put_all(messages)
    if reference.files:
        assert contents(files) == reference.files
    # And once more, from what is durable now.
    marks = index.sync()
    index = open_index(files.crash(KeepNothing()))
    index.load(marks, clean=False)
    for key in KEYS:
        assert find(index, key) == expected(messages, key)


def test_a_cut_file_says_what_it_holds_and_is_durable_after_the_next_sync() -> None:
    messages = numbered(10)
    files = MemoryFiles()
    index = open_index(files)
    index.write(batch_of(messages[:6]))
    marks = index.sync()
    index.write(batch_of(messages[6:]))
    files = files.crash(KeepPrefix(files.unsynced_bytes()))
    index = open_index(files)
    assert index.load(marks, clean=False) == 600
    marks_again = index.sync()
    assert [mark[:4] for mark in marks_again] == [mark[:4] for mark in marks]
    files = files.crash(KeepNothing())
    (cut,) = contents(files)
    (reference,) = Reference().put_all(messages[:6]).files
    # The end's time is known to the second, and the latest possible one is taken; entries after
    # the last one are left where they are.
    assert unpack_from(">q", cut, 8)[0] - messages[5].store_ms in range(1000)
    assert cut[:8] + cut[16:188] == reference[:8] + reference[16:188]
    index = open_index(files)
    assert index.load(marks_again, clean=True) == 600
    assert [find(index, b"k%d" % number) for number in (0, 5, 6)] == [[0], [500], []]
    at_ms = messages[5].store_ms
    assert index.query(TOPIC, b"k5", at_ms, at_ms, 1) == [500]


def test_every_torn_byte_of_a_write_after_a_sync() -> None:
    messages = numbered(16)
    files = MemoryFiles()
    index = open_index(files)
    index.write(batch_of(messages[:6]))
    marks = index.sync()
    index.write(batch_of(messages[6:]))
    for length in range(files.unsynced_bytes() + 1):
        disk = files.crash(KeepPrefix(length))
        again = open_index(disk)
        assert again.load(marks, clean=False) == 600
        assert [find(again, b"k%d" % number) for number in (0, 5, 6)] == [[0], [500], []]
        again.write(batch_of(messages[6:]))
        assert contents(disk) == Reference().put_all(messages).files


@pytest.mark.parametrize("operation", ["pwritev", "create"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_can_be_given_again(operation: str, error: int) -> None:
    messages = [Sent(at * 100, BEGIN_MS + at, (b"a", b"k%d" % at)) for at in range(20)]
    parts = [messages[:3], messages[3:15], messages[15:]]
    failed_count = 0
    for nth in range(1, 40):
        files = MemoryFiles()
        index = open_index(files)
        index.load([], clean=True)
        files.fail(operation, nth=nth, error=error)
        for number, part in enumerate(parts):
            try:
                index.write(batch_of(part))
            except OSError:
                failed_count += 1
                done = [message for before in parts[:number] for message in before]
                found = find(index, b"a")
                # What was there before the failure is still found.
                assert [at for at in found if at in expected(done, b"a")] == expected(done, b"a")
                index.write(batch_of(part))
        assert contents(files)[0] == Reference().put_all(messages).files[0]
        for message in messages:
            assert find(index, message.keys[1]) == [message.position]
        assert find(index, b"a") == expected(messages, b"a")
    assert failed_count >= 3


def test_a_torn_write_can_be_given_again_in_other_batches() -> None:
    messages = numbered(10)
    failed_count = 0
    for nth in range(1, 8):
        for keep_bytes in (1, 4, 7, 20, 39):
            files = MemoryFiles()
            index = open_index(files)
            index.write(batch_of(messages[:4]))
            files.tear(nth, keep_bytes)
            try:
                index.write(batch_of(messages[4:9]))
            except OSError:
                failed_count += 1
                index.write(batch_of(messages[4:6]))
                index.write(batch_of(messages[6:9]))
            files.tear(1 << 30, 0)
            index.sync()
            assert contents(files) == Reference().put_all(messages[:9]).files
    assert failed_count >= 10


def test_a_sync_after_a_failed_write_marks_only_what_was_written() -> None:
    messages = numbered(9)
    files = MemoryFiles()
    index = open_index(files)
    index.write(batch_of(messages[:4]))
    files.fail("pwritev", nth=3)
    with pytest.raises(OSError, match="/store/index/"):
        index.write(batch_of(messages[4:]))
    marks = index.sync()
    assert [(mark.entries, mark.end_position) for mark in marks] == [(4, 400)]
    disk = files.crash(KeepNothing())
    for clean in (True, False):
        again = open_index(disk)
        assert again.load(marks, clean=clean) == 400
        found = [find(again, b"k%d" % number) for number in range(6)]
        assert found == [[0], [100], [200], [300], [], []]


def test_a_failed_sync_is_never_tried_again() -> None:
    files = MemoryFiles()
    index = open_index(files)
    index.write(batch_of(numbered(3)))
    files.fail("sync_many")
    with pytest.raises(OSError, match=DIRECTORY):
        index.sync()
    with pytest.raises(StoreReadOnly, match="open the store again"):
        index.sync()
    assert find(index, b"k2") == [200]


def test_a_sync_without_news_touches_no_disk() -> None:
    files, marks = store_with(numbered(30))
    index = open_index(files)
    index.load(marks, clean=True)
    before = files.calls["sync_many"]
    assert index.sync() == marks
    assert files.calls["sync_many"] == before


# ---------------------------------------------------------------------------------------------- rot


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_flipped_bit_crashes_no_query_no_load_and_no_write(data: st.DataObject) -> None:
    messages = data.draw(message_lists())
    files, marks = store_with(messages)
    running = open_index(files)
    running.load(marks, clean=True)
    name = data.draw(st.sampled_from(files.names(DIRECTORY)))
    bit_index = data.draw(st.integers(0, files.size(f"{DIRECTORY}/{name}") * 8 - 1))
    files.flip(f"{DIRECTORY}/{name}", bit_index)
    with suppress(StoreCorrupt):
        for key in KEYS:
            find(running, key)
            running.query(TOPIC, key, BEGIN_MS - 10, BEGIN_MS + 2000, 3)
    running.close()
    for clean, known in [(True, marks), (False, marks)]:
        with suppress(StoreCorrupt):
            index = open_index(files.crash(KeepAll()))
            start = index.load(known, clean=clean)
            assert 0 <= start <= messages[-1].position + 100
            index.write(batch_of([message for message in messages if message.position >= start]))
            index.write(batch_of([Sent(100_000, BEGIN_MS + 9_999_999, (b"after",))]))
            # It says that it is damaged, or it finds everything.
            assert find(index, b"after") == [100_000]
            for key in KEYS:
                assert set(find(index, key)) >= set(expected(messages, key))
    # A file that nobody vouches for says what it says.
    index = open_index(files.crash(KeepAll()))
    index.load([], clean=True)
    index.write(batch_of([Sent(100_000, BEGIN_MS + 9_999_999, (b"after",))]))
    if bit_index >= 64:  # a file with a wrong begin lies out of every time range
        assert 100_000 in find(index, b"after")
    for key in KEYS:
        find(index, key)


@pytest.mark.parametrize("seed", range(30))
def test_after_a_crash_a_rotten_file_that_was_not_full_is_made_anew(seed: int) -> None:
    messages = [Sent(at * 100, BEGIN_MS + at * 400, (b"a", b"k%d" % at)) for at in range(10)]
    files, marks = store_with(messages)
    assert [mark.entries for mark in marks] == [11, 9]
    random = Random(seed)
    at = random.choice([0, 16, 40 + 4 * SLOTS + 20 + random.randrange(180)])
    files.flip(f"{DIRECTORY}/{marks[1].name}", at * 8 + random.randrange(8))
    index = open_index(files)
    start = index.load(marks, clean=False)
    assert start == marks[0].end_position == 500
    index.write(batch_of(messages[5:]))
    assert contents(files) == Reference().put_all(messages).files


@pytest.mark.parametrize("field_at", [16, 24, 32, 36])
def test_a_foreign_file_with_an_implausible_header_is_moved_aside(field_at: int) -> None:
    files, marks = store_with(numbered(5))
    files.flip(f"{DIRECTORY}/{marks[0].name}", field_at * 8 + 6)
    assert open_index(files).load([], clean=True) == 0
    assert files.names(ASIDE) == [marks[0].name]


def test_a_rotten_slot_is_not_passed_on() -> None:
    files, marks = store_with([Sent(0, BEGIN_MS, (b"k",))])
    path = f"{DIRECTORY}/{marks[0].name}"
    slot_at = 40 + key_hashes([TOPIC + b"#k"]).tolist()[0] % SLOTS * 4
    index = open_index(files)
    index.load([], clean=True)
    for bit in (0, 20):  # a negative number, then one beyond the entries
        files.flip(path, slot_at * 8 + 7 - bit if bit == 0 else slot_at * 8 + bit)
        index.write(batch_of([Sent(100 + bit, BEGIN_MS, (b"k",))]))
        number = index.sync()[0].entries
        entry_at = 40 + SLOTS * 4 + number * 20
        assert unpack_from(">i", files.read(path, 1 << 20), entry_at + 16) == (0,)
    assert find(index, b"k") == [120]


def test_chains_that_lead_in_circles_or_nowhere_end() -> None:
    messages = [Sent(at * 100, BEGIN_MS, (b"k",)) for at in range(8)]
    files, marks = store_with(messages)
    path = f"{DIRECTORY}/{marks[0].name}"
    whole = files.read(path, 1 << 20)
    entry_at = 40 + SLOTS * 4 + 5 * 20
    slot_at = 40 + key_hashes([TOPIC + b"#k"]).tolist()[0] % SLOTS * 4
    for previous in (5, 6, 8, 9, 11, 12, 13, 1 << 30, -1, -(1 << 31), 0):
        rotten = bytearray(whole)
        pack_into(">i", rotten, entry_at + 16, previous)
        files.replace(path, bytes(rotten))
        index = open_index(files)
        index.load([], clean=True)
        assert find(index, b"k") == [700, 600, 500, 400]
        index.close()
    for head in (9, 12, 13, 1 << 30, -1, 0):
        rotten = bytearray(whole)
        pack_into(">i", rotten, slot_at, head)
        files.replace(path, bytes(rotten))
        index = open_index(files)
        index.load([], clean=True)
        assert find(index, b"k") == []
        index.close()


def test_a_chain_is_walked_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index_file, "CHAIN_STEPS_MAX", 4)
    index = open_index(MemoryFiles(), slots=1)
    index.write(batch_of(numbered(9)))
    assert find(index, b"k8") == [800]
    assert find(index, b"k5") == [500]
    assert find(index, b"k4") == []
