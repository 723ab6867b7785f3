"""This module coordinates the transactions of Kafka's producers: who may write under a
transactional id, which partitions and groups a transaction touches, and how it ends.

All of it is in the one log, so an end is three things in a row, written together:

    prepared    an entry says how the transaction ends, and where
    markers     one control batch in each of its partitions
    completed   an entry says that it is over, and makes its offsets count, or forgets them

A crash may cut that off anywhere. After a start, and while the disk was full, what was prepared is
carried to its end: markers are written where a partition still has the transaction open. What was
not prepared is open, and is rolled back when its time is over, or when its producer comes back.

A producer that begins (`init`) gets a higher epoch, and whoever has a lower one is refused from
then on. Clients of the newer kind (KIP-890) get a higher epoch with every end, and add partitions
by writing to them. Methods belong to the store's owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from sluice.broker.kafka_transaction_state import (
    EPOCH_LAST,
    NO_EPOCH,
    NO_PRODUCER,
    Partition,
    Phase,
    Transaction,
)
from sluice.errors import SluiceError
from sluice.model import LOOPBACK_HOST
from sluice.protocol import kafka_batches
from sluice.protocol import kafka_codes as codes
from sluice.storage.state import KAFKA_TRANSACTION_TABLE, Change

if TYPE_CHECKING:
    from sluice.broker.core import BrokerCore

_LOOK_MS: Final = 500
_EXPIRY_LOOK_MS: Final = 60_000
_PARTITIONS_MAX: Final = 20_000  # of one transaction
_COORDINATOR_EPOCH: Final = 0
_NAME_MAX: Final = 1024  # characters of a transactional id

Told = Callable[[int], None]  # with an error code
Named = Callable[[int, int, int], None]  # error code, producer id, epoch

log_lines = logging.getLogger("sluice.kafka")


class KafkaTransactions:
    """The transactions of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self._by_id: dict[str, Transaction] = {}
        self._open: dict[str, Transaction] = {}  # those that time may bring something for
        self._looked_ms = 0
        self._looked_for_old_ms = 0
        self._beginning: set[str] = set()  # ids that wait for their first producer id
        self.committed_count = 0
        self.aborted_count = 0
        self.timed_out_count = 0

    # -------------------------------------------------------------------------------------- looking

    def get(self, transactional_id: str) -> Transaction | None:
        return self._by_id.get(transactional_id)

    def all(self) -> Iterator[Transaction]:
        yield from self._by_id.values()

    def producer_ids(self) -> set[int]:
        """The ids that producers of transactions have, or had before."""
        return {
            producer_id
            for found in self._by_id.values()
            for producer_id in (found.producer_id, found.previous_id)
        }

    @property
    def open_count(self) -> int:
        return len(self._open)

    # ------------------------------------------------------------------------------------ beginning

    def init(
        self, transactional_id: str, timeout_ms: int, producer_id: int, epoch: int, then: Named
    ) -> None:
        """A producer begins, or begins anew with the id and epoch that it has (else -1)."""
        core = self._core
        if not 0 < len(transactional_id) <= _NAME_MAX:
            then(codes.INVALID_REQUEST, NO_PRODUCER, NO_EPOCH)
            return
        if not 0 < timeout_ms <= core.config.kafka_transaction_max_ms:
            then(codes.INVALID_TRANSACTION_TIMEOUT, NO_PRODUCER, NO_EPOCH)
            return
        found = self._by_id.get(transactional_id)
        if found is None:
            self._first(transactional_id, timeout_ms, then)
            return
        code = found.check_init(producer_id, epoch)
        if code:
            then(code, NO_PRODUCER, NO_EPOCH)
        elif found.phase == Phase.ONGOING:
            # Whoever has it open is shut out, and what was written is rolled back first.
            self._fence(
                found,
                lambda code: (
                    then(code, NO_PRODUCER, NO_EPOCH)
                    if code
                    else self.init(transactional_id, timeout_ms, producer_id, epoch, then)
                ),
            )
        elif found.is_exhausted and epoch in (NO_EPOCH, found.epoch):
            self._rotate(found, timeout_ms, keep=epoch >= 0, then=then)
        else:
            found.begin(timeout_ms, epoch, core.now_ms())
            self._save(found, lambda code: _name(found, code, then))

    def _first(self, transactional_id: str, timeout_ms: int, then: Named) -> None:
        core = self._core
        if transactional_id in self._beginning:
            then(codes.CONCURRENT_TRANSACTIONS, NO_PRODUCER, NO_EPOCH)
            return
        if len(self._by_id) + len(self._beginning) >= core.config.kafka_transactional_ids_max:
            then(codes.COORDINATOR_NOT_AVAILABLE, NO_PRODUCER, NO_EPOCH)
            return
        self._beginning.add(transactional_id)

        def numbered(producer_id: int) -> None:
            self._beginning.discard(transactional_id)
            if producer_id < 0:
                then(codes.COORDINATOR_NOT_AVAILABLE, NO_PRODUCER, NO_EPOCH)
                return
            new = Transaction(transactional_id, producer_id, timeout_ms=timeout_ms)
            new.begin(timeout_ms, NO_EPOCH, core.now_ms())
            self._by_id[transactional_id] = new
            self._save(new, lambda code: _name(new, code, then))

        core.producers.new_producer_id(numbered)

    def _rotate(self, found: Transaction, timeout_ms: int, *, keep: bool, then: Named) -> None:
        """All epochs are used up: go on with another producer id."""
        found.is_busy = True

        def numbered(producer_id: int) -> None:
            found.is_busy = False
            if producer_id < 0:
                then(codes.COORDINATOR_NOT_AVAILABLE, NO_PRODUCER, NO_EPOCH)
                return
            found.rotate(producer_id, timeout_ms, self._core.now_ms(), keep=keep)
            self._save(found, lambda code: _name(found, code, then))

        self._core.producers.new_producer_id(numbered)

    # --------------------------------------------------------------------------------------- adding

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Iterable[Partition],
        then: Told,
    ) -> None:
        """A producer is about to write to partitions; `then` when that is durable."""
        found = self._by_id.get(transactional_id)
        code = self._refusal(found, transactional_id, producer_id, epoch)
        if code or found is None:
            then(code)
            return
        new = set(partitions) - found.partitions
        if found.phase == Phase.ONGOING and not new:
            then(0)
        elif len(found.partitions) + len(new) > _PARTITIONS_MAX:
            then(codes.INVALID_TXN_STATE)
        else:
            self._go_on(found, new, None, then)

    def add_group(
        self, transactional_id: str, producer_id: int, epoch: int, group: str, then: Told
    ) -> None:
        """A producer is about to commit offsets of a group."""
        found = self._by_id.get(transactional_id)
        code = self._refusal(found, transactional_id, producer_id, epoch)
        if code or found is None:
            then(code)
        elif found.phase == Phase.ONGOING and group in found.groups:
            then(0)
        else:
            self._go_on(found, (), group, then)

    def check_append(
        self,
        transactional_id: str | None,
        producer_id: int,
        epoch: int,
        topic: str,
        partition: int,
        *,
        implicit: bool,
    ) -> int:
        """Whether a batch may be appended; where `implicit`, its partition is added by it.

        That is staged here, so it is in the log before the batch.
        """
        found = self._by_id.get(transactional_id or "")
        code = self._check_write(found, producer_id, epoch, implicit=implicit)
        if code or found is None:
            return code
        place = (topic, partition)
        if found.phase == Phase.ONGOING and place in found.partitions:
            return 0
        if not implicit or len(found.partitions) >= _PARTITIONS_MAX:
            return codes.INVALID_TXN_STATE
        return self._go_on(found, (place,), None, _ignore)

    def check_offsets(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        group: str,
        *,
        implicit: bool,
    ) -> int:
        """The same for offsets of a group."""
        found = self._by_id.get(transactional_id)
        code = self._check_write(found, producer_id, epoch, implicit=implicit)
        if code or found is None:
            return code
        if found.phase == Phase.ONGOING and group in found.groups:
            return 0
        if not implicit:
            return codes.INVALID_TXN_STATE
        return self._go_on(found, (), group, _ignore)

    def _check_write(
        self, found: Transaction | None, producer_id: int, epoch: int, *, implicit: bool
    ) -> int:
        if found is None or found.producer_id != producer_id:
            return codes.INVALID_PRODUCER_ID_MAPPING
        if found.epoch != epoch:
            return codes.INVALID_PRODUCER_EPOCH
        if found.is_ending:
            # Older clients know no better word for "in a moment".
            return codes.CONCURRENT_TRANSACTIONS if implicit else codes.NOT_ENOUGH_REPLICAS
        return 0

    def _refusal(
        self, found: Transaction | None, transactional_id: str, producer_id: int, epoch: int
    ) -> int:
        if not transactional_id:
            return codes.INVALID_REQUEST
        if found is None or found.producer_id != producer_id:
            return codes.INVALID_PRODUCER_ID_MAPPING
        if found.epoch != epoch:
            return codes.PRODUCER_FENCED
        return codes.CONCURRENT_TRANSACTIONS if found.is_ending else 0

    def _go_on(
        self, found: Transaction, new: Iterable[Partition], group: str | None, then: Told
    ) -> int:
        found.add(new, group, self._core.now_ms())
        self._open[found.transactional_id] = found
        return self._save(found, then)

    # --------------------------------------------------------------------------------------- ending

    def end(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        *,
        commit: bool,
        bumps: bool,
        then: Named,
    ) -> None:
        """A producer ends its transaction; `bumps`: its epoch goes up with it."""
        found = self._by_id.get(transactional_id)
        if not transactional_id:
            then(codes.INVALID_REQUEST, NO_PRODUCER, NO_EPOCH)
            return
        if found is None:
            then(codes.INVALID_PRODUCER_ID_MAPPING, NO_PRODUCER, NO_EPOCH)
            return
        code = found.check_end(producer_id, epoch, commit=commit, bumps=bumps)
        if code is None:  # it ended so before
            then(0, found.producer_id, found.epoch)
        elif code:
            then(code, NO_PRODUCER, NO_EPOCH)
        elif bumps and found.epoch >= EPOCH_LAST:
            found.is_busy = True

            def numbered(next_id: int) -> None:
                found.is_busy = False
                if next_id < 0:
                    then(codes.COORDINATOR_NOT_AVAILABLE, NO_PRODUCER, NO_EPOCH)
                    return
                found.prepare(self._core.now_ms(), commit=commit, bumps=True, next_id=next_id)
                self._finish(found, lambda code: _name(found, code, then))

            self._core.producers.new_producer_id(numbered)
        else:
            found.prepare(self._core.now_ms(), commit=commit, bumps=bumps)
            self._finish(found, lambda code: _name(found, code, then))

    def _fence(self, found: Transaction, then: Told) -> None:
        """Roll back what a producer has open; it is shut out by a higher epoch."""
        found.fence()
        found.prepare(self._core.now_ms(), commit=False, bumps=False)
        self._finish(found, then)

    def _finish(self, found: Transaction, then: Told) -> None:
        """Stage all that makes the end, in this order; go on from where it stopped."""
        core = self._core
        self._open[found.transactional_id] = found
        found.is_finishing = True
        commit = found.phase == Phase.PREPARE_COMMIT

        def done(error: SluiceError | None) -> None:
            found.is_finishing = False
            if error is not None:
                then(codes.COORDINATOR_NOT_AVAILABLE)
                return
            core.kafka_offsets.ended(producer_id, places, commit=commit)
            found.complete()
            self._open.pop(found.transactional_id, None)
            if commit:
                self.committed_count += 1
            else:
                self.aborted_count += 1
            then(0)

        producer_id = found.producer_id
        places, rows = core.kafka_offsets.ending(producer_id, commit=commit)
        completed = (KAFKA_TRANSACTION_TABLE, found.transactional_id, found.completed_row())
        try:
            if not found.is_prepared:
                self._stage(found, found.told_prepared)
            self._mark(found, commit)
            core.store.change([completed, *rows], done)
        except SluiceError as error:
            log_lines.warning("a transaction cannot end yet: %s", error)
            found.is_finishing = False
            then(codes.COORDINATOR_NOT_AVAILABLE)
        core.ask_turn()

    def _mark(self, found: Transaction, commit: bool) -> None:
        """A marker for each partition that has none yet."""
        core = self._core
        data = marker(found.producer_id, found.epoch, core.now_ms(), commit=commit)
        head = kafka_batches.read_sent(data)
        for place in sorted(found.unmarked):
            if core.topics.get(place[0]) is not None:
                told = _Marked(core, found, place)
                core.producers.append(*place, head, data, LOOPBACK_HOST, told)
            found.unmarked.discard(place)

    # --------------------------------------------------------------------------------- start, ticks

    def start(self) -> None:
        for name, row in self._core.store.table(KAFKA_TRANSACTION_TABLE).items():
            found = self._by_id[name] = Transaction.from_row(name, row)
            if found.phase == Phase.ONGOING:
                self._open[name] = found
            elif found.is_ending:
                # Some markers may be there: where one is, nothing is open any more.
                found.is_prepared = True
                producers = self._core.producers
                found.unmarked = {
                    place
                    for place in found.partitions
                    if producers.stable_offsets(*place).is_open(found.producer_id)
                }
                self._finish(found, _ignore)

    def tick(self, now_ms: int) -> None:
        if now_ms - self._looked_ms >= _LOOK_MS:
            self._looked_ms = now_ms
            for found in list(self._open.values()):
                if found.is_ending and not found.is_finishing:
                    self._finish(found, _ignore)
                elif found.phase == Phase.ONGOING and found.is_over(now_ms):
                    log_lines.info("a transaction is rolled back: its time is over")
                    self.timed_out_count += 1
                    self._fence(found, _ignore)
        if now_ms - self._looked_for_old_ms >= _EXPIRY_LOOK_MS:
            self._looked_for_old_ms = now_ms
            self._forget_old(now_ms)

    def _forget_old(self, now_ms: int) -> None:
        old_ms = now_ms - self._core.config.kafka_transactional_id_expiration_ms
        old = [
            found
            for found in self._by_id.values()
            if found.update_ms < old_ms and found.is_idle and not found.is_busy
        ]
        changes: list[Change] = [
            (KAFKA_TRANSACTION_TABLE, found.transactional_id, None) for found in old
        ]
        if not changes:
            return
        try:
            self._core.store.change(changes)
        except SluiceError:
            return  # the next look finds them again
        self._core.ask_turn()
        for found in old:
            del self._by_id[found.transactional_id]

    # --------------------------------------------------------------------------------------- saving

    def _save(self, found: Transaction, then: Told) -> int:
        """Stage how a transaction stands; what cannot be written did not happen."""

        def done(error: SluiceError | None) -> None:
            if error is not None:
                self._take_back(found)
            then(0 if error is None else codes.COORDINATOR_NOT_AVAILABLE)

        try:
            self._stage(found, done)
        except SluiceError as error:
            done(error)
            return codes.COORDINATOR_NOT_AVAILABLE
        self._core.ask_turn()
        return 0

    def _stage(self, found: Transaction, done: Callable[[SluiceError | None], None]) -> None:
        row = found.row()
        self._core.store.change([(KAFKA_TRANSACTION_TABLE, found.transactional_id, row)], done)

    def _take_back(self, found: Transaction) -> None:
        name = found.transactional_id
        row = self._core.store.state.newest(KAFKA_TRANSACTION_TABLE, name)
        if row is None:
            self._by_id.pop(name, None)
            self._open.pop(name, None)
            return
        found.load(row)
        if found.phase == Phase.ONGOING or found.is_ending:
            self._open[name] = found
        else:
            self._open.pop(name, None)


