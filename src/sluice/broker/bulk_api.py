"""This module translates bulk reads: requests of Sluice's own, which no other broker serves.

Who asks such a broker is told that it does not know the request (code 3), and pulls instead.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import orjson

from sluice.broker.admin_base import AdminPart, as_error
from sluice.broker.bulk import AtTime, Bulk, BulkRead
from sluice.broker.core import BrokerCore
from sluice.broker.remoting_api import Handle, RemotingApi
from sluice.errors import RecordDamaged, RequestInvalid
from sluice.net import Connection
from sluice.protocol import remoting
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_schemas import ext_of
from sluice.storage.bulk_reads import Stretch
from sluice.storage.store import ReadStatus

RANGES_MAX: Final = 4096
_CODES: Final = {
    ReadStatus.FOUND: Response.SUCCESS,
    ReadStatus.NO_MATCHED_MESSAGE: Response.SUCCESS,
    ReadStatus.OFFSET_OVERFLOW_ONE: Response.PULL_NOT_FOUND,
    ReadStatus.NO_MESSAGE_IN_QUEUE: Response.PULL_NOT_FOUND,
    ReadStatus.NO_MATCHED_LOGIC_QUEUE: Response.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: Response.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: Response.PULL_OFFSET_MOVED,
}


class BulkApi(AdminPart):
    """Bulk reads of one broker."""

    def __init__(self, api: RemotingApi, core: BrokerCore) -> None:
        super().__init__(api, core)
        self._bulk = Bulk(core)

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.SLUICE_BULK_FETCH: self._fetch,
            Request.SLUICE_RANGE_BYTES: self._range_bytes,
            Request.SLUICE_OFFSET_AT: self._offset_at,
        }

    def _fetch(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        wanted = BulkRead(
            fields["topic"],
            fields["queueId"],
            fields["offset"],
            fields["toOffset"],
            fields["maxBytes"],
            fields["consumerGroup"] or "",
            fields["tags"],
            fields["keys"],
            fields["sql"],
        )

        def done(found: Stretch | None, error: BaseException | None) -> None:
            if isinstance(error, RecordDamaged):
                # Who may lose data goes on behind it.
                ext = {"nextOffset": str(error.next_queue_offset)}
                self._answer(connection, command, Response.SYSTEM_ERROR, ext, str(error))
            elif found is None:
                self._api.refuse(connection, command, as_error(error))
            elif not command.is_oneway:
                topic_id = self._bulk.topic_id(wanted.topic, wanted.queue_id)
                self._send(connection, command, found, topic_id)

        self._bulk.read(wanted, done)

    @staticmethod
    def _send(
        connection: Connection, command: RemotingCommand, found: Stretch, topic_id: str
    ) -> None:
        result = found.result
        sizes = found.sizes.astype(">i4").tobytes()
        ext = {
            "nextOffset": result.next_offset,
            "minOffset": result.min_offset,
            "maxOffset": result.max_offset,
            "count": result.count,
            "topicId": topic_id or None,
        }
        head = remoting.answer_head(
            command,
            _CODES[result.status],
            ext_of(ext),
            result.status.value,
            result.byte_count + len(sizes),
        )
        connection.send(head, *result.slices, sizes)

    def _range_bytes(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)

        def done(sizes: list[int] | None, error: BaseException | None) -> None:
            if sizes is None:
                self._api.refuse(connection, command, as_error(error))
            else:
                self._answer(connection, command, body=orjson.dumps(sizes))

        ranges = _ranges(bytes(command.body))
        self._bulk.range_bytes(fields["topic"], fields["queueId"], ranges, done)

    def _offset_at(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)

        def done(found: AtTime | None, error: BaseException | None) -> None:
            if found is None:
                self._api.refuse(connection, command, as_error(error))
            else:
                ext = ext_of({"offset": found.offset, "isOrdered": found.is_ordered})
                self._answer(connection, command, ext=ext)

        self._bulk.offset_at(fields["topic"], fields["queueId"], fields["timestamp"], done)


def _ranges(body: bytes) -> list[tuple[int, int]]:
    """[[from, to], ...] of a request's body."""
    try:
        pairs: Any = np.array(orjson.loads(body), np.int64)
    except (orjson.JSONDecodeError, ValueError, TypeError, OverflowError) as error:
        raise RequestInvalid(f"the body is no list of ranges: {error}") from None
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not 1 <= len(pairs) <= RANGES_MAX:
        raise RequestInvalid(f"the body is no list of 1 to {RANGES_MAX} pairs of offsets")
    return [(start, stop) for start, stop in pairs.tolist()]
