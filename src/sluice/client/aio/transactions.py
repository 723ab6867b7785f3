"""This module sends transactional messages: a half message, local work, commit or rollback.

    send_transaction: half message --> executor(message) --> commit | rollback | unknown
    begin:            half message --> whatever the caller does --> commit() | rollback()

A half message that nobody ended is asked for by its broker: `checker(message)` says what became of
the local work, on this producer or another one of the same group. Both are plain functions (they
get a thread) or coroutine functions.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sluice.client.aio.observers import EndedTransaction, Observer
from sluice.client.aio.requests import Producer
from sluice.client.core.messages import Message, ReceivedMessage, SendResult, read_pulled
from sluice.client.core.transactions import HalfPlace, TransactionState, place_of, state_of
from sluice.errors import ConfigError, MessageInvalid, SluiceError
from sluice.link import RemotingLink
from sluice.protocol import records
from sluice.protocol.client_frames import SEND
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request

log_lines = logging.getLogger("sluice.client")

Checker = Callable[[ReceivedMessage], Any]
Executor = Callable[[Message], Any]


async def call_either(function: Callable[..., Any], *arguments: Any) -> Any:
    """Await a coroutine function; run a plain one on a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


class Transaction:
    """One open half message. It is ended once; who does not end it leaves that to the checker."""

    def __init__(self, producer: TransactionProducer, message: Message, sent: SendResult) -> None:
        self._producer = producer
        self.message = message
        self.result = sent
        self.state: TransactionState | None = None

    @property
    def message_id(self) -> str:
        return self.result.message_id

    @property
    def transaction_id(self) -> str:
        return self.result.transaction_id or self.result.message_id

    async def commit(self) -> None:
        await self.end(TransactionState.COMMIT)

    async def rollback(self) -> None:
        await self.end(TransactionState.ROLLBACK)

    async def give_up(self) -> None:
        """Roll back after an error, which counts more than that the broker does not hear of it: it
        asks the checker later.
        """
        if self.state is None:
            await self.settle(TransactionState.ROLLBACK)

    async def settle(self, state: TransactionState) -> None:
        """End it after the local work is over. That nobody hears of it changes nothing: the broker
        asks the checker, which says the same.
        """
        try:
            await self.end(state)
        except SluiceError as error:
            text = "the %s of %s was not told, its broker asks for it: %s"
            log_lines.warning(text, state.name.lower(), self.message_id, error)

    async def end(self, state: TransactionState) -> None:
        """Tell the broker; where it does not hear it, it asks the checker later."""
        if self.state is not None:
            raise MessageInvalid(f"the transaction was ended already ({self.state.name})")
        self.state = state
        sent = self.result
        place = place_of(sent.offset_id, sent.queue_offset)
        await self._producer.end(
            *(sent.queue.broker_name, self.message.topic, sent.message_id, self.transaction_id),
            *(place, state),
        )


