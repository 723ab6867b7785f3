"""This module is `sluice serve` and `sluice broker`: settings, the process, signals, words for
people.

`serve` runs everything in one process, with all data in one directory: what a laptop, a CI job or a
small service needs. `broker` runs one broker that registers with nameservers elsewhere. SIGTERM and
SIGINT drain and stop; what cannot work is a ConfigError or a StoreError, printed as one line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import fields, replace

import uvloop

from sluice import process_metrics
from sluice.broker.server import Broker
from sluice.config import (
    BrokerConfig,
    ListeningConfig,
    Loaded,
    NameserverConfig,
    add_flags,
    is_everywhere,
    load,
)
from sluice.errors import ConfigError
from sluice.heap import keep_freed_memory, use_large_pages
from sluice.link import join_address, split_address
from sluice.metrics_http import MetricsListener
from sluice.nameserver.metrics import NameserverMetrics
from sluice.nameserver.server import Nameserver
from sluice.net import own_address
from sluice.tls import client_tls

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_NAMESERVER_PORT = 9876
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def serve(argv: list[str]) -> int:
    """Nameserver and broker in one process, until a signal comes."""
    parser = _parser("serve", "Runs everything in one process, with all data in one directory.")
    parser.add_argument(
        "--nameserver-port",
        type=int,
        default=_NAMESERVER_PORT,
        metavar="PORT",
        help=f"Port of the nameserver; 0 takes a free one. Default: {_NAMESERVER_PORT}.",
    )
    arguments = parser.parse_args(argv)
    loaded = _config(arguments)
    if not 0 <= arguments.nameserver_port <= 65535:
        raise ConfigError(f"--nameserver-port {arguments.nameserver_port}: allowed are 0 to 65535")
    return _run(lambda stop: _serve(loaded, arguments.nameserver_port, stop))


def broker(argv: list[str]) -> int:
    """One broker, until a signal comes."""
    parser = _parser("broker", "Runs one broker that registers with nameservers elsewhere.")
    loaded = _config(parser.parse_args(argv))
    if not loaded.config.nameserver_addresses:
        raise ConfigError(
            "no nameserver to register with; name one with --nameserver-addresses host:port, "
            "or run everything together with `sluice serve`"
        )
    return _run(lambda stop: _broker(loaded, stop))


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sluice {name}",
        description=description,
        epilog="Settings come from flags, then SLUICE_* variables, then what was changed while "
        "a broker ran on the directory, then the file.",
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="a .toml file, or RocketMQ's .conf")
    add_flags(parser, BrokerConfig)
    return parser


def _config(arguments: argparse.Namespace) -> Loaded[BrokerConfig]:
    loaded = load(BrokerConfig, file=arguments.config, environ=os.environ, flags=arguments)
    logging.basicConfig(stream=sys.stderr, format=_LOG_FORMAT)
    logging.getLogger("sluice").setLevel(loaded.config.log_level.upper())
    for warning in loaded.warnings:
        logging.getLogger("sluice").warning("%s", warning)
    return loaded


def _run(start: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            loop.add_signal_handler(number, stop.set)
        await start(stop)
        return 0

    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _serve(loaded: Loaded[BrokerConfig], nameserver_port: int, stop: asyncio.Event) -> None:
    async with _listening(loaded.config) as listener:
        await _serve_both(loaded, nameserver_port, listener, stop)


async def _serve_both(
    loaded: Loaded[BrokerConfig],
    nameserver_port: int,
    listener: MetricsListener,
    stop: asyncio.Event,
) -> None:
    config = loaded.config
    own_tls = _own_tls(config)
    nameserver = Nameserver(_nameserver_config(config, nameserver_port))
    with _port_flag("--nameserver-port"):
        await nameserver.start()
    try:
        near, shown = _dialable(nameserver.address)
        addresses = (near, *config.nameserver_addresses)
        running = Broker(
            replace(config, nameserver_addresses=addresses),
            tls_by_address={near: own_tls},
            pinned=loaded.pinned,
        )
        with _port_flag("--listen-port"):
            await running.start()
        try:
            await running.registrar.registered()
            page = NameserverMetrics(nameserver)
            listener.ready(
                (process_metrics.collect, page.collect, running.metrics.collect),
                running.metrics.complaint,
            )
            _say(
                f"nameserver  {nameserver.address}",
                f"broker      {running.address}  ({config.broker_name}, "
                f"flush={config.store.flush}, data in {config.store.directory})",
                *_metrics_line(listener),
                "",
                f"RocketMQ clients: namesrvAddr={shown}",
                f"try it:           sluice send orders hello -n {shown}",
                *_kafka_line(running),
            )
            _settle()
            await stop.wait()
        finally:
            await running.stop()
    finally:
        await nameserver.stop()


def _nameserver_config(config: BrokerConfig, port: int) -> NameserverConfig:
    """The nameserver has the same door as the broker: limits, certificate, all of it."""
    door = {each.name: getattr(config, each.name) for each in fields(ListeningConfig)}
    return NameserverConfig(
        **door,
        listen_host=config.listen_host,
        listen_port=port,
        directory=f"{config.store.directory}/nameserver",
        log_level=config.log_level,
    )


def _own_tls(config: BrokerConfig) -> ssl.SSLContext | None:
    """How the broker speaks to the nameserver of its own process, whose certificate it knows."""
    if config.tls_mode != "enforcing" or not config.tls_certificate_file:
        return None
    if config.tls_client_auth == "require" and not config.outgoing_tls_certificate_file:
        raise ConfigError(
            "tls_client_auth=require: the broker needs a certificate for its nameserver too; "
            "name one with --outgoing-tls-certificate-file"
        )
    return client_tls(
        config.tls_certificate_file,
        check_name=False,
        certificate_file=config.outgoing_tls_certificate_file,
        key_file=config.outgoing_tls_key_file,
    )


def _dialable(address: str) -> tuple[str, str]:
    """Where this process, and where others reach a listener of this machine."""
    host, port = split_address(address)
    if not is_everywhere(host):
        return address, address
    return join_address("127.0.0.1", port), join_address(own_address(), port)


async def _broker(loaded: Loaded[BrokerConfig], stop: asyncio.Event) -> None:
    config = loaded.config
    async with _listening(config) as listener:
        running = Broker(config, pinned=loaded.pinned)
        with _port_flag("--listen-port"):
            await running.start()
        try:
            metrics = running.metrics
            listener.ready((process_metrics.collect, metrics.collect), metrics.complaint)
            _say(
                f"broker      {running.address}  ({config.broker_name})",
                *_metrics_line(listener),
                *_kafka_line(running),
            )
            _settle()
            await stop.wait()
        finally:
            await running.stop()


@contextlib.asynccontextmanager
async def _listening(config: BrokerConfig) -> AsyncIterator[MetricsListener]:
    """The door of /metrics, open where that is wanted; first of all, as the other ports."""
    listener = MetricsListener()
    if config.metrics:
        with _port_flag("--metrics-port"):
            await listener.start(config.metrics_host, config.metrics_port)
    try:
        yield listener
    finally:
        await listener.stop()


def _kafka_line(running: Broker) -> tuple[str, ...]:
    if running.kafka_refusal:
        return (f"Kafka clients:    not served, {running.kafka_refusal}",)
    address = running.kafka_address
    return (f"Kafka clients:    bootstrap.servers={_dialable(address)[1]}",) if address else ()


def _metrics_line(listener: MetricsListener) -> tuple[str, ...]:
    return (f"metrics     http://{listener.address}/metrics",) if listener.address else ()


@contextlib.contextmanager
def _port_flag(flag: str) -> Iterator[None]:
    """Name the flag that helps where a port is taken."""
    try:
        yield
    except ConfigError as error:
        if "in use" in str(error):
            raise ConfigError(f"{error} ({flag})") from error
        raise


def _settle() -> None:
    """What is loaded now stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    use_large_pages()
    # A broker makes thousands of values in a turn and drops them at its end; looking for cycles
    # among them after every few hundred finds none and costs some percent of all time.
    gc.set_threshold(50_000, 20, 50)


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
