"""This module sends a consumer elsewhere when an administrator has moved its group's offsets.

The broker passes the new offsets on (`sluice admin resetOffsetByTime`). A pull that is held at the
old place is given up, so that nobody waits for it to end.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sluice.link import RemotingLink
from sluice.protocol.json_members import as_number, read_object, read_queue_keys
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request

if TYPE_CHECKING:
    from sluice.client.aio.member import Member

log_lines = logging.getLogger("sluice.client")


def install_resets(member: Member) -> None:
    """Do what the broker says about offsets of the member's group."""

    def reset(link: RemotingLink, command: RemotingCommand) -> None:
        if command.ext.get("group") != member.group:
            return
        table = read_queue_keys(read_object(command.body), "offsetTable")
        for queue, value in table.items():
            lane = member.lanes.get(queue)
            if lane is not None:
                offset = as_number(value, "an offset")
                log_lines.warning("%s: %s is reset to %d", member.group, queue, offset)
                member.pull_from(lane, offset)
        member.session.spawn(member.commit_all())

    member.session.requests[Request.RESET_CONSUMER_CLIENT_OFFSET] = reset
