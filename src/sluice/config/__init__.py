"""This package holds the settings of every process: typed, checked, documented, declared once.

    store.py, processes.py   which settings there are (StoreConfig, BrokerConfig, NameserverConfig)
    listening.py             those that both processes have: limits of connections, TLS
    settings.py, kinds.py    what a setting is; how sizes, times and so on are written
    views.py                 TOML, environment, flags, RocketMQ's broker.conf -> one object
    properties.py            Java's properties syntax
    rocketmq.py              RocketMQ's names that mean nothing here, and why
    markdown.py              docs/settings.md

It reads the file that it is told to read and nothing else: no environment, no clock, no log.
"""

from sluice.config.listening import ListeningConfig, is_everywhere, is_loopback
from sluice.config.markdown import settings_markdown
from sluice.config.processes import BrokerConfig, NameserverConfig
from sluice.config.settings import flatten, settings_of
from sluice.config.store import StoreConfig
from sluice.config.views import Loaded, add_flags, load, loads, to_properties, to_toml, update

__all__ = [
    "BrokerConfig",
    "ListeningConfig",
    "Loaded",
    "NameserverConfig",
    "StoreConfig",
    "add_flags",
    "flatten",
    "is_everywhere",
    "is_loopback",
    "load",
    "loads",
    "settings_markdown",
    "settings_of",
    "to_properties",
    "to_toml",
    "update",
]
