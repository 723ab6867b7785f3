"""This module serves sends, batches and commits of the usual form straight from their bytes.

Sends are what a broker does most. One with a binary header, to a topic that asks for nothing
special, with properties that ask for nothing either, is not made into a command: its parts are
used as the bytes they are, and what its producer repeats with every message is looked up at once
(a lane, see `storage/lanes.py`). Frames that came together are answered together, when all of them
are safe. Whatever is unusual is left to the plain way (`send_api.py`), which does the same, slower.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.broker.core import BrokerCore
from sluice.broker.quick_commits import QuickCommits
from sluice.broker.quick_delays import QuickDelays, Sent
from sluice.broker.quick_halves import QuickHalves
from sluice.broker.sending import Sending, is_special
from sluice.broker.topics import (
    HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TopicSettings,
)
from sluice.config import BrokerConfig
from sluice.errors import SluiceError
from sluice.net import Connection
from sluice.protocol import records, remoting
from sluice.protocol.batch_presses import Presses, together_max
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import BINARY
from sluice.protocol.remoting_fast import (
    QUICK_BYTES_MIN,
    SendHead,
    batch_ids,
    quick_batch_answer,
    quick_send,
    quick_send_answer,
    send_answer,
    with_field,
)
from sluice.storage.copies import Copied
from sluice.storage.lanes import Arrived, Lane, PlacedBatch, tell

if TYPE_CHECKING:
    from sluice.broker.remoting_api import RemotingApi

Keys = tuple[bytes, bytes, bytes]
# A send that waits for its group: frame, opaque, lane, its place there, keys.
_Waiting = tuple[bytes, int, Lane, tuple[int, int, int], Keys]

# One that is stored elsewhere for now, until its time or its word comes: frame, opaque, lane, the
# topic that it is in, its place there, handle, unique key.
_WaitingElsewhere = tuple[bytes, int, Lane, str, Copied, str, bytes]

_LANES_MAX: Final = 4096
_SEND: Final = b"\x016"  # 310, as a binary header begins
_BATCH: Final = b"\x01@"  # 320
_END: Final = b"\x00%"  # 37
_UNIQUE_BYTES_MAX: Final = 127  # of a key that fits into a quick answer


# A batch that may be placed together with the next one; its frame and opaque.
_Unplaced = tuple[Arrived, bytes, int]


class _WaitingBatch(NamedTuple):
    frame: bytes
    opaque: int
    lane: Lane
    placed: PlacedBatch


class QuickSends:
    """The usual sends of all connections of one broker."""

    def __init__(self, core: BrokerCore, api: RemotingApi, sending: Sending) -> None:
        self._core = core
        self._api = api
        self._sending = sending
        self._host_hex = core.store.encoder.store_host.hex().upper().encode()
        self._host_text = self._host_hex.decode()
        self._presses = Presses()
        self._lanes: dict[SendHead, tuple[Lane, TopicSettings, BrokerConfig]] = {}
        self._group: list[_Waiting] = []
        self._batches: list[_WaitingBatch] = []
        self._unplaced: list[_Unplaced] = []  # batches of one size to one topic
        self._delays = QuickDelays(core, sending)
        self._halves = QuickHalves(core, sending)
        self._delayed: list[_WaitingElsewhere] = []
        self._commits = QuickCommits(core)

    def serve(self, connection: Connection, frame: Frame) -> bool:
        """Serve a frame if it is a send of the usual form; False: it is served the plain way.

        Its answer waits for `end_group`.
        """
        code = frame[4:6]
        if code == _BATCH:
            return self._serve_batch(connection, frame)
        if self._unplaced:
            self._place_batches(connection)
        if code != _SEND:
            return code == _END and self._commits.serve(frame)
        if len(frame) < QUICK_BYTES_MIN or type(frame) is not bytes:
            return False
        request = quick_send(frame)
        if request is None:
            return False
        opaque, head, born_ms, properties, reconsume_times, body_at = request
        body = frame[body_at:]
        keys = records.message_keys(properties)
        if not 0 < len(keys[0]) <= _UNIQUE_BYTES_MAX or reconsume_times:
            return False
        core = self._core
        host = host_of(connection)
        try:
            lane = self._lane(head, host)
            if lane is None:
                return False
            if core.store.log.end > core.admission.free_end:
                core.admission.admit(host, len(body))
            if head.sys_flag & records.SYS_TX_MASK or is_special(properties):
                parts = (lane.topic, lane.queue_id, head.sys_flag, born_ms, host, properties, body)
                elsewhere = self._place_elsewhere(Sent(*parts), keys)
                if elsewhere is not None:
                    self._delayed.append((frame, opaque, lane, *elsewhere, keys[0]))
                return elsewhere is not None
            place = lane.place(body, self._sending.completed(properties), keys, born_ms, host)
        except Exception as error:
            self._api.failed(connection, remoting.decode(frame), error)
            return True
        self._group.append((frame, opaque, lane, place, keys))
        return True

    def _place_elsewhere(self, sent: Sent, keys: Keys) -> tuple[str, Copied, str] | None:
        """The topic and the place of what is stored for a special message, and its handle."""
        if sent.sys_flag & records.SYS_TX_MASK:
            half = self._halves.place(sent, keys)
            return None if half is None else (HALF_TOPIC, half, "")
        placed = self._delays.place(sent, keys)
        if placed is None:
            return None
        return (TIMER_TOPIC if placed[1] else SCHEDULE_TOPIC, *placed)

    def _serve_batch(self, connection: Connection, frame: Frame) -> bool:
        """Batches that come one after the other may be placed together: they wait for that."""
        if len(frame) < QUICK_BYTES_MIN or type(frame) is not bytes:
            self._place_batches(connection)
            return False
        request = quick_send(frame)
        if request is None or request[1].sys_flag & records.SYS_TX_MASK:
            self._place_batches(connection)
            return False
        opaque, head, born_ms, _, _, body_at = request
        if head not in self._lanes:
            self._place_batches(connection)  # its topic may be made now, which is stored too
        core, unplaced = self._core, self._unplaced
        host = host_of(connection)
        data = memoryview(frame)[body_at:]
        try:
            lane = self._lane(head, host)
            if lane is None:
                self._place_batches(connection)
                return False
            if core.store.log.end + len(unplaced) * len(data) > core.admission.free_end:
                self._place_batches(connection)
                core.admission.admit(host, len(data))
        except Exception as error:
            self._api.failed(connection, remoting.decode(frame), error)
            return True
        if unplaced:
            first = unplaced[0][0]
            if len(data) != len(first[1]) or not lane.goes_with(first[0]):
                self._place_batches(connection)
        self._unplaced.append(((lane, data, born_ms, host), frame, opaque))
        if len(self._unplaced) >= together_max(len(data)):
            self._place_batches(connection)
        return True

    def _place_batches(self, connection: Connection) -> None:
        """Give those their places that wait for it: together where they are alike."""
        unplaced = self._unplaced
        if not unplaced:
            return
        self._unplaced = []
        placed: list[PlacedBatch] | None = None
        if len(unplaced) > 1:
            with suppress(SluiceError):  # each is told by itself
                lane = unplaced[0][0][0]
                placed = lane.place_alike([each[0] for each in unplaced], is_special)
        if placed is None:
            for each in unplaced:
                self._place_batch(connection, *each)
            return
        for (arrived, frame, opaque), place in zip(unplaced, placed, strict=True):
            self._batches.append(_WaitingBatch(frame, opaque, arrived[0], place))

    def _place_batch(
        self, connection: Connection, arrived: Arrived, frame: bytes, opaque: int
    ) -> None:
        lane, data, born_ms, host = arrived
        try:
            placed = lane.place_batch(data, born_ms, host, is_special)
        except Exception as error:
            self._api.failed(connection, remoting.decode(frame), error)
            return
        if placed is None:
            self._api.serve(connection, remoting.decode(frame))
        else:
            self._batches.append(_WaitingBatch(frame, opaque, lane, placed))

    def _lane(self, head: SendHead, host: bytes) -> Lane | None:
        """The lane of sends with this head; None where they need a look at each."""
        core = self._core
        known = self._lanes.get(head)
        if known is not None:
            lane, settings, config = known
            if (
                settings is core.topics.get(head.topic)
                and config is core.config
                and lane.is_current
                and len(host) == Lane.HOST_BYTES
            ):
                return lane
        sending = self._sending
        settings = sending.topic_for(head.topic, head.default_topic, head.default_queue_count)
        queue_id = sending.queue_for(settings, head.queue_id)
        flags = head.sys_flag & ~records.SYS_TX_MASK  # what is transactional is stored elsewhere
        if (
            settings.attributes
            or head.topic.startswith(RETRY_PREFIX)
            or not Lane.fits(core.store, head.topic, queue_id, flags, host)
        ):
            return None
        if len(self._lanes) >= _LANES_MAX:
            self._lanes.clear()
        lane = Lane(core.store, head.topic, queue_id, flags, self._presses)
        self._lanes[head] = (lane, settings, core.config)
        return lane

    # ---------------------------------------------------------------------------------- the answers

    def end_group(self, connection: Connection) -> None:
        """The frames that came together are served: their answers go out when all are safe."""
        self._place_batches(connection)
        group, batches, delayed = self._group, self._batches, self._delayed
        if not group and not batches and not delayed:
            self._commits.end_group()
            return
        self._group, self._batches, self._delayed = [], [], []
        core = self._core
        core.ask_turn()
        self._commits.end_group()
        self._count(group, batches, delayed)
        others = len(group) + len(batches) + len(delayed) - 1
        core.admission.grouped_count += others

        def sent(error: SluiceError | None) -> None:
            core.admission.grouped_count -= others
            if error is not None:
                frames = [waiting[0] for waiting in group] + [batch.frame for batch in batches]
                frames += [waiting[0] for waiting in delayed]
                for command in map(remoting.decode, frames):
                    self._api.failed(connection, command, error)
                return
            host_hex = self._host_hex
            answers = [
                quick_send_answer(opaque, host_hex, place[0], lane.queue_id, place[2], keys[0])
                for _, opaque, lane, place, keys in group
            ]
            answers += map(self._batch_answer, batches)
            answers += map(self._delayed_answer, delayed)
            connection.send(b"".join(answers))
            if core.polls.is_awaited:
                for _, _, lane, _, keys in group:
                    self._arrived(lane, records.java_hash(keys[2]) if keys[2] else 0)
                for batch in batches:
                    for code in batch.placed.tags_codes:
                        self._arrived(batch.lane, code)

        tell(core.store, sent)

    def _count(
        self, group: list[_Waiting], batches: list[_WaitingBatch], delayed: list[_WaitingElsewhere]
    ) -> None:
        stored = self._core.stats.stored
        sums: dict[str, list[int]] = {}
        for _, _, lane, place, _ in group:
            counts = sums.setdefault(lane.topic, [0, 0])
            counts[0] += 1
            counts[1] += place[1]
        for topic, (count, byte_count) in sums.items():
            stored(topic, count, byte_count, calls=count)
        for batch in batches:
            stored(batch.lane.topic, len(batch.placed.positions), batch.placed.byte_count)
        for _, _, _, topic, copied, _, _ in delayed:
            stored(topic, 1, copied.size)

    def _delayed_answer(self, waiting: _WaitingElsewhere) -> bytes:
        _, opaque, lane, _, place, handle, unique = waiting
        answer = quick_send_answer(
            opaque, self._host_hex, place.position, lane.queue_id, place.queue_offset, unique
        )
        return with_field(answer, b"recallHandle", handle.encode()) if handle else answer

    def _batch_answer(self, batch: _WaitingBatch) -> bytes:
        placed = batch.placed
        place = (batch.lane.queue_id, placed.queue_offset)
        ids = batch_ids(self._host_text, placed.packed)
        if 0 < len(placed.unique) <= _UNIQUE_BYTES_MAX and placed.unique.isascii():
            return quick_batch_answer(batch.opaque, ids, *place, placed.unique)
        unique = placed.unique.decode("utf-8", "replace")
        return send_answer(BINARY, batch.opaque, ids, *place, unique)

    def _arrived(self, lane: Lane, code: int) -> None:
        """Messages can be read now: whoever waits for such is asked again."""
        self._core.polls.arrived((lane.topic, lane.queue_id), code)


def host_of(connection: Connection) -> bytes:
    """The address of a connection's peer, as messages carry it."""
    host = connection.attributes.get("host")
    if type(host) is not bytes:
        host = connection.attributes["host"] = connection.packed_peer()
    return host
