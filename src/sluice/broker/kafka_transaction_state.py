"""This module is one transactional id of a Kafka producer: who may use it, what its transaction
touches, and which requests it allows. Pure: no clock, no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from sluice.errors import SluiceError
from sluice.protocol import kafka_codes as codes

NO_PRODUCER: Final = -1
NO_EPOCH: Final = -1
EPOCH_LAST: Final = 32_766  # the next one is used to shut out, and then none is left

Partition = tuple[str, int]  # topic as the store has it, partition


class Phase(StrEnum):
    """The states of a transaction, in the words that Kafka's tools print."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


_COMPLETED: Final = {
    Phase.PREPARE_COMMIT: Phase.COMPLETE_COMMIT,
    Phase.PREPARE_ABORT: Phase.COMPLETE_ABORT,
}


@dataclass(slots=True)
class Transaction:
    """One transactional id."""

    transactional_id: str
    producer_id: int
    epoch: int = NO_EPOCH
    previous_id: int = NO_PRODUCER  # before all epochs of it were used up
    last_epoch: int = NO_EPOCH  # of a producer that raised its own epoch
    next_id: int = NO_PRODUCER  # with which it goes on after this end
    timeout_ms: int = 0
    phase: Phase = Phase.EMPTY
    start_ms: int = -1
    update_ms: int = 0
    partitions: set[Partition] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    # Only in memory.
    unmarked: set[Partition] = field(default_factory=set)  # partitions that have no marker yet
    is_prepared: bool = False  # ... and the log says how it ends
    is_finishing: bool = False  # ... and all of the end is on its way
    is_busy: bool = False  # another producer id is on its way

    # -------------------------------------------------------------------------------------- looking

    @property
    def is_ending(self) -> bool:
        return self.is_busy or self.phase in _COMPLETED

    @property
    def is_idle(self) -> bool:
        return self.phase != Phase.ONGOING and self.phase not in _COMPLETED

    @property
    def is_exhausted(self) -> bool:
        return self.epoch >= EPOCH_LAST

    def is_over(self, now_ms: int) -> bool:
        return now_ms >= self.start_ms + self.timeout_ms

    def check_init(self, producer_id: int, epoch: int) -> int:
        """Whether a producer may begin; -1 for both: it is a new one."""
        if self.is_ending:
            return codes.CONCURRENT_TRANSACTIONS
        if producer_id < 0:
            return 0
        is_before = producer_id == self.previous_id and epoch >= EPOCH_LAST
        if self.epoch != NO_EPOCH and producer_id != self.producer_id and not is_before:
            return codes.PRODUCER_FENCED
        if self.phase == Phase.ONGOING or epoch == self.epoch or is_before:
            return 0
        return 0 if epoch == self.last_epoch and epoch >= 0 else codes.PRODUCER_FENCED

    def check_end(self, producer_id: int, epoch: int, *, commit: bool, bumps: bool) -> int | None:
        """Whether a transaction may end so; None: it did already."""
        is_used_up = (
            self.previous_id == producer_id and epoch == EPOCH_LAST and self.epoch == 0 and bumps
        )
        is_again = is_used_up or (bumps and epoch == self.last_epoch == self.epoch - 1)
        if self.producer_id != producer_id and not is_used_up:
            return codes.INVALID_PRODUCER_ID_MAPPING
        if epoch != self.epoch and (not is_again or self.phase in (Phase.ONGOING, Phase.EMPTY)):
            return codes.PRODUCER_FENCED
        if self.is_busy:
            return codes.CONCURRENT_TRANSACTIONS
        if self.phase == Phase.ONGOING:
            return 0
        if self.phase in _COMPLETED:
            same = (self.phase == Phase.PREPARE_COMMIT) == commit
            return codes.CONCURRENT_TRANSACTIONS if same else codes.INVALID_TXN_STATE
        if bumps and not is_again:
            # Nothing was written since the last end; rolling back nothing is allowed.
            return codes.INVALID_TXN_STATE if commit else 0
        if self.phase == Phase.EMPTY:
            return codes.INVALID_TXN_STATE
        same = (self.phase == Phase.COMPLETE_COMMIT) == commit
        return None if same else codes.INVALID_TXN_STATE

    # ------------------------------------------------------------------------------------- changing

    def begin(self, timeout_ms: int, epoch: int, now_ms: int) -> None:
        """A producer begins, with the epoch that it had (else -1): its next one is higher."""
        if epoch >= 0 and epoch == self.last_epoch and epoch != self.epoch:
            pass  # it asks again, because it did not hear the answer
        else:
            self.last_epoch = NO_EPOCH if epoch < 0 else self.epoch
            self.epoch += 1
        self._clear(timeout_ms, now_ms)

    def rotate(self, producer_id: int, timeout_ms: int, now_ms: int, *, keep: bool) -> None:
        """Go on with another producer id, whose epochs are all unused."""
        self.previous_id, self.producer_id = self.producer_id, producer_id
        self.last_epoch = self.epoch if keep else NO_EPOCH
        self.epoch = 0
        self._clear(timeout_ms, now_ms)

    def _clear(self, timeout_ms: int, now_ms: int) -> None:
        self.phase, self.timeout_ms = Phase.EMPTY, timeout_ms
        self.start_ms, self.update_ms = -1, now_ms
        self.partitions = set()
        self.groups = set()

    def add(self, partitions: Iterable[Partition], group: str | None, now_ms: int) -> None:
        """The transaction touches more; the first of it opens it."""
        if self.phase != Phase.ONGOING:
            self.phase, self.start_ms = Phase.ONGOING, now_ms
            self.partitions = set()
            self.groups = set()
        self.partitions |= set(partitions)
        if group is not None:
            self.groups.add(group)
        self.update_ms = now_ms

    def fence(self) -> None:
        """Shut out whoever has the transaction open; as long as nobody else begins, that producer
        may roll back once more, and begin again.
        """
        self.last_epoch = self.epoch
        self.epoch += 1

    def prepare(
        self, now_ms: int, *, commit: bool, bumps: bool, next_id: int = NO_PRODUCER
    ) -> None:
        """It is decided how the transaction ends."""
        if self.phase != Phase.ONGOING:  # nothing was written
            self.partitions, self.groups, self.start_ms = set(), set(), now_ms
        self.phase = Phase.PREPARE_COMMIT if commit else Phase.PREPARE_ABORT
        if bumps:
            self.last_epoch = self.epoch
            self.epoch += 1
        self.next_id = next_id
        self.update_ms = now_ms
        self.unmarked = set(self.partitions)
        self.is_prepared = False

    def told_prepared(self, error: SluiceError | None) -> None:
        self.is_prepared = error is None

    def complete(self) -> None:
        """All markers are written, and that it is over."""
        self.phase = _COMPLETED[self.phase]
        if self.next_id != NO_PRODUCER:
            self.previous_id, self.producer_id = self.producer_id, self.next_id
            self.epoch, self.next_id = 0, NO_PRODUCER
        self.partitions = set()
        self.groups = set()
        self.is_prepared = False

    # --------------------------------------------------------------------------------------- saving

    def row(self) -> dict[str, Any]:
        return {
            "producer": [self.producer_id, self.epoch],
            "before": [self.previous_id, self.last_epoch],
            "next": self.next_id,
            "timeout": self.timeout_ms,
            "phase": self.phase.value,
            "times": [self.start_ms, self.update_ms],
            "partitions": sorted(map(list, self.partitions)),
            "groups": sorted(self.groups),
        }

    def completed_row(self) -> dict[str, Any]:
        """What `row` will be when the end is complete."""
        after = Transaction.from_row(self.transactional_id, self.row())
        after.complete()
        return after.row()

    def load(self, row: Mapping[str, Any]) -> None:
        """Be as `row` says."""
        self.producer_id, self.epoch = row["producer"]
        self.previous_id, self.last_epoch = row["before"]
        self.next_id, self.timeout_ms = row["next"], row["timeout"]
        self.phase = Phase(row["phase"])
        self.start_ms, self.update_ms = row["times"]
        self.partitions = {(topic, partition) for topic, partition in row["partitions"]}
        self.groups = set(row["groups"])

    @classmethod
    def from_row(cls, transactional_id: str, row: Mapping[str, Any]) -> Transaction:
        found = cls(transactional_id, NO_PRODUCER)
        found.load(row)
        return found
