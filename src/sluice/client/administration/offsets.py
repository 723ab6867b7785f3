"""This module says how far groups have read, and moves them: to a time, an offset, another group.

A group that is connected goes on at the new place within seconds. Times are a `datetime` or seconds
since 1970, as everywhere in the client.
"""

from __future__ import annotations

from datetime import datetime

from sluice.client.admin import TO_THE_END_MS
from sluice.client.administration.groups import GroupDesk
from sluice.client.administration.values import Offsets
from sluice.errors import ConfigError, NotFound
from sluice.protocol.json_members import MessageQueue

When = datetime | float


def when_ms(when: When) -> int:
    """A time in milliseconds."""
    seconds = when.timestamp() if isinstance(when, datetime) else when
    if seconds < 0:
        raise ConfigError(f"the time {when} is before 1970")
    return round(seconds * 1000)


class OffsetDesk(GroupDesk):
    """Offsets of groups."""

    async def offsets(self, group: str, topic: str | None = None) -> Offsets:
        """The offset up to which a group has read each queue; raises NotFound where it has none."""
        # Asked for a topic, a broker also answers for a group that never read it: with zeros.
        found = {
            queue: row.consumer_offset
            for queue, row in (await self.consume_stats(group)).queues.items()
            if topic in (None, queue.topic) and row.consumer_offset >= 0
        }
        if not found:
            on = f" on {topic}" if topic is not None else ""
            raise NotFound(f"group {group} has no offsets{on}; none of its consumers has committed")
        return found

    async def reset_to_time(
        self, group: str, topic: str, when: When, *, backward_only: bool = False
    ) -> Offsets:
        """Move a group to the first messages that were stored at a time or later."""
        return await self.reset_offsets(
            group, topic, when_ms(when), force=not backward_only, route_of=None
        )

    async def reset_to_begin(self, group: str, topic: str) -> Offsets:
        """Move a group to the first messages that there are."""
        return await self.reset_offsets(group, topic, 0, route_of=None)

    async def reset_to_end(self, group: str, topic: str) -> Offsets:
        """Move a group behind all messages that are there now: skip them."""
        return await self.reset_offsets(group, topic, TO_THE_END_MS, route_of=None)

    async def reset_to_offset(self, group: str, queue: MessageQueue, offset: int) -> Offsets:
        """Move a group on one queue to an offset."""
        if offset < 0:
            raise ConfigError(f"offset {offset} is below 0")
        place = await self.queue(queue.broker_name, queue.queue_id)
        return await self.reset_queue(place.address, group, queue.topic, queue.queue_id, offset)

    async def set_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Set how far a group has read a queue; a connected member overwrites it."""
        place = await self.queue(queue.broker_name, queue.queue_id)
        await self.put_offset(place.address, group, queue, offset)
