"""This module is the one table of errors: what went wrong, in whose words, and what the caller may
do.

Every error that can reach a user is a class here. A class carries the code that each protocol gives
for it, whether trying again can help, and whether the connection it came over can still be trusted.
The text of an error says what to do next. Nothing here may import another module of the package.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SluiceError(Exception):
    """Base of all errors that are the world's fault; a broken assert is ours."""

    rocketmq_code: ClassVar[int] = 1  # SYSTEM_ERROR
    kafka_code: ClassVar[int] = -1  # UNKNOWN_SERVER_ERROR
    retriable: ClassVar[bool] = False
    closes_connection: ClassVar[bool] = False


class ConfigError(SluiceError):
    """A setting is unknown, malformed or out of its limits."""


class StoreError(SluiceError):
    """The store on disk cannot do what was asked."""


class StoreInUse(StoreError):
    """Another process (or another store of this process) holds the directory's lock."""


class StoreCorrupt(StoreError):
    """A file of the store is damaged or foreign where it must not be: the store does not open."""

    kafka_code = 2  # CORRUPT_MESSAGE

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: at byte {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class RecordDamaged(StoreError):
    """One stored entry no longer matches its checksum; it is never served."""

    kafka_code = 2

    def __init__(self, path: str, offset: int, reason: str, next_queue_offset: int = -1) -> None:
        super().__init__(f"{path}: at byte {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason
        self.next_queue_offset = next_queue_offset


class StoreReadOnly(StoreError):
    """Writing has stopped for good (a failed fsync, a closed store) until the store is opened
    anew.
    """

    rocketmq_code = 14  # SERVICE_NOT_AVAILABLE
    kafka_code = 56  # KAFKA_STORAGE_ERROR


class DiskFull(StoreError):
    """The disk has no room; writing goes on by itself when there is some again."""

    rocketmq_code = 14
    kafka_code = 56
    retriable = True


class MessageIllegal(StoreError):
    """The message breaks a limit (body, properties, topic) and can never be stored as it is."""

    rocketmq_code = 13  # MESSAGE_ILLEGAL
    kafka_code = 10  # MESSAGE_TOO_LARGE


class OffsetGone(StoreError):
    """The offset asked for is outside of what the queue holds; carries the next good one."""

    rocketmq_code = 21  # PULL_OFFSET_MOVED
    kafka_code = 1  # OFFSET_OUT_OF_RANGE


class ProtocolError(SluiceError):
    """Bytes from a peer break the protocol: nothing that follows them can be trusted."""

    kafka_code = 42  # INVALID_REQUEST
    closes_connection = True


class RequestInvalid(ProtocolError):
    """A whole frame, but a field or the body of the request is missing or malformed."""

    closes_connection = False


class TopicMissing(SluiceError):
    """The topic is not known here and may not be created by asking."""

    rocketmq_code = 17  # TOPIC_NOT_EXIST
    kafka_code = 3  # UNKNOWN_TOPIC_OR_PARTITION


class GroupMissing(SluiceError):
    """The consumer group is not known here and may not be created by asking."""

    rocketmq_code = 26  # SUBSCRIPTION_GROUP_NOT_EXIST
    kafka_code = 69  # GROUP_ID_NOT_FOUND


class NoPermission(SluiceError):
    """The broker, the topic or the group does not allow it."""

    rocketmq_code = 16  # NO_PERMISSION
    kafka_code = 29  # TOPIC_AUTHORIZATION_FAILED


class ParameterInvalid(SluiceError):
    """A value is outside of what exists here (a queue, a count)."""

    rocketmq_code = 29  # INVALID_PARAMETER
    kafka_code = 42  # INVALID_REQUEST


class IllegalOperation(SluiceError):
    """What is asked for makes no sense for what it is asked of (a message that is gone)."""

    rocketmq_code = 604  # ILLEGAL_OPERATION
    kafka_code = 42


class RequestLate(SluiceError):
    """A request came so late that who asked does not wait for its answer any more."""

    rocketmq_code = 210  # POLLING_TIMEOUT
    kafka_code = 7  # REQUEST_TIMED_OUT
    retriable = True


class NotInFlight(SluiceError):
    """A message that is acknowledged was never popped, or somebody else has it now."""

    rocketmq_code = 208  # NO_MESSAGE
    kafka_code = 42


class SubscriptionIllegal(SluiceError):
    """An expression cannot be understood, or is too large."""

    rocketmq_code = 23  # SUBSCRIPTION_PARSE_FAILED
    kafka_code = 42


class SubscriptionMissing(SluiceError):
    """The consumer's heartbeat has not told its subscription yet; it tries again by itself."""

    rocketmq_code = 24  # SUBSCRIPTION_NOT_EXIST
    kafka_code = 25  # UNKNOWN_MEMBER_ID
    retriable = True


class SubscriptionOld(SluiceError):
    """The consumer knows a newer subscription than the broker has heard of."""

    rocketmq_code = 25  # SUBSCRIPTION_NOT_LATEST
    kafka_code = 25
    retriable = True


class NotFound(SluiceError):
    """What is asked for does not exist; not a fault."""

    rocketmq_code = 22  # QUERY_NOT_FOUND
    kafka_code = 0


class ConsumerOffline(SluiceError):
    """Nobody of the group is connected."""

    rocketmq_code = 206  # CONSUMER_NOT_ONLINE
    kafka_code = 25


class Busy(SluiceError):
    """A bound is reached; the text names it. Trying again later helps."""

    rocketmq_code = 2  # SYSTEM_BUSY
    kafka_code = 89  # THROTTLING_QUOTA_EXCEEDED
    retriable = True


class Stopping(SluiceError):
    """The process is about to end: another broker, or this one later, may do it."""

    rocketmq_code = 14  # SERVICE_NOT_AVAILABLE
    kafka_code = 6  # NOT_LEADER_OR_FOLLOWER
    retriable = True


class LinkError(SluiceError):
    """A request over a connection to another process got no answer; it may have been done."""

    retriable = True
    kafka_code = 13  # NETWORK_EXCEPTION


class LinkLost(LinkError):
    """The connection could not be had, or ended before the answer came."""


class RequestTimedOut(LinkError):
    """The answer did not come in time; one that comes later is dropped."""

    kafka_code = 7  # REQUEST_TIMED_OUT


class LinkBusy(LinkError):
    """So many requests wait for their answers on one connection that it takes no further one."""


# ------------------------------------------------------------------------------ what a client meets


class NoNameserver(LinkLost):
    """No nameserver is known, or none of those that are known answers."""


class NoRoute(TopicMissing):
    """A topic is known, or could be made by sending, and no broker that can do it is."""


class MessageInvalid(SluiceError, TypeError):
    """A message, or what goes with it, is of a type or form that no broker takes."""

    rocketmq_code = 13  # MESSAGE_ILLEGAL


class MessageTooLarge(MessageIllegal):
    """A message is over the client's or the broker's limit."""


class BrokerRefused(SluiceError):
    """A broker answered with an error: its code and its own words."""

    def __init__(self, code: int, remark: str | None, what: str) -> None:
        super().__init__(f"{what}: {remark or 'no reason given'} (code {code})")
        self.code = code
        self.remark = remark or ""


class PartlyDone(SluiceError):
    """Some of several brokers or nameservers refused, or did not answer.

    `result` is what the method would have returned: its outcomes say who did what.
    """

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text)
        self.result = result


class SendFailed(SluiceError):
    """A message was not acknowledged by any broker that was tried; it may have been stored."""

    retriable = True


class NoReply(RequestTimedOut):
    """A request got no reply in time; whoever got it may have done what it asks for."""


class HandlerFailed(SluiceError):
    """A consumer's handler raised an error; the message comes again later."""


class HandlerHung(SluiceError):
    """A consumer's handler did not come back in time; the message comes again later."""


class PipelineFailed(SluiceError):
    """Spark, or a query of a pipeline, ended with an error; its checkpoint says how far it was."""


class ClientClosed(SluiceError):
    """The client was closed, or not started yet, or belongs to the process before a fork."""
