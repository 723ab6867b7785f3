"""This module is `sluice top`: a live view of brokers, topics and groups, or one look for a script.

On a terminal it draws with curses, which the standard library has, and stays until `q` is pressed.
Looking and drawing are apart: keys and a new size of the window are answered also while a broker
does not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import curses
import os
import signal
import sys
from collections.abc import Iterable

import uvloop

from sluice.client.administration.admin import Admin
from sluice.client.simple import add_tls_flags, nameserver_address, tls_of
from sluice.client.top_data import View, Watcher
from sluice.client.top_text import HELP, ORDERS, Line, layout, next_order, to_json
from sluice.errors import ConfigError

_INTERVAL_SECONDS = 2.0
_INTERVAL_SECONDS_MIN = 0.1
_INTERVAL_SECONDS_MAX = 3600.0
_ESCAPE_MS = 25  # so long the rest of a function key's code may take
_EMPTY_READS_MAX = 100
_STYLES = {"title": curses.A_BOLD, "head": curses.A_REVERSE, "warning": curses.A_BOLD, "plain": 0}


def main(argv: list[str]) -> int:
    """`sluice top`."""
    arguments = _arguments(argv)
    prints = arguments.once or arguments.json
    if not prints and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("this is no terminal; use --once to look once, or --json for scripts")
    arguments.context = tls_of(arguments)
    if prints:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_print(arguments))
    try:
        return curses.wrapper(_run_screen, arguments)
    except curses.error as error:
        kind = os.environ.get("TERM", "")
        raise ConfigError(f"cannot draw on this terminal (TERM={kind}): {error}") from error


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sluice top",
        description="Shows brokers, topics and groups with their rates and lag, as they change.",
        epilog="Keys: q ends, s chooses the next order.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "--nameserver", help="host:port, several with ;. Default: $NAMESRV_ADDR, then local."
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=_INTERVAL_SECONDS,
        metavar="SECONDS",
        help=f"time between two looks. Default: {_INTERVAL_SECONDS:g}.",
    )
    parser.add_argument("--once", action="store_true", help="print one look and end")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per look; with --once a single one"
    )
    parser.add_argument(
        "--sort", choices=ORDERS, default=ORDERS[0], help=f"what is on top. Default: {ORDERS[0]}."
    )
    parser.add_argument(
        "--all", action="store_true", help="also topics that belong to brokers and groups"
    )
    add_tls_flags(parser)
    arguments = parser.parse_args(argv)
    if not _INTERVAL_SECONDS_MIN <= arguments.interval <= _INTERVAL_SECONDS_MAX:  # and NaN
        raise ConfigError(
            f"--interval {arguments.interval:g}: allowed are {_INTERVAL_SECONDS_MIN:g} to "
            f"{_INTERVAL_SECONDS_MAX:g} seconds"
        )
    return arguments


async def _print(arguments: argparse.Namespace) -> int:
    nameserver = nameserver_address(arguments.nameserver)
    async with Admin(nameserver, tls=arguments.context) as admin:
        watcher = Watcher(admin, all_topics=arguments.all)
        while True:
            view = await (watcher.look() if arguments.once else watcher.look_on())
            if arguments.json:
                _write([to_json(view)])
            else:
                _write(line.text for line in layout(view, title=nameserver, order=arguments.sort))
            if arguments.once:
                return 1 if view.problems else 0
            await asyncio.sleep(arguments.interval)


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


# The screen -------------------------------------------------------------------------------------


def _run_screen(window: curses.window, arguments: argparse.Namespace) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Screen(window, arguments).run())


class Screen:
    """The terminal while `sluice top` runs."""

    def __init__(self, window: curses.window, arguments: argparse.Namespace) -> None:
        self._window = window
        self._nameserver = nameserver_address(arguments.nameserver)
        self._interval = arguments.interval
        self._order = arguments.sort
        self._all_topics = arguments.all
        self._tls = arguments.context
        self._over = asyncio.Event()
        self._view: View | None = None
        self._empty_reads = 0

    async def run(self) -> int:
        """Until `q` is pressed."""
        loop = asyncio.get_running_loop()
        self._window.nodelay(True)
        curses.set_escdelay(_ESCAPE_MS)
        with contextlib.suppress(curses.error):  # not every terminal can hide its cursor
            curses.curs_set(0)
        loop.add_reader(sys.stdin.fileno(), self._pressed)
        loop.add_signal_handler(signal.SIGWINCH, self._resized)
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        self._draw()
        looking = asyncio.ensure_future(self._look())
        looking.add_done_callback(lambda _: self._over.set())
        try:
            await self._over.wait()
            if looking.done():
                looking.result()  # it only ends by itself with a mistake of ours
            return 0
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            loop.remove_reader(sys.stdin.fileno())
            for number in (signal.SIGWINCH, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _look(self) -> None:
        async with Admin(self._nameserver, tls=self._tls) as admin:
            watcher = Watcher(admin, all_topics=self._all_topics)
            while True:
                view = await watcher.look_on()
                if not view.brokers and self._view is not None:
                    # What was seen last stays, under the line that says how it is now.
                    view = self._view._replace(problems=view.problems, taken_ms=view.taken_ms)
                self._view = view
                self._draw()
                await asyncio.sleep(self._interval)

    def _pressed(self) -> None:
        self._empty_reads += 1
        if self._empty_reads > _EMPTY_READS_MAX:
            self._over.set()  # the terminal is gone: it can be read for ever, and gives nothing
        while (key := self._window.getch()) != -1:
            self._empty_reads = 0
            if key in (ord("q"), ord("Q")):
                self._over.set()
            elif key == ord("s"):
                self._order = next_order(self._order)
                self._draw()
            # KEY_RESIZE is no news: the signal came first, and answering it here would never end.

    def _resized(self) -> None:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
        with contextlib.suppress(curses.error):
            curses.resizeterm(rows, columns)
        self._draw()

    def _draw(self) -> None:
        height, width = self._window.getmaxyx()
        title = f"{self._nameserver}   every {self._interval:g} s"
        if self._view is None:
            lines = [Line(f"sluice top   {title}   looking ...", "title")]
        else:
            lines = layout(self._view, title=title, order=self._order, width=width, height=height)
        self._window.erase()
        for number, line in enumerate(lines):
            self._put(number, line, width)
        self._put(height - 1, Line(HELP, "head"), width)
        self._window.refresh()

    def _put(self, number: int, line: Line, width: int) -> None:
        # The last cell of a screen cannot be written without an error; neither can what a window
        # that just became smaller no longer has.
        with contextlib.suppress(curses.error):
            self._window.addnstr(number, 0, line.text, max(0, width - 1), _STYLES[line.style])
