"""This module translates what consumers that pop ask, and what is asked about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sluice.broker.admin_base import AdminPart
from sluice.broker.pop_log import retry_topic
from sluice.broker.pop_state import ORDER_REVIVE_QUEUE, QueueName
from sluice.broker.pop_taking import NORMAL, RETRY, Popped, PopRequest
from sluice.broker.pops import Changed, Ticket
from sluice.broker.remoting_api import Handle
from sluice.errors import NotInFlight, RequestInvalid, RequestLate, SluiceError
from sluice.net import Connection
from sluice.protocol import remoting, remoting_pops
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.protocol.remoting_schemas import ext_of

_FOUND: Final = "FOUND"
_NOTHING: Final = "NO_MESSAGE_IN_QUEUE"
_FROM_END: Final = 1  # RocketMQ's ConsumeInitMode
_NO_CHANGE: Final = {"popTime": "0", "invisibleTime": "0", "reviveQid": "0"}
_ZEROS: Final = {**_NO_CHANGE, "restNum": "0"}


class PopApi(AdminPart):
    """The door of pop consumption."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.POP_MESSAGE: self._pop,
            Request.PEEK_MESSAGE: self._peek,
            Request.ACK_MESSAGE: self._ack,
            Request.BATCH_ACK_MESSAGE: self._batch_ack,
            Request.CHANGE_MESSAGE_INVISIBLETIME: self._change,
            Request.NOTIFICATION: self._notify,
            Request.POLLING_INFO: self._polling_info,
            Request.POP_ROLLBACK: self._rollback,
        }

    # -------------------------------------------------------------------------------------- popping

    def _request(self, command: RemotingCommand) -> PopRequest:
        # RocketMQ takes a request without its time as one of now.
        command.ext.setdefault("bornTime", "0")
        fields = self._fields(command)
        return PopRequest(
            fields["consumerGroup"],
            fields["topic"],
            max(-1, fields["queueId"]),
            fields.get("maxMsgNums") or 0,
            fields.get("invisibleTime") or 0,
            fields.get("pollTime") or 0,
            fields.get("bornTime") or 0,
            fields.get("initMode") == _FROM_END,
            bool(fields.get("order")),
            fields.get("attemptId") or "",
            fields.get("exp"),
            fields.get("expType"),
        )

    def _pop(self, connection: Connection, command: RemotingCommand) -> None:
        request = self._request(command)

        def popped(found: Popped | None, full: str, error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
                return
            outcome = (Response.SUCCESS, _FOUND)
            if found is None:
                outcome = (Response.POLLING_TIMEOUT, _NOTHING)
                if full:
                    outcome = (Response.POLLING_FULL, full)
                revive_queue = ORDER_REVIVE_QUEUE if request.order else 0
                found = Popped(self._core.now_ms(), revive_queue, 0, [], [])
            self._answer_popped(connection, command, outcome, found, request)

        try:
            self._core.pops.pop(request, connection, popped)
        except RequestLate as error:
            self._refuse(connection, command, error, _ZEROS)

    def _refuse(
        self,
        connection: Connection,
        command: RemotingCommand,
        error: SluiceError,
        ext: dict[str, str],
    ) -> None:
        """A refusal with fields: Java's client reads them whatever the code is."""
        self._core.stats.refused[error.rocketmq_code] += 1
        self._answer(connection, command, error.rocketmq_code, ext, str(error))

    def _answer_popped(
        self,
        connection: Connection,
        command: RemotingCommand,
        outcome: tuple[int, str],
        found: Popped,
        request: PopRequest,
    ) -> None:
        parts = found.parts
        ext = {
            "popTime": str(found.pop_ms),
            "invisibleTime": str(request.invisible_ms),
            "reviveQid": str(found.revive_queue),
            "restNum": str(found.rest),
            "startOffsetInfo": remoting_pops.start_info(
                (part.mark, part.queue_id, part.start) for part in parts
            ),
            "msgOffsetInfo": remoting_pops.offset_info(
                (part.mark, part.queue_id, part.offsets) for part in parts
            ),
        }
        if request.order:
            ext["orderCountInfo"] = remoting_pops.count_info(
                (part.mark, part.queue_id, *pair) for part in parts for pair in part.counts
            )
        if not command.is_oneway:
            size = sum(map(len, found.pieces))
            code, remark = outcome
            head = remoting.answer_head(command, code, ext, remark, size)
            connection.send(head, *found.pieces)

    def _peek(self, connection: Connection, command: RemotingCommand) -> None:
        request = self._request(command)

        def peeked(found: Popped | None, error: SluiceError | None) -> None:
            if found is None:
                assert error is not None, "a look gives messages or an error"
                self._api.refuse(connection, command, error)
                return
            code = Response.SUCCESS if found.parts else Response.PULL_NOT_FOUND
            rest = found.rest + sum(len(part.offsets) for part in found.parts)
            ext = {**_ZEROS, "restNum": str(rest)}
            remark = _FOUND if found.parts else _NOTHING
            self._answer(connection, command, code, ext, remark, b"".join(found.pieces))

        self._core.pops.peek(request, peeked)

    def _notify(self, connection: Connection, command: RemotingCommand) -> None:
        def noticed(has_messages: bool, is_full: bool) -> None:
            ext = ext_of({"hasMsg": has_messages, "pollingFull": is_full})
            self._answer(connection, command, ext=ext)

        self._core.pops.notify(self._request(command), connection, noticed)

    def _polling_info(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        count = self._core.pops.waiting_count(
            fields["consumerGroup"], fields["topic"], max(-1, fields["queueId"])
        )
        self._answer(connection, command, ext={"pollingNum": str(count)})

    def _rollback(self, connection: Connection, command: RemotingCommand) -> None:
        """RocketMQ may keep what is in flight in two ways; here there is one, so nothing to do."""
        self._answer(connection, command)

    # ------------------------------------------------------------------------------- acknowledging

    def _ticket(self, extra_info: str, name: QueueName, offset: int) -> Ticket:
        """A ticket that belongs to this broker, queue and message, as far as it says so."""
        ticket = remoting_pops.read_ticket(extra_info)
        own, queue_id = self._core.config.broker_name, name[2]
        if ticket.broker not in (None, own):
            raise NotInFlight(f"the message was popped from broker {ticket.broker}, this is {own}")
        if ticket.queue_id not in (None, queue_id) or ticket.offset not in (None, offset):
            self._core.pops.check_offset(name, offset)
            raise NotInFlight(
                f"extraInfo is of offset {ticket.offset} of queue {ticket.queue_id}, the request "
                f"of offset {offset} of queue {queue_id}"
            )
        return Ticket(ticket.start, ticket.pop_ms, ticket.revive_queue)

    def _done(
        self, connection: Connection, command: RemotingCommand
    ) -> Callable[[SluiceError | None], None]:
        def done(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
            else:
                self._answer(connection, command)

        return done

    def _ack(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        queue_id, offset = fields["queueId"], fields["offset"]
        name = (fields["consumerGroup"], fields["topic"], queue_id)
        ticket = self._ticket(fields["extraInfo"], name, offset)
        self._core.pops.acknowledge(name, offset, ticket, self._done(connection, command))

    def _change(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        queue_id, offset = fields["queueId"], fields["offset"]
        name = (fields["consumerGroup"], fields["topic"], queue_id)

        def changed(new: Changed | None, error: SluiceError | None) -> None:
            if new is None:
                assert error is not None, "a change gives a ticket or an error"
                self._refuse(connection, command, error, _NO_CHANGE)
                return
            ext = ext_of(
                {
                    "popTime": new.pop_ms,
                    "invisibleTime": new.invisible_ms,
                    "reviveQid": new.revive_queue,
                }
            )
            self._answer(connection, command, ext=ext)

        try:
            ticket = self._ticket(fields["extraInfo"], name, offset)
            invisible_ms, suspend = fields["invisibleTime"], bool(fields["suspend"])
            self._core.pops.change(name, offset, ticket, invisible_ms, changed, suspend=suspend)
        except SluiceError as error:
            changed(None, error)

    def _batch_ack(self, connection: Connection, command: RemotingCommand) -> None:
        """Every message for itself; refused where none of them could be acknowledged."""
        broker, acks = remoting_pops.read_batch_acks(command.body)
        own = self._core.config.broker_name
        if broker not in ("", own):
            raise NotInFlight(f"the messages were popped from broker {broker}, this is {own}")
        rows = [(ack, offset) for ack in acks for offset in ack.offsets]
        if not rows:
            raise NotInFlight("the request acknowledges no message")
        left, taken = len(rows), 0
        first: SluiceError | None = None

        def told(error: SluiceError | None) -> None:
            nonlocal left, taken, first
            left -= 1
            taken += error is None
            first = first or error
            if left:
                return
            if first is not None and not taken:
                self._api.refuse(connection, command, first)
                return
            remark = None
            if first is not None:
                remark = f"{len(rows) - taken} of {len(rows)} were refused, the first: {first}"
            self._answer(connection, command, remark=remark)

        for ack, offset in rows:
            ticket = Ticket(ack.ticket.start, ack.ticket.pop_ms, ack.ticket.revive_queue)
            try:
                name = (ack.group, _real_topic(ack), ack.queue_id)
                self._core.pops.acknowledge(name, offset, ticket, told)
            except SluiceError as error:
                told(error)


def _real_topic(ack: remoting_pops.BatchAck) -> str:
    if ack.mark == NORMAL:
        return ack.topic
    if ack.mark == RETRY:
        return retry_topic(ack.group, ack.topic)
    raise RequestInvalid(
        f"retry {ack.mark[:20]!r} of an ack; here are 0 (topic) and 1 (its retries)"
    )
