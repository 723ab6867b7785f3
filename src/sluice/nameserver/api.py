"""This module answers requests to a nameserver: request code -> route table or values -> answer.

Codes, fields, remarks and bodies are those of RocketMQ's nameserver. What a request does wrong is
answered with the code and the remark of the error, and logged in one line with the peer; the
connection stays. This module does not send and does not write: an answer that has to wait until the
values are on disk says so, and notices for brokers go to `on_notice`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from zlib import crc32

import orjson

from sluice.config import (
    NameserverConfig,
    is_everywhere,
    is_loopback,
    to_properties,
    update,
)
from sluice.errors import NoPermission, NotFound, RequestInvalid, SluiceError, TopicMissing
from sluice.nameserver.kv import ORDER_TOPICS, KvTable
from sluice.nameserver.routes import (
    UNIT,
    UNIT_SUBSCRIPTION,
    BrokerEntry,
    Gone,
    Notice,
    RouteTable,
    in_zone,
)
from sluice.net import Connection
from sluice.protocol import remoting_bodies as bodies
from sluice.protocol.framing import Frame
from sluice.protocol.json_members import read_object
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_codes import RequestCode, ResponseCode
from sluice.protocol.remoting_schemas import REQUESTS, ext_of, parse_fields

log_lines = logging.getLogger("sluice.nameserver")

ZONE_NAME: Final = "__ZONE_NAME"
ZONE_MODE: Final = "__ZONE_MODE"
# Clients recognise an unknown topic by the code; people know the sentence.
_NO_ROUTE: Final = (
    "No topic route info in name server for the topic: {}\n"
    "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
)
# What RocketMQ's nameserver lets nobody change over the wire.
_NEVER_UPDATED: Final = {"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What to send back; `after_save`: only when the values are on disk."""

    code: int = ResponseCode.SUCCESS
    ext: dict[str, str] = field(default_factory=dict)
    remark: str | None = None
    body: Frame = b""
    after_save: bool = False


Fields: TypeAlias = dict[str, Any]
_Handler: TypeAlias = Callable[[Connection, RemotingCommand, Fields], Answer]


