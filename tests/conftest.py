"""This module gives every test the mark of its folder, and leaves soak tests out by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Time is never a reason to fail: a slow machine is not a bug.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")

# Tests start many brokers side by side, and the port of the metrics is a fixed one.
os.environ.setdefault("SLUICE_METRICS", "false")
os.environ.setdefault("SLUICE_NAMESERVER_METRICS", "false")

_TESTS = Path(__file__).parent
_MARKS = {
    "unit": "unit",
    "property": "property",
    "crash": "crash",
    "interop": "interop",
    "scenarios": "scenario",
    "tidy": "tidy",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        mark = _MARKS.get(item.path.relative_to(_TESTS).parts[0])
        if mark is not None:
            item.add_marker(mark)
    # A soak test runs when the mark expression speaks of it, or when it was named by its node id.
    if "soak" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
