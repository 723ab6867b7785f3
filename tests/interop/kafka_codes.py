"""This module asks a broker, request by request, what Kafka's clients rarely ask, and notes the
error codes of the answers: of groups, offsets and transactions that are not as they should be.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from kio.index import load_response_schema
from kio.serial import entity_reader

from sluice.protocol import kafka_codes as codes
from tests.unit.broker.kafka_kit import request_bytes

LIMIT_S = 120.0
TOPIC = "codes"

Noted = dict[str, Any]


class Wire:
    """One connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), LIMIT_S)

    def ask(self, key: int, version: int, /, **values: Any) -> Any:
        frame = request_bytes(key, version, values)
        self._socket.sendall(len(frame).to_bytes(4, "big") + frame)
        size = int.from_bytes(self._read(4), "big")
        data = self._read(size)
        shape = load_response_schema(key, version)
        at = 4 + (1 if shape.__flexible__ else 0)
        body, _ = entity_reader(shape)(data, at)
        return body

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            assert part, "the broker closed the connection"
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self._socket.close()


class Codes:
    """Asks and notes."""

    def __init__(self, wire: Wire, word: str) -> None:
        self._wire = wire
        self._ask = wire.ask
        self._word = word
        self.noted: Noted = {}

    def all(self) -> Noted:
        self._ready()
        self._strangers()
        self._members()
        self._offsets()
        self._transactions()
        return self.noted

    def _note(self, name: str, value: Any) -> None:
        self.noted[name] = int(value) if isinstance(value, int) else value

    def _ready(self) -> None:
        """A broker that has just started may have to make topics of its own first."""
        topic = {"name": TOPIC, "num_partitions": 2, "replication_factor": 1}
        self._ask(codes.CREATE_TOPICS, 5, topics=[topic], timeout=30_000)
        deadline = time.monotonic() + LIMIT_S
        for key_type in (0, 1):
            while True:
                body = self._ask(
                    codes.FIND_COORDINATOR, 4, key_type=key_type, coordinator_keys=["x"]
                )
                if not body.coordinators[0].error_code:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.2)
        while self._join("warm", 0).error_code == codes.COORDINATOR_LOAD_IN_PROGRESS:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    # --------------------------------------------------------------------------------------- groups

    def _strangers(self) -> None:
        """Requests of those who are in no group."""
        for group in (f"none{self._word}", ""):
            names: dict[str, Any] = {"group_id": group, "member_id": "m"}
            mark = f"group {'' if group else '(no name)'}"
            self._note(f"{mark} heartbeat", self._beat(group, "m", 1))
            body = self._ask(codes.SYNC_GROUP, 4, **names, generation_id=1)
            self._note(f"{mark} sync", body.error_code)
            body = self._ask(codes.LEAVE_GROUP, 4, group_id=group, members=[{"member_id": "m"}])
            self._note(f"{mark} leave", body.error_code)
            self._note(f"{mark} leavers", [int(each.error_code) for each in body.members])
            self._note(f"{mark} old leave", self._ask(codes.LEAVE_GROUP, 1, **names).error_code)
            self._note(f"{mark} join", self._join(group, 5, "m").error_code)
        for version in (5, 6):
            body = self._ask(codes.DESCRIBE_GROUPS, version, groups=[f"none{self._word}"])
            found = body.groups[0]
            self._note(f"describe {version}", [int(found.error_code), found.group_state])
        body = self._ask(codes.DELETE_GROUPS, 2, groups_names=[f"none{self._word}"])
        self._note("delete", body.results[0].error_code)

    def _beat(self, group: str, member_id: str, generation: int) -> int:
        body = self._ask(
            codes.HEARTBEAT, 4, group_id=group, member_id=member_id, generation_id=generation
        )
        return int(body.error_code)

    def _join(self, group: str, version: int, member_id: str = "", **changes: Any) -> Any:
        times = {"session_timeout": 600_000}
        if version:
            times["rebalance_timeout"] = 600_000
        subscription = b"\0\1\0\0\0\1\0\5" + TOPIC.encode() + b"\xff\xff\xff\xff"
        values = {
            "group_id": f"{group}{self._word}" if group else "",
            "member_id": member_id,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": subscription}],
            **times,
            **changes,
        }
        return self._ask(codes.JOIN_GROUP, version, **values)

    def _members(self) -> None:
        """A member that does what it should not."""
        self._note("no protocols", self._join("bad", 3, protocols=[]).error_code)
        self._note("no type", self._join("bad", 3, protocol_type="").error_code)
        self._note("short session", self._join("bad", 3, session_timeout=10).error_code)
        self._note("long session", self._join("bad", 3, session_timeout=1 << 30).error_code)
        told = self._join("one", 5)
        self._note("an id first", told.error_code)
        member = told.member_id
        told = self._join("one", 5, member)
        self._note("then in", [int(told.error_code), told.generation_id])
        group = f"one{self._word}"
        names: dict[str, Any] = {"group_id": group, "member_id": member}
        self._note("commit before sync", self._commit(8, 1, member, group))
        self._note("heartbeat before sync", self._beat(group, member, 1))
        bad = {"protocol_type": "consumer", "protocol_name": "other"}
        body = self._ask(codes.SYNC_GROUP, 5, **names, generation_id=1, **bad)
        self._note("sync of another protocol", body.error_code)
        body = self._ask(codes.SYNC_GROUP, 5, **names, generation_id=1)
        self._note("sync of no protocol", body.error_code)
        body = self._ask(codes.SYNC_GROUP, 4, **names, generation_id=2)
        self._note("sync of another generation", body.error_code)
        plan = [{"member_id": member, "assignment": b"all"}]
        body = self._ask(codes.SYNC_GROUP, 4, **names, generation_id=1, assignments=plan)
        self._note("sync", [int(body.error_code), body.assignment])
        self._note("heartbeat", self._beat(group, member, 1))
        self._note("heartbeat of another generation", self._beat(group, member, 2))
        self._note("heartbeat of nobody", self._beat(group, "nobody", 1))
        other = {"protocol_type": "connect"}
        self._note("join of another type", self._join("one", 3, **other).error_code)
        other_name: dict[str, Any] = {"protocols": [{"name": "other", "metadata": b""}]}
        self._note("join of another protocol", self._join("one", 3, **other_name).error_code)
        self._note("commit", self._commit(8, 1, member, group))
        self._note("commit of another generation", self._commit(8, 2, member, group))
        self._note("commit of nobody", self._commit(8, 1, "nobody", group))
        self._note("commit without a member", self._commit(8, -1, "", group))
        body = self._ask(codes.DELETE_GROUPS, 2, groups_names=[group])
        self._note("delete in use", body.results[0].error_code)
        self._note("delete offsets in use", self._delete_offsets(group))
        static = self._join("static", 5, group_instance_id="i")
        self._note("static join", static.error_code)
        wrong = {"group_instance_id": "i"}
        self._note("static join of another id", self._join("static", 5, "m", **wrong).error_code)
        wrong = {"group_instance_id": "unknown"}
        self._note("unknown instance", self._join("static", 5, "m", **wrong).error_code)
        leavers = [
            {"member_id": "", "group_instance_id": "unknown"},
            {"member_id": "m", "group_instance_id": "i"},
            {"member_id": "", "group_instance_id": "i"},
        ]
        body = self._ask(codes.LEAVE_GROUP, 4, group_id=f"static{self._word}", members=leavers)
        self._note("static leavers", [int(each.error_code) for each in body.members])
        self._note("leave", self._ask(codes.LEAVE_GROUP, 1, **names).error_code)
        self._note("commit after it", self._commit(8, -1, "", group))
        self._note("delete offsets", self._delete_offsets(group))

    # -------------------------------------------------------------------------------------- offsets

    def _commit(self, version: int, generation: int, member: str, group: str, **more: Any) -> int:
        line = {
            "partition_index": more.pop("partition", 0),
            "committed_offset": 1,
            "committed_metadata": more.pop("text", ""),
        }
        topics = [{"name": more.pop("topic", TOPIC), "partitions": [line]}]
        body = self._ask(
            codes.OFFSET_COMMIT,
            version,
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member,
            topics=topics,
        )
        return int(body.topics[0].partitions[0].error_code)

    def _delete_offsets(self, group: str) -> list[int]:
        topics = [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]
        body = self._ask(codes.OFFSET_DELETE, 0, group_id=group, topics=topics)
        lines = [int(each.error_code) for topic in body.topics for each in topic.partitions]
        return [int(body.error_code), *lines]

    def _offsets(self) -> None:
        group = f"offsets{self._word}"
        for version in (2, 8, 9):
            code = self._commit(version, 5, "m", f"none{self._word}")
            self._note(f"commit {version} to no group", code)
        self._note("simple commit", self._commit(8, -1, "", group))
        self._note("commit of no topic", self._commit(8, -1, "", group, topic="missing"))
        self._note("long text", self._commit(8, -1, "", group, text="x" * 4097))
        self._note("text", self._commit(8, -1, "", group, text="x" * 4096))
        for version in (5, 8):
            topics = [{"name": TOPIC, "partition_indexes": [0]}]
            name = f"none{self._word}"
            if version < 8:
                body = self._ask(codes.OFFSET_FETCH, version, group_id=name, topics=topics)
            else:
                groups = [{"group_id": name, "topics": topics}]
                body = self._ask(codes.OFFSET_FETCH, version, groups=groups).groups[0]
            line = body.topics[0].partitions[0]
            self._note(
                f"fetch {version} of no group",
                [int(body.error_code), int(line.error_code), line.committed_offset],
            )
        self._note("delete offsets of no group", self._delete_offsets(f"none{self._word}"))

    # --------------------------------------------------------------------------------- transactions

    def _init(self, name: str, timeout_ms: int = 600_000, *pair: int) -> tuple[int, int, int]:
        more = {"producer_id": pair[0], "producer_epoch": pair[1]} if pair else {}
        deadline = time.monotonic() + LIMIT_S
        while True:
            body = self._ask(
                codes.INIT_PRODUCER_ID,
                4,
                transactional_id=name,
                transaction_timeout=timeout_ms,
                **{"producer_id": -1, "producer_epoch": -1, **more},
            )
            later = (codes.CONCURRENT_TRANSACTIONS, codes.COORDINATOR_LOAD_IN_PROGRESS)
            if body.error_code not in later:
                return int(body.error_code), body.producer_id, body.producer_epoch
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _add(self, name: str, producer_id: int, epoch: int, **more: Any) -> list[int]:
        deadline = time.monotonic() + LIMIT_S
        while True:
            body = self._ask(
                codes.ADD_PARTITIONS_TO_TXN,
                more.get("version", 3),
                v3_and_below_transactional_id=name,
                v3_and_below_producer_id=producer_id,
                v3_and_below_producer_epoch=epoch,
                v3_and_below_topics=[
                    {"name": each, "partitions": [0]} for each in more.get("topics", [TOPIC])
                ],
            )
            found = [
                int(each.partition_error_code)
                for topic in body.results_by_topic_v3_and_below
                for each in topic.results_by_partition
            ]
            if codes.CONCURRENT_TRANSACTIONS not in found:
                return sorted(found)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _end(
        self, name: str, producer_id: int, epoch: int, *, commit: bool, version: int = 4
    ) -> int:
        deadline = time.monotonic() + LIMIT_S
        while True:
            body = self._ask(
                codes.END_TXN,
                version,
                transactional_id=name,
                producer_id=producer_id,
                producer_epoch=epoch,
                committed=commit,
            )
            if body.error_code != codes.CONCURRENT_TRANSACTIONS:
                return int(body.error_code)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _transactions(self) -> None:
        name = f"tx{self._word}"
        self._note("init without a name", self._init("")[0])
        self._note("init for too long", self._init(name, 1 << 30)[0])
        self._note("init for no time", self._init(name, 0)[0])
        self._note("add to no transaction", self._add(f"none{self._word}", 1, 0))
        self._note("end of no transaction", self._end(f"none{self._word}", 1, 0, commit=True))
        code, producer_id, epoch = self._init(name)
        self._note("init", [code, epoch])
        for commit in (True, False):
            code = self._end(name, producer_id, epoch, commit=commit)
            self._note(f"end of nothing, commit={commit}", code)
        self._note("add of another", self._add(name, producer_id + 12345, epoch))
        self._note("add of another epoch", self._add(name, producer_id, epoch + 1))
        self._note("add in old words", self._add(name, producer_id, epoch + 1, version=1))
        self._note("add no topic", self._add(name, producer_id, epoch, topics=[TOPIC, "missing"]))
        self._note("add", self._add(name, producer_id, epoch))
        self._note("end of another", self._end(name, producer_id + 12345, epoch, commit=True))
        self._note("end of another epoch", self._end(name, producer_id, epoch + 1, commit=True))
        self._note("end", self._end(name, producer_id, epoch, commit=True))
        self._note("end again", self._end(name, producer_id, epoch, commit=True))
        self._note("end otherwise", self._end(name, producer_id, epoch, commit=False))
        code, same, next_epoch = self._init(name)
        self._note("init again", [code, same == producer_id, next_epoch > epoch])
        self._note("end of the old", self._end(name, producer_id, epoch, commit=True))
        self._note("init of the old", self._init(name, 600_000, producer_id, epoch)[0])
        self._note("init of another", self._init(name, 600_000, producer_id + 12345, 0)[0])
        newer = f"newer{self._word}"
        _, producer_id, epoch = self._init(newer)
        code = self._end(newer, producer_id, epoch, commit=True, version=5)
        self._note("newer end of nothing", code)
        code = self._end(newer, producer_id, epoch, commit=False, version=5)
        self._note("newer roll back of nothing", code)
        body = self._ask(codes.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[f"none{self._word}"])
        self._note("describe no transaction", body.transaction_states[0].error_code)
        body = self._ask(codes.LIST_TRANSACTIONS, 2, transactional_id_pattern="[")
        self._note("list with a bad pattern", body.error_code)


