"""This module keeps Spark's Python workers quick between two tasks.

After every task a worker looks for garbage among all of its objects, which takes some 30 ms: most
of them are the modules that it has imported, and live as long as it does. That is much beside a
micro-batch of a tenth of a second, and the cores are needed by the next one.
"""

from __future__ import annotations

import gc

_is_settled = False


def settle() -> None:
    """What this process has loaded by its first task is not garbage; it need not be looked at."""
    global _is_settled  # noqa: PLW0603
    if not _is_settled:
        _is_settled = True
        gc.freeze()
