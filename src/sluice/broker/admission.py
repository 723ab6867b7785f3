"""This module decides whether one more send is taken while many wait for the disk.

Every send that is not confirmed yet is in memory, so their bytes and their number are bounded. Up
to half of a bound nobody is looked at: that is one comparison for a send (`free_end`). Above it,
no connection takes more than an eighth of the bound until all that waited then is confirmed, so
that one that floods is refused before the others are. A refusal names the bound; clients try again.

How many bytes wait is not counted: it is the distance between the end of the log and what of it is
confirmed. This module knows no wire and no socket; a sender is whatever tells connections apart.
"""

from __future__ import annotations

from typing import Final

from sluice.errors import Busy
from sluice.storage.store import Store

_FREE_PART: Final = 2  # so little of a bound is given to everybody who asks
_SHARE_PART: Final = 8  # and so little of it to one sender, above that


class Admission:
    """The bounds on sends of one broker."""

    def __init__(self, store: Store, *, bytes_max: int, requests_max: int) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._requests_max = requests_max
        self._free_bytes = bytes_max // _FREE_PART
        self._request_bytes = max(1, bytes_max // requests_max)  # what one counts beside its body
        self._shares: dict[bytes, int] = {}
        self._shares_until = 0  # a position in the log: they begin anew when it is confirmed
        self.free_end = 0  # while the log ends before it, `admit` need not be asked
        self.refused_count = 0
        self.grouped_count = 0  # sends that wait, beside the one of their group that is told
        self.end_turn()

    @property
    def waiting_bytes(self) -> int:
        """The bytes of sends that nobody was told about yet."""
        return self._store.log.end - self._store.confirmed

    @property
    def waiting_count(self) -> int:
        """The number of those sends."""
        return self._store.flusher.waiting_count + self.grouped_count

    def end_turn(self) -> None:
        """Many small sends are much memory too: above half of their bound each is looked at."""
        store = self._store
        crowded = self.waiting_count > self._requests_max // _FREE_PART
        self.free_end = -1 if crowded else store.confirmed + self._free_bytes

    def admit(self, sender: bytes, size: int) -> None:
        """Take a send of `size` bytes into account, or raise `Busy`."""
        self.end_turn()  # more may be confirmed than when this turn began
        if self._store.log.end <= self.free_end:
            return
        try:
            self._check_all(size)
            self._check_share(sender, size + self._request_bytes)
        except Busy:
            self.refused_count += 1
            raise

    def _check_all(self, size: int) -> None:
        waiting_bytes, count = self.waiting_bytes, self.waiting_count
        if waiting_bytes + size > self._bytes_max:
            raise Busy(
                f"system busy: {waiting_bytes} bytes of messages wait for the disk, the limit is "
                f"{self._bytes_max} (inflight_bytes_max); try again"
            )
        if count >= self._requests_max:
            raise Busy(
                f"system busy: {count} sends wait for the disk, the limit is "
                f"{self._requests_max} (inflight_requests_max); try again"
            )

    def _check_share(self, sender: bytes, size: int) -> None:
        store = self._store
        if store.confirmed >= self._shares_until:
            self._shares.clear()
            self._shares_until = store.log.end
        share_max = self._bytes_max // _SHARE_PART
        taken = self._shares.get(sender, 0) + size
        if taken > share_max:
            raise Busy(
                f"system busy: sends of this connection that wait for the disk would take "
                f"{taken} bytes, its share is {share_max} of {self._bytes_max} "
                "(inflight_bytes_max); try again"
            )
        self._shares[sender] = taken
