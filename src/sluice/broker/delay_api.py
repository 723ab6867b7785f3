"""This module translates requests about delayed messages: taking one back, and the list of them."""

from __future__ import annotations

import re
from typing import Final

import orjson

from sluice.broker.admin_base import AdminPart, as_error
from sluice.broker.core import BrokerCore
from sluice.broker.delay_desk import DelayDesk, Delayed, DelayedPage
from sluice.broker.delays import Waiting
from sluice.broker.remoting_api import Handle, RemotingApi
from sluice.broker.sending import REGION
from sluice.errors import IllegalOperation, RequestInvalid, SluiceError
from sluice.model import message_id
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_schemas import ext_of

_ANY_POSITION: Final = 1 << 62  # above all: what comes after has another place in its queue
_AFTER: Final = re.compile(r"([0-9]{1,16})-([0-9]{1,9})-([0-9]{1,12})")


class DelayApi(AdminPart):
    """Delayed messages of one broker."""

    def __init__(self, api: RemotingApi, core: BrokerCore) -> None:
        super().__init__(api, core)
        self._desk = DelayDesk(core, core.delays)

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.RECALL_MESSAGE: self._recall,
            Request.SLUICE_LIST_DELAYED: self._list,
        }

    def _recall(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)

        def done(error: SluiceError | None) -> None:
            # Apache's broker does not look whether such a message waits, and its clients take every
            # other code for a failure. The remark says that nothing was taken back.
            if error is not None and not isinstance(error, IllegalOperation):
                self._api.refuse(connection, command, error)
            else:
                ext = {"msgId": handle.unique_key, "MSG_REGION": REGION}
                remark = None if error is None else str(error)
                self._answer(connection, command, ext=ext, remark=remark)

        handle = self._desk.handle(fields["topic"], fields["recallHandle"])
        self._desk.recall(handle, fields["producerGroup"] or "", done)

    def _list(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        after = None
        if fields["after"]:
            match = _AFTER.fullmatch(fields["after"])
            if match is None:
                raise RequestInvalid(f"after={fields['after'][:60]!r}: not what a page ended with")
            due_ms, level, offset = map(int, match.groups())
            after = Waiting(due_ms, level, offset, _ANY_POSITION)
        delays = self._core.delays

        def done(page: DelayedPage | None, error: BaseException | None) -> None:
            if page is None:
                self._api.refuse(connection, command, as_error(error))
                return
            ext = {
                "after": "" if page.after is None else "-".join(map(str, page.after[:3])),
                "timerCount": delays.waiting_timers,
                "levelCount": delays.waiting_levels,
            }
            body = orjson.dumps({"messages": [self._row(row) for row in page.found]})
            self._answer(connection, command, ext=ext_of(ext), body=body)

        self._desk.page(after, fields["topic"] or None, done)

    def _row(self, row: Delayed) -> dict[str, object]:
        return {
            "dueTimestamp": row.item.due_ms,
            "delayLevel": row.item.level,
            "topic": row.topic,
            "queueId": row.queue_id,
            "keys": row.keys,
            "uniqueKey": row.unique_key,
            "offsetMsgId": message_id(self._core.store.encoder.store_host, row.position),
            "bodySize": row.body_bytes,
            "storeTimestamp": row.store_ms,
        }
