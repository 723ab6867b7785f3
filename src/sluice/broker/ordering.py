"""This module lends queues to the members of groups that read in order, and remembers to whom.

`locks.py` decides who gets a queue. Here it is checked that a member asks for a queue that exists,
and every change of an owner is an entry of the log before the owner hears of it: a broker that was
killed does not give a queue away whose owner is still at work. An owner cannot have renewed its
lock while the broker was down, so a lock counts from the last entry that was written before. So
renewals need not be written, but where nobody writes anything else: then one of them is, that the
last entry is not older than they are.

It knows neither a wire nor a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from sluice.broker.groups import Connected
from sluice.broker.locks import QueueName
from sluice.errors import SluiceError, SubscriptionMissing
from sluice.storage.state import LOCK_TABLE
from sluice.storage.store import Change

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

_SAVE_MS: Final = 10_000
_IDLE_MS: Final = 15_000  # owners renew every 20 s, a little sooner or later
_SEPARATOR: Final = "@"  # neither a topic's nor a group's name has one

Locked = Callable[[list[QueueName], SluiceError | None], None]
Done = Callable[[SluiceError | None], None]


class Ordering:
    """Queues that are read in order, of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._stopped_ms = core.store.last_ms
        self._saved_ms = 0

    def start(self) -> None:
        for text, client_id in self._core.store.table(LOCK_TABLE).items():
            topic, group, queue_id = text.split(_SEPARATOR)
            self._core.locks.restore((group, topic, int(queue_id)), client_id, self._stopped_ms)

    def tick(self, now_ms: int) -> None:
        if now_ms - self._saved_ms >= _SAVE_MS:
            self._saved_ms = now_ms
            self._save(lambda error: None)  # what nobody renewed

    def lock(self, group: str, who: Connected, queues: Sequence[QueueName], done: Locked) -> None:
        """Take or renew locks; `done` gets the queues that the client has now."""
        core, now_ms = self._core, self._core.now_ms()
        self._require_member(group, who)
        known = [queue for queue in queues if self._exists(queue)]
        owned = core.locks.lock(group, who[0], known, now_ms)
        if owned and not core.locks.changed and now_ms - core.store.last_ms >= _IDLE_MS:
            core.locks.changed.add((group, *owned[0]))  # one is enough: any entry tells the time
        self._save(lambda error: done([] if error is not None else owned, error))

    def unlock(self, group: str, who: Connected, queues: Sequence[QueueName], done: Done) -> None:
        """Give locks back; those of somebody else stay."""
        self._require_member(group, who)
        self._core.locks.unlock(group, who[0], queues)
        self._save(done)

    def _require_member(self, group: str, who: Connected) -> None:
        """Refuse who is not connected as the member that it names."""
        members = self._core.clients.consumers.get(group)
        if members is None or who not in members.connections:
            raise SubscriptionMissing(
                f"the consumer's group info not exist: {who[0]} is no member of group {group} over "
                "this connection; its heartbeat comes first"
            )

    def _exists(self, queue: QueueName) -> bool:
        settings = self._core.topics.get(queue[0])
        return settings is not None and 0 <= queue[1] < max(
            settings.read_queues, settings.write_queues
        )

    def _save(self, done: Done) -> None:
        """Write down which queues have another owner than before."""
        core, locks = self._core, self._core.locks
        changed = locks.take_changed()
        if not changed:
            done(None)
            return
        changes: list[Change] = [
            (LOCK_TABLE, f"{topic}{_SEPARATOR}{group}{_SEPARATOR}{queue_id}", locks.owner(key))
            for key in changed
            for group, topic, queue_id in [key]
        ]

        def saved(error: SluiceError | None) -> None:
            if error is not None:
                locks.changed |= changed
            done(error)

        try:
            core.store.change(changes, saved)
        except SluiceError as error:
            saved(error)
            return
        core.ask_turn()
