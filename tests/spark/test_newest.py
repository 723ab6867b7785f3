"""The other tests of this folder, with the newest PySpark in place of the supported one.

It lies beside the environment and is put before it, so all else is the same. Only what stands in
`MAY_BE_MISSING` may be skipped there, and docs/spark.md says so.
"""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET  # what is read is written by our own run
from pathlib import Path

import pytest

from peers import PeerUnavailable
from peers.process import run_tool
from peers.python import python_packages

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REQUIREMENTS = ROOT / "requirements" / "spark-newest.txt"
FILES = (
    "tests/spark/test_spark.py",
    "tests/spark/test_spark_kafka.py",
    "tests/spark/test_tables.py",
    "tests/spark/test_pipelines.py",
    "tests/spark/test_cluster.py",
    "tests/unit/test_docs.py",
    "tests/unit/spark",
)
# So many pass at least; fewer would say that something was not collected.
PASSED_MIN = 300
MAY_BE_MISSING = "Delta"
TIMEOUT_S = 5_400.0


def wanted_version() -> str:
    lines = REQUIREMENTS.read_text(encoding="utf-8").split()
    (pin,) = (line for line in lines if line.startswith("pyspark=="))
    return pin.removeprefix("pyspark==")


@pytest.mark.soak
def test_the_newest_pyspark_passes_the_same_tests(tmp_path: Path) -> None:
    try:
        packages = python_packages(REQUIREMENTS)
    except PeerUnavailable as error:
        pytest.skip(error.reason)
    environment = {"PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    asked = run_tool(
        [sys.executable, "-c", "import pyspark; print(pyspark.__version__)"],
        timeout_s=60.0,
        directory=tmp_path,
        environment=environment,
    )
    assert asked.stdout.strip() == wanted_version()

    report = tmp_path / "report.xml"
    done = run_tool(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(f"--basetemp={tmp_path / 'tests'}", f"--junit-xml={report}", *FILES),
        ],
        timeout_s=TIMEOUT_S,
        directory=ROOT,
        environment=environment,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314
    skipped = [
        f"{case.get('classname')}.{case.get('name')}: {reason.get('message')}"
        for case in cases
        if (reason := case.find("skipped")) is not None
    ]
    assert all(MAY_BE_MISSING in each for each in skipped), skipped
    assert len(cases) - len(skipped) >= PASSED_MIN
