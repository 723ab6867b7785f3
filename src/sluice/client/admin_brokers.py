"""This module has the admin commands about brokers and nameservers: state, settings, permission."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from sluice.client.admin import Admin
from sluice.client.admin_flags import (
    BROKER_FLAGS,
    BROKER_OR_CLUSTER,
    DONE,
    Command,
    Flag,
    Options,
    at_least,
    each,
    result_rows,
    result_text,
    settle,
    text,
    yes_no,
)
from sluice.client.admin_topics import addresses_for
from sluice.client.printing import Printer, Table
from sluice.clock import wall_ms
from sluice.errors import SluiceError
from sluice.protocol.remoting_bodies import BrokerData

_HOUR_MS: Final = 3_600_000


async def _replicas(admin: Admin, options: Options) -> list[str]:
    """The broker that was named, or all replicas of all brokers of a cluster."""
    if options.brokerAddr is not None:
        return [options.brokerAddr]
    brokers = await admin.brokers(options.clusterName)
    return [broker.addresses[number] for broker in brokers for number in sorted(broker.addresses)]


# ------------------------------------------------------------------------------------------ looking


async def _cluster_list(admin: Admin, options: Options, printer: Printer) -> int:
    show = _show_totals if options.moreStats else _show_brokers
    while True:
        brokers = await admin.brokers(options.clusterName)
        await show(admin, brokers, printer)
        if options.interval is None:
            return DONE
        await sleep(options.interval)


def _first_rate(runtime: Mapping[str, str], name: str) -> float:
    """The rate of the last ten seconds: the first of three."""
    return _number((runtime.get(name) or "0").split(" ")[0])


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


async def _asked(
    admin: Admin, brokers: list[BrokerData]
) -> list[tuple[BrokerData, int, dict[str, str], str]]:
    """Every replica with its state; where it does not answer, with the reason."""
    result = []
    for broker in sorted(brokers, key=lambda one: (one.cluster, one.name)):
        for number in sorted(broker.addresses):
            try:
                runtime = await admin.runtime_info(broker.addresses[number])
                result.append((broker, number, runtime, ""))
            except SluiceError as error:
                result.append((broker, number, {}, str(error)))
    return result


async def _show_brokers(admin: Admin, brokers: list[BrokerData], printer: Printer) -> None:
    found = []
    for broker, number, runtime, error in await _asked(admin, brokers):
        oldest_ms = _number(runtime.get("earliestMessageTimeStamp", "-1"))
        found.append(
            {
                "clusterName": broker.cluster,
                "brokerName": broker.name,
                "brokerId": number,
                "brokerAddr": broker.addresses[number],
                "brokerVersionDesc": runtime.get("brokerVersionDesc", ""),
                "inTps": _first_rate(runtime, "putTps"),
                "outTps": _first_rate(runtime, "getTransferredTps"),
                "pageCacheLockTimeMills": int(_number(runtime.get("pageCacheLockTimeMills", "0"))),
                "hour": max(0.0, wall_ms() - oldest_ms) / _HOUR_MS if oldest_ms > 0 else 0.0,
                "space": _number(runtime.get("commitLogDiskRatio", "0")),
                "brokerActive": runtime.get("brokerActive") == "true",
                "error": error,
            }
        )
    rows = [
        (
            *(row["clusterName"], row["brokerName"], row["brokerId"], row["brokerAddr"]),
            *(row["brokerVersionDesc"], row["inTps"], row["outTps"]),
            *(row["pageCacheLockTimeMills"], row["hour"], row["space"], row["brokerActive"]),
        )
        for row in found
    ]
    names = (
        *("Cluster", "Broker", "Id", "Address", "Version", "In/s", "Out/s"),
        *("Lock ms", "Hours", "Disk", "Active"),
    )
    errors = [f"WARNING: {row['error']}" for row in found if row["error"]]
    printer.show({"brokers": found}, Table(names, rows), *errors)


async def _show_totals(admin: Admin, brokers: list[BrokerData], printer: Printer) -> None:
    found: list[dict[str, Any]] = []
    errors = []
    for broker, number, runtime, error in await _asked(admin, brokers):

        def between(name: str, first: str, last: str, table: Mapping[str, str] = runtime) -> int:
            counts = (table.get(f"{name}{last}", "0"), table.get(f"{name}{first}", "0"))
            return int(_number(counts[0]) - _number(counts[1]))

        found.append(
            {
                "clusterName": broker.cluster,
                "brokerName": broker.name,
                "brokerId": number,
                "inTotalYest": between("msgPutTotal", "YesterdayMorning", "TodayMorning"),
                "outTotalYest": between("msgGetTotal", "YesterdayMorning", "TodayMorning"),
                "inTotalToday": between("msgPutTotal", "TodayMorning", "TodayNow"),
                "outTotalToday": between("msgGetTotal", "TodayMorning", "TodayNow"),
            }
        )
        errors += [f"WARNING: {error}"] if error else []
    names = (
        *("Cluster", "Broker", "Id", "In Yesterday", "Out Yesterday"),
        *("In Today", "Out Today"),
    )
    printer.show({"brokers": found}, Table(names, [tuple(row.values()) for row in found]), *errors)


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

    outcomes = await each(await _replicas(admin, options), look)
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
    if options.updateAllBroker:
        addresses = await _replicas(admin, options)
    else:
        addresses = await addresses_for(admin, options)
    outcomes = await each(
        addresses,
        lambda address: admin.update_broker_config(address, options.key, options.value),
    )
    document = {"key": options.key, "value": options.value, "brokers": result_rows(outcomes)}
    rows = [
        (address, options.key, options.value, result_text(error))
        for address, error in outcomes.items()
    ]
    printer.show(document, Table(("Broker", "Setting", "Value", "Result"), rows))
    return settle(outcomes)


async def _wipe(admin: Admin, options: Options, printer: Printer) -> int:
    return await _write_permission(
        admin, options, printer, admin.wipe_write_permission, "wipeTopicCount"
    )


async def _add(admin: Admin, options: Options, printer: Printer) -> int:
    return await _write_permission(
        admin, options, printer, admin.add_write_permission, "addTopicCount"
    )


async def _write_permission(
    admin: Admin,
    options: Options,
    printer: Printer,
    change: Callable[[str, str], Awaitable[int]],
    member: str,
) -> int:
    await admin.broker_named(options.brokerName)  # nameservers say nothing of an unknown one
    counts: dict[str, int] = {}

    async def one(nameserver: str) -> None:
        counts[nameserver] = await change(nameserver, options.brokerName)

    outcomes = await each(admin.nameservers, one)
    document = {
        "brokerName": options.brokerName,
        "nameServers": [
            {**row, member: counts.get(row["namesrvAddr"], 0)}
            for row in result_rows(outcomes, "namesrvAddr")
        ],
    }
    rows = [
        (options.brokerName, address, counts.get(address, 0), result_text(error))
        for address, error in outcomes.items()
    ]
    printer.show(document, Table(("Broker", "Nameserver", "Topics Changed", "Result"), rows))
    return settle(outcomes)


async def _update_value(admin: Admin, options: Options, printer: Printer) -> int:
    space, key, value = options.namespace, options.key, options.value
    outcomes = await each(
        admin.nameservers, lambda address: admin.put_value(address, space, key, value)
    )
    document = {
        "namespace": space,
        "key": key,
        "value": value,
        "nameServers": result_rows(outcomes, "namesrvAddr"),
    }
    return _show_values(printer, document, space, key, outcomes)


async def _delete_value(admin: Admin, options: Options, printer: Printer) -> int:
    space, key = options.namespace, options.key
    outcomes = await each(
        admin.nameservers, lambda address: admin.delete_value(address, space, key)
    )
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
