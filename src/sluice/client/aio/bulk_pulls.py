"""This module asks for many messages at a time while a queue has many waiting.

An ordinary pull brings as many as the broker's limits allow, some tens. It is the one that counts:
the broker holds it until something comes, it carries what is done, and it learns of a reset and of
rights that were taken away. Beside it Sluice's brokers answer bulk reads. While a queue is far
behind, most requests are those, with an ordinary pull every half second; what a bulk read does not
answer with messages is left to the next ordinary pull. A broker that does not know the request
is asked once for each queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sluice.errors import ProtocolError
from sluice.protocol.framing import Frame
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_clients import TAG
from sluice.protocol.remoting_codes import ResponseCode as Response

if TYPE_CHECKING:
    from sluice.client.aio.member import Lane, Member

_COUNT_MIN: Final = 64  # fewer are not worth another kind of request
_PULL_COUNT_MIN: Final = 32  # who asks for fewer than clients do by default wants small portions
_PULL_SECONDS: Final = 0.5
_SIZE_BYTES: Final = 4  # of each entry, behind all of them
_NOTHING: Final = (Response.PULL_NOT_FOUND, Response.PULL_OFFSET_MOVED)


class Backlog:
    """How far a queue is behind, and whether bulk reads are of use for it."""

    __slots__ = ("behind", "is_unfit", "pulled_at")

    def __init__(self) -> None:
        self.behind = 0  # messages behind those of the last answer
        self.is_unfit = False  # refused, or its entries are no single messages
        self.pulled_at = 0.0  # when an ordinary pull was answered, by the event loop's clock


class Stretch(NamedTuple):
    """What a bulk read found."""

    data: Frame
    entry_count: int
    next_offset: int


def is_of_use(member: Member, lane: Lane) -> bool:
    """Whether the next request of a queue is better a bulk read, if there is room for one."""
    backlog, settings = lane.backlog, member.settings
    return (
        backlog.behind >= _COUNT_MIN
        and not backlog.is_unfit
        and settings.pull_count >= _PULL_COUNT_MIN
        and settings.queue_count_max >= 2 * _COUNT_MIN
        and settings.bulk_bytes > 0
        and member.subscriptions[lane.queue.topic].expression_type == TAG
    )


def must_wait(member: Member, lane: Lane, more_count: int = 0) -> bool:
    """Whether a bulk read waits for room. It brings half of what may be in memory, so that the
    next half is on its way while one is handled; many small ones would cost more.
    """
    unfinished = lane.process.unfinished_count + more_count
    return unfinished > member.settings.queue_count_max // 2 and is_of_use(member, lane)


def bulk_fields(
    member: Member, lane: Lane, now: float, offset: int, more_count: int, more_bytes: int
) -> dict[str, str] | None:
    """The fields of a bulk read; None where an ordinary pull is better.

    `now` is by the event loop's clock; `more` is what was received and is not in memory yet.
    """
    settings = member.settings
    if not is_of_use(member, lane):
        return None
    if now - lane.backlog.pulled_at > _PULL_SECONDS:
        return None
    room_count, room_bytes = lane.process.room(more_count, more_bytes)
    count = min(room_count, settings.queue_count_max // 2)
    bytes_max = min(room_bytes, settings.bulk_bytes)
    if count < _COUNT_MIN or bytes_max <= 0:
        return None
    fields = {
        "topic": lane.queue.topic,
        "queueId": str(lane.queue.queue_id),
        "offset": str(offset),
        "toOffset": str(offset + count),
        "maxBytes": str(bytes_max),
        "consumerGroup": member.group,
    }
    subscription = member.subscriptions[lane.queue.topic]
    if subscription.tags:
        fields["tags"] = subscription.expression
    return fields


def read_bulk(lane: Lane, answer: RemotingCommand) -> Stretch | None:
    """What a broker says to a bulk read; None where an ordinary pull has to ask again."""
    backlog, ext = lane.backlog, answer.ext
    backlog.behind = 0
    if answer.code != Response.SUCCESS or "topicId" in ext:
        # Batches of Kafka's producers come whole here, and one by one to a pull.
        backlog.is_unfit = answer.code not in _NOTHING
        return None
    try:
        count, next_offset = int(ext["count"]), int(ext["nextOffset"])
        backlog.behind = int(ext["maxOffset"]) - next_offset
    except (KeyError, ValueError):
        raise ProtocolError(f"{lane.queue}: the answer to a bulk read has no offsets") from None
    data_bytes = len(answer.body) - count * _SIZE_BYTES
    if count < 0 or data_bytes < 0:
        raise ProtocolError(f"{lane.queue}: a bulk read of {count} entries without their sizes")
    return Stretch(answer.body[:data_bytes], count, next_offset)
