"""This module has what only Sluice's brokers tell: dead letters, delayed messages, transactions.

Apache's brokers refuse these requests, except to ask anew about a half message. Lists go page by
page: there may be very many. A broker keeps what was sent again, so that a call that was
interrupted, or is made twice, sends nothing twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple

import orjson

from sluice.client.admin import DEAD_PREFIX
from sluice.client.administration.brokers import BrokerDesk
from sluice.client.administration.offsets import When, when_ms
from sluice.client.administration.values import (
    DELAYED_MEMBERS,
    LETTER_MEMBERS,
    DeadLetter,
    DelayedMessage,
    DelayedMessages,
    DelayTotals,
    ResendReport,
    Resent,
    from_members,
)
from sluice.client.core.recalls import read_handle, write_handle
from sluice.client.messages import TIME_MAX, StoredMessage, stored_messages
from sluice.client.simple import PRODUCER_GROUP, QueueAt
from sluice.errors import ConfigError, NotFound, ProtocolError, TopicMissing
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_transactions import OpenHalf, read_open_halves

_PAGE: Final = 500  # letters that are listed with one request
_CHUNK: Final = 100  # letters that are sent again with one request
_SECONDS: Final = 60.0
_MESSAGE_ID: Final = re.compile(r"(?:[0-9a-fA-F]{16}|[0-9a-fA-F]{40})([0-9a-fA-F]{16})")

Watch = Callable[[int, int], None]  # how much was looked at, of how much
Told = Callable[[Resent], None]


class LetterChoice(NamedTuple):
    """Which dead letters of a group are wanted."""

    topic: str | None = None  # that they came from
    key: str | None = None  # or unique key
    begin_ms: int = 0  # when they died
    end_ms: int = TIME_MAX

    @property
    def is_all(self) -> bool:
        return self == LetterChoice()


def letter_choice(
    topic: str | None, key: str | None, begin: When | None, end: When | None
) -> LetterChoice:
    """A choice of what a user gave."""
    begin_ms = 0 if begin is None else when_ms(begin)
    return LetterChoice(topic, key, begin_ms, TIME_MAX if end is None else when_ms(end))


class BusinessDesk(BrokerDesk):
    """Dead letters, delayed messages and open transactions of a cluster."""

    # ---------------------------------------------------------------------------- dead letters

    async def dead_letters(
        self,
        group: str,
        *,
        topic: str | None = None,
        key: str | None = None,
        begin: When | None = None,
        end: When | None = None,
        count: int | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """The dead letters of a group, up to what was there when the call began.

        Only those that came from a topic, that have a key or unique key, that died in a span of
        time, where this is given.
        """
        choice = letter_choice(topic, key, begin, end)
        async for letter in self.walk_dead_letters(group, choice, count):
            yield letter

    async def walk_dead_letters(
        self,
        group: str,
        choice: LetterChoice,
        count: int | None = None,
        watch: Watch | None = None,
    ) -> AsyncIterator[DeadLetter]:
        queues = await self.letter_queues(group)
        async for _, letters in self._letter_pages(group, queues, choice, count, watch):
            for letter in letters:
                yield letter

    async def resend_dead_letters(
        self,
        group: str,
        *,
        ids: Sequence[str] | None = None,
        topic: str | None = None,
        key: str | None = None,
        begin: When | None = None,
        end: When | None = None,
        everything: bool = False,
        to_topic: bool = False,
    ) -> ResendReport:
        """Send dead letters to their group again, each once.

        Those with these ids, or those that `dead_letters` lists with the same words, or everything.
        `to_topic`: to the topic that each came from, for all who read it.
        """
        choice = letter_choice(topic, key, begin, end)
        given = [ids is not None, not choice.is_all, everything]
        if sum(given) != 1:
            raise ConfigError(
                "say which dead letters: ids=, or topic=, key=, begin=, end=, or everything=True"
            )
        if ids is not None:
            return await self.resend_named(group, ids, to_topic=to_topic)
        return await self.resend_chosen(group, choice, to_topic=to_topic)

    async def resend_named(
        self, group: str, ids: Sequence[str], *, to_topic: bool = False, told: Told | None = None
    ) -> ResendReport:
        """Send the dead letters with these ids again; `told` gets every outcome as it comes."""
        queues = await self.letter_queues(group)
        batches = self._named_letters(group, queues, ids)
        return await self._resend_all(group, batches, to_topic, told)

    async def resend_chosen(
        self,
        group: str,
        choice: LetterChoice,
        *,
        to_topic: bool = False,
        told: Told | None = None,
        watch: Watch | None = None,
    ) -> ResendReport:
        """Send the dead letters again that fit and were not sent again yet."""
        queues = await self.letter_queues(group)
        batches = self._chosen_letters(group, queues, choice, watch)
        return await self._resend_all(group, batches, to_topic, told)

    async def _resend_all(
        self,
        group: str,
        batches: AsyncIterator[tuple[QueueAt, list[int]]],
        to_topic: bool,
        told: Told | None,
    ) -> ResendReport:
        counts: Counter[str] = Counter()
        failed: list[Resent] = []
        async for queue, offsets in batches:
            for start in range(0, len(offsets), _CHUNK):
                part = offsets[start : start + _CHUNK]
                for outcome in await self._resend(group, queue, part, to_topic=to_topic):
                    counts[outcome.outcome] += 1
                    if not outcome.is_fine:
                        failed.append(outcome)
                    if told is not None:
                        told(outcome)
        return ResendReport(dict(counts), failed)

    async def letter_queues(self, group: str) -> list[QueueAt]:
        """The queues of a group's dead letters; raises NotFound where it has none."""
        try:
            return await self.queues(f"{DEAD_PREFIX}{group}", writing=False)
        except TopicMissing:
            raise NotFound(f"group {group} has no dead letters") from None

    async def _letter_page(
        self, group: str, queue: QueueAt, choice: LetterChoice, offset: int, count: int
    ) -> tuple[list[DeadLetter], int, int]:
        """Letters from an offset on, where to go on, and the end of the queue."""
        ext: dict[str, object] = {
            "group": group,
            "queueId": queue.queue_id,
            "offset": offset,
            "maxNum": count,
            "beginTimestamp": choice.begin_ms,
            "endTimestamp": choice.end_ms,
        }
        if choice.key is not None:
            ext["key"] = choice.key
        if choice.topic is not None:
            ext["originTopic"] = choice.topic
        answer = await self.done(
            queue.address,
            Request.SLUICE_LIST_DEAD_LETTERS,
            ext,
            what=f"the dead letters of group {group}",
            timeout_seconds=_SECONDS,
        )
        letters = [
            from_members(DeadLetter, LETTER_MEMBERS, queue.broker_name, row)
            for row in _rows(answer.body, "letters")
        ]
        return letters, int(answer.ext["nextOffset"]), int(answer.ext["maxOffset"])

    async def _letter_pages(
        self,
        group: str,
        queues: list[QueueAt],
        choice: LetterChoice,
        count_max: int | None = None,
        watch: Watch | None = None,
    ) -> AsyncIterator[tuple[QueueAt, list[DeadLetter]]]:
        """Page after page, up to what was there at first."""
        ends = [(await self._letter_page(group, queue, choice, 0, 1))[2] for queue in queues]
        found = 0
        for at, (queue, end) in enumerate(zip(queues, ends, strict=True)):
            offset = 0
            while offset < end and (count_max is None or found < count_max):
                letters, offset, _ = await self._letter_page(group, queue, choice, offset, _PAGE)
                letters = [letter for letter in letters if letter.offset < end]
                if count_max is not None:
                    letters = letters[: count_max - found]
                found += len(letters)
                if watch is not None:
                    watch(sum(ends[:at]) + offset, sum(ends))
                yield queue, letters

    async def _named_letters(
        self, group: str, queues: list[QueueAt], ids: Sequence[str]
    ) -> AsyncIterator[tuple[QueueAt, list[int]]]:
        topic = f"{DEAD_PREFIX}{group}"
        for one in ids:
            message = await self.message_by_id(topic, one)
            if message.topic != topic:
                raise NotFound(f"{one} is no dead letter of group {group}")
            for queue in queues:
                if (queue.broker_name, queue.queue_id) == (message.broker_name, message.queue_id):
                    yield queue, [message.queue_offset]

    async def _chosen_letters(
        self, group: str, queues: list[QueueAt], choice: LetterChoice, watch: Watch | None
    ) -> AsyncIterator[tuple[QueueAt, list[int]]]:
        """The letters that fit and were not sent again yet."""
        async for queue, letters in self._letter_pages(group, queues, choice, None, watch):
            yield queue, [letter.offset for letter in letters if not letter.is_resent]

    async def _resend(
        self, group: str, queue: QueueAt, offsets: list[int], *, to_topic: bool
    ) -> list[Resent]:
        answer = await self.done(
            queue.address,
            Request.SLUICE_RESEND_DEAD_LETTERS,
            {
                "group": group,
                "queueId": queue.queue_id,
                "toTopic": "true" if to_topic else "false",
            },
            orjson.dumps({"offsets": offsets}),
            what=f"sending dead letters of group {group} again",
            timeout_seconds=_SECONDS,
        )
        place = (queue.broker_name, queue.queue_id)
        return [
            Resent(*place, row["offset"], row["outcome"], row["remark"], row["msgId"])
            for row in _rows(answer.body, "outcomes")
        ]

    # ------------------------------------------------------------------------ delayed messages

    async def delayed(
        self, topic: str | None = None, *, cluster: str | None = None, count: int = 100
    ) -> DelayedMessages:
        """Messages that wait for their time, the earliest first; so many of each broker."""
        totals = DelayTotals()
        walk = self.walk_delayed(totals, topic=topic, cluster=cluster, count=count)
        return DelayedMessages([message async for message in walk], totals)

    async def walk_delayed(
        self,
        totals: DelayTotals,
        *,
        topic: str | None = None,
        cluster: str | None = None,
        count: int = 100,
    ) -> AsyncIterator[DelayedMessage]:
        """The same one by one; how many wait in all is added to `totals`."""
        for broker in await self.brokers(cluster):
            if 0 not in broker.addresses:
                continue
            left = count
            async for rows in self._delayed_pages(broker.addresses[0], topic, totals):
                for row in rows[:left]:
                    left -= 1
                    yield from_members(DelayedMessage, DELAYED_MEMBERS, broker.name, row)
                if not left:
                    break

    async def _delayed_pages(
        self, address: str, topic: str | None, totals: DelayTotals
    ) -> AsyncIterator[list[dict[str, Any]]]:
        after = ""
        is_first = True
        while after or is_first:
            ext: dict[str, object] = {"after": after, **({"topic": topic} if topic else {})}
            answer = await self.done(
                address,
                Request.SLUICE_LIST_DELAYED,
                ext,
                what="the list of delayed messages",
                timeout_seconds=_SECONDS,
            )
            if is_first:
                totals.timer_count += int(answer.ext["timerCount"])
                totals.level_count += int(answer.ext["levelCount"])
            is_first = False
            yield _rows(answer.body, "messages")
            after = answer.ext.get("after", "")

    async def recall(self, delayed: DelayedMessage | str) -> str:
        """Take a timed message back before it is delivered; its id.

        Takes a row of `delayed`, or the `recall_handle` that its producer got.
        """
        if isinstance(delayed, str):
            text = delayed
        elif delayed.delay_level:
            raise ConfigError("a message with a delay level cannot be taken back, only a timed one")
        else:
            text = write_handle(
                delayed.topic, delayed.broker_name, delayed.due_ms, delayed.unique_key
            )
        handle = read_handle(text)
        place = await self.queue(handle.broker_name, 0)
        ext = {"producerGroup": PRODUCER_GROUP, "topic": handle.topic, "recallHandle": text}
        what = f"recalling a message of {handle.topic}"
        answer = await self.done(place.address, Request.RECALL_MESSAGE, ext, what=what)
        return answer.ext.get("msgId", "")

    # ---------------------------------------------------------------------------- transactions

    async def open_transactions(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        cluster: str | None = None,
        count: int = 100,
    ) -> list[OpenHalf]:
        """Transactions that nobody has ended yet, the oldest first; so many of each broker."""
        walk = self.walk_transactions(
            Counter(), topic=topic, group=group, cluster=cluster, count=count
        )
        return [half async for _, half in walk]

    async def walk_transactions(
        self,
        totals: Counter[str],
        *,
        topic: str | None = None,
        group: str | None = None,
        cluster: str | None = None,
        count: int = 100,
    ) -> AsyncIterator[tuple[str, OpenHalf]]:
        """The same one by one with the broker of each; `totals` counts all that are open."""
        for broker in await self.brokers(cluster):
            if 0 not in broker.addresses:
                continue
            left = count
            async for halves in self._half_pages(broker.addresses[0], topic, group, totals):
                for half in halves[:left]:
                    left -= 1
                    yield broker.name, half
                if not left:
                    break

    async def _half_pages(
        self, address: str, topic: str | None, group: str | None, totals: Counter[str]
    ) -> AsyncIterator[list[OpenHalf]]:
        offset = 0
        while offset >= 0:
            ext: dict[str, object] = {"offset": offset}
            ext |= {"topic": topic} if topic is not None else {}
            ext |= {"group": group} if group is not None else {}
            answer = await self.done(
                address,
                Request.SLUICE_LIST_TRANSACTIONS,
                ext,
                what="the list of open transactions",
                timeout_seconds=_SECONDS,
            )
            if not offset:
                totals["openCount"] += int(answer.ext["openCount"])
            yield read_open_halves(answer.body)
            offset = int(answer.ext["nextOffset"])

    async def resume_check(self, message_id: str, *, cluster: str | None = None) -> StoredMessage:
        """Have a broker ask anew about a half message that is open, or was parked."""
        match = _MESSAGE_ID.fullmatch(message_id)
        if match is None:
            raise ConfigError(f"{message_id!r} is not the id that the list shows")
        for broker in await self.brokers(cluster):
            address = broker.addresses.get(0)
            if address is None:
                continue
            # An id names the address that the broker knows of itself: all are asked whose it is.
            place = {"offset": str(int(match[1], 16))}
            answer = await self.ask(address, Request.VIEW_MESSAGE_BY_ID, place)
            if answer.code != Response.SUCCESS:
                continue
            (message,) = stored_messages(answer.body, broker.name)
            if message.offset_id != message_id.upper():
                continue
            ext: dict[str, object] = {"topic": message.topic, "msgId": message.offset_id}
            what = f"asking about {message_id} anew"
            await self.done(address, Request.RESUME_CHECK_HALF_MESSAGE, ext, what=what)
            return message
        raise NotFound(f"no broker has a message with the id {message_id}")


def _rows(body: bytes | memoryview, name: str) -> list[dict[str, Any]]:
    """The rows of a list that a broker sent; raises ProtocolError."""
    try:
        rows = orjson.loads(body)[name]
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
    except (orjson.JSONDecodeError, KeyError, TypeError):
        pass
    raise ProtocolError(f"a broker sent a list of {name} that cannot be read")
