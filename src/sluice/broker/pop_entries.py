"""This module has the events of pop consumption as the bodies of log entries, and applies them.

They lie in the topic rmq_sys_REVIVE_LOG_<cluster>. All have "c", "t", "q": group, topic, queue.
Check points and acknowledgements have the form that Apache's broker gives them:

    popped          "so": start, "d": [offset - start, ...], "pt": pop time, "it": invisible for
    acknowledged    "so", "pt", "ao": offset; or "aol": [offset, ...]

Those of ordered groups are ours: a window is a check point with "or". Beside it are "vt": visible
at, "ao": offset, for a message whose time was changed; "rs": offset, for a reset; "cl" for a queue
that is gone. "su" is with a message that was put off: of a check point, or of a change; a window
lists them as "os". Pure: no IO, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from sluice.broker.pop_state import CheckPoint, OrderWindow, PopQueue, PopState, QueueName


class Place(NamedTuple):
    """Where an event is: revive queue, offset there, position in the log."""

    revive_queue: int
    offset: int
    position: int


def point_body(point: CheckPoint, offsets: Sequence[int], broker: str) -> bytes:
    """The check point of these messages."""
    put_off = {"su": True} if point.suspended else {}
    span = {**_span(point, offsets), "reviveTime": point.due_ms}
    return orjson.dumps({**_head(point.queue, broker), **span, **put_off})


def window_body(window: OrderWindow, queue: PopQueue, broker: str) -> bytes:
    """A window with all that was said about it."""
    order = {
        "a": window.attempt,
        "oc": sorted(window.counts.items()),
        "ot": sorted(window.visible_ms.items()),
        "e": sorted(queue.early),
        "os": sorted(window.suspended),
    }
    body = {**_head(window.queue, broker), **_span(window, window.offsets), "or": order}
    return orjson.dumps(body)


def _head(name: QueueName, broker: str) -> dict[str, Any]:
    group, topic, queue_id = name
    return {"bn": broker, "c": group, "q": queue_id, "t": topic}


def _span(item: CheckPoint | OrderWindow, offsets: Sequence[int]) -> dict[str, Any]:
    return {
        "bm": 0,
        "d": [offset - item.start for offset in offsets],
        "it": item.invisible_ms,
        "n": len(offsets),
        "pt": item.pop_ms,
        "so": item.start,
    }


def ack_body(item: CheckPoint | OrderWindow, offsets: Sequence[int], broker: str) -> bytes:
    """These messages of a check point are done with."""
    body = {**_head(item.queue, broker), "pt": item.pop_ms, "so": item.start}
    if len(offsets) == 1:
        body["ao"] = offsets[0]
    else:
        body["ao"] = -1
        body["aol"] = list(offsets)
    return orjson.dumps(body)


def change_body(
    window: OrderWindow, offset: int, visible_ms: int, broker: str, *, suspend: bool
) -> bytes:
    """A message of a window becomes visible at this time."""
    head = _head(window.queue, broker)
    put_off = {"su": True} if suspend else {}
    return orjson.dumps({**head, "pt": window.pop_ms, "ao": offset, "vt": visible_ms, **put_off})


def reset_body(name: QueueName, offset: int, broker: str) -> bytes:
    """The group goes on at an offset, wherever it was."""
    return orjson.dumps({**_head(name, broker), "rs": offset})


def clear_body(name: QueueName, broker: str) -> bytes:
    """Nobody has anything of this queue any more."""
    return orjson.dumps({**_head(name, broker), "cl": True})


def apply_body(
    state: PopState, body: bytes | memoryview, place: Place, deleted: Mapping[str, int]
) -> None:
    """An entry that was written: what it says holds. Entries come in the order of the log.

    `deleted`: topics with the positions of their deletion, before which nothing holds.
    """
    event: dict[str, Any] = orjson.loads(body)
    name: QueueName = (event["c"], event["t"], event["q"])
    if place.position < deleted.get(name[1], 0):
        return
    if "it" in event:
        _apply_taken(state, name, event, place)
    elif "cl" in event:
        state.take_out(name)
    elif "rs" in event:
        state.reset(name, event["rs"])
    else:
        _apply_done(state, name, event)


def _apply_taken(state: PopState, name: QueueName, event: dict[str, Any], place: Place) -> None:
    start, pop_ms, invisible_ms = event["so"], event["pt"], event["it"]
    # Apache's broker leaves the list out where the messages follow each other.
    offsets = tuple([start + difference for difference in event.get("d") or range(event["n"])])
    if "or" not in event:
        point = CheckPoint(name, start, pop_ms, invisible_ms, place.revive_queue, offsets)
        point.place, point.position = place.offset, place.position
        point.suspended = bool(event.get("su"))
        state.take(point, offsets[-1] + 1)
        return
    order = event["or"]
    window = OrderWindow(name, start, pop_ms, invisible_ms, place.revive_queue, offsets, order["a"])
    window.counts = dict(order["oc"])
    window.visible_ms = dict(order["ot"])
    window.suspended = set(order.get("os", ()))
    window.place, window.position = place.offset, place.position
    state.queue(name).early.update(order["e"])
    state.open_window(window, again=True)


def _apply_done(state: PopState, name: QueueName, event: dict[str, Any]) -> None:
    queue = state.queues.get(name)
    if queue is None:
        return
    window = queue.window
    if window is not None and window.pop_ms == event["pt"] and event["ao"] in window.offsets:
        if "vt" in event:
            suspend = bool(event.get("su"))
            state.change_window(window, event["ao"], event["vt"], suspend=suspend)
        else:
            state.acknowledge(window, event["ao"])
        return
    for offset in event.get("aol", (event["ao"],)):
        point = queue.flights.get(offset)
        if point is not None and (point.start, point.pop_ms) == (event["so"], event["pt"]):
            state.land(point, (offset,))
