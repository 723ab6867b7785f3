"""This module asks a broker for messages of one queue and takes the answer apart.

The next request goes out before the messages of an answer are looked at, so that the broker and
this process work at the same time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.client.aio.bulk_pulls import bulk_fields, must_wait, read_bulk
from sluice.client.core.messages import ReceivedMessage, read_pulled
from sluice.client.core.process_queues import ProcessQueue
from sluice.client.core.refusals import refusal
from sluice.errors import LinkError, ProtocolError, SubscriptionMissing
from sluice.protocol.framing import Frame
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response

if TYPE_CHECKING:
    from sluice.client.aio.links import ClientLink
    from sluice.client.aio.member import Lane, Member

_FLAG_COMMIT: Final = 1
_FLAG_SUSPEND: Final = 2
_FLAG_SUBSCRIPTION: Final = 4
_FLAG_LITE: Final = 16
_MORE_MS: Final = 15_000  # a broker looks at the pulls that it holds every 5 s
_NOTHING: Final = (Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY)
_NOT_KNOWN: Final = (
    Response.SUBSCRIPTION_NOT_EXIST,
    Response.SUBSCRIPTION_NOT_LATEST,
    Response.FILTER_DATA_NOT_EXIST,
    Response.FILTER_DATA_NOT_LATEST,
)


class Asked(NamedTuple):
    """A pull that is under way, for a queue as it was then."""

    process: ProcessQueue
    answer: asyncio.Future[RemotingCommand]
    offset: int
    is_bulk: bool = False

    def forget(self) -> None:
        """Nobody wants the answer any more."""
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()  # it is known now, so that nobody is told of it


class Pulled(NamedTuple):
    """What one pull brought. `is_elsewhere`: the queue has no such offset, go on at the next."""

    data: Frame
    count_max: int  # messages in the data
    next_offset: int
    is_elsewhere: bool = False

    def messages(self, queue: MessageQueue, begin: int) -> list[ReceivedMessage]:
        """From the offset on that was asked for: a batch that is stored whole comes from its first
        message on, also where a reader goes on in its middle. Raises ProtocolError where the bytes
        are no messages.
        """
        found = read_pulled(self.data, queue) if self.data else []
        if found and found[0].queue_offset < begin:
            found = [message for message in found if message.queue_offset >= begin]
        return found


async def ask(member: Member, lane: Lane) -> Asked:
    """Ask for messages from the queue's next offset on; the broker waits where there is none."""
    queue, session = lane.queue, member.session
    address = await session.address_of(queue.broker_name, queue.topic, lane.read_from)
    link = await session.link(address)
    return _asked(member, lane, link, lane.process.next_offset)


def ask_on(member: Member, lane: Lane, found: Pulled) -> Asked | None:
    """Ask for what follows an answer that is not in memory yet, where that can be done at once."""
    process = lane.process
    if not found.data or process.is_dropped or process.is_paused:
        return None
    if process.why_full(found.count_max, len(found.data)):
        return None
    if must_wait(member, lane, found.count_max):
        return None
    link = member.session.known_link(lane.queue.broker_name, lane.read_from)
    if link is None:
        return None
    try:
        more = (found.count_max, len(found.data))
        return _asked(member, lane, link, found.next_offset, *more)
    except LinkError:
        return None  # it is asked for again when nothing is under way


def _asked(
    member: Member,
    lane: Lane,
    link: ClientLink,
    offset: int,
    more_count: int = 0,
    more_bytes: int = 0,
) -> Asked:
    process = lane.process
    seconds = (member.settings.pull_wait_ms + _MORE_MS) / 1000
    now = asyncio.get_running_loop().time()
    fields = bulk_fields(member, lane, now, offset, more_count, more_bytes)
    if fields is not None:
        answer = link.request_now(Request.SLUICE_BULK_FETCH, fields, timeout_seconds=seconds)
        return Asked(process, answer, offset, is_bulk=True)
    fields = _pull_fields(member, lane, offset)
    answer = link.request_now(member.pull_code, fields, timeout_seconds=seconds)
    return Asked(process, answer, offset)


def _pull_fields(member: Member, lane: Lane, offset: int) -> dict[str, str]:
    process, queue, settings = lane.process, lane.queue, member.settings
    subscription = member.subscriptions[queue.topic]
    flags = _FLAG_SUSPEND
    commit = 0
    by_pull = member.commits_by_pull and not settings.broadcasting and not lane.read_from
    if by_pull and process.commit_offset > 0:
        flags |= _FLAG_COMMIT
        commit = process.commit_offset
    ext = {
        "consumerGroup": member.group,
        "topic": queue.topic,
        "queueId": str(queue.queue_id),
        "queueOffset": str(offset),
        "maxMsgNums": str(settings.pull_count),
        "commitOffset": str(commit),
        "suspendTimeoutMillis": str(settings.pull_wait_ms),
        "subVersion": str(subscription.version),
        "bname": queue.broker_name,
    }
    if member.is_lite:
        flags |= _FLAG_LITE | _FLAG_SUBSCRIPTION
        ext["subscription"] = subscription.expression
        ext["expressionType"] = subscription.expression_type
    ext["sysFlag"] = str(flags)
    return ext


def read_answer(member: Member, lane: Lane, asked: Asked, answer: RemotingCommand) -> Pulled:
    """What a broker says to a pull; raises what it refuses with."""
    code, queue = answer.code, lane.queue
    if asked.is_bulk:
        found = read_bulk(lane, answer)
        return Pulled(b"", 0, asked.offset) if found is None else Pulled(*found)
    if code in _NOT_KNOWN:
        raise SubscriptionMissing(f"the broker does not know what {member.group} wants yet")
    if code not in (Response.SUCCESS, Response.PULL_OFFSET_MOVED, *_NOTHING):
        raise refusal(code, answer.remark, f"reading {queue}")
    try:
        next_offset = int(answer.ext["nextBeginOffset"])
        lane.read_from = int(answer.ext.get("suggestWhichBrokerId", "0"))
        lane.backlog.behind = int(answer.ext.get("maxOffset", "0")) - next_offset
        lane.backlog.pulled_at = asyncio.get_running_loop().time()
    except (KeyError, ValueError):
        raise ProtocolError(f"{queue}: the answer to a pull has no offset") from None
    if code == Response.SUCCESS:
        return Pulled(answer.body, member.settings.pull_count, next_offset)
    return Pulled(b"", 0, next_offset, code == Response.PULL_OFFSET_MOVED)
