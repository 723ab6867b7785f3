"""`sluice inspect --salvage`: every intact entry lives on at its place; the source is untouched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sluice.errors import StoreCorrupt
from sluice.model import Message, Placed
from sluice.protocol import records
from sluice.storage import inspect as command
from sluice.storage.log_walk import ENTRY_BYTES_MIN
from sluice.storage.salvage import DAMAGED_TOPIC, filler
from tests.unit.storage.store_kit import SEGMENT_BYTES, flip, read_all, real_store, tree_digest

QUEUES = 3
COUNT = 90


def fill(directory: Path, count: int = COUNT, **changes: Any) -> list[Placed]:
    with real_store(directory, **changes) as store:
        store.change([("topic", "t", {"perm": 6})])
        placed = [
            store.put(Message("t", number % QUEUES, b"%d:" % number + b"x" * (number * 7 % 300)))
            for number in range(count)
        ]
        store.commit_offset("g", "t", 0, 4)
    return placed


def log_path(directory: Path, position: int) -> Path:
    return directory / "commitlog" / f"{position - position % SEGMENT_BYTES:020d}"


def damage(directory: Path, placed: Placed, at: int = 60) -> None:
    flip(log_path(directory, placed.position), placed.position % SEGMENT_BYTES + at)


def salvage(capsys: pytest.CaptureFixture[str], source: Path, out: Path) -> tuple[int, Any]:
    before = tree_digest(source)
    status = command.main([str(source), "--salvage", str(out), "--json"])
    captured = capsys.readouterr()
    assert tree_digest(source) == before, "the damaged store is evidence"
    return status, json.loads(captured.out) if captured.out else captured.err


def numbers(directory: Path, queue_id: int) -> dict[int, int]:
    """offset -> number of the message, of everything that can be read."""
    with real_store(directory) as store:
        bodies = read_all(lambda offset: store.read("t", queue_id, offset, count_max=5))
    return {offset: int(body.split(b":")[0]) for offset, body in bodies.items()}


def expected(lost: set[int], queue_id: int) -> dict[int, int]:
    return {
        number // QUEUES: number
        for number in range(COUNT)
        if number % QUEUES == queue_id and number not in lost
    }


def check_whole(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    status = command.main([str(directory), "--verify"])
    captured = capsys.readouterr()
    assert status == 0, captured.out


@pytest.mark.parametrize("lost", [{0}, {COUNT - 1}, {40}, {10, 11, 12, 50, 80}])
def test_all_but_the_damaged_messages_keep_offset_and_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: set[int]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    placed = fill(source)
    for number in lost:
        damage(source, placed[number])
    unread = tmp_path / "unread"
    shutil.copytree(source, unread)
    (unread / "sluice" / "snapshot.json").unlink()  # so that opening it reads all of it
    with pytest.raises(StoreCorrupt), real_store(unread):
        pass
    status, done = salvage(capsys, source, out)
    assert status == 1
    assert done["lost_bytes"] == sum(placed[number].size for number in lost)
    check_whole(capsys, out)
    for queue_id in range(QUEUES):
        assert numbers(out, queue_id) == expected(lost, queue_id)
    with real_store(out) as store:
        for number in set(range(COUNT)) - lost:
            entry = store.entry_at(placed[number].position)
            assert entry is not None
            assert records.decode(entry).queue_offset == placed[number].queue_offset
        assert store.table("topic") == {"t": {"perm": 6}}
        assert store.committed_offset("g", "t", 0) == 4
        # No offset that was given away is given away again.
        for queue_id in range(QUEUES):
            assert store.put(Message("t", queue_id, b"new")).queue_offset >= COUNT // QUEUES
    check_whole(capsys, out)


def test_a_whole_store_is_copied_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    fill(source)
    status, done = salvage(capsys, source, out)
    assert (status, done["gaps"], done["skipped_queue_count"]) == (0, [], 0)
    for queue_id in range(QUEUES):
        assert numbers(out, queue_id) == expected(set(), queue_id)
    with real_store(out) as store:
        assert store.put(Message("t", 0, b"new")).queue_offset == COUNT // QUEUES


def test_a_missing_file_and_one_that_is_nothing_but_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    placed = fill(source)
    gone = {n for n in range(COUNT) if placed[n].position // SEGMENT_BYTES in (1, 3)}
    log_path(source, SEGMENT_BYTES).unlink()
    log_path(source, 3 * SEGMENT_BYTES).write_bytes(Random(1).randbytes(SEGMENT_BYTES))
    assert 0 < len(gone) < COUNT
    status, _ = salvage(capsys, source, out)
    assert status == 1
    check_whole(capsys, out)
    for queue_id in range(QUEUES):
        assert numbers(out, queue_id) == expected(gone, queue_id)


def test_the_newest_messages_are_lost_behind_the_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows then which offsets were given away: the queues go on well behind them."""
    source, out = tmp_path / "source", tmp_path / "out"
    killed = tmp_path / "killed"
    with real_store(source, checkpoint_interval_ms=86_400_000) as store:
        placed = [store.put(Message("t", 0, b"%d:" % number)) for number in range(COUNT)]
        shutil.copytree(source, killed)
    for number in (COUNT - 3, COUNT - 1):
        damage(killed, placed[number])
    salvage(capsys, killed, out)
    assert set(numbers(out, 0).values()) == set(range(COUNT)) - {COUNT - 3, COUNT - 1}
    with real_store(out) as store:
        assert store.put(Message("t", 0, b"new")).queue_offset >= COUNT


