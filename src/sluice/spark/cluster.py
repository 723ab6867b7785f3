"""This module speaks to nameservers and brokers for Spark: routes, offsets, reads and sends.

It works with Sluice's brokers and with Apache's. Where a broker serves bulk reads they are used;
one that does not know the request is pulled from, 32 messages at a time. A broker that is gone or
busy is asked again, at the address that the nameserver names by then, until `patience_ms` are over:
so a task survives a restart and a change of the leader.

Objects of this module live in one process and are never pickled: readers keep the options, and ask
`cluster_for` where they run. Its links are kept between the tasks of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from sluice.client.blocking import Body, LinkPool
from sluice.client.core.signing import Credentials, make_credentials
from sluice.errors import (
    BrokerRefused,
    ConfigError,
    LinkError,
    LinkLost,
    NoNameserver,
    OffsetGone,
    ProtocolError,
    SluiceError,
    TopicMissing,
)
from sluice.model import Buffer
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_bodies import (
    Route,
    read_cluster_info,
    read_consumer_offsets,
    read_route,
    read_topic_stats,
)
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_codes import ResponseCode as Response
from sluice.spark.options import Connection, Filters
from sluice.tls import client_tls

T = TypeVar("T")

READER_GROUP: Final = "SLUICE_SPARK"
SENDER_GROUP: Final = "SLUICE_SPARK"
_AUTO_CREATE_TOPIC: Final = "TBW102"
_DOT: Final = "%2E"
_PULL_COUNT: Final = 32
_FLAG_SUBSCRIPTION: Final = 4
_FIRST_WAIT_SECONDS: Final = 0.05
_WAIT_SECONDS_MAX: Final = 2.0
_MISSING_SECONDS: Final = 15.0
_GREETING_SECONDS: Final = 30.0
_HINT: Final = "it names nameservers, which have port 9876, and not brokers or Kafka's port"
_READABLE, _WRITABLE = 4, 2
# What another try may change: the broker is busy, starts, stops, or is about to be replaced.
_PASSING: Final = (
    Response.SYSTEM_BUSY,
    Response.SERVICE_NOT_AVAILABLE,
    Response.FLOW_CONTROL,
    Response.PULL_RETRY_IMMEDIATELY,
)
_STORED: Final = (
    *(Response.SUCCESS, Response.FLUSH_DISK_TIMEOUT, Response.SLAVE_NOT_AVAILABLE),
    Response.FLUSH_SLAVE_TIMEOUT,
)
# Topics that a pattern never means: those of the brokers themselves.
_OWN_PREFIXES: Final = ("%RETRY%", "%DLQ%", "rmq_sys_", "RMQ_SYS_", "SCHEDULE_TOPIC_", "%SYS%")
_OWN_TOPICS: Final = frozenset(
    (
        *("TBW102", "SELF_TEST_TOPIC", "BenchmarkTest", "OFFSET_MOVED_EVENT", "DefaultCluster"),
        *("DefaultHeartBeatSyncerTopic", "TRANS_CHECK_MAX_TIME_TOPIC"),
    )
)


class Queue(NamedTuple):
    """A queue of a topic and the broker that has it."""

    topic: str
    broker: str
    queue_id: int


class Span(NamedTuple):
    """What a queue holds: offsets [low, high)."""

    low: int
    high: int


class Chunk(NamedTuple):
    """Entries as they are stored, one after the other, and where to go on."""

    data: Buffer
    sizes: npt.NDArray[np.int64]
    next_offset: int
    topic_id: str = ""  # of topics that may hold batches of Kafka's producers


class Gone(OffsetGone):
    """Offsets that were asked for are not there any more; `next_offset` is the next that is."""

    def __init__(self, text: str, next_offset: int) -> None:
        super().__init__(text)
        self.next_offset = next_offset


class Cluster:
    """The nameservers and brokers behind one set of addresses."""

    def __init__(
        self,
        connection: Connection,
        patience_ms: int = 120_000,
        credentials: Credentials | None = None,
    ) -> None:
        self._connection = connection
        self._patience_seconds = patience_ms / 1000
        tls = None
        if connection.tls:
            tls = client_tls(
                connection.tls_ca_file,
                check_name=not connection.tls_any_name,
                certificate_file=connection.tls_certificate_file,
                key_file=connection.tls_key_file,
            )
        own = make_credentials(connection.access_key, connection.secret_key)
        self._pool = LinkPool(tls, credentials or own)
        self._routes: dict[str, Route] = {}
        self._without_bulk: set[str] = set()  # brokers that do not serve bulk reads
        self._known_groups: set[tuple[str, str]] = set()
        self._is_greeted = False
        self._seen: set[str] = set()  # topics that exist, or did a while ago
        self._unmade: set[str] = set()  # topics whose route is that of the one they are made after

    def close(self) -> None:
        self._pool.close()

    # --------------------------------------------------------------------------------------- asking

    def _ask_nameserver(self, code: int, ext: dict[str, str]) -> RemotingCommand:
        failure: SluiceError | None = None
        for address in self._connection.nameservers:
            try:
                return self._pool.request(address, code, ext, timeout_seconds=10)
            except SluiceError as error:
                failure = error
        raise NoNameserver(f"no nameserver answers: {failure}")

    def _ask(
        self, broker: str, topic: str, code: int, ext: dict[str, str], body: Body = b""
    ) -> RemotingCommand:
        address = self._address(topic, broker)
        return self._pool.request(
            address, code, ext, body, timeout_seconds=self._connection.request_seconds
        )

    def _patiently(self, topic: str, ask: Callable[[], T], limit_seconds: float = 1e9) -> T:
        """Ask, and again while the broker is away or busy; routes are looked up anew each time."""
        now = time.monotonic()
        until = now + min(self._patience_seconds, limit_seconds)
        missing_until = now + min(self._patience_seconds, _MISSING_SECONDS)
        wait_seconds = _FIRST_WAIT_SECONDS
        while True:
            try:
                return ask()
            except (LinkError, BrokerRefused, TopicMissing) as error:
                if isinstance(error, BrokerRefused) and error.code not in _PASSING:
                    raise
                limit = until
                if isinstance(error, TopicMissing):
                    # A broker that starts anew is not in the routes for a while; but a topic that
                    # nobody has seen is an error at once.
                    if topic not in self._seen:
                        raise
                    limit = missing_until
                if time.monotonic() + wait_seconds > limit:
                    raise
            self._routes.pop(topic, None)
            time.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, _WAIT_SECONDS_MAX)

    def greet(self) -> None:
        """Ask the nameservers before all else: an address that is wrong is not waited for long."""
        if self._is_greeted:
            return
        code = Request.GET_BROKER_CLUSTER_INFO
        try:
            answer = self._patiently("", lambda: self._ask_nameserver(code, {}), _GREETING_SECONDS)
        except NoNameserver as error:
            raise NoNameserver(f"option sluice.bootstrap.servers: {error}; {_HINT}") from None
        if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED:
            raise ConfigError(f"option sluice.bootstrap.servers: a broker answers there; {_HINT}")
        self._is_greeted = True

    # --------------------------------------------------------------------------------------- routes

    def _route(self, topic: str) -> Route:
        route = self._routes.get(topic)
        if route is None:
            ext = {"topic": stored_name(topic), "acceptStandardJsonOnly": "true"}
            answer = self._ask_nameserver(Request.GET_ROUTEINFO_BY_TOPIC, ext)
            if answer.code == Response.TOPIC_NOT_EXIST:
                self._require_brokers(topic)  # one may have come just now
                answer = self._ask_nameserver(Request.GET_ROUTEINFO_BY_TOPIC, ext)
            if answer.code == Response.TOPIC_NOT_EXIST:
                raise TopicMissing(f"topic {topic} is not known to the nameservers")
            _require(answer, f"the route of {topic}")
            route = self._routes[topic] = read_route(answer.body)
            self._seen.add(topic)
        return route

    def _require_brokers(self, topic: str) -> None:
        """Where no broker is there at all, one starts: that is waited for, not an error at once."""
        answer = self._ask_nameserver(Request.GET_BROKER_CLUSTER_INFO, {})
        if answer.code == Response.SUCCESS and not read_cluster_info(answer.body):
            names = ", ".join(self._connection.nameservers)
            raise LinkLost(f"{names}: waited for a broker with topic {topic}; none has registered")

    def _address(self, topic: str, broker: str) -> str:
        for each in self._route(topic).brokers:
            if each.name == broker and each.addresses:
                return each.addresses.get(0) or each.addresses[min(each.addresses)]
        raise BrokerRefused(
            Response.SERVICE_NOT_AVAILABLE, "no address is known", f"{topic} on broker {broker}"
        )

    def forget_routes(self) -> None:
        """Look routes up anew: queues and brokers may have come."""
        self._routes.clear()

    def broker_names(self) -> set[str]:
        """The brokers that the nameservers know."""
        answer = self._patiently(
            "", lambda: self._ask_nameserver(Request.GET_BROKER_CLUSTER_INFO, {})
        )
        return set(read_cluster_info(_require(answer, "the list of brokers").body))

    def topics(self) -> list[str]:
        """The names of all topics but those of the brokers themselves."""
        answer = self._patiently(
            "", lambda: self._ask_nameserver(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
        )
        _require(answer, "the list of topics")
        names = orjson.loads(bytes(answer.body)).get("topicList") or []
        return sorted(
            name.replace(_DOT, ".")
            for name in names
            if isinstance(name, str)
            and not name.startswith(_OWN_PREFIXES)
            and name not in _OWN_TOPICS
        )

    def queues(self, topic: str, *, writing: bool = False) -> list[Queue]:
        """The queues of a topic, in the order that gives them their partition numbers.

        Raises TopicMissing.
        """
        route = self._patiently(topic, lambda: self._route(topic))
        needed = _WRITABLE if writing else _READABLE
        return sorted(
            Queue(topic, each.broker_name, number)
            for each in route.queues
            if each.perm & needed
            for number in range(each.write_queue_count if writing else each.read_queue_count)
        )

    def queues_to_send(self, topic: str) -> list[Queue]:
        """Where to send to: the topic's queues, or those of a topic that is made by sending."""
        if topic in self._unmade:  # it may have been made since, with queues of its own
            self._unmade.discard(topic)
            self._routes.pop(topic, None)
        try:
            queues = self.queues(topic, writing=True)
        except TopicMissing as missing:
            try:
                model = self.queues(_AUTO_CREATE_TOPIC, writing=True)
            except TopicMissing:
                raise missing from None
            queues = [each._replace(topic=topic) for each in model if each.queue_id < 4]
            self._routes[topic] = self._routes[_AUTO_CREATE_TOPIC]
            self._unmade.add(topic)
        if not queues:
            raise BrokerRefused(
                Response.NO_PERMISSION, "it has no queue that can be written", f"topic {topic}"
            )
        return queues

    # -------------------------------------------------------------------------------------- offsets

    def spans(self, topic: str) -> dict[Queue, Span]:
        """What each queue of a topic holds now."""
        queues = self.queues(topic)
        found: dict[Queue, Span] = {}
        for broker in sorted({queue.broker for queue in queues}):
            answer = self._patiently(topic, partial(self._stats, broker, topic))
            for name, span in read_topic_stats(answer.body).items():
                queue = Queue(topic, broker, name.queue_id)
                high = span.max_offset if span.stable_offset is None else span.stable_offset
                found[queue] = Span(span.min_offset, max(span.min_offset, high))
        return {queue: found.get(queue, Span(0, 0)) for queue in queues}

    def _stats(self, broker: str, topic: str) -> RemotingCommand:
        answer = self._ask(
            broker, topic, Request.GET_TOPIC_STATS_INFO, {"topic": stored_name(topic)}
        )
        if answer.code == Response.TOPIC_NOT_EXIST:
            raise TopicMissing(f"topic {topic} is gone from broker {broker}")
        _require(answer, f"the offsets of {topic} on broker {broker}")
        return answer

    def offset_at(self, queue: Queue, when_ms: int) -> tuple[int, bool]:
        """The offset of the first message whose time is this or later, the end where there is
        none; and whether all that follow are not older either.
        """
        ext = {**_place(queue), "timestamp": str(when_ms)}

        def ask() -> RemotingCommand:
            answer = self._ask(queue.broker, queue.topic, Request.SLUICE_OFFSET_AT, ext)
            if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED:
                rocketmq = {**ext, "boundaryType": "LOWER"}
                code = Request.SEARCH_OFFSET_BY_TIMESTAMP
                answer = self._ask(queue.broker, queue.topic, code, rocketmq)
            return _require(answer, f"the offset of {name_of(queue)} at a time")

        answer = self._patiently(queue.topic, ask)
        return int(answer.ext["offset"]), answer.ext.get("isOrdered", "true") == "true"

    def range_bytes(self, queue: Queue, ranges: list[tuple[int, int]]) -> list[int] | None:
        """About how many bytes ranges have; None where the broker cannot tell."""
        if queue.broker in self._without_bulk or not ranges:
            return None if ranges else []
        body = orjson.dumps(ranges)

        def ask() -> RemotingCommand:
            ext = _place(queue)
            answer = self._ask(queue.broker, queue.topic, Request.SLUICE_RANGE_BYTES, ext, body)
            if answer.code != Response.REQUEST_CODE_NOT_SUPPORTED:
                _require(answer, f"the sizes of {name_of(queue)}")
            return answer

        answer = self._patiently(queue.topic, ask)
        if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED:
            self._without_bulk.add(queue.broker)
            return None
        return [int(each) for each in orjson.loads(bytes(answer.body))]

    # --------------------------------------------------------------------------------------- groups

    def commit(self, group: str, queue: Queue, offset: int) -> None:
        """Note how far a group is; the broker makes the group where it is not known."""
        ext = {"consumerGroup": group, **_place(queue), "commitOffset": str(offset)}
        if (queue.broker, group) not in self._known_groups:
            # A pull makes it, on every kind of broker; what it brings is not needed.
            self._pull_once(queue, offset, Filters(), group)
            self._known_groups.add((queue.broker, group))

        def ask() -> None:
            answer = self._ask(queue.broker, queue.topic, Request.UPDATE_CONSUMER_OFFSET, ext)
            _require(answer, f"group {group} at {name_of(queue)}")

        self._patiently(queue.topic, ask)

    def committed(self, group: str, queues: list[Queue]) -> dict[Queue, int]:
        """How far a group is, without the queues for which it never said.

        The request for one queue is of no use: of a young topic it answers 0 for any group.
        """
        found: dict[Queue, int] = {}
        for broker, topic in sorted({(queue.broker, queue.topic) for queue in queues}):
            answer = self.tell(broker, topic, Request.GET_ALL_CONSUMER_OFFSET, {})
            table = read_consumer_offsets(answer.body).get(f"{stored_name(topic)}@{group}", {})
            for queue_id, offset in table.items():
                found[Queue(topic, broker, queue_id)] = offset
        return {queue: found[queue] for queue in queues if queue in found}

    def forget_group(self, group: str, queues: list[Queue]) -> None:
        """Delete a group and its offsets from all brokers of these queues."""
        ext = {"groupName": group, "cleanOffset": "true"}
        for broker, topic in sorted({(queue.broker, queue.topic) for queue in queues}):
            self.tell(broker, topic, Request.DELETE_SUBSCRIPTIONGROUP, ext)
            self._known_groups.discard((broker, group))

    # -------------------------------------------------------------------------------------- reading

    def fetch(
        self, queue: Queue, offset: int, stop: int, filters: Filters, bytes_max: int, *, bulk: bool
    ) -> Chunk:
        """Entries from an offset on; may hold some at or above `stop`. Raises Gone."""

        def ask() -> Chunk | None:
            return self._bulk_once(queue, offset, stop, filters, bytes_max)

        self._seen.add(queue.topic)
        if bulk and queue.broker not in self._without_bulk:
            chunk = self._patiently(queue.topic, ask)
            if chunk is not None:
                return chunk
            self._without_bulk.add(queue.broker)
        return self._pulled(queue, offset, stop, filters, bytes_max)

    def _bulk_once(
        self, queue: Queue, offset: int, stop: int, filters: Filters, bytes_max: int
    ) -> Chunk | None:
        """None where the broker does not know the request."""
        ext = {
            **_place(queue), "offset": str(offset), "toOffset": str(stop),
            "maxBytes": str(bytes_max),
        }  # fmt: skip
        named = {"tags": filters.tags, "keys": " ".join(filters.keys), "sql": filters.sql}
        ext.update({name: value for name, value in named.items() if value})
        answer = self._ask(queue.broker, queue.topic, Request.SLUICE_BULK_FETCH, ext)
        if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED:
            return None
        if answer.code != Response.SUCCESS and "nextOffset" in answer.ext:
            raise _gone(queue, offset, answer, int(answer.ext["nextOffset"]))
        _require(answer, f"reading {name_of(queue)} at {offset}")
        count = int(answer.ext["count"])
        cut = len(answer.body) - 4 * count
        if cut < 0:
            raise ProtocolError(f"{name_of(queue)}: {count} entries without their sizes")
        sizes = np.frombuffer(answer.body[cut:], ">i4").astype(np.int64)
        topic_id = answer.ext.get("topicId", "")
        return Chunk(answer.body[:cut], sizes, int(answer.ext["nextOffset"]), topic_id)

    def _pulled(
        self, queue: Queue, offset: int, stop: int, filters: Filters, bytes_max: int
    ) -> Chunk:
        """Ordinary pulls until there is a good portion."""
        parts: list[Buffer] = []
        byte_count = 0
        begin = offset
        while offset < stop and byte_count < bytes_max:
            try:
                data, next_offset = self._patiently(
                    queue.topic,
                    partial(self._pull_once, queue, offset, filters, READER_GROUP),
                )
            except Gone:
                if offset == begin:
                    raise
                break  # what was found before comes first
            if next_offset <= offset:
                break
            offset = next_offset
            if len(data):
                parts.append(data)
                byte_count += len(data)
        if offset == begin:
            raise Gone(f"{name_of(queue)}: nothing is there at {begin}, below {stop}", begin)
        data = b"".join(parts)
        return Chunk(data, _walk(data), offset)

    def _pull_once(
        self, queue: Queue, offset: int, filters: Filters, group: str
    ) -> tuple[Buffer, int]:
        ext = {
            **_place(queue), "consumerGroup": group, "queueOffset": str(offset),
            "maxMsgNums": str(_PULL_COUNT), "sysFlag": str(_FLAG_SUBSCRIPTION),
            "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0",
            "subscription": filters.sql or filters.tags or "*",
            "expressionType": "SQL92" if filters.sql else "TAG",
        }  # fmt: skip
        answer = self._ask(queue.broker, queue.topic, Request.PULL_MESSAGE, ext)
        next_offset = int(answer.ext.get("nextBeginOffset", offset))
        if answer.code == Response.PULL_OFFSET_MOVED:
            raise _gone(queue, offset, answer, next_offset)
        if answer.code in (Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY):
            return b"", next_offset
        _require(answer, f"reading {name_of(queue)} at {offset}")
        return answer.body, next_offset

    # -------------------------------------------------------------------------------------- sending

    def send_batch(self, queue: Queue, body: Body, born_ms: int) -> None:
        """Store a batch of messages; more than once where an answer is lost."""
        ext = {
            "a": SENDER_GROUP, "b": stored_name(queue.topic), "c": _AUTO_CREATE_TOPIC, "d": "4",
            "e": str(queue.queue_id), "f": "0", "g": str(born_ms), "h": "0", "i": "", "j": "0",
            "k": "false", "m": "true",
        }  # fmt: skip

        def ask() -> None:
            answer = self._ask(queue.broker, queue.topic, Request.SEND_BATCH_MESSAGE, ext, body)
            if answer.code not in _STORED:
                _require(answer, f"sending to {name_of(queue)}")

        self._patiently(queue.topic, ask)

    def can_stage(self, broker: str, topic: str, sink: str) -> bool:
        """Whether a broker serves staged writes."""
        return self._last_batch(broker, topic, sink) is not None

    def _last_batch(self, broker: str, topic: str, sink: str) -> int | None:
        """The newest batch that a sink has published at a broker; None where it cannot stage."""

        def ask() -> RemotingCommand:
            answer = self._ask(broker, topic, Request.SLUICE_SINK_STATE, {"sink": sink})
            if answer.code != Response.REQUEST_CODE_NOT_SUPPORTED:
                _require(answer, f"sink {sink} at broker {broker}")
            return answer

        answer = self._patiently(topic, ask)
        return int(answer.ext["batch"]) if answer.code == Response.SUCCESS else None

    def stage(self, queue: Queue, sink: str, batch: int, body: Body, count: int) -> str:
        """Store so many images where nobody sees them; the handle to publish them by."""
        ext = {"sink": sink, "batch": str(batch), **_place(queue), "imageCount": str(count)}
        return self.tell(queue.broker, queue.topic, Request.SLUICE_STAGE, ext, body).ext["handle"]

    def publish(
        self, broker: str, topic: str, sink: str, batch: int, handles: list[str], *, once: bool
    ) -> bool:
        """Make staged messages visible, once for a sink and a batch; whether this call did it."""
        others = {queue.broker for queue in self.queues_to_send(topic)} - {broker}
        for other in sorted(others):
            last = self._last_batch(other, topic, sink)
            if last is not None and last >= batch:
                return False  # it was published there, before the routes changed
        ext = {"sink": sink, "batch": str(batch), "once": str(once).lower()}
        answer = self.tell(broker, topic, Request.SLUICE_PUBLISH, ext, orjson.dumps(handles))
        return answer.ext.get("published") == "true"

    def tell(
        self, broker: str, topic: str, code: int, ext: dict[str, str], body: Body = b""
    ) -> RemotingCommand:
        """Any request to a broker of a topic, asked again while it is away; it must succeed."""

        def ask() -> RemotingCommand:
            answer = self._ask(broker, topic, code, ext, body)
            return _require(answer, f"topic {topic} on broker {broker}")

        return self._patiently(topic, ask)


