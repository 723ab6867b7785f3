"""This package tests programs that use Sluice: a broker beside the test, its time, its faults.

    plugin.py    the fixtures, registered with pytest (`sluice_broker`, `sluice_clock`, ...)
    site.py      a nameserver and a broker on threads of their own; host.py one such thread
    stopping.py  how a broker dies
    clients.py   producers and consumers that are closed with their test
    clock.py     time that moves when it is told to; due.py what a broker has to do until then
    members.py   what the consumers of this process are at; readers.py the broker's word on them
    faults.py    what can go wrong: gate.py on the way to the broker, disk.py at its disk

docs/testing.md is the tutorial. Only `plugin.py` imports pytest: everything else works without it.
Importing this package imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.testing.clock import Clock
    from sluice.testing.faults import Faults
    from sluice.testing.site import BrokerFactory, LiveBroker

_NAMES = {"BrokerFactory": "site", "Clock": "clock", "Faults": "faults", "LiveBroker": "site"}

__all__ = ["BrokerFactory", "Clock", "Faults", "LiveBroker"]


def __getattr__(name: str) -> Any:
    """A name of this package, imported when it is first asked for."""
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'sluice.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sluice.testing.{module}"), name)
    globals()[name] = value
    return value
