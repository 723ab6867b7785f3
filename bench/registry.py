"""This module is the list of benchmarks; each is imported only when it is asked for."""

from bench.harness import Benchmark, Figure, Run


def _store(run: Run) -> list[Figure]:
    from bench.store import measure

    return measure(run)


def _rocketmq(run: Run) -> list[Figure]:
    from bench.rocketmq import measure

    return measure(run)


def _business(run: Run) -> list[Figure]:
    from bench.business import measure

    return measure(run)


def _client(run: Run) -> list[Figure]:
    from bench.client import measure

    return measure(run)


def _kafka(run: Run) -> list[Figure]:
    from bench.kafka import measure

    return measure(run)


def _spark(run: Run) -> list[Figure]:
    from bench.spark import measure

    return measure(run)


BENCHMARKS = {
    row.name: row
    for row in (
        Benchmark(
            "store",
            "Appends, reads, recovery and memory of the store, beside the disk's own limit.",
            _store,
        ),
        Benchmark(
            "rocketmq",
            "Sends, consuming, start and memory beside Apache RocketMQ, with its own programs.",
            _rocketmq,
            has_parts=True,
        ),
        Benchmark(
            "business",
            "Transactions, delays, filters, retries and pops beside Apache RocketMQ.",
            _business,
            has_parts=True,
        ),
        Benchmark(
            "client",
            "Our Python client beside RocketMQ's in Java, C++ and Python, and Kafka's in Python.",
            _client,
            has_parts=True,
        ),
        Benchmark(
            "kafka",
            "Producing, consuming and latency beside Apache Kafka, with its own programs.",
            _kafka,
            has_parts=True,
        ),
        Benchmark(
            "spark",
            "Reading, writing and micro-batch latency in Spark, beside its own Kafka source.",
            _spark,
            has_parts=True,
        ),
    )
}
