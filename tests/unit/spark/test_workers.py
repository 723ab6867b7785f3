"""What a Python worker does before its first task."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc
import pyarrow as pa
from sluice.spark.workers import settle
before = pa.default_memory_pool().backend_name
settle()
settle()
print(before == pa.default_memory_pool().backend_name, pa.default_memory_pool().backend_name)
print(gc.get_freeze_count() > 1000)
"""


@pytest.mark.parametrize(("wish", "wanted"), [("", "False system"), ("mimalloc", "True mimalloc")])
def test_a_worker_keeps_its_memory_unless_its_user_has_chosen(wish: str, wanted: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"ARROW_DEFAULT_MEMORY_POOL": wish} if wish else {},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout.split("\n")[:2] == [wanted, "True"]
