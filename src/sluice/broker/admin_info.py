"""This module translates what administrators ask about the broker itself: settings, rates, state.

Settings can be changed while it runs: those that are declared so, by RocketMQ's names or ours, with
values that the settings allow. Everything else is refused with the reason.
"""

from __future__ import annotations

from typing import Final

from sluice.broker.admin_base import AdminPart, log_lines, version_of
from sluice.broker.browsing import first_message_ms
from sluice.broker.remoting_api import Handle
from sluice.broker.runtime_settings import change
from sluice.broker.stats import Series, Window
from sluice.broker.topic_deletion import delete_topic, unused_topics
from sluice.broker.topics import SCHEDULE_TOPIC
from sluice.config import to_properties
from sluice.errors import NoPermission, SluiceError
from sluice.net import Connection
from sluice.protocol import remoting_admin, remoting_bodies
from sluice.protocol.remoting import RemotingCommand
from sluice.protocol.remoting_admin import StatsSpan
from sluice.protocol.remoting_codes import RequestCode as Request
from sluice.storage.store import DELAY_TABLE

VERSION_TEXT: Final = "V5_5_0"  # whose protocol is spoken; tools show it and compare by it
_BLACK_LIST: Final = ("brokerConfigPath", "rocketmqHome", "configBlackList")
_TEXT_MAX: Final = 4096
_SECOND_MS: Final = 1000
_SIZE_UNITS: Final = "KMGTPE"
# One event loop does all work: nothing waits in a queue in front of it.
_NO_QUEUES: Final = {
    f"{name}ThreadPoolQueue{what}": "0"
    for name in ("send", "pull", "litePull", "query", "ack")
    for what in ("Size", "Capacity", "HeadWaitTimeMills")
}


