"""This module translates sends: from frames to the sending service, and its word back into answers.

Sends are what a broker does most, so a frame of the usual form takes a way of its own (`quick`):
its parts are used as the bytes they are and no command is made. Everything else about it is the
same as on the plain way, and whatever is unusual goes there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.broker.core import BrokerCore
from sluice.broker.sending import Sending
from sluice.broker.topics import RETRY_PREFIX
from sluice.errors import ParameterInvalid, SluiceError
from sluice.model import Message, message_id
from sluice.net import Connection
from sluice.protocol import records, remoting
from sluice.protocol.framing import Frame
from sluice.protocol.message_batches import split_batch
from sluice.protocol.record_runs import Run
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_fast import (
    QUICK_BYTES_MIN,
    quick_send,
    quick_send_answer,
    read_send,
    send_answer,
)

if TYPE_CHECKING:
    from sluice.broker.remoting_api import RemotingApi

_QUICK_CODE: Final = b"\x016"  # 310, as a binary header begins
_UNIQUE_BYTES_MAX: Final = 127  # of a key that fits into a quick answer


class SendApi:
    """Sends of all connections of one broker."""

    def __init__(self, core: BrokerCore, api: RemotingApi) -> None:
        self._core = core
        self._api = api
        self._sending = Sending(core)
        self._store_host = core.store.encoder.store_host
        self._host_hex = self._store_host.hex().upper().encode()
        self._unique_count = 0

    # -------------------------------------------------------------------------------- the usual one

    def quick(self, connection: Connection, frame: Frame) -> bool:
        """Serve a frame if it is a send of the usual form; False: it is served the plain way."""
        if frame[4:6] != _QUICK_CODE or len(frame) < QUICK_BYTES_MIN or type(frame) is not bytes:
            return False
        request = quick_send(frame)
        if request is None or request[1]:
            return False
        opaque, _, head, born_ms, properties, reconsume_times, body = request
        keys = records.message_keys(properties)
        unique = keys[0]
        if not 0 < len(unique) <= _UNIQUE_BYTES_MAX:
            return False
        api = self._api
        topic, default_topic, default_queue_count, queue_id, sys_flag = head

        def sent(error: SluiceError | None) -> None:
            if error is not None:
                api.failed(connection, remoting.decode(frame), error)
                return
            connection.send(
                quick_send_answer(opaque, self._host_hex, placed[0], queue_id, placed[2], unique)
            )
            if self._core.polls.held_count:
                self._arrived(topic, queue_id, keys[2])

        try:
            sending = self._sending
            settings = sending.topic_for(topic, default_topic, default_queue_count)
            if not sending.is_plain(settings, sys_flag, properties):
                return False
            message = Message(
                topic,
                sending.queue_for(settings, queue_id),
                body,
                sending.completed(properties),
                0,
                sys_flag,
                born_ms,
                self._host_of(connection),
                reconsume_times,
            )
            placed = sending.send(message, keys, sent)
        except Exception as error:
            api.failed(connection, remoting.decode(frame), error)
        return True

    # ----------------------------------------------------------------------------------- the others

    def send(self, connection: Connection, command: RemotingCommand) -> None:
        request = read_send(command)
        sending = self._sending
        settings = sending.topic_for(
            request.topic, request.default_topic, request.default_queue_count
        )
        queue_id = sending.queue_for(settings, request.queue_id)
        properties = request.properties.encode()
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
            self._host_of(connection),
            request.reconsume_times,
        )

        def sent(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
                return
            if command.flag == 0:
                connection.send(
                    send_answer(
                        command.serialization,
                        command.opaque,
                        message_id(self._store_host, placed.position),
                        queue_id,
                        placed.queue_offset,
                        keys[0].decode("utf-8", "replace"),
                    )
                )
            if self._core.polls.held_count:
                self._arrived(message.topic, queue_id, keys[2])

        placed = sending.send(sending.stored_form(message, settings), keys, sent)

    def send_batch(self, connection: Connection, command: RemotingCommand) -> None:
        request = read_send(command)
        sending = self._sending
        topic, sys_flag, born_ms = request.topic, request.sys_flag, request.born_ms
        if topic.startswith(RETRY_PREFIX):
            raise ParameterInvalid(f"batch request does not support retry topic {topic}")
        settings = sending.topic_for(topic, request.default_topic, request.default_queue_count)
        queue_id = sending.queue_for(settings, request.queue_id)
        parts = split_batch(command.body)
        host = self._host_of(connection)
        run = Run(topic, queue_id, sys_flag, born_ms, host, request.reconsume_times, parts)
        keys = [records.message_keys(properties) for _, _, properties in parts]

        def sent(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
                return
            if command.flag == 0:
                connection.send(
                    send_answer(
                        command.serialization,
                        command.opaque,
                        self._message_ids(placed.positions),
                        queue_id,
                        placed.queue_offset,
                        keys[0][0].decode("utf-8", "replace"),
                    )
                )
            if self._core.polls.held_count:
                for _, _, tag in keys:
                    self._arrived(topic, queue_id, tag)

        placed = sending.send_run(run, keys, sent)

    # ---------------------------------------------------------------------------------------- parts

    def _message_ids(self, positions: list[int]) -> str:
        """The ids of messages at these places, as an answer lists them."""
        one = self._host_hex.decode() + "%016X,"
        return (one * len(positions) % tuple(positions))[:-1]

    def _arrived(self, topic: str, queue_id: int, tag: bytes) -> None:
        """A message can be read now: whoever waits for it is asked again."""
        self._core.polls.arrived((topic, queue_id), records.java_hash(tag) if tag else 0)

    @staticmethod
    def _host_of(connection: Connection) -> bytes:
        host = connection.attributes.get("host")
        if type(host) is not bytes:
            host = connection.attributes["host"] = connection.packed_peer()
        return host

    def _new_unique_key(self) -> bytes:
        """For messages of producers that give none: this store's address, time and a counter."""
        self._unique_count = (self._unique_count + 1) & 0xFFFFFFFF
        stamp = self._core.now_ms().to_bytes(8, "big") + self._unique_count.to_bytes(4, "big")
        return (self._store_host[:4] + stamp).hex().upper().encode()
