"""This module lets a writer stage messages that nobody sees, and publish them once, all or none.

A job that writes in batches (Spark) fails in the middle, tries again, and does not know what of it
was stored. So its tasks stage what they write, each try for itself; when all are done the job
publishes what the successful ones staged, under its own name (the sink) and the batch's number:

    stage      one entry where nobody looks, for one queue; its position is the handle
    publish    1. the decision: a row (sink -> batch, handles) in a table, durable
               2. every staged entry is written to its queue, message by message; each names the
                  entry that it was made from, its origin
               3. the row loses its handles when all of it is confirmed

A batch that the sink has published already is not published again, whatever its handles are. After
a crash the table says what was decided; the origins in the log since then say how many messages of
each staged entry were written, and the rest follows. What is staged and never published is an entry
that nothing points to: it costs its bytes for a while (`staged_entries.py` says where).

What is staged is a producer's batch, or images (`protocol/record_images.py`): messages in the log's
own layout, which need not be looked at one by one, neither when they are staged nor when they are
published. Images are an order of magnitude faster.

A handle is a position and a random number, which the entry holds too: where a crash took a staged
entry and another one lies in its place, the old handle is not good for it.

It knows neither a wire nor a socket.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from secrets import randbits
from typing import TYPE_CHECKING, Any, Final

from sluice.broker.attributes import DEDUP_WINDOW
from sluice.broker.browsing import ask_each
from sluice.broker.memory_queues import is_in_memory
from sluice.broker.staged_entries import (
    Entry,
    Handle,
    Known,
    Owner,
    SeenImages,
    about_of,
    check_owner,
    entry_at,
    owner_in,
    properties_of,
    refuse_special,
)
from sluice.broker.topics import AUTO_CREATE_TOPIC, STAGED_TOPIC
from sluice.errors import (
    Busy,
    IllegalOperation,
    MessageIllegal,
    ParameterInvalid,
    RecordDamaged,
    SluiceError,
)
from sluice.model import Buffer, Message
from sluice.protocol import records
from sluice.protocol.lifetimes import EXPIRES_NAME
from sluice.protocol.message_batches import split_batch
from sluice.protocol.record_images import Images, read_images
from sluice.protocol.record_runs import Run, measure_run
from sluice.storage.images import place_images, stage_large, takes_images
from sluice.storage.lanes import Lane, tell
from sluice.storage.origins import made_since
from sluice.storage.staging import FLOOR, StagingArea
from sluice.storage.state import STAGED_TABLE
from sluice.storage.store import ColdRead

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

HANDLES_MAX: Final = 131_072  # of one publish: they are one row of a table
SINKS_MAX: Final = 10_000
_ONCE_MS: Final = 3_600_000  # so long is a sink known that publishes one batch only
_SWEEP_MS: Final = 60_000
_KNOWN_MAX: Final = 100_000  # handles that are remembered; others are read again
_TURN_MESSAGES_MAX: Final = 4096
_TURN_BYTES_MAX: Final = 4 << 20
_WHOLE_BYTES_MAX: Final = 4 << 20  # of a staged entry that is written in one turn
_WIDER_BYTES: Final = 24  # more than in an image may addresses take in an entry
_AGAIN_MS: Final = 1_000

log_lines = logging.getLogger("sluice.broker")

Staged = Callable[[SluiceError | None], None]
Published = Callable[[bool, SluiceError | None], None]  # whether this call published it
Arrived = tuple[tuple[str, int], set[int]]  # messages to a queue, and the codes of their tags


@dataclass(slots=True)
class _Publishing:
    """A batch that was decided and is being written to its queues."""

    sink: str
    batch: int
    handles: list[int]  # positions
    is_once: bool
    is_decided: bool = False
    done_count: Counter[int] = field(default_factory=Counter)  # messages written, by handle
    next_handle: int = 0  # its number in the list
    is_going: bool = False
    again_ms: int = 0
    waiters: list[Published] = field(default_factory=list)


class StagedWrites:
    """Staged and published batches of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        store = core.store
        self._area = StagingArea(
            *(store.files, f"{store.root}/sluice/staging", store.background, core.now_ms),
            store.config.segment_bytes,
        )
        self._known: dict[int, Known] = {}
        self._seen = SeenImages()
        self._publishing: dict[str, _Publishing] = {}
        self._swept_ms = 0
        self.staged_count = 0
        self.published_count = 0  # batches
        core.store.housekeeping.rescuers.append(self.is_clear)

    # -------------------------------------------------------------------------------------- staging

    def stage(
        self,
        owner: Owner,
        topic: str,
        queue_id: int,
        body: Buffer,
        born_host: bytes,
        done: Staged,
        image_count: int = 0,
    ) -> Handle:
        """Store messages where nobody sees them; their handle, good when `done` says so.

        `body` is a batch as producers send it, or so many images.
        """
        from sluice.broker.sending import Sending  # which knows the core

        core = self._core
        check_owner(owner)
        settings = Sending(core).topic_for(topic, AUTO_CREATE_TOPIC, 4)
        if is_in_memory(settings) or DEDUP_WINDOW in settings.attributes:
            raise MessageIllegal(
                f"topic {topic} is kept in memory or removes duplicates: nothing can be staged "
                "for it; send instead"
            )
        if not 0 <= queue_id < settings.write_queues:
            raise ParameterInvalid(f"queueId[{queue_id}]: {settings.write_queues} queues are there")
        # What cannot be stored is refused now: after the decision nobody could be told.
        run = Run(topic, queue_id, 0, core.now_ms(), born_host, 0, ())
        parts: tuple[Buffer, ...] = (body,)
        images: Images | None = None
        if image_count:
            images = read_images(body, image_count, topic.encode())
            self._check_images(images, run)
            parts = (body, images.seal())
        else:
            self._check_batch(body, run)
        token = randbits(48)
        properties = properties_of(owner, topic, queue_id, token, image_count)
        if core.store.log.end > core.admission.free_end:
            core.admission.admit(born_host, len(body))
        position = self._keep(parts, properties, born_host, done, is_image=bool(image_count))
        if len(self._known) >= _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[position] = Known(owner, token)
        if images is not None:
            self._seen.keep(position, images)
        self.staged_count += 1
        return Handle(position, token)

    def _keep(
        self,
        parts: tuple[Buffer, ...],
        properties: bytes,
        born_host: bytes,
        done: Staged,
        *,
        is_image: bool,
    ) -> int:
        core, born_ms = self._core, self._core.now_ms()
        if is_image:
            core.store.require_writable()
            position = self._area.put(about_of(born_ms, born_host, properties), parts)
            if position is not None:
                core.call_soon(lambda: done(None))
                return position
        position = stage_large(
            core.store, STAGED_TOPIC, parts, properties, born_ms, born_host, done
        )
        core.ask_turn()
        return position

    def _check_batch(self, body: Buffer, run: Run) -> None:
        run.parts = split_batch(body)
        if not all(len(one) for _, one, _ in run.parts):
            raise MessageIllegal("a message without a body")
        refuse_special(b"\x02".join([properties for _, _, properties in run.parts]))
        measure_run(self._core.store.encoder, run, run.topic.encode())

    def _check_images(self, images: Images, run: Run) -> None:
        if images.keys() is None:
            refuse_special(images.properties())
        encoder = self._core.store.encoder
        if (
            not encoder.crc_bytes
            or int(images.body_bytes.max()) > encoder.body_bytes_max
            or int(images.sizes.max()) + _WIDER_BYTES > encoder.entry_bytes_max
        ):
            run.parts = images.parts()
            measure_run(encoder, run, run.topic.encode())

    # ----------------------------------------------------------------------------------- publishing

    def last_batch(self, sink: str) -> int:
        """The newest batch that a sink has published, -1 where it has none."""
        row = self._core.store.table(STAGED_TABLE).get(sink)
        return int(row["batch"]) if row is not None else -1

    def publish(
        self, owner: Owner, handles: list[Handle], done: Published, *, once: bool = False
    ) -> None:
        """Make staged entries visible, all of them; `once`: the sink publishes nothing after it.

        `done` is told whether this call did it: a batch that was published before is left as it is.
        """
        check_owner(owner)
        if len(handles) > HANDLES_MAX or len(set(handles)) != len(handles):
            raise ParameterInvalid(f"{len(handles)} handles: each once, {HANDLES_MAX} at most")
        under_way = self._publishing.get(owner.sink)
        if under_way is not None:
            if under_way.batch != owner.batch:
                raise Busy(f"sink {owner.sink} publishes batch {under_way.batch}; try again")
            # Who asks again did not hear the answer: the first handles count.
            under_way.waiters.append(lambda _, error: done(False, error))
            return
        if owner.batch <= self.last_batch(owner.sink):
            self._forget(*owner)
            done(False, None)
            return
        table = self._core.store.table(STAGED_TABLE)
        if owner.sink not in table and len(table) + len(self._publishing) >= SINKS_MAX:
            raise Busy(f"{len(table)} sinks are known, {SINKS_MAX} at most")
        positions = [handle.position for handle in handles]
        work = _Publishing(owner.sink, owner.batch, positions, once, waiters=[done])
        self._publishing[owner.sink] = work
        unknown = [position for position in positions if position not in self._known]

        def checked(_: list[None] | None, error: BaseException | None) -> None:
            if error is None:
                try:
                    for handle in handles:
                        self._check_handle(handle, owner)
                except SluiceError as wrong:
                    error = wrong
            if error is not None:
                self._give_up(work, _as_error(error))
            else:
                # After the decision what it speaks of must be there, whatever happens.
                self._area.sync(positions, synced)

        def synced(error: SluiceError | None) -> None:
            if error is not None:
                self._give_up(work, error)
            else:
                self._decide(work)

        ask_each(self._core, [partial(self._learn, at) for at in unknown], checked)

    def _learn(self, handle: int) -> None:
        """Look into the log whose a handle is. May raise ColdRead."""
        entry = self._entry(handle)
        if entry is not None:
            self._known[handle] = entry.known()

    def _entry(self, handle: int) -> Entry | None:
        return entry_at(self._core.store, self._area, handle)

    def _check_handle(self, handle: Handle, owner: Owner) -> None:
        known = self._known.get(handle.position)
        position = handle.position
        is_there = (
            self._area.holds(position)
            if position >= FLOOR
            else position >= self._core.store.log.start
        )
        if known != (owner, handle.token) or not is_there:
            raise IllegalOperation(
                f"handle {handle.position} is nothing that sink {owner.sink} staged for batch "
                f"{owner.batch}, or it is gone; stage the batch again"
            )

    def _decide(self, work: _Publishing) -> None:
        core = self._core
        row = {
            "batch": work.batch,
            "ms": core.now_ms(),
            "once": work.is_once,
            "pending": work.handles,
            "at": core.store.log.end,
        }

        def decided(error: SluiceError | None) -> None:
            if error is not None:
                self._give_up(work, error)
                return
            work.is_decided = True
            self._go_on(work)

        try:
            core.store.change([(STAGED_TABLE, work.sink, row)], decided)
        except SluiceError as error:
            self._give_up(work, error)
            return
        core.ask_turn()

    def _give_up(self, work: _Publishing, error: SluiceError) -> None:
        """Nothing was decided: the sink may try again, also with other handles."""
        assert not work.is_decided
        del self._publishing[work.sink]
        for waiter in work.waiters:
            waiter(False, error)

    # -------------------------------------------------------------------------------------- writing

    def _go_on(self, work: _Publishing) -> None:
        """Write the next portion; it is confirmed before the one after it is begun, so that what
        of an entry was written is always its beginning.
        """
        if work.is_going:
            return
        work.is_going = True

        def answered(_: None, error: BaseException | None) -> None:
            if error is not None:
                self._failed(work, _as_error(error))

        self._core.store.call(lambda: self._write_some(work), answered)

    def _failed(self, work: _Publishing, error: SluiceError) -> None:
        """The decision stands, so it is tried again; who waits may ask again."""
        log_lines.warning(
            "batch %d of sink %s is decided and cannot be written now: %s",
            *(work.batch, work.sink, error),
        )
        work.is_going = False
        work.again_ms = self._core.now_ms() + _AGAIN_MS
        waiters, work.waiters = work.waiters, []
        for waiter in waiters:
            waiter(False, error)

    def _write_some(self, work: _Publishing) -> None:
        """May raise ColdRead, having staged nothing."""
        core = self._core
        while work.next_handle < len(work.handles):
            if self._write_whole(work):
                return
            handle = work.handles[work.next_handle]
            entry, reason = None, "it is gone"
            try:
                entry = self._entry(handle)
            except RecordDamaged as error:
                reason = str(error)
            if entry is None:
                log_lines.error("staged entry %d: its messages are lost: %s", handle, reason)
            messages = [] if entry is None else self._messages(entry, work.done_count[handle])
            if not messages:
                work.next_handle += 1
                continue
            keys = [records.message_keys(message.properties) for message in messages]
            codes = {records.java_hash(tag) if tag else 0 for _, _, tag in keys}
            queue = (messages[0].topic, messages[0].queue_id)
            written = self._written(work, [(queue, codes)], handle, len(messages))
            placed = core.store.stage_batch(messages, written, keys)
            core.stats.stored(messages[0].topic, len(messages), sum(each.size for each in placed))
            core.ask_turn()
            return
        self._finish(work)

    def _write_whole(self, work: _Publishing) -> bool:
        """Write all messages of the next staged entries at once, as far as they are usual ones: the
        same as above, several times as fast. May raise ColdRead, having staged nothing.
        """
        arrived: list[Arrived] = []
        room = _TURN_BYTES_MAX
        for handle in islice(work.handles, work.next_handle, None):
            try:
                entry = self._entry(handle)
                if entry is None or (arrived and len(entry.body) > room):
                    break
                placed = self._place_whole(entry, work.done_count[handle])
            except (ColdRead, SluiceError) as error:
                if arrived or isinstance(error, RecordDamaged):
                    break  # it is met again when its turn has come
                raise
            if placed is None:
                break
            arrived.append(placed)
            room -= len(entry.body)
        if arrived:
            tell(self._core.store, self._written(work, arrived))
            self._core.ask_turn()
        return bool(arrived)

    def _place_whole(self, entry: Entry, done_count: int) -> Arrived | None:
        """Give the messages of an entry their places; None where they have to be looked at."""
        core = self._core
        topic, queue_id = queue = entry.place()
        settings = core.topics.get(topic)
        if (
            done_count
            or settings is None
            or settings.attributes
            or len(entry.body) > _WHOLE_BYTES_MAX
            or not Lane.fits(core.store, topic, queue_id, 0, entry.born_host)
        ):
            return None
        made_from = (entry.born_ms, entry.born_host, entry.position)
        images = self._seen.images(entry) or entry.images(topic)
        if images is not None:
            if not takes_images(core.store, topic, queue_id, entry.born_host):
                return None
            count, byte_count, codes = place_images(core.store, images, topic, queue_id, *made_from)
        else:
            placed = Lane(core.store, *queue, 0).place_batch(
                bytes(entry.body), entry.born_ms, entry.born_host, _may_expire, entry.position
            )
            if placed is None:
                return None
            count, byte_count = len(placed.positions), placed.byte_count
            codes = placed.tags_codes
        core.stats.stored(topic, count, byte_count)
        return queue, codes

    def _written(
        self, work: _Publishing, arrived: list[Arrived], handle: int | None = None, count: int = 0
    ) -> Staged:
        """What is done when these are confirmed: so many messages of an entry; without its handle
        all messages of the next entries.
        """

        def written(error: SluiceError | None) -> None:
            if error is not None:
                self._failed(work, error)
                return
            # Whoever waits for messages of these queues is asked again.
            for queue, codes in arrived:
                for code in codes:
                    self._core.polls.arrived(queue, code)
            if handle is None:
                work.next_handle += len(arrived)
            else:
                work.done_count[handle] += count
            work.is_going = False
            self._core.call_soon(lambda: self._go_on(work))

        return written

    def _messages(self, entry: Entry, done_count: int) -> list[Message]:
        """The next messages of a staged entry; none where its topic is gone."""
        core = self._core
        topic, queue_id = entry.place()
        settings = core.topics.get(topic)
        if settings is None:
            log_lines.warning("topic %s is gone; what was staged for it goes nowhere", topic)
            return []
        room = min(_TURN_BYTES_MAX, core.store.log.entry_bytes_max)
        messages: list[Message] = []
        images = entry.images(topic)
        if images is not None:
            parts = images.parts(slice(done_count, None))
        else:
            parts = split_batch(entry.body)[done_count:]
        for flag, body, properties in parts:
            message = Message(
                topic,
                queue_id,
                bytes(body),
                core.expiry.stamped(topic, settings, properties),
                flag,
                0,
                entry.born_ms,
                entry.born_host,
                0,
                entry.position,
            )
            room -= core.store.encoder.measure(message, topic.encode())
            if messages and (room < 0 or len(messages) >= _TURN_MESSAGES_MAX):
                break
            messages.append(message)
        return messages

    def _finish(self, work: _Publishing) -> None:
        core = self._core
        row = {"batch": work.batch, "ms": core.now_ms(), "once": work.is_once}

        def done(error: SluiceError | None) -> None:
            if error is not None:
                self._failed(work, error)
                return
            del self._publishing[work.sink]
            self.published_count += 1
            self._forget(work.sink, work.batch, work.handles)
            for number, waiter in enumerate(work.waiters):
                waiter(number == 0, None)

        core.store.change([(STAGED_TABLE, work.sink, row)], done)
        core.ask_turn()

    def _forget(self, sink: str, batch: int, handles: Iterable[int] = ()) -> None:
        """What a sink has staged up to this batch can never be published again."""
        others = (
            position
            for position, (owner, _) in self._known.items()
            if owner.sink == sink and owner.batch <= batch
        )
        done = {*handles, *others}
        self._area.drop(done)
        for position in done:
            self._known.pop(position, None)
            self._seen.drop(position)

    # --------------------------------------------------------------------------------- start, ticks

    def start(self) -> None:
        store = self._core.store
        for sink, row in store.table(STAGED_TABLE).items():
            if row.get("pending") is not None:
                work = _Publishing(sink, int(row["batch"]), list(row["pending"]), bool(row["once"]))
                work.is_decided = True
                wanted = set(work.handles)
                origins = (made.origin for made in made_since(store.log, int(row["at"])))
                work.done_count.update(origin for origin in origins if origin in wanted)
                self._publishing[sink] = work
        decided = {handle for work in self._publishing.values() for handle in work.handles}

        def is_needed(position: int, about: bytes) -> bool:
            owner = owner_in(about)
            is_open = owner is not None and owner.batch > self.last_batch(owner.sink)
            return is_open or position in decided

        self._area.open(is_needed)

    def tick(self, now_ms: int) -> None:
        for work in list(self._publishing.values()):
            if work.is_decided and not work.is_going and now_ms >= work.again_ms:
                self._go_on(work)
        if now_ms - self._swept_ms >= _SWEEP_MS:
            self._swept_ms = now_ms
            self._sweep(now_ms)
            works = self._publishing.values()
            self._area.tick(handle for work in works for handle in work.handles)

    def _sweep(self, now_ms: int) -> None:
        """Forget sinks that published their only batch a while ago."""
        table = self._core.store.table(STAGED_TABLE)
        old: list[tuple[str, str, Any]] = [
            (STAGED_TABLE, sink, None)
            for sink, row in table.items()
            if row.get("once") and row.get("pending") is None and now_ms - row["ms"] > _ONCE_MS
        ][:HANDLES_MAX]
        if old:
            try:
                self._core.store.change(old)
            except SluiceError:
                return  # the next sweep does it
            self._core.ask_turn()

    def is_clear(self, position: int) -> bool:
        """Whether retention may take what lies below a position: not what is being published."""
        return not any(
            work.is_decided and handle < position
            for work in self._publishing.values()
            for handle in work.handles[work.next_handle :]
        )


def _may_expire(properties: bytes) -> bool:
    return EXPIRES_NAME in properties


def _as_error(error: BaseException) -> SluiceError:
    return error if isinstance(error, SluiceError) else SluiceError(str(error))
