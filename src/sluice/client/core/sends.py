"""This module decides where a send goes, and whether and where it goes again.

A send that was not acknowledged goes to another broker where there is one; to the same one after a
moment where there is none. A message that has to stay in order, or that the caller gave a queue,
is tried once: a second copy behind its successor would be worse than an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sluice.client.core.faults import FaultTable
from sluice.client.core.messages import Message
from sluice.client.core.refusals import is_worth_another_try
from sluice.client.core.routes import Publishing
from sluice.client.core.selectors import Selector, hash_selector
from sluice.errors import (
    LinkError,
    MessageInvalid,
    MessageTooLarge,
    NoNameserver,
    NoPermission,
    SendFailed,
    SluiceError,
    TopicMissing,
)
from sluice.protocol.json_members import MessageQueue

PROPERTIES_BYTES_MAX: Final = 32767
_PAUSE_MS: Final = 50
_PAUSE_MS_MAX: Final = 1_000


def check_size(message: Message, properties_bytes: int, bytes_max: int) -> None:
    """Refuse what is too large before it goes anywhere."""
    if len(message.body) > bytes_max:
        raise MessageTooLarge(
            f"a body of {len(message.body)} bytes is over {bytes_max} (message_bytes_max); "
            "send it in parts, or raise the limit here and at the broker"
        )
    if properties_bytes > PROPERTIES_BYTES_MAX:
        raise MessageTooLarge(
            f"properties of {properties_bytes} bytes are over {PROPERTIES_BYTES_MAX}; "
            "put large values into the body"
        )


def check_batch_size(size_bytes: int, bytes_max: int) -> None:
    """Refuse a batch that no broker would take."""
    if size_bytes > bytes_max:
        raise MessageTooLarge(
            f"a batch of {size_bytes} bytes is over {bytes_max} (message_bytes_max); "
            "send it in parts"
        )


def batch_of(messages: Iterable[Message]) -> list[Message]:
    """Messages that may go together in one request."""
    try:
        batch = list(messages)
    except TypeError:
        batch = []
    if not batch or any(type(message) is not Message for message in batch):
        raise MessageInvalid("a batch is a list of messages that is not empty")
    topic = batch[0].topic
    for message in batch:
        if message.topic != topic:
            raise MessageInvalid(f"a batch has one topic, not {topic} and {message.topic}")
        if not message.is_plain:
            raise MessageInvalid("delayed and transactional messages go alone, in no batch")
    return batch


def batch_key(batch: Sequence[Message]) -> Message | None:
    """A message whose sharding key says where a batch goes; None where none has a key."""
    keyed: Message | None = None
    for message in batch:
        if not message.sharding_key:
            continue
        if keyed is not None and keyed.sharding_key != message.sharding_key:
            raise MessageInvalid(
                f"a batch goes to one queue, and the sharding keys {keyed.sharding_key!r} and "
                f"{message.sharding_key!r} may have two; send a batch for each key"
            )
        keyed = message
    return keyed


def choose_queue(
    publishing: Publishing, faults: FaultTable, avoided: str, now_ms: float
) -> MessageQueue:
    """The next queue whose broker answers well, and is not the one that just failed."""
    queue = publishing.turn()
    if publishing.broker_count == 1 or (faults.is_empty and queue.broker_name != avoided):
        return queue
    for _ in range(len(publishing.queues)):
        if queue.broker_name != avoided and faults.is_available(queue.broker_name, now_ms):
            return queue
        queue = publishing.turn()
    others = [name for name in publishing.addresses if name != avoided] or [avoided]
    wanted = faults.least_bad(others)
    while queue.broker_name != wanted:
        queue = publishing.turn()
    return queue


def check_queue(queue: MessageQueue | None, topic: str) -> None:
    """Refuse what is no queue of a topic."""
    if queue is None:
        return
    if not isinstance(queue, MessageQueue):
        raise MessageInvalid(f"{queue!r} is no queue; take one of `producer.queues(topic)`")
    if queue.topic != topic:
        raise MessageInvalid(f"{queue} is no queue of topic {topic}, where the message goes")


def fixed_queue(
    message: Message,
    queues: Sequence[MessageQueue],
    queue: MessageQueue | None,
    selector: Selector | None,
    argument: Any,
) -> MessageQueue | None:
    """The queue that a message has to go to; None where any will do."""
    if queue is not None:
        check_queue(queue, message.topic)
        return queue
    if selector is None:
        return hash_selector(queues, message, None) if message.sharding_key else None
    try:
        chosen = selector(queues, message, argument)
    except SluiceError:
        raise
    except Exception as error:
        raise MessageInvalid(f"the selector raised {error!r}; it has to return a queue") from error
    if not isinstance(chosen, MessageQueue):
        raise MessageInvalid(f"the selector returned {chosen!r}, which is no queue")
    check_queue(chosen, message.topic)
    return chosen


class Tries:
    """How often a send was tried, and what is left to do when it failed."""

    __slots__ = ("_may_be_stored", "_tries_max", "avoided", "count")

    def __init__(self, tries_max: int) -> None:
        self._tries_max = tries_max
        self._may_be_stored = False
        self.count = 1
        self.avoided = ""

    def pause_ms(
        self, error: SluiceError, broker: str, broker_count: int, left_ms: float
    ) -> float | None:
        """After how long to try again; None where it is over."""
        if isinstance(error, LinkError):
            self._may_be_stored = True
        if self.count >= self._tries_max or not is_worth_another_try(error) or left_ms <= 0:
            return None
        pause = 0.0 if broker_count > 1 else min(_PAUSE_MS << self.count, _PAUSE_MS_MAX)
        if pause >= left_ms:
            return None
        self.count += 1
        self.avoided = broker
        return pause

    def verdict(self, error: SluiceError, topic: str) -> SluiceError:
        """What the caller learns."""
        if not is_worth_another_try(error) or isinstance(error, NoNameserver):
            return error  # it says all there is to say
        if isinstance(error, NoPermission | TopicMissing) and not self._may_be_stored:
            return error  # every broker said no: there is no copy, and somebody has to allow it
        times = "once" if self.count == 1 else f"{self.count} times"
        failure = SendFailed(
            f"sending to {topic} failed, tried {times}, at last: {error}; where no answer came it "
            "may be stored: send it again if a second copy does no harm"
        )
        failure.__cause__ = error
        return failure
