"""This module gives half messages of the usual form their place, straight from a frame's bytes.

It does what `half_messages.begun` does for a message that Java's producer marks as transactional,
and gives the same bytes: a test holds the two together. Whatever is unusual, or to be refused, is
left to the plain way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.half_messages import GROUP_BYTES_MAX, ROOM_BYTES
from sluice.broker.topics import HALF_TOPIC
from sluice.protocol import records
from sluice.storage.copies import Copied, Keys, stage_copy, takes_copies

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore
    from sluice.broker.quick_delays import Sent
    from sluice.broker.sending import Sending

_SEPARATOR: Final = 2
_MARK: Final = b"TRAN_MSG\x01true\x02"
# With one of these a message asks for more, or for something that is refused.
_OTHERS: Final = (
    *(b"DELAY", b"TIMER_", b"REAL_", b"_SYS_MSG_", b"MSG_TTL_MS", b"__", b"TRANSACTION_"),
    *(b"TRAN_PREP", b"SLUICE", b"POP_CK"),
)


class QuickHalves:
    """Transactional sends of one broker."""

    def __init__(self, core: BrokerCore, sending: Sending) -> None:
        self._core = core
        self._sending = sending

    def place(self, sent: Sent, keys: Keys) -> Copied | None:
        """Where the half message is; None: look closer."""
        properties, store = sent.properties, self._core.store
        at = properties.find(_MARK)
        if (
            at < 0
            or (at and properties[at - 1] != _SEPARATOR)
            or sent.sys_flag & records.SYS_TX_MASK != records.SYS_TX_PREPARED
            or self._core.config.reject_transactions
            or properties.count(b"TRAN_MSG") > 1
        ):
            return None
        for name in _OTHERS:
            if name in properties:
                return None
        group = records.property_value(properties, b"PGROUP")
        if not group or len(group) > GROUP_BYTES_MAX:
            return None
        queue = store.queue(HALF_TOPIC, 0)
        added = b"__transactionId__\x01%b\x02REAL_TOPIC\x01%b\x02REAL_QID\x01%d\x02" % (
            *(keys[0], sent.topic.encode()),
            sent.queue_id,
        )
        properties = self._sending.completed(properties) + added
        if len(properties) > ROOM_BYTES or not takes_copies(store, queue):
            return None
        store.require_writable()
        original = sent.original(sent.sys_flag & ~records.SYS_TX_MASK)
        return stage_copy(store, queue, original, properties, None, keys)
