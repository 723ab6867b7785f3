"""This module writes a pipeline to begin with and its test: `sluice pipeline new NAME`."""

from __future__ import annotations

import os
import re

from sluice.errors import ConfigError
from sluice.pipelines.files import check_hides_nothing

_PIPELINE = '''\
"""Counts the messages of a topic by key and minute.

    sluice pipeline run {name}.py      handles all that is there, and ends
    sluice pipeline serve {name}.py    goes on
"""

from pyspark.sql import functions as f

# What `--set NAME=VALUE` may change.
SETTINGS = {{"topic": "{name}", "output": "{name}-counts", "late_minutes": 10}}


def pipeline(spark, settings):
    """Plain PySpark; what is returned is not started: the command adds trigger and checkpoint."""
    # A stream with the columns of Spark's Kafka source. Its lag is seen in `sluice top`.
    messages = settings.read(spark, settings["topic"], columns="key,value,timestamp")
    counts = (
        messages.withWatermark("timestamp", f"{{settings['late_minutes']}} minutes")
        .groupBy(f.window("timestamp", "1 minute"), f.col("key").cast("string").alias("key"))
        .count()
    )
    lines = counts.select("key", f.to_json(f.struct("window.start", "key", "count")).alias("value"))
    # Counts change, so they are published as they change. What only grows in number is written
    # with `settings.write(frame, topic)`, or to files: `frame.writeStream.format("parquet")`.
    return {{"counts": settings.publish(lines, settings["output"])}}
'''

_TEST = '''\
"""The pipeline {name}, on a broker of its own. Spark takes its time: ten seconds and more."""

import json
import subprocess
import sys
from pathlib import Path

from sluice import Message

FILE = Path(__file__).with_name("{name}.py")


def test_messages_are_counted(sluice_broker, tmp_path):
    producer = sluice_broker.producer()
    for number in range(10):
        producer.send(Message("{name}", f"message {{number}}", keys="even odd".split()[number % 2]))

    command = [sys.executable, "-m", "sluice", "pipeline", "run", str(FILE)]
    command += ["-n", sluice_broker.nameserver_address, "--checkpoint", str(tmp_path / "place")]
    subprocess.run(command, check=True)

    totals = {{"even": 0, "odd": 0}}
    for message in sluice_broker.messages("{name}-counts"):
        line = json.loads(message.body)
        totals[line["key"]] += line["count"]
    assert totals == {{"even": 5, "odd": 5}}
'''


def write(name: str) -> tuple[str, str]:
    """Write NAME.py and test_NAME.py where there is none yet; the two paths."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name):
        raise ConfigError(f"{name}: a pipeline's name has small letters, digits and _, up to 63")
    check_hides_nothing(name, name)
    path, test_path = f"{name}.py", f"test_{name}.py"
    for each in (path, test_path):
        if os.path.lexists(each):
            raise ConfigError(f"{each}: is there already; nothing was written")
    for each, text in ((path, _PIPELINE), (test_path, _TEST)):
        try:
            with open(each, "x", encoding="utf-8") as file:
                file.write(text.format(name=name))
        except OSError as error:
            raise ConfigError(f"{each}: cannot be written: {error.strerror}") from error
    return path, test_path
