"""This module is the service behind every pull: who may read what, from where, and how long it
waits.

It takes plain values and gives back a `ReadResult`, at once or later: a pull that finds nothing may
be held until a message comes. Where an administrator has moved the group's offset, it gives back
an `OffsetReset` instead. It knows neither a wire nor a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from sluice.broker.core import BrokerCore
from sluice.broker.filters import Subscription, check_usable, parse
from sluice.broker.groups import BROADCASTING, GroupSettings
from sluice.broker.long_polling import HeldRead
from sluice.errors import (
    Busy,
    NoPermission,
    ParameterInvalid,
    SluiceError,
    SubscriptionMissing,
    SubscriptionOld,
    TopicMissing,
)
from sluice.model import PropertyFilter
from sluice.storage.store import ReadResult, ReadStatus

FLAG_COMMIT: Final = 1
FLAG_SUSPEND: Final = 2
FLAG_SUBSCRIPTION: Final = 4


class OffsetReset(NamedTuple):
    """The consumer is to go on somewhere else."""

    next_offset: int
    min_offset: int
    max_offset: int


Pulled = Callable[[ReadResult | OffsetReset | None, SluiceError | None], None]

# Nothing to read now, but later there may be: worth waiting for.
_WORTH_WAITING: Final = (ReadStatus.OFFSET_OVERFLOW_ONE, ReadStatus.NO_MESSAGE_IN_QUEUE)


@dataclass(slots=True)
class Pull:
    """What a consumer asks for."""

    group: str
    topic: str
    queue_id: int
    offset: int
    count_max: int
    flags: int
    commit_offset: int
    suspend_ms: int
    expression: str | None
    expression_kind: str | None
    subscription_version: int
    held: bool = False  # whether it waited for messages
    moved: bool = False  # whether some came meanwhile that it does not want


class Pulling:
    """Pulls of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def pull(self, pull: Pull, owner: object, done: Pulled) -> None:
        """Answer through `done`, now or later; raises what is wrong with the request."""
        core = self._core
        subscription = self._checked(pull)
        if pull.flags & FLAG_COMMIT and pull.commit_offset >= 0:
            core.offsets.commit(
                self._offset_name(pull), pull.topic, pull.queue_id, pull.commit_offset
            )
        until_ms = 0
        if pull.flags & FLAG_SUSPEND:
            wait_ms = pull.suspend_ms if core.config.long_polling else core.config.short_poll_ms
            until_ms = core.now_ms() + wait_ms
        self._read(pull, subscription, owner, done, until_ms)

    def _checked(self, pull: Pull, carried: Subscription | None = None) -> Subscription:
        """The checks in RocketMQ's order; returns what the consumer wants of the topic.

        `carried`: what an earlier check of the same pull returned. Its own words do not change.
        """
        core = self._core
        if core.config.permission == "w":
            raise NoPermission(
                f"the broker[{core.config.broker_name}] pulling message is forbidden"
            )
        group = core.groups.require(pull.group)
        if not group.consume_enabled:
            raise NoPermission(f"subscription group no permission, {pull.group}")
        settings = core.topics.get(pull.topic)
        if settings is None:
            raise TopicMissing(f"topic[{pull.topic}] not exist, apply first please!")
        if not settings.readable:
            raise NoPermission(f"the topic[{pull.topic}] pulling message is forbidden")
        if not 0 <= pull.queue_id < settings.read_queues:
            raise ParameterInvalid(
                f"queueId[{pull.queue_id}] is illegal, topic:[{pull.topic}] "
                f"topicConfig.readQueueNums:[{settings.read_queues}]"
            )
        if not pull.flags & FLAG_SUBSCRIPTION:
            subscription = self._heard_of(pull, group)
        elif carried is not None:
            subscription = carried
        else:
            subscription = parse(
                pull.topic, pull.expression, pull.expression_kind, pull.subscription_version
            )
        check_usable(subscription, sql_filter=core.config.sql_filter)
        return subscription

    def _heard_of(self, pull: Pull, group: GroupSettings) -> Subscription:
        """What the group's heartbeats said of the topic."""
        members = self._core.clients.consumers.get(pull.group)
        if members is None:
            raise SubscriptionMissing(
                "the consumer's group info not exist: no heartbeat of this group was heard yet"
            )
        if members.message_model == BROADCASTING and not group.broadcast_enabled:
            raise NoPermission(f"the consumer group[{pull.group}] can not consume by broadcast way")
        if not self._core.groups.may_read(pull.group, pull.topic):
            raise NoPermission(
                f"the consumer group[{pull.group}] is forbidden for topic[{pull.topic}]"
            )
        subscription = members.subscriptions.get(pull.topic)
        if subscription is None:
            raise SubscriptionMissing("the consumer's subscription not exist")
        if subscription.version < pull.subscription_version:
            raise SubscriptionOld("the consumer's subscription not latest")
        return subscription

    def _offset_name(self, pull: Pull) -> str:
        """The offsets of a broadcasting group are kept apart, as RocketMQ does."""
        members = self._core.clients.consumers.get(pull.group)
        if members is not None and members.message_model == BROADCASTING:
            return f"{pull.group}@broadcast"
        return pull.group

    def _read(
        self, pull: Pull, subscription: Subscription, owner: object, done: Pulled, until_ms: int
    ) -> None:
        """Read, and where there is nothing yet wait up to a time; 0 = do not wait."""
        core = self._core
        reset = core.offsets.take_reset(pull.group, pull.topic, pull.queue_id)
        if reset is not None:
            self._tell_reset(pull, reset, done)
            return
        accept = subscription.accept
        watch = core.expiry.watch(pull.topic)
        count_max = min(pull.count_max, core.config.pull_count_max)
        bytes_max = core.config.pull_bytes_max

        def ask() -> ReadResult:
            return core.unfolding.reader(pull.topic, pull.queue_id)(
                pull.topic,
                pull.queue_id,
                pull.offset,
                count_max=max(1, count_max),
                bytes_max=bytes_max,
                accept=accept if watch is None else watch.test(accept),
            )

        def answered(result: ReadResult | None, error: BaseException | None) -> None:
            if result is None:
                assert error is not None, "a read gives a result or an error"
                done(None, error if isinstance(error, SluiceError) else SluiceError(str(error)))
                return
            if watch is not None:
                watch.done()
            if result.status is ReadStatus.NO_MATCHED_LOGIC_QUEUE:
                result = _empty_queue(pull.offset)
            is_unwanted = pull.held and _is_at_end_unmatched(result)
            if is_unwanted:
                # It was woken by messages that it does not want: it waits on from behind them.
                pull.offset = result.next_offset
                pull.moved = True
            if (
                until_ms
                and (is_unwanted or result.status in _WORTH_WAITING)
                and self._hold(pull, subscription, owner, done, until_ms)
            ):
                return
            if pull.moved and result.status is ReadStatus.OFFSET_OVERFLOW_ONE:
                result.status = ReadStatus.NO_MATCHED_MESSAGE
            core.offsets.pulled(pull.group, pull.topic, pull.queue_id, result.next_offset)
            if result.count:
                core.stats.handed_out(pull.topic, pull.group, result.count, result.byte_count)
            else:
                core.stats.get_miss += 1
            done(result, None)

        core.store.call(ask, answered)

    def _tell_reset(self, pull: Pull, offset: int, done: Pulled) -> None:
        store, topic, queue_id = self._core.store, pull.topic, pull.queue_id

        def answered(high: int | None, error: BaseException | None) -> None:
            # The reset is what counts: a bound that cannot be read must not lose it.
            done(OffsetReset(offset, store.min_offset(topic, queue_id), high or offset), None)

        store.call(lambda: store.max_offset(topic, queue_id), answered)

    def _hold(
        self, pull: Pull, subscription: Subscription, owner: object, done: Pulled, until_ms: int
    ) -> bool:
        """Keep the pull until something comes; who is woken for nothing waits no longer for it.

        False where it is to be answered as it is.
        """

        def resume(timed_out: bool) -> None:
            pull.held = True
            try:
                # Group, topic and subscription may have changed since it began to wait.
                wanted = self._checked(pull, subscription)
            except SluiceError as error:
                done(None, error)
                return
            self._read(pull, wanted, owner, done, 0 if timed_out else until_ms)

        def resume_soon(timed_out: bool) -> None:
            # Which messages an SQL filter wants is known when they are read: all of a turn at once.
            if timed_out:
                resume(timed_out)
            else:
                core.call_soon(lambda: resume(timed_out))

        core, wants = self._core, subscription.accept
        queue = (pull.topic, pull.queue_id)
        if isinstance(wants, PropertyFilter):
            read = HeldRead(queue, until_ms, None, resume_soon, owner)
        else:
            read = HeldRead(queue, until_ms, wants, resume, owner)
        try:
            return self._core.polls.hold(read)
        except Busy as error:
            done(None, error)
            return True


def _is_at_end_unmatched(result: ReadResult) -> bool:
    """Whether everything was read and nothing of it is wanted."""
    return (
        result.status is ReadStatus.NO_MATCHED_MESSAGE and result.next_offset >= result.max_offset
    )


def _empty_queue(offset: int) -> ReadResult:
    """A queue that nobody has written to: only offset 0 makes sense."""
    status = ReadStatus.NO_MESSAGE_IN_QUEUE if offset == 0 else ReadStatus.OFFSET_OVERFLOW_BADLY
    return ReadResult(status, 0, 0, 0)


__all__ = ["Pull", "Pulling", "ReadResult", "ReadStatus"]
