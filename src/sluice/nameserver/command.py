"""This module is `sluice nameserver`: it reads the settings, runs one nameserver, and stops it.

SIGTERM and SIGINT stop it cleanly. What cannot work (a setting, the port, the directory) is a
ConfigError, which the command line prints as one line. It does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator

import uvloop

from sluice import process_metrics
from sluice.config import NameserverConfig, add_flags, load
from sluice.errors import ConfigError
from sluice.metrics_http import MetricsListener
from sluice.nameserver.metrics import NameserverMetrics
from sluice.nameserver.server import Nameserver

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: list[str]) -> int:
    """Run until a signal comes."""
    parser = argparse.ArgumentParser(
        prog="sluice nameserver",
        description="Tells RocketMQ's clients which broker serves which topic.",
        epilog="Settings come from flags, then SLUICE_NAMESERVER_* variables, then the file.",
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="a .toml file, or RocketMQ's .conf")
    add_flags(parser, NameserverConfig)
    arguments = parser.parse_args(argv)
    loaded = load(NameserverConfig, file=arguments.config, environ=os.environ, flags=arguments)
    level = loaded.config.log_level.upper()
    logging.basicConfig(stream=sys.stderr, format=_LOG_FORMAT)
    logging.getLogger("sluice").setLevel(level)
    for warning in loaded.warnings:
        logging.getLogger("sluice.nameserver").warning("%s", warning)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(loaded.config))


async def _run(config: NameserverConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    nameserver, listener = Nameserver(config), MetricsListener()
    try:
        if config.metrics:
            with _port_flag("--metrics-port"):
                await listener.start(config.metrics_host, config.metrics_port)
        with _port_flag("--listen-port"):
            await nameserver.start()
        page = NameserverMetrics(nameserver)
        listener.ready((process_metrics.collect, page.collect), lambda: "")
        sys.stdout.write(f"nameserver listens on {nameserver.address}\n")
        if listener.address:
            sys.stdout.write(f"metrics on http://{listener.address}/metrics\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await nameserver.stop()
        await listener.stop()
    return 0


@contextlib.contextmanager
def _port_flag(flag: str) -> Iterator[None]:
    """Name the flag that helps where a port is taken."""
    try:
        yield
    except ConfigError as error:
        if "in use" in str(error):
            raise ConfigError(f"{error} ({flag})") from error
        raise
