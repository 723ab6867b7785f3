"""This module marks tests by their folder, orders them, and leaves soak tests out by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

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
    "examples": "example",
    "interop": "interop",
    "scenarios": "scenario",
    "spark": "spark",
    "tidy": "tidy",
}

# These run programs of others on the clock of the wall: such a one gets a second try, and the run
# says at its end which needed it. Whatever is ours alone has to hold at once.
_BESIDE_PEERS = {"example", "interop", "spark"}

# Files are given to two processes one by one: the longest come first, so that both end together.
_LONGEST = (
    "crash/test_crash_states.py",
    "interop/test_apache_store.py",
    "interop/test_business_order.py",
    "interop/test_mqadmin.py",
    "crash/test_bit_flips_large.py",
    "interop/test_admin.py",
    "crash/test_bit_flips.py",
)
_FOLDERS = ("spark", "interop", "crash", "property")


class _OneSpark(LoadFileScheduling):  # type: ignore[misc]
    """Files are given out whole, and those of tests/spark to one process: two of Spark would cost
    more than they bring.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith("tests/spark/") else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _OneSpark | None:
    return _OneSpark(config, log) if config.option.dist == "loadfile" else None


def _place(item: pytest.Item) -> int:
    """Where a test's file stands in the order; those of one place stay as they are."""
    path = item.path.relative_to(_TESTS)
    if path.as_posix() in _LONGEST:
        return _LONGEST.index(path.as_posix())
    folder = path.parts[0]
    return len(_LONGEST) + (_FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    for item in items:
        mark = _MARKS.get(item.path.relative_to(_TESTS).parts[0])
        if mark is not None:
            item.add_marker(mark)
        if mark in _BESIDE_PEERS:
            item.add_marker(pytest.mark.flaky(reruns=1))
    # A soak test runs when the mark expression speaks of it, or when it was named by its node id.
    if "soak" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
