"""This module names the options of Kafka's client that a job of Spark's Kafka source may have."""

from __future__ import annotations

from typing import Final

# Options of Kafka's client that only tune it: a job that has them runs as it is.
TUNING: Final = (
    *("kafka.fetch.max.bytes", "kafka.max.partition.fetch.bytes", "kafka.fetch.min.bytes"),
    *("kafka.fetch.max.wait.ms", "kafka.max.poll.records", "kafka.max.poll.interval.ms"),
    *("kafka.request.timeout.ms", "kafka.session.timeout.ms", "kafka.heartbeat.interval.ms"),
    *("kafka.receive.buffer.bytes", "kafka.send.buffer.bytes", "kafka.client.id"),
    *("kafka.acks", "kafka.linger.ms", "kafka.batch.size", "kafka.buffer.memory"),
    *("kafka.retries", "kafka.compression.type", "kafka.max.request.size"),
    *("kafka.metadata.max.age.ms", "kafka.default.api.timeout.ms", "kafka.delivery.timeout.ms"),
    *("kafka.enable.idempotence", "kafka.retry.backoff.ms", "kafka.max.block.ms"),
    *("kafka.check.crcs", "kafka.connections.max.idle.ms", "kafka.client.dns.lookup"),
    *("kafka.client.rack", "kafka.reconnect.backoff.ms", "kafka.reconnect.backoff.max.ms"),
    *("kafka.retry.backoff.max.ms", "kafka.metadata.max.idle.ms", "kafka.metric.reporters"),
    *("kafka.metrics.num.samples", "kafka.metrics.recording.level"),
    *("kafka.metrics.sample.window.ms", "kafka.allow.auto.create.topics"),
    "kafka.socket.connection.setup.timeout.ms",
    "kafka.socket.connection.setup.timeout.max.ms",
    "kafka.max.in.flight.requests.per.connection",
)
# Options of Kafka's client that say what is so anyhow; with another value they cannot be kept.
KEPT: Final = {
    "kafka.isolation.level": "read_committed",
    "kafka.security.protocol": "plaintext",
}
