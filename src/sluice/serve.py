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
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import uvloop

from sluice.broker.server import Broker
from sluice.config import BrokerConfig, NameserverConfig, add_flags, load
from sluice.errors import ConfigError
from sluice.nameserver.server import Nameserver

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
    config = _config(arguments)
    if not 0 <= arguments.nameserver_port <= 65535:
        raise ConfigError(f"--nameserver-port {arguments.nameserver_port}: allowed are 0 to 65535")
    return _run(lambda stop: _serve(config, arguments.nameserver_port, stop))


def broker(argv: list[str]) -> int:
    """One broker, until a signal comes."""
    parser = _parser("broker", "Runs one broker that registers with nameservers elsewhere.")
    config = _config(parser.parse_args(argv))
    if not config.nameserver_addresses:
        raise ConfigError(
            "no nameserver to register with; name one with --nameserver-addresses host:port, "
            "or run everything together with `sluice serve`"
        )
    return _run(lambda stop: _broker(config, stop))


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"sluice {name}",
        description=description,
        epilog="Settings come from flags, then SLUICE_* variables, then the file.",
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="a .toml file, or RocketMQ's .conf")
    add_flags(parser, BrokerConfig)
    return parser


def _config(arguments: argparse.Namespace) -> BrokerConfig:
    loaded = load(BrokerConfig, file=arguments.config, environ=os.environ, flags=arguments)
    logging.basicConfig(stream=sys.stderr, format=_LOG_FORMAT)
    logging.getLogger("sluice").setLevel(loaded.config.log_level.upper())
    for warning in loaded.warnings:
        logging.getLogger("sluice").warning("%s", warning)
    return loaded.config


def _run(start: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            loop.add_signal_handler(number, stop.set)
        await start(stop)
        return 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _serve(config: BrokerConfig, nameserver_port: int, stop: asyncio.Event) -> None:
    nameserver = Nameserver(
        NameserverConfig(
            listen_host=config.listen_host,
            listen_port=nameserver_port,
            directory=f"{config.store.directory}/nameserver",
            log_level=config.log_level,
        )
    )
    with _port_flag("--nameserver-port"):
        await nameserver.start()
    try:
        addresses = (nameserver.address, *config.nameserver_addresses)
        running = Broker(replace(config, nameserver_addresses=addresses))
        with _port_flag("--listen-port"):
            await running.start()
        try:
            await running.registrar.register()
            _say(
                f"nameserver  {nameserver.address}",
                f"broker      {running.address}  ({config.broker_name}, "
                f"flush={config.store.flush}, data in {config.store.directory})",
                "",
                f"RocketMQ clients: namesrvAddr={nameserver.address}",
                f"try it:           sluice send orders hello -n {nameserver.address}",
            )
            _settle()
            await stop.wait()
        finally:
            await running.stop()
    finally:
        await nameserver.stop()


async def _broker(config: BrokerConfig, stop: asyncio.Event) -> None:
    running = Broker(config)
    with _port_flag("--listen-port"):
        await running.start()
    try:
        _say(f"broker      {running.address}  ({config.broker_name})")
        _settle()
        await stop.wait()
    finally:
        await running.stop()


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


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
