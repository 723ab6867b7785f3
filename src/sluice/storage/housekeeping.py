"""This module does what a store needs from time to time: checkpoints, retention, a look at the
disk.

Retention goes in steps, each of which may be the last before a crash:

    1. decide the position below which the log may go                         (retention.py) 2. find
    for every queue its first entry above it                          (background) 3. write all
    tables to the log again, with the end of each queue that keeps no entry; wait: durable 4. delete
    the log's files                                                 (background) 5. checkpoint, so
    that the snapshot names none of the queue files that go 6. delete those
    (background)

Its methods belong to the owner's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from sluice.config import StoreConfig
from sluice.errors import DiskFull, RecordDamaged, SluiceError, StoreReadOnly
from sluice.storage import checkpoint as checkpoints
from sluice.storage import retention
from sluice.storage.commit_log import Segment
from sluice.storage.flush import Confirmed
from sluice.storage.queue_index import QueueIndex
from sluice.storage.state import QUEUE_END_TABLE, Change, file_names

if TYPE_CHECKING:
    from sluice.storage.store import Store

CheckpointDone = Callable[[BaseException | None], None]

_DISK_LOOK_MS = 1_000
log_lines = logging.getLogger("sluice.storage")


class _NewFirst(NamedTuple):
    queue: QueueIndex
    first: int
    offset: int
    empty: bool


class Housekeeping:
    """The timers of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rules = _rules(store.config)
        self._checkpoint_running = False
        self._checkpoint_waiting: list[CheckpointDone] = []
        self._checkpoint_ms = store.now_ms()
        self._checkpoint_offset = store.log.written
        self._checkpoint_appends = 0
        self._disk_ms = 0
        self._deleting = False
        self._any_hour = False  # somebody asked for deletion by age, whatever the time of day
        self._sweep_asked = False  # ... for a look at every queue's files
        self._gone_to = store.log.start  # the log's files below this are gone for good
        self._left_over: list[str] = []  # files below the log's start that could not be removed
        # Each is asked before the log's files below a position go, and answers whether it needs
        # none of their entries; one that does appends them anew, and is asked again later.
        self.rescuers: list[Callable[[int], bool]] = []
        self.checkpoint_count = 0
        self.deleted_count = 0
        self.used_ratio = 0.0

    def reconfigure(self, config: StoreConfig) -> None:
        """Other rules hold from now on."""
        self._rules = _rules(config)
        self._disk_ms = 0  # look at the disk with them at once

    def tick(self, now_ms: int) -> None:
        store, config = self._store, self._store.config
        if now_ms - self._disk_ms >= _DISK_LOOK_MS:
            self._disk_ms = now_ms
            self._look_at_disk()
            store.log.note_reads()
            store.reader.note_time(now_ms)
            if self._sweep_asked and not self._deleting:
                self._sweep()
            self._delete_old(now_ms)
        flushed = store.flusher.flushed
        due = (
            now_ms - self._checkpoint_ms >= config.checkpoint_interval_ms
            or flushed - self._checkpoint_offset >= config.checkpoint_bytes_max
            or store.append_count - self._checkpoint_appends >= config.checkpoint_messages_max
        )
        if due and not self._checkpoint_running and flushed > self._checkpoint_offset:
            self.checkpoint()

    # --------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, done: CheckpointDone | None = None) -> None:
        """Bring queues, tables and index to the disk; `done` when a checkpoint that starts now
        is over.
        """
        if self._checkpoint_running:
            if done is not None:
                self._checkpoint_waiting.append(done)
            return
        store = self._store
        if store.released:
            if done is not None:
                done(StoreReadOnly("the store is closed"))
            return
        self._checkpoint_running = True
        store.indexing.hand_over()
        job = self._job()
        self._checkpoint_ms = store.now_ms()
        self._checkpoint_appends = store.append_count
        store.background.submit(
            "disk", job.run, lambda _, error: self._checkpoint_done(job, done, error)
        )

    def _job(self) -> checkpoints.CheckpointJob:
        store = self._store
        # Not `flushed`: a setting is in its table only when its `done` was called.
        durable = store.flusher.settled
        dirty = store.take_dirty()
        writes = checkpoints.collect(dirty, durable)
        rows = dict(store.rows)
        # Of two queues of one name, while one is being deleted, only that one has durable entries.
        rows.update({write.queue.key: checkpoints.row_of(write.queue, write) for write in writes})
        # A queue may have units above `durable` still.
        stops = {write.queue: write.stop for write in writes}
        store.mark_dirty([q for q in dirty if q.count > stops.get(q, q.written)])
        tables, store.state.unsaved = store.state.unsaved, set()
        content = {
            "version": 1,
            "log_offset": durable,
            "log_start": store.log.start,
            "last_ms": store.last_ms,
            "indexed_to": store.indexing.reached,
            "segments": {s.base: s.last_ms for s in store.log.segments.values() if s.last_ms},
            "configs": file_names(store.state.tables),
        }
        return checkpoints.CheckpointJob(
            files=store.files,
            root=store.root,
            log_offset=durable,
            last_ms=store.last_ms,
            index_ms=store.last_ms,
            content=content,
            writes=writes,
            rows=rows,
            removed_topics=dict(store.removal.waiting),
            tables=tables,
            configs=store.state.render(tables, durable),
            sync_index=store.indexing.sync,
        )

    def _checkpoint_done(
        self,
        job: checkpoints.CheckpointJob,
        done: CheckpointDone | None,
        error: BaseException | None,
    ) -> None:
        store = self._store
        self._checkpoint_running = False
        kept = [write for write in job.writes if store.removal.is_kept(write.queue)]
        if error is None:
            store.removal.files_removed(job.removed_topics)
            for write in kept:
                write.queue.collected(write)
            # Retention may have changed rows meanwhile: only what this job wrote is taken over.
            for write in kept:
                store.rows[write.queue.key] = checkpoints.row_of(write.queue)
            self._checkpoint_offset = job.log_offset
            self.checkpoint_count += 1
        else:
            log_lines.error("checkpoint failed, the next one tries again: %s", error)
            store.mark_dirty([write.queue for write in kept])
            store.state.unsaved |= job.tables
        if done is not None:
            done(error)
        waiting, self._checkpoint_waiting = self._checkpoint_waiting, []
        if waiting:
            self.checkpoint(lambda failure: _tell(waiting, failure))

    # ------------------------------------------------------------------------------------ retention

    def _look_at_disk(self) -> None:
        store = self._store
        try:
            self.used_ratio = store.files.usage(store.root).used_ratio
        except OSError as error:
            log_lines.error("cannot tell how full the disk of %s is: %s", store.root, error)
            return
        refuse = self._rules.refuse_ratio
        if self.used_ratio < refuse:
            if isinstance(store.refusal, DiskFull):
                log_lines.warning("the disk has room again: writes are accepted")
                store.refuse(None)
        elif store.refusal is None:
            refusal = DiskFull(
                f"the disk of {store.root} is {self.used_ratio:.0%} full, the limit is "
                f"{refuse:.0%} (disk_refuse_ratio); writing goes on by itself when there is room"
            )
            log_lines.error("%s", refusal)
            store.refuse(refusal)

    def delete_expired(self) -> None:
        """Delete what is older than the retention soon, without waiting for its hour."""
        self._any_hour = True
        self._disk_ms = 0

    def sweep_queues(self) -> None:
        """Remove queue files soon that point nowhere: what a failure or somebody else left."""
        self._sweep_asked = True
        self._disk_ms = 0

    def _sweep(self) -> None:
        self._sweep_asked = False
        store = self._store

        def dropped() -> None:
            if store.closed:
                return  # it would be done when the directory is another process's already
            kept = {queue.directory: queue.freeze() for queue in store.removal.kept_queues()}
            store.background.submit(
                "disk",
                lambda: checkpoints.remove_left_overs(store.files, store.root, kept),
                swept,
            )

        def swept(count: int | None, error: BaseException | None) -> None:
            if error is not None:
                log_lines.error("queue files that nobody needs could not be removed: %s", error)
            elif count:
                log_lines.info("removed %d queue files that nobody needs", count)

        # Nothing of the log goes, but everything that points below it.
        self.delete_before(store.log.start, dropped)

    def _delete_old(self, now_ms: int) -> None:
        if self._deleting:
            return
        self._deleting = True  # a file's age may have to come from the disk first
        self._store.call(
            self._closed_files, lambda closed, error: self._delete_some(closed, error, now_ms)
        )

    def _closed_files(self) -> list[retention.OldFile]:
        """The files that are not written any more. May raise `ColdRead`."""
        log = self._store.log
        segments = list(log.segments.values())
        closed = []
        for number, segment in enumerate(segments[:-1]):
            if segment.last_ms is None:
                segment.last_ms = self._last_ms(segments[number + 1 :])
            closed.append(retention.OldFile(segment.base + log.segment_bytes, segment.last_ms))
        return closed

    def _delete_some(
        self, closed: list[retention.OldFile] | None, error: BaseException | None, now_ms: int
    ) -> None:
        self._deleting = False
        store = self._store
        if store.closed:
            return
        if closed is None:
            log_lines.error("retention could not read the log, nothing was deleted: %s", error)
            return
        hour = time.localtime(now_ms / 1000).tm_hour
        if self._any_hour:
            hour = min(self._rules.hours_of_day)
        position = retention.delete_before(
            closed, self._rules, now_ms=now_ms, hour_of_day=hour, used_ratio=self.used_ratio
        )
        # What a checkpoint does not cover yet is not deleted: recovery starts there.
        any_hour = self._any_hour
        self._any_hour = any_hour and position > self._checkpoint_offset
        position = min(position, self._checkpoint_offset)
        position -= position % store.log.segment_bytes
        if position > store.log.start:
            # Everybody is asked, each time: what each moves away makes a later pass possible.
            answers = [ask(position) for ask in self.rescuers]
            if all(answers):
                self.delete_before(position)
            else:
                self._any_hour = any_hour  # whoever asked for it is not forgotten

    def _last_ms(self, later: list[Segment]) -> int:
        """The newest entry of a closed file is not newer than the first of a file after it."""
        for segment in later:
            with suppress(RecordDamaged):
                return self._store.reader.store_ms(segment.base)
        return self._store.last_ms  # nobody can tell: it counts as new and stays

    def delete_before(self, position: int, done: Callable[[], None] | None = None) -> None:
        """Delete the log's files below a position, and what points into them."""
        self._deleting = True
        store = self._store
        frozen = [(queue, queue.freeze()) for queue in store.removal.kept_queues()]

        def search() -> list[_NewFirst]:
            result = []
            for queue, copy in frozen:
                first, offset = copy.find_first(position, store.queue_files)
                result.append(_NewFirst(queue, first, offset, first >= copy.count))
            return result

        def found(firsts: list[_NewFirst] | None, error: BaseException | None) -> None:
            if firsts is None:
                log_lines.error("retention could not read a queue, nothing was deleted: %s", error)
                self._deleting = False
                return
            self._write_tables(position, firsts, done)

        store.background.submit("disk", search, found)

    def _write_tables(
        self, position: int, firsts: list[_NewFirst], done: Callable[[], None] | None
    ) -> None:
        store = self._store
        ends = self._ends(firsts)

        def everything_written(error: SluiceError | None) -> None:
            if error is None:
                self._forget(position, firsts, done)
            elif isinstance(error, DiskFull):
                # Deleting is what makes room. Meanwhile config/ holds the tables: a checkpoint has
                # covered what goes. The log gets them again once there is room.
                self._forget(position, firsts, lambda: self._write_tables_again(firsts, done))
            else:
                self._deleting = False
                log_lines.error("retention could not write the tables, nothing deleted: %s", error)

        def ends_written(error: SluiceError | None) -> None:
            if error is not None:
                everything_written(error)
            else:
                self._stage_all(store.state.full_bodies(store.state_bytes_max), everything_written)

        if ends:
            self._stage_all(store.state.bodies(ends, store.state_bytes_max), ends_written)
        else:
            ends_written(None)

    def _ends(self, firsts: list[_NewFirst]) -> list[Change]:
        """Where queues that keep no entry go on; and what the tables need not say any more."""
        store = self._store
        known = store.table(QUEUE_END_TABLE)
        ends = store.removal.outdated(self._gone_to)
        for queue, _, offset, empty in firsts:
            key = f"{queue.key.topic}@{queue.key.queue_id}"
            # One that was deleted since ends nowhere.
            is_there = store.queues.get(queue.key) is queue
            if empty and is_there and known.get(key) != offset:
                ends.append((QUEUE_END_TABLE, key, offset))
        return ends

    def _stage_all(self, bodies: list[bytes], done: Confirmed) -> None:
        store = self._store
        try:
            for body in bodies[:-1]:
                store.stage_state(body)
            store.stage_state(bodies[-1], done)
        except SluiceError as error:
            done(error)
        store.write_staged()

    def _write_tables_again(self, firsts: list[_NewFirst], done: Callable[[], None] | None) -> None:
        state, bytes_max = self._store.state, self._store.state_bytes_max
        ends = self._ends(firsts)

        def written(error: SluiceError | None) -> None:
            if error is not None:
                log_lines.error("the tables are in config/ only, not in the log: %s", error)
            if done is not None:
                done()

        def ends_written(error: SluiceError | None) -> None:
            if error is not None:
                written(error)
            else:
                self._stage_all(state.full_bodies(bytes_max), written)

        if ends:
            self._stage_all(state.bodies(ends, bytes_max), ends_written)
        else:
            ends_written(None)

    def _forget(
        self, position: int, firsts: list[_NewFirst], done: Callable[[], None] | None
    ) -> None:
        store = self._store
        log_paths = [*self._left_over, *store.log.detach_before(position)]
        queue_paths: list[tuple[QueueIndex, str]] = []
        for queue, first, offset, _ in firsts:
            if not store.removal.is_kept(queue):
                continue
            for path in queue.drop_before(first, offset):
                store.queue_files.forget(path)
                queue_paths.append((queue, path))
            if queue.key in store.rows and store.removal.has_row(queue):
                store.rows[queue.key] = checkpoints.row_of(queue)

        def log_removed(_: None, error: BaseException | None) -> None:
            # What is left over goes first the next time: the log must have no hole.
            self._left_over = [path for path in log_paths if store.files.exists(path)]
            if error is not None:
                log_lines.error("retention could not delete a log file: %s", error)
            else:
                self._gone_to = max(self._gone_to, position)
            # The snapshot must not name a queue file that is gone, or a start would rebuild
            # everything.
            self.checkpoint(checkpointed)

        def checkpointed(error: BaseException | None) -> None:
            if error is None and not store.released:
                # Those of a topic that was deleted meanwhile are gone, or its successor's.
                paths = [path for queue, path in queue_paths if store.removal.is_kept(queue)]
                store.background.submit("disk", lambda: remove_rest(paths), removed)
            else:
                removed(None, error)

        def remove_rest(paths: list[str]) -> None:
            self._remove(paths)
            store.indexing.delete_before(position)

        def removed(_: None, error: BaseException | None) -> None:
            self._deleting = False
            self.deleted_count += len(log_paths)
            if error is not None:
                log_lines.error("retention could not delete a file: %s", error)
            if done is not None:
                done()

        store.background.submit("disk", lambda: self._remove(log_paths), log_removed)

    def _remove(self, paths: list[str]) -> None:
        files = self._store.files
        directory = ""
        for path in paths:
            if directory == f"{self._store.root}/commitlog":
                files.sync_directory(directory)  # one after the other: the log must have no hole
            files.remove(path)
            directory = path.rpartition("/")[0]
        for directory in sorted({path.rpartition("/")[0] for path in paths}):
            files.sync_directory(directory)


def _rules(config: StoreConfig) -> retention.RetentionRules:
    return retention.RetentionRules(
        retention_hours=config.retention_hours,
        hours_of_day=frozenset(config.retention_hours_of_day),
        clean_ratio=config.disk_clean_ratio,
        force_ratio=config.disk_force_ratio,
        refuse_ratio=config.disk_refuse_ratio,
    )


def _tell(waiting: list[CheckpointDone], failure: BaseException | None) -> None:
    for each in waiting:
        each(failure)