def test_settings_whose_entry_is_lost_come_from_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    with real_store(source) as store:
        store.change([("topic", "t", {"perm": 2})])
        before = store.store.log.written
        store.change([("topic", "t", {"perm": 4})])
        store.put(Message("t", 0, b"0:"))
    flip(log_path(source, before), before % SEGMENT_BYTES + 60)
    status, _ = salvage(capsys, source, out)
    assert status == 1
    shutil.rmtree(out / "config")
    with real_store(out) as store:
        assert store.table("topic") == {"t": {"perm": 4}}, "the log alone has it"


def test_a_batch_queue_goes_on_behind_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    flags = records.SYS_INNER_BATCH | records.SYS_NEED_UNWRAP
    with real_store(source) as store:
        store.change([("topic", "t", {"attributes": {"queue.type": "BatchCQ"}})])
        placed = [
            store.put(Message("t", 0, b"%d:" % n, b"INNER_NUM\x015\x02", sys_flag=flags, count=5))
            for n in range(10)
        ]
    for lost in (4, 9):
        damage(source, placed[lost])
    salvage(capsys, source, out)
    kept = {n * 5: n for n in range(10) if n not in (4, 9)}
    assert numbers(out, 0) == kept
    with real_store(out) as store:
        assert store.max_offset("t", 0) == 50
        assert store.put(Message("t", 0, b"10:")).queue_offset == 50
    assert numbers(out, 0) == {**kept, 50: 10}


def test_a_store_that_apache_wrote_has_no_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    placed = fill(source, message_crc=False)
    shutil.rmtree(source / "sluice")
    damage(
        source, placed[COUNT - 1], placed[COUNT - 1].size - 8
    )  # the topic: no checksum covers it
    flip(log_path(source, placed[50].position), placed[50].position % SEGMENT_BYTES + 30)
    status, _ = salvage(capsys, source, out)
    assert status == 1
    found = {n for queue_id in range(QUEUES) for n in numbers(out, queue_id).values()}
    assert set(range(COUNT)) - found <= {50, COUNT - 1}
    with real_store(out) as store:
        # Its queue files still told how far each queue had come.
        last = placed[COUNT - 1]
        assert store.put(Message("t", (COUNT - 1) % QUEUES, b"n")).queue_offset > last.queue_offset


@pytest.mark.parametrize("seed", range(20))
def test_any_damage_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    random = Random(seed)
    source, out = tmp_path / "source", tmp_path / "out"
    placed = fill(source)
    hit: set[int] = set()
    for _ in range(random.randrange(1, 6)):
        base = placed[random.randrange(COUNT)].position // SEGMENT_BYTES * SEGMENT_BYTES
        start = random.randrange(SEGMENT_BYTES)
        stop = min(SEGMENT_BYTES, start + random.choice([1, 8, 100, 700]))
        path = log_path(source, base)
        data = bytearray(path.read_bytes())
        data[start:stop] = (
            bytes(stop - start) if random.random() < 0.5 else random.randbytes(stop - start)
        )
        path.write_bytes(data)
        hit |= {
            n for n, p in enumerate(placed) if p.position < base + stop and p.end > base + start
        }
    salvage(capsys, source, out)
    check_whole(capsys, out)
    for queue_id in range(QUEUES):
        found = numbers(out, queue_id)
        assert expected(hit, queue_id).items() <= found.items(), "nothing intact is lost"
        assert found.items() <= expected(set(), queue_id).items(), "nothing is invented"
    with real_store(out) as store:
        for queue_id in range(QUEUES):
            assert store.put(Message("t", queue_id, b"new")).queue_offset >= COUNT // QUEUES


def test_places_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    fill(source, count=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    for out, complaint in [
        (source, "lies in the damaged store"),
        (source / "commitlog" / "x", "lies in the damaged store"),
        (tmp_path / "full", "is not empty"),
        (tmp_path / "full" / "file", "is not empty"),
    ]:
        status, err = salvage(capsys, source, out)
        assert status == 2
        assert complaint in err
    for path in (source / "commitlog").iterdir():
        path.unlink()
    status, err = salvage(capsys, source, tmp_path / "out")
    assert (status, "no log files" in err) == (2, True)


def test_what_it_says_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    placed = fill(source)
    damage(source, placed[7])
    assert command.main([str(source), "--salvage", str(out)]) == 1
    text = capsys.readouterr().out
    assert f"copied    {COUNT + 1} entries" in text
    assert "in 1 gap\n" in text
    assert f"{placed[7].position} .. {placed[7].end}: the whole-message checksum" in text
    assert f"segment_bytes = {SEGMENT_BYTES}" in text


@pytest.mark.parametrize("size", [*range(ENTRY_BYTES_MIN, 200), 4096, 1 << 20])
def test_fillers_have_exactly_the_size_asked_for(size: int) -> None:
    entry = filler(12_345, size, 99)
    summary = records.summarize(entry, 0, 12_345)
    assert summary.size == len(entry) == size
    assert not records.in_queue(summary.sys_flag)
    assert DAMAGED_TOPIC.startswith(summary.topic)
