"""This module opens a store: lock, files, recovery, and the first checkpoint after a crash.

It may block and may take long (a store that was never seen before is read from its beginning), so
it runs before anything is served. It either returns a store that is whole, or raises and leaves the
directory as it was, but for cut tails, which are kept beside.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final

from sluice.config import StoreConfig
from sluice.errors import DiskFull, MessageIllegal, StoreCorrupt, StoreError, StoreInUse
from sluice.protocol import records
from sluice.storage import compacted
from sluice.storage import recovery as recoveries
from sluice.storage import snapshot as marks
from sluice.storage import state as states
from sluice.storage.background import Background
from sluice.storage.checkpoint import TREES, collect, remove_units, row_of, write_part
from sluice.storage.files import FileLock, Files
from sluice.storage.indexing import Indexing
from sluice.storage.key_index import IndexMark, KeyIndex
from sluice.storage.queue_index import SIMPLE_UNIT, BatchQueueIndex, QueueIndex
from sluice.storage.store import Recovery, Store

_ABORT_TEXT: Final = b"sluice"

log_lines = logging.getLogger("sluice.storage")


def open_store(
    config: StoreConfig,
    files: Files,
    background: Background,
    now_ms: Callable[[], int],
    store_host: bytes,
    progress: recoveries.Progress | None = None,
) -> Store:
    """Open the store in `config.directory`, making it where there is none."""
    store = Store(config, files, background, now_ms, store_host)
    with ExitStack() as opened:
        lock = _lock(files, store.root)
        opened.callback(lock.release)
        opened.callback(store.log.close)
        try:
            _open_locked(store, lock, opened, progress)
        except MessageIllegal as error:
            raise StoreCorrupt(store.log.directory, 0, str(error)) from error
        except OSError as error:
            raise _explained(error, store.root) from error
        opened.pop_all()  # it is the store's now; before, whatever fails gives all of it back
    return store


def _lock(files: Files, root: str) -> FileLock:
    try:
        files.make_directory(root)
        return files.lock(f"{root}/{marks.LOCK_NAME}")
    except BlockingIOError as error:
        raise StoreInUse(
            f"{root}: another process uses this store; stop it or choose another directory"
        ) from error
    except OSError as error:
        raise _explained(error, root) from error


def _explained(error: OSError, root: str) -> StoreError:
    where = error.filename or root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{where}: no room on the disk to open the store; free some space")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreError(f"{where}: the directory cannot be written: {error.strerror}")
    return StoreError(f"{where}: cannot open the store: {error.strerror or error}")


def _open_locked(
    store: Store, lock: FileLock, opened: ExitStack, progress: recoveries.Progress | None
) -> None:
    files, root, log = store.files, store.root, store.log
    clean = not files.exists(f"{root}/{marks.ABORT_NAME}")
    mark = marks.DurableMark(files, root)
    durable = mark.read()
    log.load()
    snapshot = recoveries.usable_snapshot(files, root, log, durable)
    rebuilt = snapshot is None
    found_config = states.read_files(files, f"{root}/config")
    start = log.start
    if snapshot is not None:
        start = snapshot["log_offset"]
        durable = max(durable, start)
        _restore_times(store, snapshot)
    # What the last process wrote it wrote with checksums, if it was ours.
    strict = store.config.message_crc and not clean and _is_ours(files, root)
    strict_from = durable if strict else 1 << 63
    state_is_known = _restore_tables(store, found_config, snapshot, strict_from, durable)
    if snapshot is not None:
        _restore_queues(store, snapshot)
    # A rebuild knows from the beginning which entries belong to no queue.
    on_state = _on_state(store, apply=not state_is_known, drop=not rebuilt)
    queue_paths: set[str] = set()
    found = _scan(
        store, start, store.last_ms, on_state, queue_paths, strict_from, rebuilt, progress
    )
    recoveries.refuse_damage(log, found, start, durable)

    # From here on the directory may be changed.
    files.make_directory(f"{root}/sluice")
    if not files.exists(f"{root}/{marks.ABORT_NAME}"):
        files.replace(f"{root}/{marks.ABORT_NAME}", _ABORT_TEXT)
    recoveries.cut_tail(files, root, log, found, clean=clean and not rebuilt)
    for path in found.cut_files:
        log_lines.warning(
            "the log ends at %d (%s); what followed is kept in %s",
            found.end, found.stopped_by or "zeros", path,
        )  # fmt: skip
    log.finish_load(found.end)
    if rebuilt:
        marks.drop_snapshot(files, root)
        _take_over_queue_files(store)
    _restore_ends(store)
    _correct_firsts(store, snapshot)
    indexing, indexed_to = _open_index(store, snapshot, opened, clean=clean)
    indexing.kafka_keys_too = store.config.kafka_key_index
    changed = found.entry_count > 0 or rebuilt or bool(found.cut_files)
    if not clean:
        log.sync_names()
        # Where nobody knows what is durable, more than this cannot have been on its way.
        recent = found.end - store.config.checkpoint_bytes_max
        log.rewrite(max(durable or recent, log.start), found.end)
    if changed:
        for file in log.files_between(start, found.end + 1):
            file.sync()  # what a killed process left was written, but not yet durable
        store.files.sync_many(sorted(queue_paths))
    opened.callback(mark.close)
    mark.open()
    mark.write(found.end)
    recovery = Recovery(start, found.end, found.entry_count, rebuilt, found.cut_files)
    store.begin(lock, mark, indexing, recovery, max(found.last_ms, store.last_ms))
    compacted.attach_all(store)
    indexing.start(indexed_to)
    _import_foreign(store, found_config)
    store.mark_dirty([queue for queue in store.queues.values() if queue.count > queue.written])
    if changed:
        store.housekeeping.checkpoint()


def _is_ours(files: Files, root: str) -> bool:
    return files.read(f"{root}/{marks.ABORT_NAME}", 1 << 10) == _ABORT_TEXT


def _restore_times(store: Store, snapshot: dict[str, Any]) -> None:
    store.last_ms = snapshot["last_ms"]
    for base, last_ms in snapshot["segments"].items():
        if int(base) in store.log.segments:
            store.log.segments[int(base)].last_ms = last_ms


def _restore_queues(store: Store, snapshot: dict[str, Any]) -> None:
    for row in snapshot["queues"]:
        topic, queue_id, kind, first, start_offset, written, end_offset, sums = row
        # The files are as they are, whatever has become of the topic's settings since.
        queue = store.queue(topic, queue_id, batches=kind == BatchQueueIndex.kind)
        queue.restore(
            first, start_offset, written, end_offset, {int(b): crc for b, crc in sums.items()}
        )
        store.rows[queue.key] = row_of(queue)


def _restore_tables(
    store: Store,
    config: states.ConfigFiles,
    snapshot: dict[str, Any] | None,
    strict_from: int,
    durable: int,
) -> bool:
    """Tables as the files say; where they cannot be trusted, as the whole log says.

    Returns whether the whole log was read for it, so that the scan need not apply its entries
    again.
    """
    tables = store.state
    tables.version, tables.changed_ms = config.version, config.changed_ms
    for path in config.damaged:
        log_lines.warning("%s is damaged; its content is taken from the log", path)
    # What somebody else changed is compared with what the log says, so that it can be told to it.
    sound = not config.damaged and not config.foreign
    present = set(states.file_names(config.ours))
    if snapshot is not None and sound and present.issuperset(snapshot["configs"]):
        tables.tables = {**config.ours}
        return False
    # The kinds of topics must be known before the first entry is put into a queue, hence a pass of
    # its own.
    if snapshot is None:
        # Copies: the log may say something older, and is told afterwards what the files say.
        both = {**config.foreign, **config.ours}
        tables.tables = {name: dict(table) for name, table in both.items()}
    else:
        tables.tables = {}
    scan = recoveries.Scan(
        store.log,
        store.queue,
        _on_state(store, apply=True, drop=False),
        (),
        only_state=True,
        strict_from=strict_from,
    )
    found = scan.run(store.log.start, 0)
    # Settings behind damage must not get lost in silence; and nothing was changed so far.
    recoveries.refuse_damage(store.log, found, store.log.start, durable)
    tables.unsaved.update(tables.tables)
    return True


def _on_state(
    store: Store, *, apply: bool, drop: bool
) -> Callable[[memoryview, int], Iterable[str]]:
    """What a scan does with an entry of settings: not applied where the tables hold it already;
    with `drop` the queues of the topics that it deletes go, which are returned.
    """

    def on_state(entry: memoryview, store_ms: int) -> Iterable[str]:
        body = records.decode(entry).body
        if apply:
            store.state.apply(body, store_ms)
        deleted = states.deleted_topics(body) if drop else {}
        for topic, position in deleted.items():
            store.removal.dropped(topic, position)
        return deleted

    return on_state


def _scan(
    store: Store,
    start: int,
    last_ms: int,
    on_state: Callable[[memoryview, int], Iterable[str]],
    queue_paths: set[str],
    strict_from: int,
    rebuilt: bool,
    progress: recoveries.Progress | None,
) -> recoveries.Found:
    def write_out(end: int) -> None:
        """In a long rebuild: bring the units to their files, so that memory stays bounded."""
        if rebuilt:
            marks.drop_snapshot(store.files, store.root)
        # Where a topic was deleted its old files are there still: the checkpoint sees to them.
        waiting = store.removal.waiting
        queues = [queue for queue in store.queues.values() if queue.key.topic not in waiting]
        for write in collect(queues, end):
            for part in write.parts:
                queue_paths.add(write_part(store.files, write.queue, part))
            write.queue.collected(write)

    return recoveries.Scan(
        store.log,
        store.queue,
        on_state,
        store.config.delay_levels_ms,
        dict(store.table(states.DELETED_TABLE)),
        progress=progress,
        after_segment=write_out,
        strict_from=strict_from,
    ).run(start, last_ms)


def _take_over_queue_files(store: Store) -> None:
    """After a rebuild: what older files say beyond it is wiped; queues without entries keep
    their end.
    """
    files, deleted = store.files, store.table(states.DELETED_TABLE)
    for tree in TREES:
        for topic in files.names(f"{store.root}/{tree}"):
            for queue_id in files.names(f"{store.root}/{tree}/{topic}"):
                directory = f"{store.root}/{tree}/{topic}/{queue_id}"
                queue = store.queues.get((topic, int(queue_id))) if queue_id.isdigit() else None
                if topic in deleted and (queue is None or queue.tree != tree):
                    remove_units(files, directory)
                elif queue is None and queue_id.isdigit() and tree == QueueIndex.tree:
                    _restore_empty(store, topic, int(queue_id), directory)
                elif queue is not None and queue.tree == tree:
                    _wipe_beyond(files, queue, directory)


def _restore_empty(store: Store, topic: str, queue_id: int, directory: str) -> None:
    """A queue of which the log holds nothing any more: its files say where its offsets go on."""
    names = [name for name in store.files.names(directory) if name.isdigit()]
    if not names:
        return
    file = store.files.open(f"{directory}/{names[-1]}", writable=False)
    try:
        data = file.pread(file.size, 0)
    finally:
        file.close()
    width = SIMPLE_UNIT.size
    units = SIMPLE_UNIT.iter_unpack(data[: len(data) // width * width])
    used = next((index for index, unit in enumerate(units) if unit[1] == 0), len(data) // width)
    end = int(names[-1]) // width + used
    if end:
        store.queue(topic, queue_id).start_at(end, end)


def _wipe_beyond(files: Files, queue: QueueIndex, directory: str) -> None:
    for name in files.names(directory):
        path = f"{directory}/{name}"
        base = int(name) // queue.unit_bytes if name.isdigit() else -1
        if base in queue.sums:
            file = files.open(path)
            try:
                file.resize(max(0, min(queue.written - base, queue.file_units)) * queue.unit_bytes)
                file.resize(queue.file_units * queue.unit_bytes)
            finally:
                file.close()
        elif name.isdigit():
            files.remove(path)


def _restore_ends(store: Store) -> None:
    """Queues whose newest entries are not in the log any more still go on where they were."""
    for key, end in store.table(states.QUEUE_END_TABLE).items():
        topic, _, queue_id = key.rpartition("@")
        queue = store.queue(topic, int(queue_id))
        if queue.next_offset < end:
            queue.go_on_at(end)


def _correct_firsts(store: Store, snapshot: dict[str, Any] | None) -> None:
    """Files of the log that went away since the snapshot take the queues' beginnings with them."""
    if snapshot is None or snapshot["log_start"] != store.log.start:
        for queue in store.queues.values():
            if queue.count > queue.first:
                queue.drop_before(*queue.find_first(store.log.start, store.queue_files))
    for queue in store.queues.values():
        store.rows[queue.key] = row_of(queue)


