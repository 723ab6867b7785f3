"""This module translates what concerns failed messages: sent back by consumers, looked at and sent
once more by administrators.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from sluice.broker.admin_base import AdminPart, log_lines
from sluice.broker.dead_letters import Filter, Letter, Outcome
from sluice.broker.remoting_api import Handle
from sluice.broker.retries import SendBack
from sluice.errors import RequestInvalid, SluiceError
from sluice.model import Placed
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request

_VERSION_3_4_9: Final = 121  # older clients leave the maximum to the group


class RetryApi(AdminPart):
    """Failed messages of one broker."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.CONSUMER_SEND_MSG_BACK: self._send_back,
            Request.SLUICE_LIST_DEAD_LETTERS: self._list,
            Request.SLUICE_RESEND_DEAD_LETTERS: self._resend,
        }

    def _send_back(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        times_max = fields["maxReconsumeTimes"] if command.version >= _VERSION_3_4_9 else None
        asked = SendBack(
            fields["group"],
            fields["offset"],
            fields["delayLevel"],
            fields["originTopic"],
            times_max,
            fields["originMsgId"] or "",
        )

        def done(placed: Placed | None, error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
            else:
                self._answer(connection, command)

        self._core.retries.send_back(asked, done)
        self._core.ask_turn()

    # ----------------------------------------------------------------------------------- the desk

    def _list(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        wanted = Filter(
            fields["beginTimestamp"] or 0,
            1 << 62 if fields["endTimestamp"] is None else fields["endTimestamp"],
            fields["key"] or None,
            fields["originTopic"] or None,
        )

        def done(
            letters: list[Letter] | None, next_offset: int, end: int, error: SluiceError | None
        ) -> None:
            if letters is None:
                assert error is not None, "a page or an error"
                self._api.refuse(connection, command, error)
                return
            body = orjson.dumps({"letters": [letter.to_json() for letter in letters]})
            ext = {"nextOffset": str(next_offset), "maxOffset": str(end)}
            self._answer(connection, command, ext=ext, body=body)

        self._core.dead_letters.page(
            fields["group"], fields["queueId"], fields["offset"], fields["maxNum"], wanted, done
        )

    def _resend(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        offsets = _offsets(command)
        log_lines.info(
            "%s sends %d dead letters of group %s again",
            *(connection, len(offsets), fields["group"]),
        )

        def done(outcomes: list[Outcome] | None, error: SluiceError | None) -> None:
            if outcomes is None:
                assert error is not None, "outcomes or an error"
                self._api.refuse(connection, command, error)
            else:
                rows = [
                    {
                        "offset": each.offset,
                        "outcome": each.outcome,
                        "remark": each.remark,
                        "msgId": each.message_id,
                    }
                    for each in outcomes
                ]
                self._answer(connection, command, body=orjson.dumps({"outcomes": rows}))

        self._core.dead_letters.resend(
            fields["group"],
            fields["queueId"],
            offsets,
            to_topic=fields["toTopic"] or False,
            done=done,
        )
        self._core.ask_turn()


def _offsets(command: RemotingCommand) -> list[int]:
    """The offsets in the body: {"offsets": [...]}."""
    try:
        content: Any = orjson.loads(command.body)
    except orjson.JSONDecodeError:
        raise RequestInvalid("the body is no JSON object with offsets") from None
    offsets = content.get("offsets") if isinstance(content, dict) else None
    if not isinstance(offsets, list) or not all(type(each) is int for each in offsets):
        raise RequestInvalid("the body needs offsets: a list of whole numbers")
    return offsets
