"""This module is what all parts of the admin door share: fields in, answers out, now or later.

Each part has the handlers of some request codes and registers them with the door. Like
`remoting_api` they translate and do not decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from sluice.broker import filters
from sluice.broker.browsing import ask_each
from sluice.broker.core import BrokerCore
from sluice.broker.groups import Client
from sluice.broker.remoting_api import Handle, RemotingApi
from sluice.errors import SluiceError
from sluice.net import Connection
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import DataVersion
from sluice.protocol.remoting_clients import Subscription
from sluice.protocol.remoting_schemas import REQUESTS, parse_fields

T = TypeVar("T")

log_lines = logging.getLogger("sluice.admin")


class AdminPart:
    """Some of the admin requests of one broker."""

    def __init__(self, api: RemotingApi, core: BrokerCore) -> None:
        self._api = api
        self._core = core
        self._answer = api.answer

    def handlers(self) -> dict[int, Handle]:
        """The handlers of this part, by request code."""
        raise NotImplementedError

    @staticmethod
    def _fields(command: RemotingCommand) -> dict[str, Any]:
        return parse_fields(REQUESTS[command.code], command.ext)

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._core.config.broker_name, queue_id)

    def _ask_each(
        self,
        connection: Connection,
        command: RemotingCommand,
        asks: Iterable[Callable[[], T]],
        to_body: Callable[[list[T]], bytes],
    ) -> None:
        """Answer with what the store says to all of these; the disk may have to be read first."""

        def done(answers: list[T] | None, error: BaseException | None) -> None:
            if answers is None:
                self._api.refuse(connection, command, as_error(error))
            else:
                self._api.guard(
                    connection,
                    command,
                    lambda: self._answer(connection, command, body=to_body(answers)),
                )

        ask_each(self._core, asks, done)

    def _when_durable(
        self, connection: Connection, command: RemotingCommand, *, routes: bool = False
    ) -> Callable[[SluiceError | None], None]:
        """A callback that answers: done, and known to the nameservers where `routes` change."""

        def done(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
            elif routes:
                self._api.when_registered(partial(self._answer, connection, command))
            else:
                self._answer(connection, command)

        return done


def as_error(error: BaseException | None) -> SluiceError:
    """Whatever a background job raised, as something that can be answered."""
    return error if isinstance(error, SluiceError) else SluiceError(str(error))


def client_channel(client: Client) -> Connection:
    """The connection that a client speaks over."""
    assert isinstance(client.channel, Connection), "clients of this door come over connections"
    return client.channel


def version_of(table: dict[str, int]) -> DataVersion:
    return DataVersion(table["counter"], table["stateVersion"], table["timestamp"])


def wire_subscription(wanted: filters.Subscription) -> Subscription:
    """A subscription as the wire has it."""
    return Subscription(
        wanted.topic,
        wanted.expression,
        wanted.version,
        wanted.tags,
        tuple(sorted(wanted.codes)),
        wanted.kind,
    )


def page(
    names: list[str], first: int | None, count: int | None, same_version: bool, size_max: int
) -> list[str]:
    """One page of a sorted table; it begins anew where the table changed since the last page."""
    if first is None and count is None:
        return names
    begin = max(0, first or 0)
    if not same_version:
        begin = 0
    return names[begin : begin + min(size_max, size_max if count is None else max(0, count))]
