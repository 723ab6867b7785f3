"""This module gives delayed messages of the usual form their place, straight from a frame's bytes.

It does for one way to ask (a level, or one of the three times) what `delay_forms.py` does for all
of them, and gives the same bytes: a test holds the two together. Whatever is unusual, or to be
refused, is left to the plain way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from isal.isal_zlib import crc32

from sluice.broker.delay_forms import ROOM_BYTES, Handle
from sluice.broker.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from sluice.protocol import records
from sluice.storage.copies import Copied, Keys, Original, stage_copy

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.sending import Sending

_MASK_31: Final = 0x7FFFFFFF
_DIGITS_MAX: Final = 15
_FACTORS: Final = {b"TIMER_DELAY_SEC": 1000, b"TIMER_DELAY_MS": 1, b"TIMER_DELIVER_MS": 0}
# With one of these a message asks for more than to come later, or for something that is refused.
_OTHERS: Final = (b"REAL_", b"TRAN_MSG", b"_SYS_MSG_", b"MSG_TTL_MS", b"__CRC32#", b"POP_CK")
_ASKED_BYTES_MAX: Final = 40


class Sent(NamedTuple):
    """What a producer sent, in parts."""

    topic: str
    queue_id: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    properties: bytes
    body: bytes

    def original(self, sys_flag: int) -> Original:
        """What is stored elsewhere is made from: an entry that never was one."""
        return Original(
            *(0, b"", crc32(self.body) & _MASK_31, 0, sys_flag, self.born_ms, self.born_host),
            *(0, 0, self.body, b""),
        )


class QuickDelays:
    """Delayed sends of one broker."""

    def __init__(self, core: BrokerCore, sending: Sending) -> None:
        self._core = core
        self._sending = sending
        self._levels_ms = core.store.config.delay_levels_ms

    def place(self, sent: Sent, keys: Keys) -> tuple[Copied, str] | None:
        """Where the message that waits is, and the handle of a timed one; None: look closer."""
        properties = sent.properties
        for name in _OTHERS:
            if name in properties:
                return None
        if b"TIMER_" in properties:
            return self._place_timer(sent, keys)
        return self._place_level(sent, keys)

    def _place_timer(self, sent: Sent, keys: Keys) -> tuple[Copied, str] | None:
        properties, core = sent.properties, self._core
        at = properties.find(b"TIMER_")
        name, _, rest = properties[at : at + _ASKED_BYTES_MAX].partition(b"\x01")
        text, end, _ = rest.partition(b"\x02")
        factor = _FACTORS.get(name)
        if (
            factor is None
            or not end
            or not text.isdigit()
            or len(text) > _DIGITS_MAX
            or (at and properties[at - 1] != 2)
            or properties.count(b"TIMER_") > 1
            or properties.count(b"DELAY") > name.count(b"DELAY")
            or b" " in keys[0]
        ):
            return None
        now_ms = core.now_ms()
        due_ms = now_ms + int(text) * factor if factor else int(text)
        if not now_ms < due_ms <= now_ms + core.config.timer_max_delay_ms:
            return None
        place = b"REAL_TOPIC\x01%s\x02REAL_QID\x01%d\x02" % (sent.topic.encode(), sent.queue_id)
        place += b"TIMER_OUT_MS\x01%d\x02" % due_ms
        copied = self._stage(sent, keys, (TIMER_TOPIC, 0), place, due_ms)
        if copied is None:
            return None
        handle = Handle(sent.topic, core.config.broker_name, due_ms, keys[0].decode("ascii"))
        return copied, handle.text()

    def _place_level(self, sent: Sent, keys: Keys) -> tuple[Copied, str] | None:
        properties = sent.properties
        text = records.property_value(properties, b"DELAY") or b""
        if properties.count(b"DELAY") > 1 or not text.isdigit() or len(text) > 2:
            return None
        level = int(text)
        if not 0 < level <= len(self._levels_ms) or text[:1] == b"0":
            return None
        place = b"REAL_TOPIC\x01%s\x02REAL_QID\x01%d\x02" % (sent.topic.encode(), sent.queue_id)
        due_ms = self._core.store.turn_ms(fresh=True) + self._levels_ms[level - 1]
        copied = self._stage(sent, keys, (SCHEDULE_TOPIC, level - 1), place, due_ms)
        return None if copied is None else (copied, "")

    def _stage(
        self, sent: Sent, keys: Keys, queue: tuple[str, int], added: bytes, due_ms: int
    ) -> Copied | None:
        store = self._core.store
        properties = self._sending.completed(sent.properties) + added
        if len(properties) > records.PROPERTIES_BYTES_MAX - ROOM_BYTES:
            return None
        store.require_writable()
        original = sent.original(sent.sys_flag)
        return stage_copy(store, store.queue(*queue), original, properties, due_ms, keys)