class TransactionProducer(Producer):
    """A producer of transactional messages; of all others as well."""

    def __init__(
        self,
        nameservers: str | Iterable[str] | None = None,
        *,
        checker: Checker,
        properties: Mapping[str, str] | None = None,
        observers: Sequence[Observer] = (),
        **options: Any,
    ) -> None:
        super().__init__(nameservers, properties=properties, observers=observers, **options)
        if not callable(checker):
            raise ConfigError("checker: a function that says what became of a transaction")
        self._checker = checker
        self.session.requests[Request.CHECK_TRANSACTION_STATE] = self._asked

    async def start(self) -> None:
        await super().start()
        self.session.spawn(self._meet_brokers())
        self.session.repeat(self.settings.route_ms / 1000, self._meet_brokers)

    async def _meet_brokers(self) -> None:
        """A broker that keeps an open half message of this group asks whoever it knows of it, and
        that may be one who was started after a crash and has not sent anything yet.
        """
        try:
            await self.session.learn_brokers()
        except SluiceError as error:
            log_lines.warning("%s: brokers cannot ask this producer yet: %s", self.client_id, error)
            return
        await self.session.greet_new()

    async def begin(self, message: Message) -> Transaction:
        """Send the half message; it is not delivered before it is committed."""
        if type(message) is not Message:
            raise MessageInvalid(f"a transaction takes a Message, not {type(message).__name__}")
        if not message.is_plain:
            raise MessageInvalid("a transactional message cannot be delayed")
        half = message.with_extra(TRAN_MSG="true", PGROUP=self.settings.group)
        # The broker asks for it over this connection's group, so it has to know of the producer.
        await self.publishing(message.topic)
        await self.session.greet_new()
        result = await self.send_as(half, SEND, sys_flag=records.SYS_TX_PREPARED)
        return Transaction(self, message, result)

    async def send_transaction(
        self, message: Message, executor: Executor
    ) -> tuple[SendResult, TransactionState]:
        """Send the half message, do the local work, end it by what the executor returns.

        An executor that raises rolls back, and its error is raised.
        """
        transaction = await self.begin(message)
        try:
            state = state_of(await call_either(executor, message))
        except BaseException:
            await transaction.give_up()
            raise
        await transaction.settle(state)
        return transaction.result, state

    @asynccontextmanager
    async def transaction(self, message: Message) -> AsyncIterator[Transaction]:
        """Commit the message when the block ends in order, roll it back when it raises.

        What the block has decided itself stays so.
        """
        open_one = await self.begin(message)
        try:
            yield open_one
        except BaseException:
            await open_one.give_up()
            raise
        if open_one.state is None:
            await open_one.commit()

    async def end(
        self,
        broker_name: str,
        topic: str,
        message_id: str,
        transaction_id: str,
        place: HalfPlace,
        state: TransactionState,
        *,
        from_check: bool = False,
        asked_over: RemotingLink | None = None,
    ) -> None:
        """Tell a broker how a transaction ended. One-way, as RocketMQ has it.

        `asked_over`: the connection over which the broker asks for it, which is the way back.
        """
        ext = {
            "topic": topic,
            "producerGroup": self.settings.group,
            "tranStateTableOffset": str(place.queue_offset),
            "commitLogOffset": str(place.position),
            "commitOrRollback": str(state.value),
            "fromTransactionCheck": "true" if from_check else "false",
            "msgId": message_id,
            "transactionId": transaction_id,
            "bname": broker_name,
        }
        if asked_over is not None and asked_over.is_open:
            asked_over.oneway(Request.END_TRANSACTION, ext)
        else:
            address = await self.session.address_of(broker_name, topic)
            link = await self.session.link(address)
            link.oneway(Request.END_TRANSACTION, ext)
        told = EndedTransaction(topic, message_id, transaction_id, broker_name)
        for observer in self._observers:
            observer.ended(told, state, from_check=from_check)

    # ------------------------------------------------------------------------------------ checks

    def _asked(self, link: RemotingLink, command: RemotingCommand) -> None:
        self.session.spawn(self._check(link, command))

    async def _check(self, link: RemotingLink, command: RemotingCommand) -> None:
        ext = command.ext
        queue = MessageQueue(ext.get("topic", ""), ext.get("bname", ""), 0)
        try:
            message = read_pulled(command.body, queue)[0]
            place = HalfPlace(int(ext["tranStateTableOffset"]), int(ext["commitLogOffset"]))
        except (SluiceError, IndexError, KeyError, ValueError) as error:
            log_lines.error("a broker asks for a transaction that cannot be read: %s", error)
            return
        real = records.property_value(message.wire_properties, b"REAL_TOPIC")
        topic = real.decode("utf-8", "replace") if real else queue.topic
        message.queue = queue._replace(topic=topic)
        try:
            state = state_of(await call_either(self._checker, message))
        except Exception as error:  # the broker asks again
            log_lines.warning("the checker failed with %s: %r", message, error)
            state = TransactionState.UNKNOWN
        message_id = message.message_id
        transaction_id = ext.get("transactionId") or message_id
        try:
            await self.end(
                *(queue.broker_name, topic, message_id, transaction_id, place, state),
                from_check=True,
                asked_over=link,
            )
        except SluiceError as error:
            text = "what became of %s was not told, its broker asks again: %s"
            log_lines.warning(text, message_id, error)