class NameserverApi:
    """The requests that one nameserver understands."""

    def __init__(
        self,
        config: NameserverConfig,
        table: RouteTable,
        values: KvTable,
        now_ms: Callable[[], int],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self.config = config  # replaced when a setting is changed over the wire
        self._table = table
        self._values = values
        self._now_ms = now_ms
        self._on_notice = on_notice
        self._handlers: dict[int, _Handler] = {
            RequestCode.PUT_KV_CONFIG: self._put_value,
            RequestCode.GET_KV_CONFIG: self._get_value,
            RequestCode.DELETE_KV_CONFIG: self._delete_value,
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster_info,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_permission,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._all_topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._values_of_namespace,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self._unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self._unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self._unit_topics,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._update_config,
            RequestCode.GET_NAMESRV_CONFIG: self._get_config,
            RequestCode.QUERY_DATA_VERSION: self._data_version,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write_permission,
            RequestCode.GET_BROKER_MEMBER_GROUP: self._member_group,
            RequestCode.BROKER_HEARTBEAT: self._heartbeat,
        }

    @property
    def codes(self) -> frozenset[int]:
        """The request codes that are served."""
        return frozenset(self._handlers)

    def handle(self, connection: Connection, request: RemotingCommand) -> Answer:
        """The answer to a request; never raises for what is the peer's fault."""
        handler = self._handlers.get(request.code)
        if handler is None:
            connection.log_share.line(
                log_lines,
                logging.INFO,
                "%s: request code %d is not served",
                connection,
                request.code,
            )
            remark = f" request type {request.code} not supported"
            return Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        try:
            return handler(connection, request, parse_fields(REQUESTS[request.code], request.ext))
        except (TopicMissing, NotFound) as error:
            return Answer(error.rocketmq_code, remark=str(error))
        except SluiceError as error:
            name = REQUESTS[request.code].name
            connection.log_share.line(
                log_lines, logging.WARNING, "%s: %s refused: %s", connection, name, error
            )
            return Answer(error.rocketmq_code, remark=str(error))

    # ------------------------------------------------------------------------------------- brokers

    def _register(self, connection: Connection, request: RemotingCommand, fields: Fields) -> Answer:
        checksum = fields["bodyCrc32"]
        if checksum and crc32(request.body) & 0x7FFFFFFF != checksum:
            raise SluiceError("crc32 not match")
        registration = bodies.Registration({})
        if request.body:
            try:
                registration = bodies.read_registration(
                    request.body, compressed=bool(fields["compressed"]), version=request.version
                )
            except RequestInvalid as error:
                raise SluiceError(f"Failed to decode RegisterBrokerBody: {error}") from error
        entry = BrokerEntry(
            cluster=fields["clusterName"],
            name=fields["brokerName"],
            address=fields["brokerAddr"],
            broker_id=fields["brokerId"],
            ha_address=fields["haServerAddr"],
            timeout_ms=fields["heartbeatTimeoutMillis"],
            acting_master=fields["enableActingMaster"],
            zone=request.ext.get(ZONE_NAME),
            everywhere=_everywhere(connection, request),
        )
        done = self._table.register(entry, registration, connection, self._now_ms())
        if done.ignored:
            log_lines.warning("%s: registration of %s ignored: %s", connection, entry, done.ignored)
        elif done.is_new:
            log_lines.info(
                "broker %s id %d of %s registered from %s with %d topics",
                *(entry.name, entry.broker_id, entry.cluster, entry.address),
                len(registration.topics),
            )
        self._notify(done.notice)
        order_topics = None
        if self.config.order_topics_to_brokers:
            order_topics = self._values.namespace(ORDER_TOPICS)
        return Answer(
            ext=ext_of({"haServerAddr": done.ha_address, "masterAddr": done.master_address}),
            body=b"" if order_topics is None else bodies.write_kv_table(order_topics),
        )

    def _unregister(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        cluster, address = fields["clusterName"], fields["brokerAddr"]
        log_lines.info("broker %s of %s unregistered", address, cluster)
        notice = self._table.unregister(cluster, address, fields["brokerName"], fields["brokerId"])
        self._notify(notice)
        return Answer()

    def _heartbeat(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        self._table.heard(fields["clusterName"], fields["brokerAddr"], self._now_ms())
        return Answer()

    def _data_version(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        cluster, address = fields["clusterName"], fields["brokerAddr"]
        told = bodies.read_data_version(read_object(request.body)) if request.body else None
        known = self._table.version_of(cluster, address)
        self._table.heard(cluster, address, self._now_ms())
        return Answer(
            ext=ext_of({"changed": known is None or known != told}),
            body=b"" if known is None else orjson.dumps(known.members()),
        )

    def _register_topic(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        queues = bodies.read_route(request.body).queues if request.body else ()
        if queues and not self._table.register_topic(fields["topic"], queues):
            log_lines.warning(
                "%s: topic %s names a broker that is not registered", connection, fields["topic"]
            )
        return Answer()

    def _member_group(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        group = self._table.member_group(fields["clusterName"], fields["brokerName"])
        group = self._table.dialled(group, connection.local[0])
        # RocketMQ forgets to set the remark here, and what it sends is what clients know.
        return Answer(remark="not set any response code", body=bodies.write_member_group(group))

    def lost(self, connection: Connection) -> None:
        """A connection is closed: brokers that registered over it leave the routes."""
        self._left(self._table.lost(connection, self._now_ms()), "its connection closed")

    def expire(self) -> list[Gone]:
        """Take silent brokers out of the routes; the caller closes their connections."""
        gone = self._table.expire(self._now_ms())
        self._left(gone, "it was silent")
        return gone

    def _left(self, brokers: list[Gone], reason: str) -> None:
        for gone in brokers:
            log_lines.warning(
                "broker %s of %s left the routes: %s (%d ms since it was heard of)",
                *(gone.address, gone.cluster, reason, gone.silent_ms),
            )
            self._notify(gone.notice)

    def _notify(self, notice: Notice | None) -> None:
        if notice is not None and self.config.notify_lowest_id:
            self._on_notice(notice)

    # ------------------------------------------------------------------------------ clients' side

    def _route(self, connection: Connection, request: RemotingCommand, fields: Fields) -> Answer:
        topic = fields["topic"]
        route = self._table.route(topic)
        if route is None:
            raise TopicMissing(_NO_ROUTE.format(topic))
        here, dialled = connection.local[0], self._table.dialled
        route = route._replace(brokers=tuple(dialled(broker, here) for broker in route.brokers))
        if self.config.order_topics_in_routes:
            route = route._replace(order_config=self._values.get(ORDER_TOPICS, topic))
        quoted = bodies.wants_quoted_keys(request.version, fields["acceptStandardJsonOnly"])
        zone = request.ext.get(ZONE_NAME, "")
        if zone and request.ext.get(ZONE_MODE, "").lower() == "true":
            route, quoted = in_zone(route, zone), False  # RocketMQ writes this one without quotes
        return Answer(body=bodies.write_route(route, quoted=quoted))

    # ------------------------------------------------------------------------------ administration

    def _cluster_info(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        here, brokers = connection.local[0], self._table.brokers()
        return Answer(
            body=bodies.write_cluster_info([self._table.dialled(each, here) for each in brokers])
        )

    def _all_topics(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        if not self.config.list_all_topics:
            raise SluiceError("disable")
        return Answer(body=bodies.write_topic_list(self._table.topics()))

    def _topics_of_cluster(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        self._check_lists()
        topics = self._table.topics_of_cluster(fields["cluster"])
        return Answer(body=bodies.write_topic_list(topics))

    def _system_topics(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        topics, address = self._table.system_topics(connection.local[0])
        return Answer(body=bodies.write_topic_list(topics, address))

    def _unit_topics(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        self._check_lists()
        if request.code == RequestCode.GET_UNIT_TOPIC_LIST:
            topics = self._table.topics_by_flag(UNIT)
        elif request.code == RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST:
            topics = self._table.topics_by_flag(UNIT_SUBSCRIPTION)
        else:
            topics = self._table.topics_by_flag(UNIT_SUBSCRIPTION, without_bits=UNIT)
        return Answer(body=bodies.write_topic_list(topics))

    def _check_lists(self) -> None:
        if not self.config.list_topics:
            raise SluiceError("disable")

    def _wipe_write_permission(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        count = self._table.wipe_write_permission(fields["brokerName"])
        log_lines.info("%s: took the write permission of %s", connection, fields["brokerName"])
        return Answer(ext=ext_of({"wipeTopicCount": count}))

    def _add_write_permission(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        count = self._table.add_write_permission(fields["brokerName"])
        log_lines.info("%s: gave the write permission to %s", connection, fields["brokerName"])
        return Answer(ext=ext_of({"addTopicCount": count}))

    def _delete_topic(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        self._table.delete_topic(fields["topic"], fields["clusterName"] or "")
        log_lines.info("%s: deleted topic %s from the routes", connection, fields["topic"])
        return Answer()

    # -------------------------------------------------------------------------- values, settings

    def _put_value(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        self._values.put(fields["namespace"], fields["key"], fields["value"])
        return Answer(after_save=True)

    def _get_value(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        namespace, key = fields["namespace"], fields["key"]
        value = self._values.get(namespace, key)
        if value is None:
            raise NotFound(f"No config item, Namespace: {namespace} Key: {key}")
        return Answer(ext={"value": value})

    def _delete_value(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        self._values.delete(fields["namespace"], fields["key"])
        return Answer(after_save=True)

    def _values_of_namespace(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        table = self._values.namespace(fields["namespace"])
        if table is None:
            raise NotFound(f"No config item, Namespace: {fields['namespace']}")
        return Answer(body=bodies.write_kv_table(table))

    def _update_config(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        changes = bodies.read_properties(request.body)
        if not _NEVER_UPDATED.isdisjoint(changes):
            raise NoPermission("Can not update config in black list.")
        loaded = update(self.config, changes, f"update by {connection}")
        self.config = loaded.config
        for name, origin in loaded.origins.items():
            log_lines.info("%s is %s now (%s)", name, getattr(self.config, name), origin)
        if "log_level" in loaded.origins:
            logging.getLogger("sluice").setLevel(self.config.log_level.upper())
        for warning in loaded.warnings:
            log_lines.warning("%s", warning)
        return Answer()

    def _get_config(
        self, connection: Connection, request: RemotingCommand, fields: Fields
    ) -> Answer:
        return Answer(body=to_properties(self.config).encode())


def _everywhere(connection: Connection, request: RemotingCommand) -> str:
    """Where a broker of our own machine listens, if that is everywhere; empty otherwise.

    A broker of another machine is not reached where we are, whatever it listens on.
    """
    listens_on = request.ext.get(bodies.EVERYWHERE_FIELD, "")
    peer, local = connection.peer[0], connection.local[0]
    is_neighbour = peer == local or is_loopback(peer)
    return listens_on if is_neighbour and is_everywhere(listens_on) else ""
