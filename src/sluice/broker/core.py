"""This module joins the services of one broker, and nothing more: who owns what, and the turn.

All appends of one turn of the event loop are written together: the first one asks for the turn's
end, and there the store writes once. Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.broker.groups import Clients, Groups
from sluice.broker.locks import QueueLocks
from sluice.broker.long_polling import LongPolling
from sluice.broker.offsets import Offsets
from sluice.broker.stats import BrokerStats
from sluice.broker.topics import Topics
from sluice.config import BrokerConfig
from sluice.errors import SluiceError
from sluice.model import Message, Placed
from sluice.storage.store import Store


class BrokerCore:
    """The services that the doors share."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        now_ms: Callable[[], int],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.config = config
        self.store = store
        self.now_ms = now_ms
        self.call_soon = call_soon
        self._turn_asked = False
        self.topics = Topics(
            store, cluster_name=config.cluster_name, broker_name=config.broker_name
        )
        self.groups = Groups(store, auto_create=lambda: self.config.auto_create_groups)
        self.clients = Clients()
        self.offsets = Offsets(store)
        self.locks = QueueLocks()
        self.polls = LongPolling()
        self.stats = BrokerStats(now_ms)
        self.started_ms = now_ms()
        self.address = ""  # host:port that clients are given, once it is known
        self.end_turn()

    def append(
        self, message: Message, done: Callable[[SluiceError | None], None] | None = None
    ) -> Placed:
        """Append a message with all others of this turn."""
        placed = self.store.stage(message, done)
        self.ask_turn()
        return placed

    def ask_turn(self) -> None:
        """Something is staged: it is written at the end of this turn."""
        if not self._turn_asked:
            self._turn_asked = True
            self.call_soon(self.end_turn)

    def end_turn(self) -> None:
        self._turn_asked = False
        self.store.write_staged()

    def tick(self) -> None:
        """Some ten times a second."""
        now_ms = self.now_ms()
        self.store.tick()
        self.polls.tick(now_ms)
        self.stats.tick(now_ms)
