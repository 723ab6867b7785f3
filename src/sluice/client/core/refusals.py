"""This module turns a broker's error answer into an error that says what to do.

Which answers are worth a try at another broker is here as well; the list is that of RocketMQ's Java
client.
"""

from __future__ import annotations

from typing import Final

from sluice.errors import (
    BrokerRefused,
    Busy,
    GroupMissing,
    LinkError,
    MessageIllegal,
    MessageTooLarge,
    NoPermission,
    NoRoute,
    SluiceError,
    Stopping,
    SubscriptionIllegal,
    TopicMissing,
)
from sluice.protocol.remoting_codes import ResponseCode as Response

_RETRIED_CODES: Final = frozenset(
    (
        Response.TOPIC_NOT_EXIST,
        Response.SERVICE_NOT_AVAILABLE,
        Response.SYSTEM_ERROR,
        Response.SYSTEM_BUSY,
        Response.NO_PERMISSION,
        Response.NO_BUYER_ID,
        Response.NOT_IN_CURRENT_UNIT,
        Response.GO_AWAY,
    )
)
_BUSY_CODES: Final = (Response.SYSTEM_BUSY, Response.FLOW_CONTROL)
_ADVICE: Final[dict[int, tuple[type[SluiceError], str]]] = {
    Response.NO_PERMISSION: (
        NoPermission,
        "look at the permissions of broker, topic and group (`sluice admin topicRoute`), and at "
        "access_key and secret_key where the broker wants them",
    ),
    Response.TOPIC_NOT_EXIST: (
        TopicMissing,
        "make the topic (`sluice admin updateTopic`), or allow the broker to make topics",
    ),
    Response.SUBSCRIPTION_GROUP_NOT_EXIST: (
        GroupMissing,
        "make the group (`sluice admin updateSubGroup`), or allow the broker to make groups",
    ),
    Response.SUBSCRIPTION_PARSE_FAILED: (SubscriptionIllegal, "correct the expression"),
    Response.SERVICE_NOT_AVAILABLE: (Stopping, "the broker's log says why; it may be its disk"),
}


def refusal(code: int, remark: str | None, what: str) -> SluiceError:
    """The error for an answer that is no success, with the broker's own words."""
    words = f"{what}: {remark or 'no reason given'} (code {code})"
    if code == Response.MESSAGE_ILLEGAL:
        too_large = "length" in (remark or "") or "bytes" in (remark or "")
        kind = MessageTooLarge if too_large else MessageIllegal
        return kind(f"{words}; the broker will never take this message as it is")
    if code in _BUSY_CODES:
        return Busy(f"{words}; send less at a time, or try again later")
    known = _ADVICE.get(code)
    if known is None:
        return BrokerRefused(code, remark, what)
    return known[0](f"{words}; {known[1]}")


def is_worth_another_try(error: SluiceError) -> bool:
    """Whether another broker, or the same one a moment later, may take what this one did not."""
    if isinstance(error, LinkError | NoRoute):
        return isinstance(error, LinkError)
    code = error.code if isinstance(error, BrokerRefused) else error.rocketmq_code
    return code in _RETRIED_CODES