def name_of(queue: Queue) -> str:
    """A queue, for people."""
    return f"topic {queue.topic}, queue {queue.queue_id} of broker {queue.broker}"


def _place(queue: Queue) -> dict[str, str]:
    return {"topic": stored_name(queue.topic), "queueId": str(queue.queue_id)}


def stored_name(topic: str) -> str:
    """How brokers call a topic of Kafka's clients, whose name may have dots."""
    return topic.replace(".", _DOT)


def _require(answer: RemotingCommand, what: str) -> RemotingCommand:
    if answer.code != Response.SUCCESS:
        raise BrokerRefused(answer.code, answer.remark, what)
    return answer


def _gone(queue: Queue, offset: int, answer: RemotingCommand, next_offset: int) -> Gone:
    why = answer.remark or "the data is gone"
    return Gone(
        f"{name_of(queue)}: offset {offset} cannot be read ({why}); the next good offset is "
        f"{next_offset}",
        next_offset,
    )


def _walk(data: bytes) -> npt.NDArray[np.int64]:
    """The sizes of entries, from one to the next."""
    sizes: list[int] = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big", signed=True)
        if not 0 < size <= len(data) - at:
            raise ProtocolError(f"an entry of {size} bytes in an answer of {len(data)}")
        sizes.append(size)
        at += size
    return np.array(sizes, np.int64)


_clusters: Final[dict[tuple[Connection, int], Cluster]] = {}
_CLUSTERS_MAX: Final = 16


def cluster_for(connection: Connection, patience_ms: int) -> Cluster:
    """The cluster of this process behind these addresses: links live longer than a task."""
    key = (connection, patience_ms)
    cluster = _clusters.get(key)
    if cluster is None:
        if len(_clusters) >= _CLUSTERS_MAX:
            _clusters.pop(next(iter(_clusters))).close()
        cluster = _clusters[key] = Cluster(connection, patience_ms)
    return cluster
