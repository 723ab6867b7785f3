"""This module translates what producers and administrators say about half messages, and asks.

A question goes to a producer over its own connection and wants no answer: what the producer knows
comes as the end of the transaction. It names the half message by the place where it was first
stored, so that one word fits the producer's send and every question about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Final

from sluice.broker.admin_base import AdminPart, as_error, client_channel, log_lines
from sluice.broker.browsing import ask_each
from sluice.broker.core import BrokerCore
from sluice.broker.groups import Client
from sluice.broker.half_messages import Ending, Half, asked_form
from sluice.broker.remoting_api import Handle, RemotingApi
from sluice.broker.topics import HALF_TOPIC
from sluice.errors import RequestInvalid
from sluice.model import message_id
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_schemas import ext_of
from sluice.protocol.remoting_transactions import OpenHalf, write_open_halves

LISTED_MAX: Final = 256
_NUMBERS: Final = ("tranStateTableOffset", "commitLogOffset", "commitOrRollback")
_PLAIN: Final = re.compile(r"[0-9]{1,18}")
# Address and port of a store, then a position in its log: IPv4 or IPv6, in hex.
_MESSAGE_ID: Final = re.compile(r"(?:[0-9a-fA-F]{16}|[0-9a-fA-F]{40})([0-9a-fA-F]{16})")


class TransactionApi(AdminPart):
    """Transactions of one broker."""

    def __init__(self, api: RemotingApi, core: BrokerCore) -> None:
        super().__init__(api, core)
        self._store_host = core.store.encoder.store_host
        core.transactions.ask = self._ask

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.END_TRANSACTION: self._end,
            Request.RESUME_CHECK_HALF_MESSAGE: self._resume,
            Request.SLUICE_LIST_TRANSACTIONS: self._list,
        }

    def _end(self, connection: Connection, command: RemotingCommand) -> None:
        ext = command.ext
        texts = [ext.get(name, "") for name in _NUMBERS]
        if "producerGroup" in ext and "msgId" in ext and all(map(_PLAIN.fullmatch, texts)):
            group = ext["producerGroup"]
            offset, position, verdict = map(int, texts)
            from_check = ext.get("fromTransactionCheck", "").lower() == "true"
        else:
            fields = self._fields(command)  # it knows what is wrong, or unusual
            group = fields["producerGroup"]
            offset, position, verdict = (fields[name] for name in _NUMBERS)
            from_check = bool(fields["fromTransactionCheck"])
        ending = Ending(group, offset, position, verdict, from_check)
        self._core.transactions.end(ending, self._when_durable(connection, command))

    def _ask(self, client: Client, half: Half, checks: int) -> None:
        message = asked_form(half, checks)
        encoder, topic = self._core.store.encoder, message.topic.encode()
        body = encoder.encode(
            message,
            topic,
            encoder.measure(message, topic),
            half.first_offset,
            half.first_position,
            half.entry.store_ms,
        )
        ext = ext_of(
            {
                "topic": HALF_TOPIC,
                "tranStateTableOffset": half.first_offset,
                "commitLogOffset": half.first_position,
                "msgId": half.unique_key,
                "transactionId": half.unique_key,
                "offsetMsgId": message_id(self._store_host, half.position),
                "bname": self._core.config.broker_name,
            }
        )
        self._api.calls.tell(client_channel(client), Request.CHECK_TRANSACTION_STATE, ext, body)

    # --------------------------------------------------------------------------------------- admins

    def _resume(self, connection: Connection, command: RemotingCommand) -> None:
        text = self._fields(command)["msgId"] or ""
        match = _MESSAGE_ID.fullmatch(text)
        if match is None:
            raise RequestInvalid(f"{text[:60]!r} is not the id of a stored message")
        log_lines.info("%s lets half message %s be asked about anew", connection, text)
        position = int(match[1], 16)
        self._core.transactions.resume(position, self._when_durable(connection, command))

    def _list(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        transactions = self._core.transactions
        transactions.follow()
        count = min(max(1, fields["maxNum"] or LISTED_MAX), LISTED_MAX)
        offsets = list(islice(transactions.table.open_from(fields["offset"] or 0), count + 1))
        next_offset = offsets.pop() if len(offsets) > count else -1

        def reading(offset: int) -> Callable[[], Half | None]:
            return lambda: transactions.open_half(offset)

        def read(halves: list[Half | None] | None, error: BaseException | None) -> None:
            if halves is None:
                self._api.refuse(connection, command, as_error(error))
                return
            rows = [
                self._row(half)
                for half in halves
                if half is not None
                and fields["topic"] in (None, "", half.topic)
                and fields["group"] in (None, "", half.group)
            ]
            ext = {"nextOffset": next_offset, "openCount": transactions.table.open_count}
            self._answer(connection, command, ext=ext_of(ext), body=write_open_halves(rows))

        ask_each(self._core, map(reading, offsets), read)

    def _row(self, half: Half) -> OpenHalf:
        why = self._core.transactions.why(half)
        return OpenHalf(
            message_id(self._store_host, half.position),
            half.unique_key,
            half.topic,
            half.group,
            half.queue_id,
            half.offset,
            half.since_ms,
            *why,
        )
