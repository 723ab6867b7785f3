"""This module sets up TCP sockets for requests and answers. It opens none and moves no bytes.

What is written goes out at once. And where both ends are on one machine nothing is paced: BBR,
which some systems take for all connections, sends no faster than it believes the way to be, looks
now and then whether it is longer, and lets timers go off for that. Between two programs of one
machine there is no way, and megabytes of an answer come in steps.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

# 0: the system has no choice of them.
_CONGESTION: Final[int] = getattr(socket, "TCP_CONGESTION", 0)
_NAME_BYTES_MAX: Final = 16
_UNPACED: Final = b"reno"  # every Linux has it, and lets everybody take it


def set_up(connected: socket.socket) -> None:
    """Make a socket that is connected ready for requests and answers; raises OSError."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not _CONGESTION or not _is_within(connected):
        return
    with contextlib.suppress(OSError):  # nothing but speed is lost
        name = connected.getsockopt(socket.IPPROTO_TCP, _CONGESTION, _NAME_BYTES_MAX)
        if name.startswith(b"bbr"):
            connected.setsockopt(socket.IPPROTO_TCP, _CONGESTION, _UNPACED)


def _is_within(connected: socket.socket) -> bool:
    """Whether both ends are on this machine: then they have one address."""
    try:
        return bool(connected.getsockname()[0] == connected.getpeername()[0])
    except OSError:  # it is closed already: whoever uses it next finds out
        return False
