"""This module gathers what `sluice top` shows: brokers, topics and groups, with rates and lag.

It asks with RocketMQ's admin requests only, so Apache's brokers can be watched too. A rate is what
happened between two samples; the first sample has none before it and takes the broker's own
figures, which look back a minute. A broker that does not answer is a row that says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from sluice.client.admin import AdminRequests
from sluice.errors import LinkError, NotFound, SluiceError
from sluice.protocol import remoting_bodies
from sluice.protocol.json_members import (
    as_number,
    as_object,
    items,
    mapping,
    objects,
    read_object,
    read_queue_keys,
)
from sluice.protocol.remoting_bodies import BrokerData
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.protocol.remoting_reports import read_topic_stats

_ASKS_MAX: Final = 32  # under way at one time, to one broker
_NAMES_SECONDS: Final = 10.0  # so long a broker's list of topics is good
_ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
_ANSWER_SECONDS: Final = 5.0
# Topics that belong to groups and brokers, not to people; a broker's list has the rest.
_INNER_PREFIXES: Final = ("%RETRY%", "%DLQ%", "%SYS%", "rmq_sys_", "RMQ_SYS_", "SLUICE_")


class BrokerRow(NamedTuple):
    """One broker; a figure that it does not tell is None."""

    name: str
    address: str
    version: str = ""
    in_rate: float = 0.0
    out_rate: float = 0.0
    disk_ratio: float | None = None
    held_pulls: int | None = None
    warning: str = ""


class TopicRow(NamedTuple):
    """One topic, over all brokers."""

    name: str
    queues: int
    messages: int
    in_rate: float


class GroupRow(NamedTuple):
    """One group on one topic, over all brokers."""

    group: str
    topic: str
    lag: int
    out_rate: float


class View(NamedTuple):
    """Everything that is shown at one time."""

    taken_ms: int
    brokers: tuple[BrokerRow, ...] = ()
    topics: tuple[TopicRow, ...] = ()
    groups: tuple[GroupRow, ...] = ()
    problems: tuple[str, ...] = ()


class _Counts(NamedTuple):
    """A total that rises, what goes with it, and the broker's own figure of its rate."""

    total: int
    rate: float
    queues: int = 0
    rest: int = 0  # of a topic: messages that are there; of a group: those it has not read


class _Sample(NamedTuple):
    """What one broker said at one time."""

    taken: float
    info: Mapping[str, str]
    topics: Mapping[str, _Counts]
    groups: Mapping[tuple[str, str], _Counts]


