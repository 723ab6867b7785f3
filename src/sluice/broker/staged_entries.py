"""This module says what a staged entry is: whose, for which queue, and how it is written down.

Entries lie in one of two places, and their positions tell in which. Images are kept in files that
are written again and again (`storage/staging.py`). Batches of producers, and images for which those
files have no room, are entries of a topic of the broker's own, in the log. `staged_writes.py` knows
what becomes of them.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import Final, NamedTuple

from sluice.broker.topics import STAGED_TOPIC
from sluice.errors import MessageIllegal, ParameterInvalid
from sluice.protocol import records
from sluice.protocol.record_images import Images, read_images
from sluice.storage.staging import FLOOR, StagingArea
from sluice.storage.store import Store

_SINK: Final = re.compile(r"[ -~]{1,255}")
_FLAG_AND_TIME: Final = Struct(">36xiq")
_TIME_AND_HOST: Final = Struct(">qB")
_STAGED_FIELD: Final = records.field_of_topic(STAGED_TOPIC.encode())[1]
_SINK_NAME: Final = b"STAGED_SINK"
_BATCH_NAME: Final = b"STAGED_BATCH"
_TOPIC_NAME: Final = b"REAL_TOPIC"
_QUEUE_NAME: Final = b"REAL_QID"
_TOKEN_NAME: Final = b"STAGED_TOKEN"
_COUNT_NAME: Final = b"STAGED_IMAGES"
SEEN_IMAGES_MAX: Final = 1_000_000  # some 70 bytes each


class Owner(NamedTuple):
    """Whose a staged entry is."""

    sink: str
    batch: int


def check_owner(owner: Owner) -> None:
    """Refuse an owner that nothing can be staged for."""
    if not _SINK.fullmatch(owner.sink):
        raise ParameterInvalid("a sink is named by 1 to 255 printable ASCII characters")
    if not 0 <= owner.batch < 1 << 62:
        raise ParameterInvalid(f"batch {owner.batch}: from 0 on")


def refuse_special(properties: bytes) -> None:
    """Refuse properties of messages that cannot be staged."""
    from sluice.broker.sending import is_special  # which knows the core

    # What is special may stand in a value too, where it means nothing.
    if is_special(properties) and any(
        is_special(item.partition(b"\x01")[0]) for item in properties.split(b"\x02")
    ):
        raise MessageIllegal("staged messages cannot be delayed, transactional or short-lived")


class Handle(NamedTuple):
    """What a staged entry is published by."""

    position: int
    token: int


class Known(NamedTuple):
    """What a handle is compared with."""

    owner: Owner
    token: int


class Entry(NamedTuple):
    """A staged entry."""

    position: int
    born_ms: int
    born_host: bytes
    body: memoryview
    properties: bytes

    def place(self) -> tuple[str, int]:
        """Topic and queue that it is for."""
        topic = (records.property_value(self.properties, _TOPIC_NAME) or b"").decode()
        return topic, int(records.property_value(self.properties, _QUEUE_NAME) or b"0")

    def images(self, topic: str) -> Images | None:
        """Its images; None where it holds a batch."""
        count = int(records.property_value(self.properties, _COUNT_NAME) or b"0")
        return read_images(self.body, count, topic.encode(), is_sealed=True) if count else None

    def known(self) -> Known:
        return _known_of(self.properties)


class SeenImages:
    """What was found out of images when they were staged, so that it is not looked for again when
    they are published. Bounded: the oldest goes, nobody may come for it.
    """

    def __init__(self) -> None:
        self._by_position: dict[int, Images] = {}
        self.count = 0  # images

    def __len__(self) -> int:
        return len(self._by_position)

    def keep(self, position: int, images: Images) -> None:
        """Remember images that are sealed, without themselves."""
        self._by_position[position] = images.apart()
        self.count += len(images)
        while self.count > SEEN_IMAGES_MAX:
            self.drop(next(iter(self._by_position)))

    def images(self, entry: Entry) -> Images | None:
        """The images of an entry, where they are known."""
        seen = self._by_position.get(entry.position)
        return None if seen is None else seen.at(entry.body)

    def drop(self, position: int) -> None:
        seen = self._by_position.pop(position, None)
        if seen is not None:
            self.count -= len(seen)


def properties_of(owner: Owner, topic: str, queue_id: int, token: int, image_count: int) -> bytes:
    """What is written down beside the body."""
    return b"%b\x01%b\x02%b\x01%d\x02%b\x01%b\x02%b\x01%d\x02%b\x01%d\x02%b\x01%d\x02" % (
        *(_SINK_NAME, owner.sink.encode(), _BATCH_NAME, owner.batch),
        *(_TOPIC_NAME, topic.encode(), _QUEUE_NAME, queue_id, _TOKEN_NAME, token),
        *(_COUNT_NAME, image_count),
    )


def about_of(born_ms: int, born_host: bytes, properties: bytes) -> bytes:
    """The same for the files of `storage/staging.py`, where nothing else tells of an entry."""
    return _TIME_AND_HOST.pack(born_ms, len(born_host)) + born_host + properties


def owner_in(about: bytes) -> Owner | None:
    """Whose an entry is that was found there; None where a crash has left only a part of it."""
    try:
        return _known_of(_taken_apart(about)[2]).owner
    except ValueError:
        return None


def entry_at(store: Store, area: StagingArea, position: int) -> Entry | None:
    """The staged entry at a position; None where there is none. May raise ColdRead, and
    RecordDamaged where the log has one that is not what was written.
    """
    if position >= FLOOR:
        found = area.get(position)
        if found is None:
            return None
        born_ms, born_host, properties = _taken_apart(bytes(found.about))
        return Entry(position, born_ms, born_host, found.body, properties)
    view = store.entry_at(position) if store.log.start <= position < store.log.end else None
    return None if view is None else _read_entry(view, position)


def _taken_apart(about: bytes) -> tuple[int, bytes, bytes]:
    if len(about) < _TIME_AND_HOST.size:
        return 0, b"", b""
    born_ms, host_bytes = _TIME_AND_HOST.unpack_from(about)
    end = _TIME_AND_HOST.size + host_bytes
    return born_ms, about[_TIME_AND_HOST.size : end], about[end:]


def _read_entry(view: memoryview, position: int) -> Entry | None:
    """Take apart an entry that was checked already; None where it is not one of ours."""
    (sys_flag, born_ms) = _FLAG_AND_TIME.unpack_from(view)
    born_host = bytes(view[48 : 68 if sys_flag & records.SYS_BORN_V6 else 56])
    body_at = records.origin_place(sys_flag) + 12
    body_end = body_at + int.from_bytes(view[body_at - 4 : body_at], "big")
    field = view[body_end : body_end + len(_STAGED_FIELD)]
    if field != _STAGED_FIELD:
        return None
    properties = bytes(view[body_end + len(field) + 2 :])
    return Entry(position, born_ms, born_host, view[body_at:body_end], properties)


def _known_of(properties: bytes) -> Known:
    sink = records.property_value(properties, _SINK_NAME) or b""
    batch = records.property_value(properties, _BATCH_NAME) or b"-1"
    token = records.property_value(properties, _TOKEN_NAME) or b"-1"
    return Known(Owner(sink.decode("ascii", "replace"), int(batch)), int(token))
