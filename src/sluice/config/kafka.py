"""This module declares the settings of the door for Kafka's clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from sluice.config.kafka_groups import KafkaGroupsConfig
from sluice.config.kinds import KIB, MIB
from sluice.config.settings import count, flag, millis, size, switch

KafkaMode = Literal["auto", "on", "off"]

_MINUTE_MS: Final = 60_000
_DAY_MS: Final = 24 * 60 * _MINUTE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig(KafkaGroupsConfig):
    """The settings of Kafka's door, with those of its groups."""

    kafka: KafkaMode = switch(
        "Whether Kafka's clients are served; auto: yes, unless another process has the port.",
    )
    kafka_port: int = count(9092, "Port for Kafka's clients; 0 takes a free one.", 0, 65_535)
    kafka_advertised_port: int = count(
        0, "Port that Kafka's clients are told to connect to; 0: the one listened on.", 0, 65_535
    )
    kafka_node_id: int = count(
        1, "Number that Kafka's clients know this broker by.", 0, 2_147_483_647
    )
    kafka_request_bytes_max: int = size(
        100 * MIB,
        "The largest request of a Kafka client; a longer one closes its connection.",
        64 * KIB,
        1024 * MIB,
    )
    kafka_idle_ms_max: int = millis(
        10 * _MINUTE_MS,
        "Silence after which the connection of a Kafka client is closed.",
        1000,
        _DAY_MS,
    )
    kafka_batch_bytes_max: int = size(
        1_048_588,
        "The largest batch that a Kafka producer may send; a topic's max.message.bytes replaces "
        "it.",
        1,
        64 * MIB,
        dynamic=True,
    )
    kafka_unpacked_bytes_max: int = size(
        64 * MIB,
        "The most that the records of one compressed batch may take unpacked; the batch is "
        "refused above it.",
        64 * KIB,
        1024 * MIB,
        dynamic=True,
    )
    kafka_check_records: bool = flag(
        True,
        "Whether the records of a batch are counted and looked into before it is stored, beside "
        "its checksum; compressed batches are unpacked for it.",
        dynamic=True,
    )
    kafka_fetch_bytes_max: int = size(
        55 * MIB,
        "Bytes in one answer to a fetch; one batch is always answered whole.",
        1024,
        1024 * MIB,
        dynamic=True,
    )
    kafka_fetch_pause_ms: int = millis(
        1,
        "How long a fetch that finds nothing and would not wait (fetch.max.wait.ms=0) is held all "
        "the same, where its consumer reads one partition: what comes meanwhile goes with its "
        "answer. 0 answers at once.",
        0,
        100,
        dynamic=True,
    )
    kafka_fetch_sessions_max: int = count(
        1000,
        "Fetch sessions of Kafka consumers; one that is idle or small makes room.",
        0,
        1_000_000,
    )
    kafka_timestamp_ahead_ms_max: int = millis(
        60 * _MINUTE_MS,
        "How far ahead of the broker's clock a record's timestamp may be.",
        0,
        3650 * _DAY_MS,
        dynamic=True,
    )
    kafka_producer_expiry_ms: int = millis(
        _DAY_MS,
        "Silence after which the sequence numbers of an idempotent Kafka producer are forgotten.",
        1000,
        3650 * _DAY_MS,
        dynamic=True,
    )
    compaction_interval_ms: int = millis(
        15_000,
        "How often topics with cleanup.policy=compact are looked at.",
        1,
        _DAY_MS,
        dynamic=True,
    )
    topic_retention_interval_ms: int = millis(
        30_000,
        "How often topics are looked at that keep less than the log does (retention.ms and "
        "retention.bytes of Kafka's topics).",
        1,
        _DAY_MS,
        dynamic=True,
    )