def _open_index(
    store: Store, snapshot: dict[str, Any] | None, opened: ExitStack, *, clean: bool
) -> tuple[Indexing, int]:
    config = store.config
    if not config.key_index:
        return Indexing(store.background, None, store.log), 0
    directory = f"{store.root}/index"
    index = KeyIndex(
        store.files,
        directory,
        slots=config.key_index_slots,
        entries_max=config.key_index_entries,
        now_ms=store.now_ms,
    )
    opened.callback(index.close)
    saved: list[IndexMark] = []
    if snapshot is not None:
        saved = [IndexMark(*mark) for mark in snapshot["index"] or []]
        # An index that had stopped is not taken as it is, however orderly the store was closed.
        clean = clean and snapshot["index"] is not None
    indexed_to = index.load(saved, clean)
    if snapshot is not None and (not saved or indexed_to >= saved[-1].end_position):
        indexed_to = max(indexed_to, snapshot["indexed_to"])
    # What the snapshot does not cover may have been lost and written anew since: indexed again.
    known_to = snapshot["log_offset"] if snapshot is not None else store.log.written
    index.forget_from(known_to)
    return Indexing(store.background, index, store.log), min(indexed_to, known_to)


def _import_foreign(store: Store, config: states.ConfigFiles) -> None:
    """Tables that somebody else wrote into the files become entries of the log."""
    changes: list[states.Change] = []
    for name, table in config.foreign.items():
        known = store.table(name)
        changes.extend(states.difference(known, table, name))
        if name == states.OFFSET_TABLE:
            changes = [change for change in changes if change[2] != known.get(change[1])]
    for body in store.state.bodies(changes, store.state_bytes_max):
        store.stage_state(body)
        # They hold already: who opens a store looks at its tables before the disk has answered.
        store.state.apply(body, store.last_ms)
    if changes:
        log_lines.info("took over %d settings from config/", len(changes))
        store.write_staged()
