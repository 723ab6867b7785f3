"""This package is the nameserver: it tells clients which broker serves which topic.

    routes.py    the table of brokers and topics, and its rules (pure)
    kv.py        values that administrators set, and their file
    api.py       request code -> table -> answer
    server.py    the process: listener, scan for silent brokers, saving, stopping
    command.py   `sluice nameserver`

Nameservers know nothing of each other: a broker registers with all of them, a client asks any.
"""

from sluice.nameserver.routes import RouteTable
from sluice.nameserver.server import Nameserver

__all__ = ["Nameserver", "RouteTable"]