class AdminInfo(AdminPart):
    """One broker, for administrators."""

    def handlers(self) -> dict[int, Handle]:
        return {
            Request.UPDATE_BROKER_CONFIG: self._update_config,
            Request.GET_BROKER_CONFIG: self._get_config,
            Request.GET_BROKER_RUNTIME_INFO: self._runtime_info,
            Request.VIEW_BROKER_STATS_DATA: self._stats,
            Request.GET_BROKER_HA_STATUS: self._ha_status,
            Request.EXCHANGE_BROKER_HA_INFO: self._exchange_ha_info,
            Request.RESET_MASTER_FLUSH_OFFSET: self._reset_master_flush,
            Request.GET_BROKER_EPOCH_CACHE: self._epochs,
            Request.CLEAN_EXPIRED_CONSUMEQUEUE: self._clean_queues,
            Request.CLEAN_UNUSED_TOPIC: self._clean_topics,
            Request.DELETE_EXPIRED_COMMITLOG: self._delete_expired,
        }

    # ------------------------------------------------------------------------------------- settings

    def _update_config(self, connection: Connection, command: RemotingCommand) -> None:
        core = self._core
        changes = remoting_bodies.read_properties(command.body)
        if any(name in changes for name in _BLACK_LIST):
            raise NoPermission("Can not update config in black list.")
        before = core.config

        def done(error: SluiceError | None) -> None:
            if error is None:
                log_lines.info("%s changed settings: %s", connection, ", ".join(sorted(changes)))
            routes = core.config.permission != before.permission
            if core.config.creates_topics != before.creates_topics:
                routes = True
                core.topics.bump()  # whether the topic is told after which others are made
            self._when_durable(connection, command, routes=routes)(error)

        change(core, changes, "updateBrokerConfig", done)

    def _get_config(self, connection: Connection, command: RemotingCommand) -> None:
        version = version_of(self._core.topics.data_version())
        lines = sorted(to_properties(self._core.config).splitlines())
        self._answer(
            connection,
            command,
            ext={"version": remoting_admin.data_version_text(version)},
            body="".join(f"{line}\n" for line in lines).encode(),
        )

    # -------------------------------------------------------------------------------------- numbers

    def _runtime_info(self, connection: Connection, command: RemotingCommand) -> None:
        def body(answers: list[int]) -> bytes:
            table = {
                **_NO_QUEUES,
                **self._rates(),
                **self._store_info(),
                "earliestMessageTimeStamp": str(answers[0]),
                "unequalSubscriptions": self._unequal(),
            }
            return remoting_bodies.write_kv_table(dict(sorted(table.items())))

        store = self._core.store
        self._ask_each(connection, command, [lambda: first_message_ms(store)], body)

    def _rates(self) -> dict[str, str]:
        core = self._core
        stats, mornings = core.stats, core.stats.mornings
        found, miss = stats.rates("get_found"), stats.rates("get_miss")
        total = tuple(f + m for f, m in zip(found, miss, strict=True))
        run_ms = core.now_ms() - core.started_ms
        return {
            "bootTimestamp": str(core.started_ms),
            "brokerActive": "true",
            "brokerVersionDesc": VERSION_TEXT,
            "getFoundTps": _triple(found),
            "getMissTps": _triple(miss),
            "getTotalTps": _triple(total),
            "getTransferredTps": _triple(stats.rates("get")),
            "msgGetTotalTodayMorning": str(mornings.get_today),
            "msgGetTotalTodayNow": str(stats.get),
            "msgGetTotalYesterdayMorning": str(mornings.get_yesterday),
            "msgPutTotalTodayMorning": str(mornings.put_today),
            "msgPutTotalTodayNow": str(stats.put),
            "msgPutTotalYesterdayMorning": str(mornings.put_yesterday),
            "putMessageAverageSize": str(stats.put_bytes / max(1, stats.put)),
            "putMessageSizeTotal": str(stats.put_bytes),
            "putMessageTimesTotal": str(max(1, stats.put)),
            "putTps": _triple(stats.rates("put")),
            "runtime": _duration(run_ms),
            "startAcceptSendRequestTimeStamp": "0",
            "EndTransactionQueueSize": "0",
            "EndTransactionThreadPoolQueueCapacity": "0",
        }

    def _store_info(self) -> dict[str, str]:
        store = self._core.store
        usage = store.files.usage(store.root)
        unflushed = store.log.written - store.flusher.flushed
        total, free = _size(usage.total_bytes), _size(usage.free_bytes)
        table = {
            "commitLogDirCapacity": f"Total : {total}, Free : {free}.",
            "commitLogDiskRatio": str(usage.used_ratio),
            "commitLogMaxOffset": str(store.log.written),
            "commitLogMinOffset": str(store.log.start),
            "consumeQueueDiskRatio": str(usage.used_ratio),
            "dispatchBehindBytes": "0",
            "heldPulls": str(self._core.polls.held_count),
            "pageCacheLockTimeMills": "0",
            "remainHowManyDataToFlush": _size(unflushed),
            "remainTransientStoreBufferNumbs": "0",
            "storeRefuses": str(store.refusal or "nothing"),
            "timerCongestNum": "0",
            "timerDequeueTps": "0.0",
            "timerEnqueueTps": "0.0",
            "timerOffsetBehind": "0",
            "timerReadBehind": "0",
        }
        for level, done in store.table(DELAY_TABLE).items():
            high = store.max_offset(SCHEDULE_TOPIC, int(level) - 1)
            table[f"scheduleMessageOffset_{level}"] = f"{done},{high}"
        return table

    def _unequal(self) -> str:
        """Groups whose members subscribe differently: each misses messages of another."""
        groups = self._core.clients.disagreements()
        lines = [f"{group}: {line}" for group in sorted(groups) for line in groups[group]]
        return " | ".join(lines)[:_TEXT_MAX] or "none"

    def _stats(self, connection: Connection, command: RemotingCommand) -> None:
        fields = self._fields(command)
        name, key = fields["statsName"], fields["statsKey"]
        stats = self._core.stats
        spans = [self._span(name, key, span) for span in (stats.minute, stats.hour, stats.day)]
        self._answer(connection, command, body=remoting_admin.write_stats(*spans))

    def _span(self, name: str, key: str, series: Series) -> StatsSpan:
        core = self._core
        stats = core.stats
        window: Window | None = None
        if name in ("TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE"):
            window = stats.put_window(series, key)
        elif name in ("GROUP_GET_NUMS", "GROUP_GET_SIZE"):
            topic, _, group = key.partition("@")
            window = stats.get_window(series, topic, group)
        elif name == "BROKER_PUT_NUMS" and key == core.config.cluster_name:
            window = stats.all_puts_window(series)
        elif name == "BROKER_GET_NUMS" and key == core.config.cluster_name:
            window = stats.all_gets_window(series)
        if window is None:
            raise SluiceError(f"The stats <{name}> <{key}> not exist")
        amount = window.bytes if name.endswith("_SIZE") else window.messages
        return StatsSpan(amount, window.rate(amount), amount / max(1, window.calls))

    # ---------------------------------------------------------------------------------------- state

    def _ha_status(self, connection: Connection, command: RemotingCommand) -> None:
        body = remoting_admin.write_ha_status(self._core.store.log.written)
        self._answer(connection, command, body=body)

    def _exchange_ha_info(self, connection: Connection, command: RemotingCommand) -> None:
        """A replica asks the master for its addresses, or tells another one's: nobody copies."""
        core = self._core
        ext: dict[str, str] = {}
        if self._fields(command)["masterHaAddress"] is None and core.config.broker_id == 0:
            ext = {
                "masterHaAddress": core.address,
                "masterFlushOffset": str(core.store.recovery.end),
                "masterAddress": core.address,
            }
        self._answer(connection, command, ext=ext)

    def _reset_master_flush(self, connection: Connection, command: RemotingCommand) -> None:
        """How far a master had flushed matters to its replicas, of which this is none."""
        self._answer(connection, command)

    def _epochs(self, connection: Connection, command: RemotingCommand) -> None:
        raise SluiceError("this request only for controllerMode ")

    # ------------------------------------------------------------------------------------- cleaning

    def _clean_queues(self, connection: Connection, command: RemotingCommand) -> None:
        log_lines.info("%s asks for a look at all queue files", connection)
        self._core.store.housekeeping.sweep_queues()
        self._answer(connection, command)

    def _delete_expired(self, connection: Connection, command: RemotingCommand) -> None:
        log_lines.info("%s asks to delete what is older than the retention", connection)
        self._core.store.housekeeping.delete_expired()
        self._answer(connection, command)

    def _clean_topics(self, connection: Connection, command: RemotingCommand) -> None:
        """Delete the queues of topics that have no settings."""
        names = unused_topics(self._core)
        answer = self._when_durable(connection, command)
        open_count = len(names)

        def deleted(error: SluiceError | None) -> None:
            nonlocal open_count
            open_count -= 1
            failures.extend([error] if error is not None else [])
            if open_count == 0:
                answer(failures[0] if failures else None)

        failures: list[SluiceError] = []
        log_lines.info("%s deletes unused topics: %s", connection, ", ".join(names) or "none")
        for name in names:
            try:
                delete_topic(self._core, name, deleted)
            except SluiceError as error:
                deleted(error)
        if not names:
            answer(None)


def _triple(rates: tuple[float, ...]) -> str:
    return " ".join(str(rate) for rate in rates)


def _duration(run_ms: int) -> str:
    minutes, seconds = divmod(run_ms // _SECOND_MS, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _size(byte_count: int) -> str:
    """As RocketMQ writes sizes for people."""
    if byte_count < 1024:
        return f"{byte_count} B"
    power = min((byte_count.bit_length() - 1) // 10, len(_SIZE_UNITS))
    return f"{byte_count / 1024**power:.1f} {_SIZE_UNITS[power - 1]}iB"
