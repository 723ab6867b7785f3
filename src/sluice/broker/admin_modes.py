"""This module translates what consumers ask that let the broker divide the queues, and their modes.

Such a consumer (Java's with `clientRebalance=false`) asks any broker of a topic which queues it
shall read, and whether it pulls or pops them. The queues are those of all brokers, as the
nameserver lists them.
"""

from __future__ import annotations

from typing import Any, Final

from sluice.broker.admin_base import AdminPart, log_lines
from sluice.broker.allocation import Queue, allocate, allocate_pops
from sluice.broker.groups import BROADCASTING
from sluice.broker.remoting_api import Handle
from sluice.broker.topics import RETRY_PREFIX
from sluice.errors import NoPermission, ParameterInvalid, TopicMissing
from sluice.net import Connection
from sluice.protocol import remoting_admin
from sluice.protocol.json_members import MessageQueue
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.store import REQUEST_MODE_TABLE

PULL: Final = "PULL"
POP: Final = "POP"


class AdminModes(AdminPart):
    """Allocation of queues by the broker, and how groups read topics."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.QUERY_ASSIGNMENT: self._assignment,
            Request.SET_MESSAGE_REQUEST_MODE: self._set_mode,
            Request.GET_ALL_MESSAGE_REQUEST_MODE: self._all_modes,
        }

    def _assignment(self, connection: Connection, command: RemotingCommand) -> None:
        query = remoting_admin.read_assignment_query(command.body)
        core = self._core

        def routed(queue_counts: dict[str, int] | None) -> None:
            """Queues to read by broker; None: no nameserver said anything of the topic."""
            settings = core.topics.get(query.topic)
            if queue_counts is None and settings is not None:
                queue_counts = {core.config.broker_name: settings.read_queues}
            mode = self._mode(query.topic, query.group)
            chosen = None if queue_counts is None else self._chosen(query, queue_counts, mode)
            rows = None
            if chosen is not None:
                name = mode["mode"] if query.message_model != BROADCASTING else PULL
                rows = [(MessageQueue(query.topic, *queue), name) for queue in chosen]
            body = remoting_admin.write_assignments(rows)
            self._answer(connection, command, body=body)

        core.ask_route(query.topic, routed)

    def _mode(self, topic: str, group: str) -> dict[str, Any]:
        """How a group reads a topic: it pulls, unless an administrator said otherwise."""
        mode = (self._core.store.table(REQUEST_MODE_TABLE).get(topic) or {}).get(group)
        if isinstance(mode, dict) and mode.get("mode") == POP:
            return mode
        return {"mode": PULL}

    def _chosen(
        self,
        query: remoting_admin.AssignmentQuery,
        queue_counts: dict[str, int],
        mode: dict[str, Any],
    ) -> list[Queue] | None:
        queues = [
            (broker, queue_id)
            for broker, count in queue_counts.items()
            for queue_id in range(count)
        ]
        if query.message_model == BROADCASTING:
            return queues
        members = self._core.clients.consumers.get(query.group)
        if members is None:
            return None
        names = members.members
        if mode["mode"] == POP:
            share = int(mode.get("popShareQueueNum") or 0)
            chosen = allocate_pops(query.strategy, queues, names, query.client_id, share)
        else:
            chosen = allocate(query.strategy, queues, names, query.client_id)
        return None if chosen is None else list(chosen)

    def _set_mode(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        wanted = remoting_admin.read_request_mode(command.body)
        topic, group = wanted["topic"], wanted["consumerGroup"]
        if topic.startswith(RETRY_PREFIX):
            raise NoPermission("retry topic is not allowed to set mode")
        if core.topics.get(topic) is None:
            raise TopicMissing(f"topic[{topic}] not exist")
        if wanted["mode"] not in (PULL, POP):
            raise ParameterInvalid(f"mode {wanted['mode'][:50]!r}; allowed: {PULL}, {POP}")
        core.groups.require(group)  # the mode is often set before the first consumer comes
        log_lines.info("%s sets the mode of group %s on topic %s", connection, group, topic)
        known = core.store.state.newest(REQUEST_MODE_TABLE, topic) or {}
        core.store.change(
            [(REQUEST_MODE_TABLE, topic, {**known, group: wanted})],
            self._when_durable(connection, command),
        )
        core.ask_turn()

    def _all_modes(self, connection: Connection, command: RemotingCommand) -> None:
        table = self._core.store.table(REQUEST_MODE_TABLE)
        self._answer(connection, command, body=remoting_admin.write_request_modes(table))
