"""This module answers what Kafka's clients ask about consumer groups: who coordinates, joining and
leaving, and what administrators want to know.

It only translates; the behaviour is in `kafka_groups.py`. Offsets are in `kafka_offset_api.py`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

from sluice.broker import kafka_offset_api, kafka_transaction_api
from sluice.broker.core import BrokerCore
from sluice.broker.kafka_api import Answer, KafkaApi, Request
from sluice.broker.kafka_group import Group
from sluice.broker.kafka_group_values import Joined, JoinRequest, State, Synced, SyncRequest
from sluice.broker.kafka_partitions import KafkaTopics
from sluice.errors import SluiceError
from sluice.protocol import kafka_codes as codes

_GROUP_KEY: Final = 0
_TRANSACTION_KEY: Final = 1
_KNOWN_ID_FROM: Final = 4  # versions of JoinGroup
_SKIP_FROM: Final = 9
_NAMED_FROM: Final = 5  # version of SyncGroup
_NULL_PROTOCOL_FROM: Final = 7
_MEMBERS_FROM: Final = 3  # version of LeaveGroup
_MISSING_FROM: Final = 6  # version of DescribeGroups
_INSTANCE_CHARACTERS_MAX: Final = 249
_NO_OPERATIONS: Final = -2147483648  # nobody asked what is allowed
# Read, delete, describe; describe and alter its configurations.
_ALL_OPERATIONS: Final = sum(1 << bit for bit in (3, 6, 8, 10, 11))


def install(api: KafkaApi, core: BrokerCore, topics: KafkaTopics) -> None:
    """Answer these requests."""
    groups = GroupRequests(core)
    api.register(codes.FIND_COORDINATOR, 0, 6, groups.find_coordinator)
    api.register(codes.JOIN_GROUP, 0, 9, groups.join)
    api.register(codes.HEARTBEAT, 0, 4, groups.heartbeat)
    api.register(codes.LEAVE_GROUP, 0, 5, groups.leave)
    api.register(codes.SYNC_GROUP, 0, 5, groups.sync)
    api.register(codes.DESCRIBE_GROUPS, 0, 6, groups.describe)
    api.register(codes.LIST_GROUPS, 0, 5, groups.list)
    api.register(codes.DELETE_GROUPS, 0, 2, groups.delete)
    kafka_offset_api.install(api, core, topics)
    kafka_transaction_api.install(api, core, topics)


class GroupRequests:
    """The requests about groups of one broker."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core

    def find_coordinator(self, request: Request, answer: Answer) -> None:
        """Which broker looks after a group or a transactional id: this one."""
        body, node = request.body, request.peer.node
        keys = getattr(body, "coordinator_keys", None)
        key_type = getattr(body, "key_type", _GROUP_KEY)
        code = 0 if key_type in (_GROUP_KEY, _TRANSACTION_KEY) else codes.INVALID_REQUEST
        place: dict[str, Any] = {"node_id": -1, "host": "", "port": -1, "error_code": code}
        if not code:
            place |= {"node_id": node.node_id, "host": node.host, "port": node.port}
        if keys is None:
            answer(place)
        else:
            answer({"coordinators": [{**place, "key": key} for key in keys]})

    def join(self, request: Request, answer: Answer) -> None:
        body, version = request.body, request.version
        instance_id: str | None = getattr(body, "group_instance_id", None)
        session_ms = _ms(body.session_timeout)
        asked = JoinRequest(
            body.member_id,
            instance_id,
            request.client_id,
            "/" + request.peer.name.rpartition(":")[0],
            session_ms,
            _ms(getattr(body, "rebalance_timeout", body.session_timeout)),
            body.protocol_type,
            tuple((each.name, each.metadata) for each in body.protocols),
            f"{request.client_id if instance_id is None else instance_id}-{uuid4()}",
            needs_known_id=version >= _KNOWN_ID_FROM,
            can_skip_assignment=version >= _SKIP_FROM,
        )

        def told(joined: Joined) -> None:
            no_name = None if version >= _NULL_PROTOCOL_FROM else ""
            answer(
                {
                    "error_code": joined.code,
                    "generation_id": joined.generation,
                    "protocol_type": joined.protocol_type,
                    "protocol_name": no_name if joined.protocol is None else joined.protocol,
                    "leader": joined.leader,
                    "skip_assignment": joined.skip_assignment,
                    "member_id": joined.member_id,
                    "members": [
                        {"member_id": name, "group_instance_id": instance, "metadata": data}
                        for name, instance, data in joined.members
                    ],
                }
            )

        if instance_id is not None and not 0 < len(instance_id) <= _INSTANCE_CHARACTERS_MAX:
            told(Joined(codes.INVALID_REQUEST, body.member_id))
            return
        self._core.kafka_groups.join(body.group_id, asked, told)

    def sync(self, request: Request, answer: Answer) -> None:
        body = request.body
        asked = SyncRequest(
            body.member_id,
            getattr(body, "group_instance_id", None),
            body.generation_id,
            getattr(body, "protocol_type", None),
            getattr(body, "protocol_name", None),
            {each.member_id: each.assignment for each in body.assignments},
        )

        def told(synced: Synced) -> None:
            answer(
                {
                    "error_code": synced.code,
                    "protocol_type": synced.protocol_type,
                    "protocol_name": synced.protocol,
                    "assignment": synced.assignment,
                }
            )

        if request.version >= _NAMED_FROM and None in (asked.protocol_type, asked.protocol):
            told(Synced(codes.INCONSISTENT_GROUP_PROTOCOL))
            return
        self._core.kafka_groups.sync(body.group_id, asked, told)

    def heartbeat(self, request: Request, answer: Answer) -> None:
        body = request.body
        code = self._core.kafka_groups.heartbeat(
            body.group_id,
            body.member_id,
            getattr(body, "group_instance_id", None),
            body.generation_id,
        )
        answer({"error_code": code})

    def leave(self, request: Request, answer: Answer) -> None:
        body = request.body
        if request.version < _MEMBERS_FROM:
            code, result = self._core.kafka_groups.leave(body.group_id, [(body.member_id, None)])
            answer({"error_code": code or result[0]})
            return
        leavers = [(each.member_id, each.group_instance_id) for each in body.members]
        code, result = self._core.kafka_groups.leave(body.group_id, leavers)
        answer(
            {
                "error_code": code,
                "members": [
                    {"member_id": name, "group_instance_id": instance, "error_code": each}
                    for (name, instance), each in zip(leavers, result, strict=not code)
                ],
            }
        )

    # ------------------------------------------------------------------------------- administrators

    def _end_overdue(self) -> None:
        """Who has been silent for too long is out when it is asked, not at the next tick."""
        self._core.kafka_groups.tick(self._core.now_ms())

    def describe(self, request: Request, answer: Answer) -> None:
        self._end_overdue()
        rows = [self._described(name, request.version) for name in request.body.groups]
        wants_operations = getattr(request.body, "include_authorized_operations", False)
        for row in rows:
            is_told = wants_operations and not row.get("error_code")
            row["authorized_operations"] = _ALL_OPERATIONS if is_told else _NO_OPERATIONS
        answer({"groups": rows})

    def _described(self, name: str, version: int) -> dict[str, Any]:
        group = self._core.kafka_groups.get(name)
        if group is None:
            row: dict[str, Any] = {"group_id": name, "group_state": State.DEAD.value}
            if version >= _MISSING_FROM:
                row["error_code"] = codes.GROUP_ID_NOT_FOUND
                row["error_message"] = f"Group {name} not found."
            return row
        return {
            "group_id": name,
            "group_state": group.state.value,
            "protocol_type": group.protocol_type or "",
            "protocol_data": (group.protocol or "") if group.state == State.STABLE else "",
            "members": _members(group),
        }

    def list(self, request: Request, answer: Answer) -> None:
        self._end_overdue()
        states = {each.lower() for each in getattr(request.body, "states_filter", ())}
        types = {each.lower() for each in getattr(request.body, "types_filter", ())}
        rows = [
            {
                "group_id": group.name,
                "protocol_type": group.protocol_type or "",
                "group_state": group.state.value,
                "group_type": "classic",
            }
            for group in self._core.kafka_groups.all()
            if (not states or group.state.value.lower() in states)
            and (not types or "classic" in types)
        ]
        answer({"groups": rows})

    def delete(self, request: Request, answer: Answer) -> None:
        """Delete groups without members, with their offsets; each on its own."""
        self._end_overdue()
        core = self._core
        names = list(dict.fromkeys(request.body.groups_names))
        result: dict[str, int] = {}

        def told(name: str, code: int) -> None:
            result[name] = code
            if len(result) == len(names):
                answer(
                    {"results": [{"group_id": each, "error_code": result[each]} for each in names]}
                )

        if not names:
            answer({"results": []})
        for name in names:
            code = core.kafka_groups.delete(name)
            if code:
                told(name, code)
                continue

            def deleted(error: SluiceError | None, name: str = name) -> None:
                told(name, 0 if error is None else codes.COORDINATOR_NOT_AVAILABLE)

            core.kafka_offsets.delete_group(name, deleted)


def _members(group: Group) -> list[dict[str, Any]]:
    """The members; what they said only while that holds, and what they got last."""
    is_stable = group.state == State.STABLE
    return [
        {
            "member_id": member.member_id,
            "group_instance_id": member.instance_id,
            "client_id": member.client_id,
            "client_host": member.client_host,
            "member_metadata": (
                member.protocols.get(group.protocol or "", b"") if is_stable else b""
            ),
            "member_assignment": member.assignment,
        }
        for member in group.members.values()
    ]


def _ms(time: timedelta) -> int:
    return round(time.total_seconds() * 1000)
