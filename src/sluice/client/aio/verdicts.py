"""This module says what became of a call of a handler: what it returned, what it raised, whether it
came back at all.
"""

from __future__ import annotations

import inspect

from sluice.client.core.messages import ReceivedMessage
from sluice.errors import HandlerFailed, HandlerHung, SluiceError


def verdict_of(result: object) -> SluiceError | None:
    """What a handler's return value means: False is "later", anything else is success.

    A plain function that returns what somebody would have to await has done nothing yet.
    """
    if result is None or result is True:
        return None
    if result is False:
        return HandlerFailed("the handler returned False")
    if not inspect.isawaitable(result):
        return None
    if inspect.iscoroutine(result):
        result.close()
    return HandlerFailed(
        f"the handler returned {type(result).__name__} that nobody awaits; pass the coroutine "
        "function itself (handler=handle, not handler=lambda message: handle(message))"
    )


def failure_of(error: BaseException, message: ReceivedMessage) -> HandlerFailed:
    """What a handler raised, as the client shows it."""
    if isinstance(error, HandlerFailed):
        return error
    failure = HandlerFailed(f"the handler raised {error!r} with {message}")
    failure.__cause__ = error
    return failure


def hung_error(consume_ms: int) -> HandlerHung:
    """A handler that did not come back in time."""
    return HandlerHung(
        f"the handler did not come back within {consume_ms} ms (consume_ms); "
        "make it quicker, or give it more time"
    )
