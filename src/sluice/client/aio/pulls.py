"""This module asks a broker for messages of one queue and takes the answer apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.client.core.messages import ReceivedMessage, read_pulled
from sluice.client.core.refusals import refusal
from sluice.errors import ProtocolError, SubscriptionMissing
from sluice.protocol.remoting_codes import ResponseCode as Response

if TYPE_CHECKING:
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


class Pulled(NamedTuple):
    """What one pull brought. `is_elsewhere`: the queue has no such offset, go on at the next."""

    messages: list[ReceivedMessage]
    next_offset: int
    is_elsewhere: bool = False


async def pull(member: Member, lane: Lane) -> Pulled:
    """Messages from the queue's next offset on; waits at the broker where there is none."""
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
        "queueOffset": str(process.next_offset),
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
    address = await member.session.address_of(queue.broker_name, queue.topic, lane.read_from)
    link = await member.session.link(address)
    seconds = (settings.pull_wait_ms + _MORE_MS) / 1000
    answer = await link.request(member.pull_code, ext, timeout_seconds=seconds)
    code = answer.code
    if code in _NOT_KNOWN:
        raise SubscriptionMissing(f"the broker does not know what {member.group} wants yet")
    if code not in (Response.SUCCESS, Response.PULL_OFFSET_MOVED, *_NOTHING):
        raise refusal(code, answer.remark, f"reading {queue}")
    try:
        next_offset = int(answer.ext["nextBeginOffset"])
        lane.read_from = int(answer.ext.get("suggestWhichBrokerId", "0"))
    except (KeyError, ValueError):
        raise ProtocolError(f"{queue}: the answer to a pull has no offset") from None
    if code == Response.SUCCESS:
        return Pulled(read_pulled(answer.body, queue), next_offset)
    return Pulled([], next_offset, code == Response.PULL_OFFSET_MOVED)
