"""This module makes the SparkSession of a pipeline: settings that are always wanted, and a quiet
terminal.

Java and the processes that it starts inherit standard error. While the session is made it is a
file: there Spark's own log goes, and the terminal is left to the pipeline's line.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sluice.errors import ConfigError, PipelineFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
# With few processors there is none for compiling and collecting beside the work.
_FEW: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_MANY: Final = "-XX:+UseParallelGC"
_FEW_PROCESSORS: Final = 2
_STATE_PREFIX: Final = "org.apache.spark.sql.execution.streaming.state."
_ALWAYS: Final = {
    # Between Java and Python: less time for a batch, less processor time for a row.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A day is the same day wherever a pipeline runs.
    "spark.sql.session.timeZone": "UTC",
    # State that outgrows memory stays on disk; a batch writes what changed and not all of it.
    "spark.sql.streaming.stateStore.providerClass": f"{_STATE_PREFIX}RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}


def local_settings(processors: int) -> dict[str, str]:
    """What only makes sense where all of Spark is one process on one machine."""
    return {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # 200 tasks for each batch, Spark's default, are for clusters. A checkpoint keeps the
        # number that it began with.
        "spark.sql.shuffle.partitions": str(min(max(processors, 1), 8)),
        "spark.driver.extraJavaOptions": _FEW if processors <= _FEW_PROCESSORS else _MANY,
    }


def read_conf(given: Sequence[str]) -> dict[str, str]:
    """`--conf KEY=VALUE`, as spark-submit has it."""
    found = {}
    for item in given:
        key, mark, value = item.partition("=")
        if not mark or not key.startswith("spark."):
            raise ConfigError(f"--conf {item}: write spark.NAME=VALUE")
        found[key] = value
    return found


def settings_for(master: str, conf: Mapping[str, str], processors: int) -> dict[str, str]:
    """All settings of the session; what `--conf` says wins."""
    local = local_settings(processors) if master.startswith("local") else {}
    return {**_ALWAYS, **local, **conf}


def make(name: str, master: str, conf: Mapping[str, str], log: str) -> SparkSession:
    """Start Spark; raises PipelineFailed with its reason in one line."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder.master(master).appName(f"sluice pipeline {name}")
    for key, value in settings_for(master, conf, os.cpu_count() or 1).items():
        builder = builder.config(key, value)
    with _errors_to(log):
        try:
            session: SparkSession = builder.getOrCreate()
        except Exception as error:  # whatever Java and py4j raise
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise PipelineFailed(f"Spark does not start: {first} (its log: {log})") from error
    return session


@contextlib.contextmanager
def _errors_to(path: str) -> Iterator[None]:
    """Let standard error be a file, for the processes that are started meanwhile."""
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: Spark's log cannot be written there: {error}") from error
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        os.dup2(target, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(target)