# What a broker of Kafka 4.3.0 answers.
CODES: dict[str, Any] = {
    "group  heartbeat": 25,
    "group  sync": 25,
    "group  leave": 0,
    "group  leavers": [25],
    "group  old leave": 25,
    "group  join": 25,
    "group (no name) heartbeat": 24,
    "group (no name) sync": 24,
    "group (no name) leave": 24,
    "group (no name) leavers": [],
    "group (no name) old leave": 24,
    "group (no name) join": 24,
    "describe 5": [0, "Dead"],
    "describe 6": [69, "Dead"],
    "delete": 69,
    "no protocols": 23,
    "no type": 23,
    "short session": 26,
    "long session": 26,
    "an id first": 79,
    "then in": [0, 1],
    "commit before sync": 27,
    "heartbeat before sync": 0,
    "sync of another protocol": 23,
    "sync of no protocol": 23,
    "sync of another generation": 22,
    "sync": [0, b"all"],
    "heartbeat": 0,
    "heartbeat of another generation": 22,
    "heartbeat of nobody": 25,
    "join of another type": 23,
    "join of another protocol": 23,
    "commit": 0,
    "commit of another generation": 22,
    "commit of nobody": 25,
    "commit without a member": 25,
    "delete in use": 68,
    "delete offsets in use": [0, 86],
    "static join": 0,
    "static join of another id": 82,
    "unknown instance": 25,
    "static leavers": [25, 82, 0],
    "leave": 0,
    "commit after it": 0,
    "delete offsets": [0, 0],
    "commit 2 to no group": 22,
    "commit 8 to no group": 22,
    "commit 9 to no group": 69,
    "simple commit": 0,
    "commit of no topic": 3,
    "long text": 12,
    "text": 0,
    "fetch 5 of no group": [0, 0, -1],
    "fetch 8 of no group": [0, 0, -1],
    "delete offsets of no group": [69],
    "init without a name": 42,
    "init for too long": 50,
    "init for no time": 50,
    "add to no transaction": [49],
    "end of no transaction": 49,
    "init": [0, 0],
    "end of nothing, commit=True": 48,
    "end of nothing, commit=False": 48,
    "add of another": [49],
    "add of another epoch": [90],
    "add in old words": [47],
    "add no topic": [3, 55],
    "add": [0],
    "end of another": 49,
    "end of another epoch": 90,
    "end": 0,
    "end again": 0,
    "end otherwise": 48,
    "init again": [0, True, True],
    "end of the old": 90,
    "init of the old": 90,
    "init of another": 90,
    "newer end of nothing": 48,
    "newer roll back of nothing": 0,
    "describe no transaction": 105,
    "list with a bad pattern": 128,
}