class _Marked:
    """Told when a marker is durable, or is not."""

    __slots__ = ("_core", "_found", "_place")

    def __init__(self, core: BrokerCore, found: Transaction, place: Partition) -> None:
        self._core, self._found, self._place = core, found, place

    def __call__(self, error: SluiceError | None) -> None:
        if error is None:
            self._core.polls.wake(self._place)
        else:
            self._found.unmarked.add(self._place)


def marker(producer_id: int, epoch: int, now_ms: int, *, commit: bool) -> bytes:
    """The control batch that ends a transaction in a partition."""
    key = b"\0\0\0\1" if commit else b"\0\0\0\0"  # version, type
    value = b"\0\0" + _COORDINATOR_EPOCH.to_bytes(4, "big")
    return kafka_batches.build(
        0,
        now_ms,
        now_ms,
        [kafka_batches.Record(0, 0, key, value)],
        attributes=kafka_batches.TRANSACTIONAL | kafka_batches.CONTROL,
        producer=(producer_id, epoch, -1),
    )


def _name(found: Transaction, code: int, then: Named) -> None:
    if code:
        then(code, NO_PRODUCER, NO_EPOCH)
    else:
        then(0, found.producer_id, found.epoch)


def _ignore(code: int) -> None:
    """Nobody waits for it; a tick tries again where it has to."""
