"""This module watches running programs: what members of groups own and see, what is acknowledged.

Nothing here sleeps for an effect: `wait_until` asks again until a condition holds, and says what is
missing when it never does.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable

from peers import RunningProgram
from tests.interop.clients import STOP_TIMEOUT_S, Event

WAIT_S = 240.0
_POLL_S = 0.05
_SHOWN = 5


def wait_until(
    holds: Callable[[], bool], what: Callable[[], str], timeout_s: float = WAIT_S
) -> None:
    """Return as soon as `holds`; fails with what is missing by then."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s: {what()}"
        time.sleep(_POLL_S)


class Sender:
    """A program that sends until it is stopped."""

    def __init__(self, program: RunningProgram) -> None:
        self._program = program
        self.acknowledged: list[str] = []
        self.failures: list[str] = []

    def look(self) -> None:
        """Take in what it has printed meanwhile."""
        for event in self._program.new_events():
            if event["event"] == "sent" and event["status"] == "SEND_OK":
                self.acknowledged.append(event["id"])
            elif event["event"] in ("sent", "failed"):
                self.failures.append(event.get("reason") or event["status"])

    def wait_for_more(self, count: int) -> None:
        """Until so many more messages than now are acknowledged."""
        self.look()
        wanted = len(self.acknowledged) + count

        def enough() -> bool:
            self.look()
            assert self._program.running, self._program.tail()
            return len(self.acknowledged) >= wanted

        wait_until(enough, lambda: f"{len(self.acknowledged)} of {wanted} are acknowledged")

    def stop(self) -> None:
        """Let it finish what is under way; no acknowledgement comes after this."""
        self._program.stop(STOP_TIMEOUT_S)
        self.look()


class Member:
    """A program that reads as a member of one or several groups."""

    def __init__(self, program: RunningProgram, *groups: str) -> None:
        """`groups` are those of its readers, in their order."""
        self._program = program
        self.groups = groups
        self.owned: dict[str, frozenset[str]] = defaultdict(frozenset)
        # In the order in which they came: (topic/queue, offset, id).
        self.received: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
        # The same for programs that say which time it is that they have a queue: (topic/queue,
        # which time) and the offsets that came meanwhile.
        self.periods: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.alive = True

    def look(self) -> None:
        """Take in what it has printed meanwhile."""
        ended = self.alive and not self._program.running
        for event in self._program.new_events():
            kind = event["event"]
            assert kind not in ("broken", "error"), event
            if kind == "owns":
                self.owned[event["group"]] = frozenset(event["queues"].split())
            elif kind == "received":
                self._take(event)

        assert not ended, self._program.tail()

    def _take(self, event: Event) -> None:
        queue = f"{event['topic']}/{event['queueId']}"
        group = self.groups[event["reader"]]
        self.received[group].append((queue, event["queueOffset"], event["id"]))
        if "period" in event:
            self.periods[queue, event["period"]].append(event["queueOffset"])

    def leave(self) -> None:
        """Say good-bye, as a program that is stopped."""
        self.alive = False
        self._program.stop(STOP_TIMEOUT_S)
        self.look()

    def kill(self) -> None:
        """As kill -9 does."""
        self.alive = False
        self._program.kill()
        self.look()


class Group:
    """All that were ever members of one group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[Member] = []

    def living(self) -> list[Member]:
        return [member for member in self.members if member.alive]

    def wait_for_shares(self, queues: Collection[str]) -> None:
        """Until each queue belongs to one living member, and all have about the same number."""
        fewest = len(queues) // len(self.living())

        def divided() -> bool:
            self._look()
            shares = [member.owned[self.name] for member in self.living()]
            return (
                sorted(queue for share in shares for queue in share) == sorted(queues)
                and min(len(share) for share in shares) >= fewest
                and max(len(share) for share in shares) <= fewest + 1
            )

        wait_until(
            divided,
            lambda: f"{self.name}: {[sorted(m.owned[self.name]) for m in self.living()]}",
        )

    def wait_for_reads(self) -> None:
        """Until each living member has had a message of each queue that it owns."""

        def unread() -> list[str]:
            self._look()
            return [
                queue
                for member in self.living()
                for queue in member.owned[self.name]
                - {row[0] for row in member.received[self.name]}
            ]

        wait_until(lambda: not unread(), lambda: f"{self.name}: nothing came of {unread()}")

    def seen(self) -> Counter[str]:
        """How often each message came, to whomever."""
        self._look()
        return Counter(row[2] for member in self.members for row in member.received[self.name])

    def wait_for_all(self, ids: Iterable[str], timeout_s: float = WAIT_S) -> None:
        """Until every one of these messages was seen."""
        missing = set(ids)
        read = [0] * len(self.members)

        def nothing_missing() -> bool:
            self._look()
            for index, member in enumerate(self.members):
                rows = member.received[self.name]
                missing.difference_update(row[2] for row in rows[read[index] :])
                read[index] = len(rows)
            return not missing

        wait_until(
            nothing_missing,
            lambda: f"{self.name} misses {len(missing)}: {sorted(missing)[:_SHOWN]}",
            timeout_s,
        )

    def _look(self) -> None:
        for member in self.members:
            member.look()


class Ledger:
    """What senders were told is safe, against what groups have seen; remembers only the rest."""

    def __init__(self, senders: Collection[Sender], members: Collection[Member]) -> None:
        self._senders = senders
        self._members = members
        groups = {group for member in members for group in member.groups}
        self._unseen: dict[str, set[str]] = {group: set() for group in groups}
        # Seen before the acknowledgement was read, or once more.
        self._early: dict[str, set[str]] = {group: set() for group in groups}
        self.acknowledged = 0
        self.seen: Counter[str] = Counter()

    def look(self) -> None:
        """Take in what all programs have printed meanwhile."""
        for sender in self._senders:
            sender.look()
            ids, sender.acknowledged = sender.acknowledged, []
            self.acknowledged += len(ids)
            for group, unseen in self._unseen.items():
                unseen.update(set(ids) - self._early[group])
                self._early[group].difference_update(ids)
        for member in self._members:
            member.look()
            for group in member.groups:
                ids = [row[2] for row in member.received.pop(group, [])]
                self.seen[group] += len(ids)
                self._early[group].update(set(ids) - self._unseen[group])
                self._unseen[group].difference_update(ids)

    def wait_for_more(self, count: int) -> None:
        """Until so many more messages than now are acknowledged."""
        self.look()
        wanted = self.acknowledged + count

        def enough() -> bool:
            self.look()
            return self.acknowledged >= wanted

        wait_until(enough, lambda: f"{self.acknowledged} of {wanted} are acknowledged")

    def wait_for_all(self, timeout_s: float = WAIT_S) -> None:
        """Until every group has seen everything that was acknowledged."""

        def nothing_missing() -> bool:
            self.look()
            return not any(self._unseen.values())

        wait_until(nothing_missing, self.missing, timeout_s)

    def missing(self) -> str:
        return "; ".join(
            f"{group} misses {len(unseen)} of {self.acknowledged}: {sorted(unseen)[:_SHOWN]}"
            for group, unseen in self._unseen.items()
            if unseen
        )
