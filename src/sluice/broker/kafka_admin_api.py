"""This module tells administrators of the groups of Kafka's clients, in RocketMQ's protocol: for
`sluice admin` and `sluice top`, which show them beside the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from sluice.broker.admin_base import AdminPart, as_error
from sluice.broker.browsing import ask_each
from sluice.broker.core import BrokerCore
from sluice.broker.remoting_api import Handle
from sluice.net import Connection
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import QueueProgress
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_schemas import ext_of

MARK: Final = "kafka:"  # before the name of a group among those of RocketMQ's clients
GROUPS_A_PAGE: Final = 200

Ask = Callable[[], QueueProgress]


class KafkaAdminApi(AdminPart):
    """Kafka's groups of one broker."""

    def handlers(self) -> dict[int, Handle]:
        return {Request.SLUICE_LIST_KAFKA_GROUPS: self._list}

    def _list(self, connection: Connection, command: RemotingCommand) -> None:
        """A page of groups in the order of their names, each with what it has committed."""
        core = self._core
        fields = self._fields(command)
        only, after = fields["group"], fields["after"] or ""
        names = sorted(group.name for group in core.kafka_groups.all() if group.name > after)
        if only:
            names = [only] if core.kafka_groups.get(only) is not None else []
        shown = names[:GROUPS_A_PAGE]
        asks = [(name, *each) for name in shown for each in progress_asks(core, name)]
        ext = {"after": shown[-1] if len(names) > len(shown) else ""}

        def body(rows: list[QueueProgress]) -> bytes:
            offsets: dict[str, list[dict[str, Any]]] = {name: [] for name in shown}
            for (name, topic, partition, _), row in zip(asks, rows, strict=True):
                offsets[name].append(
                    {
                        "topic": topic,
                        "queueId": partition,
                        "brokerOffset": row.broker_offset,
                        "consumerOffset": row.consumer_offset,
                        "lastTimestamp": row.last_ms,
                    }
                )
            groups = [_described(core, name, offsets[name]) for name in shown]
            return orjson.dumps({"groups": groups})

        def done(rows: list[QueueProgress] | None, error: BaseException | None) -> None:
            if rows is None:
                self._api.refuse(connection, command, as_error(error))
            else:
                self._answer(connection, command, ext=ext_of(ext), body=body(rows))

        ask_each(core, (ask for *_, ask in asks), done)


def _described(core: BrokerCore, name: str, offsets: list[dict[str, Any]]) -> dict[str, Any]:
    group = core.kafka_groups.get(name)
    return {
        "group": name,
        "state": "Dead" if group is None else group.state.value,
        "protocolType": (group.protocol_type if group is not None else None) or "",
        "protocol": (group.protocol if group is not None else None) or "",
        "members": [
            {
                "memberId": member.member_id,
                "instanceId": member.instance_id or "",
                "clientId": member.client_id,
                "host": member.client_host.removeprefix("/"),
            }
            for member in (group.members.values() if group is not None else ())
        ],
        "offsets": offsets,
    }


def progress_asks(core: BrokerCore, group: str) -> Iterator[tuple[str, int, Ask]]:
    """Topic, partition, and a question for each offset that a group has committed."""
    for (topic, partition), committed in sorted(core.kafka_offsets.of(group).items()):
        if core.topics.get(topic) is None:
            continue

        def ask(
            topic: str = topic,
            partition: int = partition,
            offset: int = committed.offset,
            commit_ms: int = committed.commit_ms,
        ) -> QueueProgress:
            high = core.store.max_offset(topic, partition)
            return QueueProgress(high, min(offset, high), min(offset, high), commit_ms)

        yield topic, partition, ask
