"""This module is the machine's clock; whoever needs the time gets it as a parameter `now_ms`."""

from __future__ import annotations

import time


def wall_ms() -> int:
    """Milliseconds since 1970, as RocketMQ counts time."""
    return time.time_ns() // 1_000_000