class Watcher:
    """Looks at a cluster again and again."""

    def __init__(
        self,
        admin: AdminRequests,
        *,
        all_topics: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admin = admin
        self._all_topics = all_topics
        self._clock = clock
        self._before: dict[str, _Sample] = {}
        self._names: dict[str, tuple[float, list[str]]] = {}

    async def look_on(self) -> View:
        """The cluster as it is now; where nothing of it can be seen, a view that says why."""
        where = ";".join(self._admin.nameservers)
        try:
            return await self.look()
        except LinkError:
            problem = f"no nameserver at {where}"
        except NotFound:
            problem = f"no broker at nameserver {where}"
        except SluiceError as error:
            problem = str(error)
        return View(_now_ms(), problems=(f"{problem}; retrying",))

    async def look(self) -> View:
        """The cluster as it is now; raises where nothing of it can be seen."""
        taken_ms = _now_ms()
        brokers = await self._admin.brokers()
        if not brokers:
            raise NotFound("no broker is registered with the nameserver; start `sluice broker`")
        asked = await asyncio.gather(*(self._ask(broker) for broker in brokers))
        samples = {sample[0].address: sample[1] for sample in asked if sample[1] is not None}
        view = View(
            taken_ms,
            tuple(row for row, _, _ in asked),
            self._topic_rows(samples),
            self._group_rows(samples),
            tuple(problem for _, _, problem in asked if problem),
        )
        self._before = samples
        return view

    # --------------------------------------------------------------------------------- one broker

    async def _ask(self, broker: BrokerData) -> tuple[BrokerRow, _Sample | None, str]:
        """A broker's row, what it said, and why it said nothing."""
        address = broker.addresses[min(broker.addresses)] if broker.addresses else ""
        row = BrokerRow(broker.name, address)
        try:
            sample = await self._sample(address)
        except LinkError:
            return row, None, f"no broker at {address}; retrying"
        except SluiceError as error:
            return row, None, f"{error}; retrying"
        return self._broker_row(row, sample), sample, ""

    async def _sample(self, address: str) -> _Sample:
        taken = self._clock()
        # First alone: a connection that has to be made is made once.
        info = await self._admin.runtime_info(address)
        names = await self._topic_names(address, taken)
        limit = asyncio.Semaphore(_ASKS_MAX)

        async def counts(name: str) -> _Counts | None:
            async with limit:
                return await self._topic(address, name)

        found = await asyncio.gather(*(counts(name) for name in names))
        topics = {name: row for name, row in zip(names, found, strict=True) if row is not None}
        return _Sample(taken, info, topics, await self._groups(address))

    async def _topic_names(self, address: str, now: float) -> list[str]:
        known = self._names.get(address)
        if known is not None and now - known[0] < _NAMES_SECONDS:
            return known[1]
        answer = await self._admin.done(
            address, Request.GET_ALL_TOPIC_CONFIG, what="the list of topics"
        )
        table = mapping(read_object(answer.body, _ANSWER_BYTES_MAX), "topicConfigTable")
        inner: set[str] = set()
        if not self._all_topics:
            answer = await self._admin.done(
                address,
                Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
                what="the list of the broker's own topics",
            )
            inner = set(remoting_bodies.read_topic_list(answer.body))
        names = [name for name in sorted(table) if self._all_topics or not _is_inner(name, inner)]
        self._names[address] = (now, names)
        return names

    async def _topic(self, address: str, name: str) -> _Counts | None:
        try:
            answer = await self._admin.done(
                address,
                Request.GET_TOPIC_STATS_INFO,
                {"topic": name},
                what=f"the offsets of {name}",
                timeout_seconds=_ANSWER_SECONDS,
            )
        except LinkError:
            raise
        except SluiceError:
            return None  # it was deleted since its name was read
        stats = read_topic_stats(answer.body)
        high = sum(span.max_offset for span in stats.spans.values())
        low = sum(span.min_offset for span in stats.spans.values())
        return _Counts(high, stats.put_tps, len(stats.spans), high - low)

    async def _groups(self, address: str) -> dict[tuple[str, str], _Counts]:
        answer = await self._admin.done(
            address,
            Request.GET_BROKER_CONSUME_STATS,
            {"isOrder": "false"},
            what="the progress of all groups",
            timeout_seconds=_ANSWER_SECONDS,
        )
        return read_progress(answer.body)

    # -------------------------------------------------------------------------------------- rows

    def _broker_row(self, row: BrokerRow, sample: _Sample) -> BrokerRow:
        before, info = self._before.get(row.address), sample.info
        unequal = info.get("unequalSubscriptions", "none")
        refuses = info.get("storeRefuses", "nothing")
        warnings = [f"unequal subscriptions: {unequal}"] if unequal != "none" else []
        warnings += [f"appends are refused: {refuses}"] if refuses != "nothing" else []
        ratio, held = info.get("commitLogDiskRatio"), info.get("heldPulls")
        return row._replace(
            version=info.get("brokerVersionDesc", ""),
            in_rate=_info_rate(sample, before, "msgPutTotalTodayNow", "putTps"),
            out_rate=_info_rate(sample, before, "msgGetTotalTodayNow", "getTransferredTps"),
            disk_ratio=None if ratio is None else _decimal(ratio),
            held_pulls=None if held is None else int(_decimal(held)),
            warning="; ".join(warnings),
        )

    def _topic_rows(self, samples: Mapping[str, _Sample]) -> tuple[TopicRow, ...]:
        rows: dict[str, TopicRow] = {}
        for address, sample in samples.items():
            before = self._before.get(address)
            for name, counts in sample.topics.items():
                old = rows.get(name, TopicRow(name, 0, 0, 0.0))
                rate = _rate(sample, before, counts, before.topics.get(name) if before else None)
                rows[name] = TopicRow(
                    name, old.queues + counts.queues, old.messages + counts.rest, old.in_rate + rate
                )
        return tuple(rows.values())

    def _group_rows(self, samples: Mapping[str, _Sample]) -> tuple[GroupRow, ...]:
        rows: dict[tuple[str, str], GroupRow] = {}
        for address, sample in samples.items():
            before = self._before.get(address)
            for pair, counts in sample.groups.items():
                if not self._all_topics and _is_inner(pair[1], ()):
                    continue
                old = rows.get(pair, GroupRow(*pair, 0, 0.0))
                rate = _rate(sample, before, counts, before.groups.get(pair) if before else None)
                rows[pair] = GroupRow(*pair, old.lag + counts.rest, old.out_rate + rate)
        return tuple(rows.values())


def read_progress(body: Any) -> dict[tuple[str, str], _Counts]:
    """How far each group has read each topic, by a broker's answer to request 317."""
    result: dict[tuple[str, str], _Counts] = {}
    for entry in objects(read_object(body, _ANSWER_BYTES_MAX), "consumeStatsList"):
        for group in entry:
            for row in items(entry, group):
                stats = as_object(row, "a value of consumeStatsList")
                per_topic: dict[str, list[tuple[int, int]]] = {}
                for queue, value in read_queue_keys(stats, "offsetTable").items():
                    offsets = as_object(value, "a value of offsetTable")
                    high = as_number(offsets.get("brokerOffset"), "brokerOffset")
                    read = as_number(offsets.get("consumerOffset"), "consumerOffset")
                    per_topic.setdefault(queue.topic, []).append((high, read))
                tps = _decimal(stats.get("consumeTps", 0))
                for topic, queues in per_topic.items():
                    total = sum(read for _, read in queues)
                    behind = sum(max(0, high - read) for high, read in queues)
                    result[group, topic] = _Counts(total, tps, len(queues), behind)
    return result


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _is_inner(name: str, listed: Iterable[str]) -> bool:
    return name in listed or name.startswith(_INNER_PREFIXES)


def _rate(sample: _Sample, before: _Sample | None, counts: _Counts, old: _Counts | None) -> float:
    if before is None or old is None or sample.taken <= before.taken:
        return counts.rate
    return max(0, counts.total - old.total) / (sample.taken - before.taken)


def _info_rate(sample: _Sample, before: _Sample | None, total: str, rate: str) -> float:
    figures = sample.info.get(rate, "").split()
    own = _decimal(figures[0]) if figures else 0.0
    now = _Counts(int(_decimal(sample.info.get(total, 0))), own)
    if before is None or total not in before.info:
        return own
    return _rate(sample, before, now, _Counts(int(_decimal(before.info[total])), 0.0))


def _decimal(value: object) -> float:
    """A figure as brokers write it; nothing where it is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0
