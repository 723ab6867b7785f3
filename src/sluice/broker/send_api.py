"""This module translates sends: from frames to the sending service, and its word back into answers.

This is the plain way, for sends of every form; the usual ones have a quicker one, `quick_sends.py`,
which gives the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.core import BrokerCore
from sluice.broker.placing import Placing
from sluice.broker.priorities import PRIORITY_NAME, routed
from sluice.broker.quick_sends import host_of
from sluice.broker.sending import Sending, unticketed
from sluice.broker.topics import RETRY_PREFIX
from sluice.errors import MessageIllegal, SluiceError
from sluice.model import Message, Placed, message_id
from sluice.net import Connection
from sluice.protocol import records
from sluice.protocol.message_batches import split_batch
from sluice.protocol.record_runs import Run
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_fast import (
    read_send,
    send_answer,
)

if TYPE_CHECKING:
    from sluice.broker.remoting_api import RemotingApi


class SendApi:
    """Sends of all connections of one broker."""

    def __init__(self, core: BrokerCore, api: RemotingApi) -> None:
        self._core = core
        self._api = api
        self.sending = Sending(core)
        self._placing = Placing(core, self.sending)
        self._store_host = core.store.encoder.store_host
        self._host_hex = self._store_host.hex().upper().encode()
        self._unique_count = 0

    def send(self, connection: Connection, command: RemotingCommand) -> None:
        request = read_send(command)
        if request.batch:
            self.send_batch(connection, command)
            return
        sending = self.sending
        settings = sending.topic_for(
            request.topic,
            request.default_topic,
            request.default_queue_count,
            of_unit=request.unit_mode,
        )
        queue_id = sending.queue_for(settings, request.queue_id)
        if not command.body:
            raise MessageIllegal(
                "the message is illegal, maybe msg body or properties length not matched. "
                "Its body is empty; send at least one byte"
            )
        properties = unticketed(request.properties.encode())
        if PRIORITY_NAME in properties:
            properties, queue_id = routed(properties, queue_id, settings.write_queues)
        keys = records.message_keys(properties)
        if not keys[0]:
            unique = self._new_unique_key()
            separator = b"" if not properties or properties[-1] == 2 else b"\x02"
            properties += separator + b"UNIQ_KEY\x01" + unique + b"\x02"
            keys = (unique, *keys[1:])
        message = Message(
            request.topic,
            queue_id,
            command.body,
            sending.completed(properties),
            request.flag,
            request.sys_flag,
            request.born_ms,
            host_of(connection),
            # Of any other topic it is nobody's word: a message there was not tried yet.
            request.reconsume_times if request.topic.startswith(RETRY_PREFIX) else 0,
        )
        if request.topic.startswith(RETRY_PREFIX) and not sending.is_half(message, settings):
            self._send_to_retry(connection, command, message, request.max_reconsume_times, keys[0])
            return

        def sent(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
                return
            assert placed is not None, "only what was placed is told of"
            if command.flag == 0:
                connection.send(
                    send_answer(
                        command.serialization,
                        command.opaque,
                        message_id(self._store_host, placed.position),
                        placed.queue_id,
                        placed.queue_offset,
                        placed.unique.decode("utf-8", "replace"),
                        placed.handle,
                    )
                )
            if self._core.polls.is_awaited and not placed.waits:
                self._arrived(message.topic, queue_id, keys[2])

        def again() -> None:
            self._api.guard(connection, command, lambda: self.send(connection, command))

        placed = self._placing.place(message, settings, keys, sent, again)

    def _send_to_retry(
        self,
        connection: Connection,
        command: RemotingCommand,
        message: Message,
        times_max: int | None,
        unique: bytes,
    ) -> None:
        """A consumer's own way to send a message back, and everybody else's to the same topic."""

        def stored(placed: Placed | None, error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
            elif placed is not None and not command.is_oneway:
                connection.send(
                    send_answer(
                        command.serialization,
                        command.opaque,
                        message_id(self._store_host, placed.position),
                        message.queue_id,
                        placed.queue_offset,
                        unique.decode("utf-8", "replace"),
                    )
                )

        self._core.retries.send(message, times_max, stored)
        self._core.ask_turn()

    def send_batch(self, connection: Connection, command: RemotingCommand) -> None:
        request = read_send(command)
        sending = self.sending
        topic, sys_flag, born_ms = request.topic, request.sys_flag, request.born_ms
        if topic.startswith(RETRY_PREFIX):
            raise MessageIllegal(f"batch request does not support retry group {topic}")
        settings = sending.topic_for(
            topic, request.default_topic, request.default_queue_count, of_unit=request.unit_mode
        )
        queue_id = sending.queue_for(settings, request.queue_id)
        parts = split_batch(command.body)
        host = host_of(connection)
        run = Run(topic, queue_id, sys_flag, born_ms, host, 0, parts)
        keys = [records.message_keys(properties) for _, _, properties in parts]

        def sent(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
                return
            assert placed is not None, "only what was placed is told of"
            if command.flag == 0:
                connection.send(
                    send_answer(
                        command.serialization,
                        command.opaque,
                        self._message_ids(placed.positions),
                        placed.queue_id,
                        placed.queue_offset,
                        placed.unique.decode("utf-8", "replace"),
                    )
                )
            if self._core.polls.is_awaited:
                for _, _, tag in keys:
                    self._arrived(topic, queue_id, tag)

        def again() -> None:
            self._api.guard(connection, command, lambda: self.send_batch(connection, command))

        placed = self._placing.place_run(run, settings, keys, sent, again)

    # ---------------------------------------------------------------------------------------- parts

    def _message_ids(self, positions: list[int]) -> str:
        """The ids of messages at these places, as an answer lists them."""
        one = self._host_hex.decode() + "%016X,"
        return (one * len(positions) % tuple(positions))[:-1]

    def _arrived(self, topic: str, queue_id: int, tag: bytes) -> None:
        """A message can be read now: whoever waits for it is asked again."""
        self._core.polls.arrived((topic, queue_id), records.java_hash(tag) if tag else 0)

    def _new_unique_key(self) -> bytes:
        """For messages of producers that give none: this store's address, time and a counter."""
        self._unique_count = (self._unique_count + 1) & 0xFFFFFFFF
        stamp = self._core.now_ms().to_bytes(8, "big") + self._unique_count.to_bytes(4, "big")
        return (self._store_host[:4] + stamp).hex().upper().encode()
