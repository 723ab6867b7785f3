"""This module declares the settings of what Kafka's clients keep at a broker: groups, offsets and
transactions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sluice.config.kinds import MIB
from sluice.config.listening import ListeningConfig
from sluice.config.settings import count, millis, size

_MINUTE_MS: Final = 60_000
_DAY_MS: Final = 24 * 60 * _MINUTE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaGroupsConfig(ListeningConfig):
    """The settings of Kafka's groups, offsets and transactions."""

    kafka_initial_rebalance_delay_ms: int = millis(
        3000,
        "How long a Kafka consumer group that was empty waits for further members before its "
        "first assignment.",
        0,
        10 * _MINUTE_MS,
    )
    kafka_session_min_ms: int = millis(
        6000, "The shortest session that a member of a Kafka group may ask for.", 1, _DAY_MS
    )
    kafka_session_max_ms: int = millis(
        30 * _MINUTE_MS,
        "The longest session that a member of a Kafka group may ask for.",
        1,
        _DAY_MS,
    )
    kafka_groups_max: int = count(
        100_000, "Kafka consumer groups; further ones are refused.", 1, 10_000_000
    )
    kafka_group_size_max: int = count(
        10_000, "Members of one Kafka group; further ones are refused.", 1, 1_000_000
    )
    kafka_group_bytes_max: int = size(
        16 * MIB,
        "Bytes that the members of one Kafka group may say of themselves together.",
        1024,
        1024 * MIB,
    )
    kafka_offset_metadata_max: int = count(
        4096, "Characters that a Kafka client may keep with a committed offset.", 0, 65_536
    )
    kafka_offsets_retention_ms: int = millis(
        7 * _DAY_MS,
        "Age at which committed offsets of a Kafka group without members are forgotten.",
        _MINUTE_MS,
        3650 * _DAY_MS,
        dynamic=True,
    )
    kafka_offsets_check_interval_ms: int = millis(
        10 * _MINUTE_MS, "How often offsets of that age are looked for.", 1, _DAY_MS, dynamic=True
    )
    kafka_transaction_max_ms: int = millis(
        15 * _MINUTE_MS,
        "The longest time that a Kafka producer may ask for before its open transaction is "
        "rolled back.",
        1,
        _DAY_MS,
        dynamic=True,
    )
    kafka_transactional_id_expiration_ms: int = millis(
        7 * _DAY_MS,
        "Age at which a transactional id that nobody uses is forgotten.",
        1,
        3650 * _DAY_MS,
        dynamic=True,
    )
    kafka_transactional_ids_max: int = count(
        100_000, "Transactional ids of Kafka producers; further ones are refused.", 1, 10_000_000
    )
