"""This module commits half messages of the usual form, straight from the bytes of a frame.

Java's producers say what became of a transaction without asking for an answer, and mostly it is a
commit. One of a half message that lies where it was first stored, that nobody was asked about and
whose topic asks for nothing special, becomes a message in its topic without being made one in
between. It gives the same bytes as `Transactions.end`: a test holds the two together. Whatever is
unusual, or to be refused, is left to the plain way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.broker.topics import HALF_TOPIC
from sluice.errors import SluiceError
from sluice.protocol import records
from sluice.protocol.framing import Frame
from sluice.protocol.remoting_fast import QUICK_BYTES_MIN, quick_commit
from sluice.storage.copies import original_at, stage_copy, takes_copies
from sluice.storage.lanes import tell
from sluice.storage.queue_index import ColdRead

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

_HALF: Final = HALF_TOPIC.encode()
_OWN: Final = b"\x02__transactionId__\x01"
_TOPIC: Final = b"REAL_TOPIC\x01"
_QUEUE: Final = b"REAL_QID\x01"
_QUEUE_DIGITS_MAX: Final = 9
# With one of these a message is a copy, or has a word of its own on when it may be ended.
_OTHERS: Final = (b"REAL_", b"TRANSACTION_", b"TRAN_PREP", b"SLUICE_", b"CHECK_IMMUNITY")


class _Commit(NamedTuple):
    offset: int  # of the half message
    position: int
    topic: str
    queue_id: int
    tags_code: int


class QuickCommits:
    """The usual commits of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._staged: list[_Commit] = []

    def serve(self, frame: Frame) -> bool:
        """Serve a frame if it is a commit of the usual form; False: it is served the plain way.

        It is confirmed after `end_group`.
        """
        if len(frame) < QUICK_BYTES_MIN or type(frame) is not bytes:
            return False
        named = quick_commit(frame)
        if named is None:
            return False
        group, offset, position = named
        try:
            if not self._is_usual(offset, position):
                return False
            commit = self._stage(group, offset, position)
        except (ColdRead, SluiceError):
            return False  # the plain way waits for the disk, or says what is wrong
        if commit is None:
            return False
        self._staged.append(commit)
        return True

    def _is_usual(self, offset: int, position: int) -> bool:
        """Whether an open half message lies there, named by its offset too. May raise ColdRead."""
        transactions = self._core.transactions
        table = transactions.table
        if offset >= table.next_offset:
            transactions.catch_up()
        return (
            table.is_open(offset)
            and table.position(offset) == table.first_position(offset) == position
            and not table.asked(offset)
            and not transactions.is_moving(position)
        )

    def _stage(self, group: bytes, offset: int, position: int) -> _Commit | None:
        """Stage the message; None: look closer, nothing is done."""
        core, store = self._core, self._core.store
        half = original_at(store, position, records.SYS_TX_COMMIT)
        if half is None or half.topic != _HALF:
            return None
        properties = half.properties
        own = properties.rfind(_OWN)
        sent = properties[: own + 1]  # all that the producer sent
        marks = properties[own + 1 :].split(b"\x02")
        if (
            own < 0
            or len(marks) != 4
            or not (marks[1].startswith(_TOPIC) and marks[2].startswith(_QUEUE))
            or records.property_value(sent, b"PGROUP") != group
        ):
            return None
        for name in _OTHERS:
            if name in sent:
                return None
        topic, queue_text = (
            marks[1][len(_TOPIC) :].decode("utf-8", "replace"),
            marks[2][len(_QUEUE) :],
        )
        settings = core.topics.get(topic)
        if (
            settings is None
            or settings.attributes
            or not queue_text.isdigit()
            or len(queue_text) > _QUEUE_DIGITS_MAX
        ):
            return None
        queue_id = int(queue_text)
        queue = store.queues.get((topic, queue_id))
        if (
            queue is None
            or queue_id >= max(settings.write_queues, settings.read_queues)
            or core.dedup.is_watched(topic)
            or not takes_copies(store, queue)
        ):
            return None
        store.require_writable()
        keys = records.message_keys(sent)
        copied = stage_copy(store, queue, half, sent + marks[0] + b"\x02", None, keys)
        if copied is None:
            return None
        core.stats.stored(topic, 1, copied.size)
        core.transactions.committed_to(offset, position, copied.position)
        return _Commit(offset, position, topic, queue_id, copied.tags_code)

    def end_group(self) -> None:
        """The frames that came together are served: whoever waits hears when they are stored."""
        staged = self._staged
        if not staged:
            return
        self._staged = []
        core = self._core
        core.ask_turn()

        def confirmed(error: SluiceError | None) -> None:
            transactions = core.transactions
            if error is not None:
                for commit in staged:
                    transactions.reopen(commit.offset, commit.position, commit.position)
                return
            transactions.committed_count += len(staged)
            if core.polls.is_awaited:
                for commit in staged:
                    core.polls.arrived((commit.topic, commit.queue_id), commit.tags_code)

        tell(core.store, confirmed)
