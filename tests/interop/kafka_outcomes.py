"""This module is what every Kafka client tells of the scenario that its program runs, whatever the
broker: `kafka_java/`, `kafka_go/`, `kafka_node/` and `kafka_kcat.py` hold the programs.
"""

from __future__ import annotations

from typing import Any, Final

RECORDS: Final = 40
_OLD_EPOCH: Final = "Producer attempted an operation with an old epoch"


def _group(strategy: str) -> dict[str, Any]:
    return {
        f"{strategy} overlap": False,
        f"{strategy} read": RECORDS,
        f"{strategy} committed": RECORDS,
        f"{strategy} read again": 0,
    }


_ALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("acks 0", "acks 1", "acks all", "idempotent"), 10),
    **dict.fromkeys(("gzip", "snappy", "lz4", "zstd"), 10),
    "keys, headers and nulls": True,
    **_group("eager"),
    **_group("cooperative"),
    "after a kill": 4,
    "static same partitions": True,
    "static same generation": True,
    "offset of the transaction": 7,
    "text of the transaction": "with t4",
    "read committed": "t1 t2 t4",
    "read uncommitted": "t1 t2 t3-gone t4",
    "while one is open": "t1 t2 t4",
    "shut out": "InvalidProducerEpochException",
    "in the end": "t1 t2 t4 t7",
    "state of the transactional id": "CompleteCommit",
    "partitions of a topic": 3,
    "configuration of a topic": "100000000",
    "partitions of a deleted topic": 0,
    "state of a group that was left": "Empty",
    "offsets of it": 4,
    "is it listed": True,
    "is it still listed": False,
}


def _without(*begins: str, **other: Any) -> dict[str, Any]:
    """What a client tells that cannot do some of it, or says it in other words."""
    result = {name: value for name, value in _ALL.items() if not name.startswith(begins)}
    return {**result, **{name.replace("_", " "): value for name, value in other.items()}}


JAVA: Final = _ALL
FRANZ: Final = {**_ALL, "shut out": f"INVALID_PRODUCER_EPOCH: {_OLD_EPOCH}."}
SARAMA: Final = _without(
    "cooperative", "state of the transactional id", shut_out=f"kafka server: {_OLD_EPOCH}"
)
KAFKAJS: Final = _without(
    *("snappy", "lz4", "zstd", "cooperative", "static", "state of the transactional id"),
    shut_out=(
        f"{_OLD_EPOCH}. Either there is a newer producer with the same transactionalId, "
        "or the producer's transaction has been expired by the broker"
    ),
)
NODE_RDKAFKA: Final = _without(
    *("zstd", "text of", "state of", "configuration of", "offsets of it", "is it"),
    shut_out="-144, fatal",
)
KCAT: Final = _without(
    *("cooperative", "static", "offset of", "text of", "state of", "configuration of"),
    *("partitions of a deleted", "offsets of it", "is it"),
    shut_out=True,
)
