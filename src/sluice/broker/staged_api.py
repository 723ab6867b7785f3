"""This module translates staged writes: requests of Sluice's own (`staged_writes.py`)."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from sluice.broker.admin_base import AdminPart
from sluice.broker.quick_sends import host_of
from sluice.broker.remoting_api import Handle
from sluice.broker.staged_entries import Handle as Staged
from sluice.broker.staged_entries import Owner
from sluice.errors import RequestInvalid, SluiceError
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_schemas import ext_of

_HANDLE: Final = re.compile(r"[0-9]{1,18}-[0-9]{1,18}", re.ASCII)


class StagedApi(AdminPart):
    """Staged writes of one broker."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.SLUICE_STAGE: self._stage,
            Request.SLUICE_PUBLISH: self._publish,
            Request.SLUICE_SINK_STATE: self._state,
        }

    def _stage(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        owner = Owner(fields["sink"], fields["batch"])

        def done(error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
            else:
                self._answer(
                    connection, command, ext={"handle": f"{handle.position}-{handle.token}"}
                )

        handle = self._core.staged.stage(
            *(owner, fields["topic"], fields["queueId"], command.body, host_of(connection), done),
            image_count=fields["imageCount"] or 0,
        )

    def _publish(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        owner = Owner(fields["sink"], fields["batch"])

        def done(is_new: bool, error: SluiceError | None) -> None:
            if error is not None:
                self._api.refuse(connection, command, error)
            else:
                self._answer(connection, command, ext=ext_of({"published": is_new}))

        handles = _handles(bytes(command.body))
        self._core.staged.publish(owner, handles, done, once=bool(fields["once"]))

    def _state(self, connection: Connection, command: RemotingCommand) -> None:
        batch = self._core.staged.last_batch(self._fields(command)["sink"])
        self._answer(connection, command, ext={"batch": str(batch)})


def _handles(body: bytes) -> list[Staged]:
    """The handles of a publish: texts, as they were given out."""
    try:
        texts: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestInvalid(f"the body is no JSON: {error}") from None
    if not isinstance(texts, list) or not all(
        isinstance(text, str) and _HANDLE.fullmatch(text) for text in texts
    ):
        raise RequestInvalid("the body is no list of handles")
    return [Staged(*map(int, text.split("-"))) for text in texts]
