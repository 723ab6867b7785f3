"""This module has the admin commands about brokers and nameservers: state, settings, permission."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from sluice.client.admin_flags import (
    BROKER_FLAGS,
    BROKER_OR_CLUSTER,
    DONE,
    Command,
    Flag,
    Options,
    at_least,
    result_rows,
    result_text,
    settle,
    text,
    tried,
    yes_no,
)
from sluice.client.administration.admin import Admin
from sluice.client.administration.everywhere import each
from sluice.client.administration.values import BrokerStatus, WritePermissionSet
from sluice.client.printing import Printer, Table
from sluice.clock import wall_ms

# ------------------------------------------------------------------------------------------ looking


async def _cluster_list(admin: Admin, options: Options, printer: Printer) -> int:
    show = _show_totals if options.moreStats else _show_brokers
    while True:
        show(await admin.broker_statuses(options.clusterName), printer)
        if options.interval is None:
            return DONE
        await sleep(options.interval)


def _show_brokers(brokers: list[BrokerStatus], printer: Printer) -> None:
    found = [
        {
            "clusterName": broker.cluster,
            "brokerName": broker.name,
            "brokerId": broker.broker_id,
            "brokerAddr": broker.address,
            "brokerVersionDesc": broker.version,
            "inTps": broker.in_tps,
            "outTps": broker.out_tps,
            "pageCacheLockTimeMills": broker.lock_ms,
            "hour": broker.hours(wall_ms()),
            "space": broker.disk_ratio,
            "brokerActive": broker.is_active,
            "error": broker.error,
        }
        for broker in brokers
    ]
    rows = [tuple(row.values())[:-1] for row in found]
    names = (
        *("Cluster", "Broker", "Id", "Address", "Version", "In/s", "Out/s"),
        *("Lock ms", "Hours", "Disk", "Active"),
    )
    printer.show({"brokers": found}, Table(names, rows), *_warnings(brokers))


def _show_totals(brokers: list[BrokerStatus], printer: Printer) -> None:
    found: list[dict[str, Any]] = [
        {
            "clusterName": broker.cluster,
            "brokerName": broker.name,
            "brokerId": broker.broker_id,
            "inTotalYest": broker.between("msgPutTotal", "YesterdayMorning", "TodayMorning"),
            "outTotalYest": broker.between("msgGetTotal", "YesterdayMorning", "TodayMorning"),
            "inTotalToday": broker.between("msgPutTotal", "TodayMorning", "TodayNow"),
            "outTotalToday": broker.between("msgGetTotal", "TodayMorning", "TodayNow"),
        }
        for broker in brokers
    ]
    names = (
        *("Cluster", "Broker", "Id", "In Yesterday", "Out Yesterday"),
        *("In Today", "Out Today"),
    )
    rows = [tuple(row.values()) for row in found]
    printer.show({"brokers": found}, Table(names, rows), *_warnings(brokers))


def _warnings(brokers: list[BrokerStatus]) -> list[str]:
    return [f"WARNING: {broker.error}" for broker in brokers if broker.error]


async def _broker_status(admin: Admin, options: Options, printer: Printer) -> int:
    return await _tables(admin, options, printer, admin.runtime_info, "table")


async def _get_config(admin: Admin, options: Options, printer: Printer) -> int:
    return await _tables(admin, options, printer, admin.broker_config, "properties")


async def _tables(
    admin: Admin,
    options: Options,
    printer: Printer,
    ask: Callable[[str], Awaitable[dict[str, str]]],
    member: str,
) -> int:
    """Names and values of one broker, or of several one below the other."""
    tables: dict[str, dict[str, str]] = {}

    async def look(address: str) -> None:
        tables[address] = await ask(address)

    outcomes = await each(await admin.replicas(options.brokerAddr, options.clusterName), look)
    blocks: list[Table | str] = []
    for address, table in tables.items():
        if options.clusterName is not None:
            blocks += [*([""] if blocks else []), f"broker {address}"]
        blocks.append(Table(("Name", "Value"), sorted(table.items())))
    document = {
        "brokers": [
            {"brokerAddr": address, member: dict(sorted(table.items()))}
            for address, table in tables.items()
        ]
    }
    printer.show(document, *blocks)
    return settle(outcomes)


# ----------------------------------------------------------------------------------------- changing


async def _update_config(admin: Admin, options: Options, printer: Printer) -> int:
    outcomes = await tried(
        admin.set_broker_config(
            options.key,
            options.value,
            broker=options.brokerAddr,
            cluster=options.clusterName,
            replicas=bool(options.updateAllBroker),
        )
    )
    document = {"key": options.key, "value": options.value, "brokers": result_rows(outcomes)}
    rows = [
        (address, options.key, options.value, result_text(error))
        for address, error in outcomes.items()
    ]
    printer.show(document, Table(("Broker", "Setting", "Value", "Result"), rows))
    return settle(outcomes)


async def _wipe(admin: Admin, options: Options, printer: Printer) -> int:
    done = await tried(admin.set_write_permission(options.brokerName, allowed=False))
    return _show_permission(printer, done, "wipeTopicCount")


async def _add(admin: Admin, options: Options, printer: Printer) -> int:
    done = await tried(admin.set_write_permission(options.brokerName, allowed=True))
    return _show_permission(printer, done, "addTopicCount")


def _show_permission(printer: Printer, done: WritePermissionSet, member: str) -> int:
    counts, outcomes = done.topic_counts, done.nameservers
    document = {
        "brokerName": done.broker_name,
        "nameServers": [
            {**row, member: counts.get(row["namesrvAddr"], 0)}
            for row in result_rows(outcomes, "namesrvAddr")
        ],
    }
    rows = [
        (done.broker_name, address, counts.get(address, 0), result_text(error))
        for address, error in outcomes.items()
    ]
    printer.show(document, Table(("Broker", "Nameserver", "Topics Changed", "Result"), rows))
    return settle(outcomes)


async def _update_value(admin: Admin, options: Options, printer: Printer) -> int:
    space, key, value = options.namespace, options.key, options.value
    outcomes = await tried(admin.set_value(space, key, value))
    document = {
        "namespace": space,
        "key": key,
        "value": value,
        "nameServers": result_rows(outcomes, "namesrvAddr"),
    }
    return _show_values(printer, document, space, key, outcomes)


async def _delete_value(admin: Admin, options: Options, printer: Printer) -> int:
    space, key = options.namespace, options.key
    outcomes = await tried(admin.delete_value(space, key))
    document = {
        "namespace": space,
        "key": key,
        "nameServers": result_rows(outcomes, "namesrvAddr"),
    }
    return _show_values(printer, document, space, key, outcomes)


def _show_values(
    printer: Printer, document: object, space: str, key: str, outcomes: Mapping[str, str]
) -> int:
    rows = [(address, space, key, result_text(error)) for address, error in outcomes.items()]
    printer.show(document, Table(("Nameserver", "Namespace", "Key", "Result"), rows))
    return settle(outcomes)


_BROKER_NAME: Final = Flag("b", "brokerName", "Name of the broker.", text, required=True)
_SPACE: Final = Flag("s", "namespace", "The namespace of the key.", text, required=True)
_KEY: Final = Flag("k", "key", "Name of the value.", text, required=True)

COMMANDS: Final = (
    Command(
        "clusterList",
        "Lists the brokers of all clusters, with their rates.",
        (
            Flag("m", "moreStats", "Messages of today and yesterday instead.", None, default=False),
            Flag("i", "interval", "Again every so many seconds, until stopped.", at_least(1)),
            Flag("c", "clusterName", "Only this cluster.", text),
        ),
        _cluster_list,
        "clusterList",
    ),
    Command(
        "brokerStatus",
        "Shows counters, rates and the state of the store of brokers.",
        BROKER_FLAGS,
        _broker_status,
        "brokerStatus -b 127.0.0.1:10911",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "getBrokerConfig",
        "Shows the settings of brokers.",
        BROKER_FLAGS,
        _get_config,
        "getBrokerConfig -b 127.0.0.1:10911",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "updateBrokerConfig",
        "Changes one setting of running brokers.",
        (
            *BROKER_FLAGS,
            Flag("a", "updateAllBroker", "Whether replicas change too. Default: false.", yes_no),
            Flag("k", "key", "Name of the setting.", text, required=True),
            Flag("v", "value", "Its new value.", str, required=True),
        ),
        _update_config,
        "updateBrokerConfig -c DefaultCluster -k autoCreateTopicEnable -v false",
        BROKER_OR_CLUSTER,
    ),
    Command(
        "wipeWritePerm",
        "Takes a broker out of sending: no nameserver lets its queues be written.",
        (_BROKER_NAME,),
        _wipe,
        "wipeWritePerm -b broker-a",
    ),
    Command(
        "addWritePerm",
        "Takes a broker back into sending.",
        (_BROKER_NAME,),
        _add,
        "addWritePerm -b broker-a",
    ),
    Command(
        "updateKvConfig",
        "Sets a value that the nameservers keep.",
        (_SPACE, _KEY, Flag("v", "value", "The value.", str, required=True)),
        _update_value,
        "updateKvConfig -s limits -k orders -v 100",
    ),
    Command(
        "deleteKvConfig",
        "Deletes a value that the nameservers keep.",
        (_SPACE, _KEY),
        _delete_value,
        "deleteKvConfig -s limits -k orders",
    ),
)
