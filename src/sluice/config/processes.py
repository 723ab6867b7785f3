"""This module declares the settings of the processes: the broker and the nameserver."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

from sluice.config.kafka import KafkaConfig
from sluice.config.kinds import KIB, MIB
from sluice.config.listening import ListeningConfig, is_loopback
from sluice.config.settings import (
    INT32_MAX,
    addresses,
    check,
    choice,
    count,
    flag,
    larger_unit,
    millis,
    size,
    switch,
    text,
    unless_empty,
    words,
)
from sluice.config.store import StoreConfig

Role = Literal["async-master", "sync-master", "slave"]
Permission = Literal["rw", "r", "w"]
Switch = Literal["auto", "on", "off"]
LogLevel = Literal["info", "debug", "warning", "error"]

_HOUR_MS: Final = 3_600_000
_NAME: Final = re.compile(r"[%|A-Za-z0-9_.-]{1,127}")
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:.%]{2,64}\]):([0-9]{1,5})")
_LOG_LEVELS: Final = ("info", "debug", "warning", "error")


def _name(value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ValueError("is not a name (1 to 127 letters, digits, and any of _ - . % |)")


def _host(value: str) -> None:
    if not _HOST.fullmatch(value):
        raise ValueError("is not a host name or address")


def _host_or_nothing(value: str) -> None:
    if value:
        _host(value)


def _address(value: str) -> None:
    match = _ADDRESS.fullmatch(value)
    if not match or not 0 < int(match[1]) < 65536:
        raise ValueError("is not a list of host:port, separated by ;")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(KafkaConfig):
    """The settings of one broker process: one replica of one broker group."""

    store: StoreConfig = field(default_factory=StoreConfig)

    cluster_name: str = text(
        "DefaultCluster",
        "Name of the cluster that the broker registers under.",
        syntax=_name,
        rocketmq="brokerClusterName",
    )
    broker_name: str = text(
        "broker-a",
        "Name of the broker group: brokers of one name are copies of one another.",
        syntax=_name,
        rocketmq="brokerName",
    )
    broker_id: int = count(
        0, "Number of this copy within its group; 0 leads.", 0, INT32_MAX, rocketmq="brokerId"
    )
    broker_role: Role = choice(
        ("async-master", "sync-master", "slave"),
        "Whether this broker leads its group, waiting for copies or not, or follows.",
        rocketmq=words(
            "brokerRole",
            {"ASYNC_MASTER": "async-master", "SYNC_MASTER": "sync-master", "SLAVE": "slave"},
        ),
    )
    nameserver_addresses: tuple[str, ...] = addresses(
        "Nameservers (host:port) to register with, separated by ;.",
        syntax=_address,
        rocketmq="namesrvAddr",
    )
    listen_host: str = text(
        "127.0.0.1",
        "Address to listen on. Only this machine can connect unless you change it.",
        syntax=_host,
        rocketmq="bindAddress",
    )
    listen_port: int = count(
        10_911, "Port to listen on; 0 takes a free one.", 0, 65_535, rocketmq="listenPort"
    )
    advertised_host: str = text(
        "",
        "Address that clients are told to connect to; empty: listen_host, or where that is every "
        "address of the machine, the one that the client dialled.",
        syntax=_host_or_nothing,
        rocketmq="brokerIP1",
    )
    permission: Permission = choice(
        ("rw", "r", "w"),
        "Whether the broker accepts messages (w) and hands them out (r).",
        rocketmq=words("brokerPermission", {"6": "rw", "4": "r", "2": "w"}),
        dynamic=True,
    )
    auto_create_topics: Switch = switch(
        "Whether a message to an unknown topic creates it; auto: where only this machine connects.",
        rocketmq="autoCreateTopicEnable",
        dynamic=True,
    )
    auto_create_groups: bool = flag(
        True,
        "Whether an unknown consumer group is created when it first asks.",
        rocketmq="autoCreateSubscriptionGroup",
        dynamic=True,
    )
    default_queue_count: int = count(
        8,
        "Queues of a topic that is created by a message.",
        1,
        65_536,
        rocketmq="defaultTopicQueueNums",
        dynamic=True,
    )
    sql_filter: bool = flag(
        True,
        "Whether consumers may filter by SQL expressions on properties.",
        rocketmq="enablePropertyFilter",
        dynamic=True,
    )
    server_side_reset: bool = flag(
        True,
        "Whether a reset of offsets is told at the next pull, so that it works without consumers "
        "too; otherwise the connected consumers are told at once, as before RocketMQ 5.",
        rocketmq="useServerSideResetOffset",
        dynamic=True,
    )
    long_polling: bool = flag(
        True,
        "Whether a pull that finds nothing waits for a message, up to the time it names.",
        rocketmq="longPollingEnable",
        dynamic=True,
    )
    short_poll_ms: int = millis(
        1000,
        "How long such a pull waits where long_polling is off.",
        0,
        60_000,
        rocketmq="shortPollingTimeMills",
        dynamic=True,
    )
    pull_count_max: int = count(
        32,
        "Messages in one answer to a pull, from memory.",
        1,
        65_536,
        rocketmq="maxTransferCountOnMessageInMemory",
        dynamic=True,
    )
    pull_bytes_max: int = size(
        256 * KIB,
        "Bytes in one answer to a pull, from memory; one message is always answered whole.",
        1,
        64 * MIB,
        rocketmq="maxTransferBytesOnMessageInMemory",
        dynamic=True,
    )
    pull_cold_count_max: int = count(
        8,
        "Messages in one answer to a pull, from disk.",
        1,
        65_536,
        rocketmq="maxTransferCountOnMessageInDisk",
        dynamic=True,
    )
    pull_cold_bytes_max: int = size(
        64 * KIB,
        "Bytes in one answer to a pull, from disk.",
        1,
        64 * MIB,
        rocketmq="maxTransferBytesOnMessageInDisk",
        dynamic=True,
    )
    query_count_max: int = count(
        64,
        "Messages in one answer to a query by key.",
        1,
        65_536,
        rocketmq="maxMsgsNumBatch",
        dynamic=True,
    )
    reject_transactions: bool = flag(
        False,
        "Whether transactional messages are refused.",
        rocketmq="rejectTransactionMessage",
        dynamic=True,
    )
    transaction_timeout_ms: int = millis(
        6000,
        "Age at which the producer of an undecided message is first asked.",
        0,
        24 * _HOUR_MS,
        rocketmq="transactionTimeOut",
        dynamic=True,
    )
    transaction_check_interval_ms: int = millis(
        30_000,
        "Time between two questions about one undecided message.",
        10,
        24 * _HOUR_MS,
        rocketmq="transactionCheckInterval",
        dynamic=True,
    )
    transaction_check_count_max: int = count(
        15,
        "How often one message is asked about before it is parked in TRANS_CHECK_MAX_TIME_TOPIC.",
        1,
        10_000,
        rocketmq="transactionCheckMax",
        dynamic=True,
    )
    timer_max_delay_ms: int = millis(
        40 * 24 * _HOUR_MS,
        "How far ahead a message may ask to be delivered (TIMER_DELIVER_MS and its like).",
        1000,
        3650 * 24 * _HOUR_MS,
        rocketmq=larger_unit("timerMaxDelaySec", 1000, "seconds"),
        dynamic=True,
    )
    recall_messages: bool = flag(
        True,
        "Whether a producer may take a timed message back before it is delivered.",
        rocketmq="recallMessageEnable",
        dynamic=True,
    )
    trace_topic: bool = flag(
        True,
        "Whether this broker makes a topic for the traces of messages that clients write.",
        rocketmq="traceTopicEnable",
    )
    trace_topic_name: str = text(
        "RMQ_SYS_TRACE_TOPIC",
        "Name of the topic of message traces.",
        syntax=_name,
        rocketmq="msgTraceTopicName",
    )
    register_interval_ms: int = millis(
        30_000,
        "How often the broker renews its entry at the nameservers.",
        100,
        _HOUR_MS,
        rocketmq="registerNameServerPeriod",
        dynamic=True,
    )
    register_timeout_ms: int = millis(
        24_000,
        "How long a nameserver may take to answer that.",
        10,
        _HOUR_MS,
        rocketmq="registerBrokerTimeoutMills",
        dynamic=True,
    )
    queue_lock_ms: int = millis(
        60_000,
        "How long a consumer that reads in order keeps a queue without renewing its lock.",
        1_000,
        _HOUR_MS,
        dynamic=True,
    )
    inflight_bytes_max: int = size(
        256 * MIB,
        "Bytes of messages that wait for the disk at one time; above it, sends are refused.",
        MIB,
        1024 * 1024 * MIB,
    )
    inflight_requests_max: int = count(
        100_000,
        "Sends that wait for the disk at one time; above it, sends are refused.",
        100,
        100_000_000,
    )
    dedup_keys_max: int = count(
        1_000_000,
        "Keys that all topics with dedup.window.ms remember together (some 250 bytes each); above "
        "it, messages with new keys are refused.",
        1,
        1_000_000_000,
        dynamic=True,
    )
    memory_topics_bytes_max: int = size(
        512 * MIB,
        "Bytes that all topics with storage=memory hold together; above it, the oldest messages "
        "are dropped or sends refused, as the topic says.",
        MIB,
        1024 * 1024 * MIB,
        dynamic=True,
    )
    held_polls_max: int = count(
        100_000,
        "Pulls that wait for a message at one time; further ones are refused.",
        1,
        10_000_000,
    )
    held_polls_per_connection_max: int = count(
        10_000,
        "Those of one connection, so that one client does not take all places.",
        1,
        10_000_000,
    )
    pop_inflight_per_queue_max: int = count(
        10_000,
        "Messages of a queue that a group may have popped and not acknowledged; above it, pops of "
        "the queue find nothing.",
        1,
        1_000_000,
        rocketmq="popInflightMessageThreshold",
        dynamic=True,
    )
    pop_inflight_max: int = count(
        1_000_000,
        "The same for all queues and groups together; above it, pops are answered POLLING_FULL.",
        1,
        100_000_000,
        dynamic=True,
    )
    metrics: bool = flag(
        True,
        "Whether /metrics and /healthz are served over HTTP.",
        rocketmq=words(
            "metricsExporterType", {"PROM": True, "DISABLE": False, "OTLP_GRPC": None, "LOG": None}
        ),
    )
    metrics_host: str = text(
        "127.0.0.1",
        "Address to serve them on; only this machine sees them unless you change it.",
        syntax=_host,
        rocketmq=unless_empty("metricsPromExporterHost"),
    )
    metrics_port: int = count(
        5557,
        "Port to serve them on; 0 takes a free one.",
        0,
        65_535,
        rocketmq="metricsPromExporterPort",
    )
    metrics_names_max: int = count(
        500,
        "Topics, and pairs of topic and group, with metrics of their own; the rest share one line.",
        1,
        100_000,
    )
    log_level: LogLevel = choice(_LOG_LEVELS, "How much is logged.", dynamic=True)

    def __post_init__(self) -> None:
        check(self)

    @property
    def client_host(self) -> str:
        """The address that clients are given; where it is every one, that depends on them."""
        return self.advertised_host or self.listen_host

    @property
    def creates_topics(self) -> bool:
        """Whether a message may create its topic: by default not where strangers can send."""
        if self.auto_create_topics == "auto":
            return is_loopback(self.listen_host)
        return self.auto_create_topics == "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class NameserverConfig(ListeningConfig):
    """The settings of one nameserver process."""

    listen_host: str = text(
        "127.0.0.1",
        "Address to listen on. Only this machine can connect unless you change it.",
        syntax=_host,
        rocketmq="bindAddress",
    )
    listen_port: int = count(
        9876, "Port to listen on; 0 takes a free one.", 0, 65_535, rocketmq="listenPort"
    )
    broker_timeout_ms: int = millis(
        120_000, "Silence after which a broker is taken out of the routes.", 100, 24 * _HOUR_MS
    )
    scan_interval_ms: int = millis(
        5000,
        "How often silent brokers are looked for.",
        10,
        _HOUR_MS,
        rocketmq="scanNotActiveBrokerInterval",
        dynamic=True,
    )
    directory: str = text(
        "",
        "Where settings that brokers and clients share (kvConfig.json) are kept; empty: nowhere.",
    )
    acting_master: bool = flag(
        False,
        "Whether the copy with the lowest id stands for a leader that is gone, to read from.",
        rocketmq="supportActingMaster",
    )
    notify_lowest_id: bool = flag(
        False,
        "Whether the copies of a broker are told when another one has the lowest id.",
        rocketmq="notifyMinBrokerIdChanged",
        dynamic=True,
    )
    order_topics_in_routes: bool = flag(
        False,
        "Whether a route says how many queues of an ordered topic each broker has.",
        rocketmq="orderMessageEnable",
    )
    order_topics_to_brokers: bool = flag(
        True,
        "Whether brokers that register are told about ordered topics.",
        rocketmq="returnOrderTopicConfigToBroker",
    )
    list_all_topics: bool = flag(
        True,
        "Whether the list of all topics is given to who asks.",
        rocketmq="enableAllTopicList",
        dynamic=True,
    )
    list_topics: bool = flag(
        True,
        "Whether lists of the topics of a cluster or a unit are given to who asks.",
        rocketmq="enableTopicList",
        dynamic=True,
    )
    forget_topics: bool = flag(
        False,
        "Whether a topic that a broker no longer registers leaves the routes at once.",
        rocketmq="deleteTopicWithBrokerRegistration",
    )
    metrics: bool = flag(True, "Whether /metrics and /healthz are served over HTTP.")
    metrics_host: str = text(
        "127.0.0.1",
        "Address to serve them on; only this machine sees them unless you change it.",
        syntax=_host,
    )
    metrics_port: int = count(5556, "Port to serve them on; 0 takes a free one.", 0, 65_535)
    log_level: LogLevel = choice(_LOG_LEVELS, "How much is logged.", dynamic=True)

    def __post_init__(self) -> None:
        check(self)
