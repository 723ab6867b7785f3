"""One SparkSession for all tests here. Without Java they are skipped, and say so."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peers import ARTIFACT_SETS, PeerUnavailable, RocketMQ, fetch
from peers.artifacts import DELTA, DELTA_PYSPARK, SPARK_KAFKA
from peers.java import java_command
from tests.interop.sluice_process import SluiceProcess
from tests.spark.kit import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def delta_settings() -> dict[str, str]:
    """What a session needs for Delta tables; empty where the jars cannot be had, and with another
    PySpark than they are for.
    """
    import pyspark

    if not pyspark.__version__.startswith(DELTA_PYSPARK):
        return {}
    try:
        directory = fetch(DELTA).directory
    except PeerUnavailable:
        return {}
    # The others in there are Spark's own.
    jars = [str(jar) for part in ("delta-*", "unitycatalog-*") for jar in directory.glob(part)]
    return {
        "spark.jars": ",".join(jars),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
    }


def with_kafka(settings: dict[str, str]) -> dict[str, Any]:
    """The same and Spark's own Kafka source, where its jars can be had."""
    try:
        jars = [str(jar) for jar in fetch(SPARK_KAFKA).directory.glob("*.jar")]
    except PeerUnavailable:
        return settings
    given = [settings["spark.jars"]] if "spark.jars" in settings else []
    return {**settings, "spark.jars": ",".join([*given, *jars])}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    try:
        java_command()
    except PeerUnavailable as error:
        pytest.skip(f"Spark needs Java 17: {error.reason}")
    pytest.importorskip("pyspark", reason="pyspark is not installed: script/setup does it")
    from pyspark.sql import SparkSession

    local = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    session = (
        SparkSession.builder.master("local[2,2]")  # two threads, two tries of a task
        .appName("sluice tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.warehouse.dir", str(local / "warehouse"))
        .config("spark.local.dir", str(local / "local"))
        .config(map=with_kafka(delta_settings()))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


# Against Apache's broker it takes as long again: `script/test -m soak tests/spark`.
@pytest.fixture(scope="session", params=["sluice", pytest.param("apache", marks=pytest.mark.soak)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "sluice":
        with SluiceProcess(directory, "--flush", "async") as process:
            yield Server(process)
        return
    try:
        jars = fetch(ARTIFACT_SETS["rocketmq-5.5.0"])
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    with RocketMQ(directory, jars=jars, config={"enablePropertyFilter": "true"}) as apache:
        yield Server(apache)


@pytest.fixture
def topic() -> str:
    """A name that no other test has."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
