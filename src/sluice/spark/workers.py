"""This module keeps Spark's Python workers quick, between two tasks and within them.

After every task a worker looks for garbage among all of its objects, which takes some 30 ms: most
of them are the modules that it has imported, and live as long as it does. That is much beside a
micro-batch of a tenth of a second, and the cores are needed by the next one.

Arrow's own allocator gives the memory of each record batch, ten megabytes, back to the system, and
the next one is made of new pages: a third of the time that a worker needs for rows of 1 KiB. That
of the C library keeps it.
"""

from __future__ import annotations

import gc
import os

import pyarrow as pa

_POOL_VARIABLE = "ARROW_DEFAULT_MEMORY_POOL"  # what it says is the user's wish

_is_settled = False


def settle() -> None:
    """What this process has loaded by its first task is not garbage; it need not be looked at."""
    global _is_settled  # noqa: PLW0603
    if not _is_settled:
        _is_settled = True
        if not os.environ.get(_POOL_VARIABLE):
            pa.set_memory_pool(pa.system_memory_pool())
        gc.freeze()
