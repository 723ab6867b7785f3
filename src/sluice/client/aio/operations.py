"""This module is one send, from the call to its result: `Operation`.

It takes a queue, goes out over the queue's connection, and gets its answer there. What happens
next is its producer's decision. A thread that waits for its own send anyway may send it itself
(`direct_send`); whatever is unusual about it comes back to the event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.client.core.ids import KeyRange
from sluice.client.core.messages import Message
from sluice.client.core.sends import Tries, check_size
from sluice.clock import wall_ms
from sluice.errors import ClientClosed, SendFailed, SluiceError
from sluice.link import ANSWER_HEADER_BYTES_MAX
from sluice.model import Buffer
from sluice.protocol import remoting
from sluice.protocol.client_frames import SEND, SendTemplate, SentFields
from sluice.protocol.framing import Frame
from sluice.protocol.json_members import MessageQueue

if TYPE_CHECKING:
    from sluice.client.aio.producer import Sender


class Operation:
    """One send."""

    __slots__ = (
        *("body", "born_ms", "code", "deadline", "fixed", "future", "keys", "message", "producer"),
        *("properties", "queue", "started", "sys_flag", "topic", "tries"),
    )

    def __init__(
        self,
        producer: Sender,
        future: Any,
        code: int,
        deadline: float,
        born_ms: int,
        topic: str,
        body: Buffer,
        properties: bytes,
    ) -> None:
        self.producer = producer
        self.future = future
        self.code = code
        self.deadline = deadline
        self.born_ms = born_ms
        self.topic = topic
        self.body = body
        self.properties = properties
        self.message: Message | None = None
        self.keys: KeyRange | None = None  # of a batch
        self.sys_flag = 0
        self.queue: MessageQueue | None = None
        self.fixed: MessageQueue | None = None
        self.tries: Tries | None = None
        self.started = 0.0

    def succeeded(self, frame: Frame, now: float) -> None:
        self.producer._succeeded(self, frame, now)

    def answered(self, code: int, fields: SentFields, remark: str | None) -> None:
        self.producer._answered(self, code, fields, remark)

    def failed(self, error: SluiceError) -> None:
        self.producer._failed(self, error)

    def prepared(self, task: asyncio.Task[Any]) -> None:
        """The task that was to bring what it needs has ended: where it did not get through, neither
        does the send, and whoever waits for it learns so.
        """
        error: SluiceError
        if task.cancelled():
            error = ClientClosed(
                f"closed before a message to {self.topic} went out; it is not stored"
            )
        elif (failure := task.exception()) is not None:
            error = SendFailed(f"a message to {self.topic} did not go out: {failure!r}")
            error.__cause__ = failure
        else:
            return
        self.producer._over(self, error)

    def came_back(self, error: SluiceError) -> None:
        """Somebody else sent it, and it failed: from now on it is its producer's."""
        self.producer._open_operations += 1
        self.failed(error)

    def came_back_answered(self, frame: Frame) -> None:
        """Somebody else sent it, and the answer is not the usual one."""
        self.producer._open_operations += 1
        command = remoting.decode(frame, ANSWER_HEADER_BYTES_MAX)
        self.answered(command.code, SentFields(None, command.ext), command.remark)


class Direct(NamedTuple):
    """A send that is ready to go out, and where to."""

    sender: Sender
    message: Message
    queue: MessageQueue
    template: SendTemplate
    address: str
    born_ms: int
    properties: bytes
    started: float
    seconds: float

    def operation(self, future: Any) -> Operation:
        """The same as an operation of the event loop's."""
        deadline = self.started + self.seconds
        topic, body = self.message.topic, self.message.body
        operation = Operation(
            *(self.sender, future, SEND, deadline, self.born_ms, topic, body, self.properties)
        )
        operation.message = self.message
        operation.queue = self.queue
        operation.started = self.started
        return operation


def direct_send(sender: Sender, message: Message, timeout_ms: int) -> Direct | None:
    """A plain send to a broker that is known; None where the event loop has to do something first.

    For any thread. Nothing of the sender is changed by it but counters that bear it.
    """
    publishing = sender._topics.get(message.topic)
    if (
        publishing is None
        or not sender.session.is_open
        or not sender.takes_direct
        or message.sharding_key
        or message.flag
        or len(message.body) >= sender._pack_bytes_min
        or not sender._faults.is_empty
    ):
        return None
    queue = publishing.turn()
    template = sender._templates.get((queue, SEND, 0)) or sender._template(queue, SEND, 0)
    now_ms = wall_ms()
    properties = sender._keys.mark(now_ms) + message.wire_tail()
    check_size(message, len(properties), sender._body_bytes_max)
    return Direct(
        sender,
        message,
        queue,
        template,
        publishing.addresses[queue.broker_name],
        now_ms,
        properties,
        time.monotonic(),
        timeout_ms / 1000 if timeout_ms else sender._send_seconds,
    )
