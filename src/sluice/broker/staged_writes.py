"""This module lets a writer stage messages that nobody sees, and publish them once, all or none.

A job that writes in batches (Spark) fails in the middle, tries again, and does not know what of it
was stored. So its tasks stage what they write, each try for itself; when all are done the job
publishes what the successful ones staged, under its own name (the sink) and the batch's number:

    stage      one entry of a topic of the broker's own, for one queue; its position is the handle
    publish    1. the decision: a row (sink -> batch, handles) in a table, durable
               2. every staged entry is written to its queue, message by message; each names the
                  entry that it was made from, its origin
               3. the row loses its handles when all of it is confirmed

A batch that the sink has published already is not published again, whatever its handles are. After
a crash the table says what was decided; the origins in the log since then say how many messages of
each staged entry were written, and the rest follows. What is staged and never published is an entry
that nothing points to: it costs its bytes until retention takes the log file that it lies in.

What is staged is a producer's batch, or images (`protocol/record_images.py`): messages in the log's
own layout, which need not be looked at one by one, neither when they are staged nor when they are
published. Images are an order of magnitude faster.

A handle is a position and a random number, which the entry holds too: where a crash took a staged
entry and another one lies in its place, the old handle is not good for it.

It knows neither a wire nor a socket.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from secrets import randbits
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluice.broker.attributes import DEDUP_WINDOW
from sluice.broker.browsing import ask_each
from sluice.broker.memory_queues import is_in_memory
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
from sluice.storage.state import STAGED_TABLE

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

HANDLES_MAX: Final = 32_768  # of one publish
SINKS_MAX: Final = 10_000
_ONCE_MS: Final = 3_600_000  # so long is a sink known that publishes one batch only
_SWEEP_MS: Final = 60_000
_KNOWN_MAX: Final = 100_000  # handles that are remembered; others are read again
_TURN_MESSAGES_MAX: Final = 4096
_TURN_BYTES_MAX: Final = 4 << 20
_WHOLE_BYTES_MAX: Final = 4 << 20  # of a staged entry that is written in one turn
_WIDER_BYTES: Final = 24  # more than in an image may addresses take in an entry
_AGAIN_MS: Final = 1_000
_FLAG_AND_TIME: Final = Struct(">36xiq")
_STAGED_FIELD: Final = records.field_of_topic(STAGED_TOPIC.encode())[1]
_SINK: Final = re.compile(r"[ -~]{1,255}")
_SINK_NAME: Final = b"STAGED_SINK"
_BATCH_NAME: Final = b"STAGED_BATCH"
_TOPIC_NAME: Final = b"REAL_TOPIC"
_QUEUE_NAME: Final = b"REAL_QID"
_TOKEN_NAME: Final = b"STAGED_TOKEN"
_COUNT_NAME: Final = b"STAGED_IMAGES"

log_lines = logging.getLogger("sluice.broker")

Staged = Callable[[SluiceError | None], None]
Published = Callable[[bool, SluiceError | None], None]  # whether this call published it


class Owner(NamedTuple):
    """Whose a staged entry is."""

    sink: str
    batch: int


class Handle(NamedTuple):
    """What a staged entry is published by."""

    position: int
    token: int


class _Known(NamedTuple):
    owner: Owner
    token: int


class _Entry(NamedTuple):
    """A staged entry."""

    position: int
    born_ms: int
    born_host: bytes
    body: memoryview
    properties: bytes


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
        self._known: dict[int, _Known] = {}
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
        _check_owner(owner)
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
        if image_count:
            images = read_images(body, image_count, topic.encode())
            self._check_images(images, run)
            parts = (body, images.seal())
        else:
            self._check_batch(body, run)
        token = randbits(48)
        properties = b"%b\x01%b\x02%b\x01%d\x02%b\x01%b\x02%b\x01%d\x02%b\x01%d\x02%b\x01%d\x02" % (
            *(_SINK_NAME, owner.sink.encode(), _BATCH_NAME, owner.batch),
            *(_TOPIC_NAME, topic.encode(), _QUEUE_NAME, queue_id, _TOKEN_NAME, token),
            *(_COUNT_NAME, image_count),
        )
        if core.store.log.end > core.admission.free_end:
            core.admission.admit(born_host, len(body))
        position = stage_large(
            core.store, STAGED_TOPIC, parts, properties, core.now_ms(), born_host, done
        )
        core.ask_turn()
        if len(self._known) >= _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[position] = _Known(owner, token)
        self.staged_count += 1
        return Handle(position, token)

    def _check_batch(self, body: Buffer, run: Run) -> None:
        run.parts = split_batch(body)
        if not all(len(one) for _, one, _ in run.parts):
            raise MessageIllegal("a message without a body")
        _refuse_special(b"\x02".join([properties for _, _, properties in run.parts]))
        measure_run(self._core.store.encoder, run, run.topic.encode())

    def _check_images(self, images: Images, run: Run) -> None:
        if images.keys() is None:
            _refuse_special(images.properties())
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
        _check_owner(owner)
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
                self._decide(work)

        ask_each(self._core, [partial(self._learn, at) for at in unknown], checked)

    def _learn(self, handle: int) -> None:
        """Look into the log whose a handle is. May raise ColdRead."""
        entry = self._entry(handle)
        if entry is not None:
            self._known[handle] = _known_of(entry)

    def _entry(self, handle: int) -> _Entry | None:
        store = self._core.store
        view = store.entry_at(handle) if store.log.start <= handle < store.log.end else None
        return None if view is None else _read_entry(view, handle)

    def _check_handle(self, handle: Handle, owner: Owner) -> None:
        known = self._known.get(handle.position)
        if known != (owner, handle.token) or handle.position < self._core.store.log.start:
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
            handle = work.handles[work.next_handle]
            try:
                entry = self._entry(handle)
            except RecordDamaged as error:
                log_lines.error("a staged entry is damaged, its messages are lost: %s", error)
                entry = None
            if entry is not None and self._write_whole(work, entry):
                return
            messages = [] if entry is None else self._messages(entry, work.done_count[handle])
            if not messages:
                work.next_handle += 1
                continue
            keys = [records.message_keys(message.properties) for message in messages]
            codes = {records.java_hash(tag) if tag else 0 for _, _, tag in keys}
            queue = (messages[0].topic, messages[0].queue_id)
            written = self._written(work, queue, codes, handle, len(messages))
            placed = core.store.stage_batch(messages, written, keys)
            core.stats.stored(messages[0].topic, len(messages), sum(each.size for each in placed))
            core.ask_turn()
            return
        self._finish(work)

    def _write_whole(self, work: _Publishing, entry: _Entry) -> bool:
        """Write all messages of a staged entry at once, if they are usual ones: the same as below,
        several times as fast.
        """
        core = self._core
        topic, queue_id = _place_of(entry)
        settings = core.topics.get(topic)
        if (
            work.done_count[entry.position]
            or settings is None
            or settings.attributes
            or len(entry.body) > _WHOLE_BYTES_MAX
            or not Lane.fits(core.store, topic, queue_id, 0, entry.born_host)
        ):
            return False
        queue = (topic, queue_id)
        made_from = (entry.born_ms, entry.born_host, entry.position)
        images = _images_of(entry, topic)
        if images is not None:
            if not takes_images(core.store, topic, queue_id, entry.born_host):
                return False
            count, byte_count, codes = place_images(core.store, images, topic, queue_id, *made_from)
        else:
            placed = Lane(core.store, *queue, 0).place_batch(
                bytes(entry.body), entry.born_ms, entry.born_host, _may_expire, entry.position
            )
            if placed is None:
                return False
            count, byte_count = len(placed.positions), placed.byte_count
            codes = placed.tags_codes
        tell(core.store, self._written(work, queue, codes))
        core.stats.stored(topic, count, byte_count)
        core.ask_turn()
        return True

    def _written(
        self,
        work: _Publishing,
        queue: tuple[str, int],
        codes: set[int],
        handle: int | None = None,
        count: int = 0,
    ) -> Staged:
        """What is done when so many messages of an entry are confirmed; without its handle: all."""

        def written(error: SluiceError | None) -> None:
            if error is not None:
                self._failed(work, error)
                return
            # Whoever waits for messages of this queue is asked again.
            for code in codes:
                self._core.polls.arrived(queue, code)
            if handle is None:
                work.next_handle += 1
            else:
                work.done_count[handle] += count
            work.is_going = False
            self._core.call_soon(lambda: self._go_on(work))

        return written

    def _messages(self, entry: _Entry, done_count: int) -> list[Message]:
        """The next messages of a staged entry; none where its topic is gone."""
        core = self._core
        topic, queue_id = _place_of(entry)
        settings = core.topics.get(topic)
        if settings is None:
            log_lines.warning("topic %s is gone; what was staged for it goes nowhere", topic)
            return []
        room = min(_TURN_BYTES_MAX, core.store.log.entry_bytes_max)
        messages: list[Message] = []
        images = _images_of(entry, topic)
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
            for handle in work.handles:
                self._known.pop(handle, None)
            for number, waiter in enumerate(work.waiters):
                waiter(number == 0, None)

        core.store.change([(STAGED_TABLE, work.sink, row)], done)
        core.ask_turn()

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

    def tick(self, now_ms: int) -> None:
        for work in list(self._publishing.values()):
            if work.is_decided and not work.is_going and now_ms >= work.again_ms:
                self._go_on(work)
        if now_ms - self._swept_ms >= _SWEEP_MS:
            self._swept_ms = now_ms
            self._sweep(now_ms)

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


def _read_entry(view: memoryview, position: int) -> _Entry | None:
    """Take apart an entry that was checked already; None where it is not one of ours."""
    (sys_flag, born_ms) = _FLAG_AND_TIME.unpack_from(view)
    born_host = bytes(view[48 : 68 if sys_flag & records.SYS_BORN_V6 else 56])
    body_at = records.origin_place(sys_flag) + 12
    body_end = body_at + int.from_bytes(view[body_at - 4 : body_at], "big")
    field = view[body_end : body_end + len(_STAGED_FIELD)]
    if field != _STAGED_FIELD:
        return None
    properties = bytes(view[body_end + len(field) + 2 :])
    return _Entry(position, born_ms, born_host, view[body_at:body_end], properties)


def _place_of(entry: _Entry) -> tuple[str, int]:
    """Topic and queue that a staged entry is for."""
    topic = (records.property_value(entry.properties, _TOPIC_NAME) or b"").decode()
    return topic, int(records.property_value(entry.properties, _QUEUE_NAME) or b"0")


def _images_of(entry: _Entry, topic: str) -> Images | None:
    """The images of a staged entry; None where it holds a batch."""
    count = int(records.property_value(entry.properties, _COUNT_NAME) or b"0")
    return read_images(entry.body, count, topic.encode(), is_sealed=True) if count else None


def _refuse_special(properties: bytes) -> None:
    from sluice.broker.sending import is_special  # which knows the core

    # What is special may stand in a value too, where it means nothing.
    if is_special(properties) and any(
        is_special(item.partition(b"\x01")[0]) for item in properties.split(b"\x02")
    ):
        raise MessageIllegal("staged messages cannot be delayed, transactional or short-lived")


def _may_expire(properties: bytes) -> bool:
    return EXPIRES_NAME in properties


def _known_of(entry: _Entry) -> _Known:
    sink = records.property_value(entry.properties, _SINK_NAME) or b""
    batch = records.property_value(entry.properties, _BATCH_NAME) or b"-1"
    token = records.property_value(entry.properties, _TOKEN_NAME) or b"-1"
    return _Known(Owner(sink.decode(), int(batch)), int(token))


def _check_owner(owner: Owner) -> None:
    if not _SINK.fullmatch(owner.sink):
        raise ParameterInvalid("a sink is named by 1 to 255 printable ASCII characters")
    if not 0 <= owner.batch < 1 << 62:
        raise ParameterInvalid(f"batch {owner.batch}: from 0 on")


def _as_error(error: BaseException) -> SluiceError:
    return error if isinstance(error, SluiceError) else SluiceError(str(error))
