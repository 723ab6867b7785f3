"""This module is the `sluice` command. It parses, calls, and turns errors into one line.

A command imports what it starts inside the command: `sluice --version` loads neither numpy nor the
store. Exit codes: 0 done, 1 done but the answer is no (a damaged store), 2 it could not be done.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from sluice._version import __version__
from sluice.errors import SluiceError

EXIT_FAILED = 2


def _inspect(argv: list[str]) -> int:
    from sluice.storage.inspect import main as inspect_main

    return inspect_main(argv)


def _demo_store(argv: list[str]) -> int:
    from sluice.demo import main as demo_main

    return demo_main(argv)


def _nameserver(argv: list[str]) -> int:
    from sluice.nameserver.command import main as nameserver_main

    return nameserver_main(argv)


def _serve(argv: list[str]) -> int:
    from sluice.serve import serve

    return serve(argv)


def _broker(argv: list[str]) -> int:
    from sluice.serve import broker

    return broker(argv)


def _send(argv: list[str]) -> int:
    from sluice.client.commands import send

    return send(argv)


def _tail(argv: list[str]) -> int:
    from sluice.client.commands import tail

    return tail(argv)


def _collect(argv: list[str]) -> int:
    from sluice.collector.command import main as collect_main

    return collect_main(argv)


def _pipeline(argv: list[str]) -> int:
    from sluice.pipelines.command import main as pipeline_main

    return pipeline_main(argv)


def _story(argv: list[str]) -> int:
    from sluice.pipelines.story import main as story_main

    return story_main(argv)


def _record(argv: list[str]) -> int:
    from sluice.replay.record_command import main as record_main

    return record_main(argv)


def _replay(argv: list[str]) -> int:
    from sluice.replay.replay_command import main as replay_main

    return replay_main(argv)


def _table(argv: list[str]) -> int:
    from sluice.tables.command import main as table_main

    return table_main(argv)


def _admin(argv: list[str]) -> int:
    from sluice.client.admin_main import admin

    return admin(argv)


def _top(argv: list[str]) -> int:
    from sluice.client.top import main as top_main

    return top_main(argv)


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "serve": (_serve, "run everything in one process: nameserver, broker, one directory"),
    "broker": (_broker, "run one broker that registers with nameservers elsewhere"),
    "send": (_send, "send messages to a topic"),
    "tail": (_tail, "print the messages of a topic as they come"),
    "collect": (_collect, "follow files and send their lines"),
    "pipeline": (_pipeline, "run pipelines on Spark: plain PySpark over topics"),
    "story": (_story, "show it all: a broker, gifts, their leaderboards on Spark"),
    "record": (_record, "keep the messages of topics in files"),
    "replay": (_replay, "send recorded messages again, at any speed, to shadow topics"),
    "table": (_table, "look at tables that streams write, and join their small files"),
    "admin": (_admin, "look at a cluster and change it, with the commands of mqadmin"),
    "top": (_top, "watch brokers, topics and groups: rates and lag"),
    "demo-store": (_demo_store, "make a small store in a new directory, to look at"),
    "inspect": (_inspect, "print a store: segments, offsets, queues, settings, the first bad byte"),
    "nameserver": (_nameserver, "run a nameserver: which broker serves which topic"),
}


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<12}{text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="sluice",
        description="A message queue on Apache RocketMQ's disk format.",
        epilog=f"commands:\n{commands}\n\n`sluice COMMAND --help` says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sluice {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; never a traceback for what is the world's fault."""
    arguments = _parser().parse_args(argv)
    run, _ = _COMMANDS[arguments.command]
    try:
        status = run(arguments.arguments)
        sys.stdout.flush()  # so that a closed pipe shows here and not at exit
    except SluiceError as error:
        sys.stderr.write(f"sluice: {' '.join(str(error).split())}\n")
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader has left (`sluice inspect x | head`). Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    return status
