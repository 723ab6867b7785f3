"""This module is `sluice admin`: it finds the command, reads its flags and runs it.

Exit codes: 0 done, 1 done but the answer is no (a broker refuses, nothing is found), 2 it could not
be done (a wrong command line, nobody answers).
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import uvloop

from sluice.client import (
    admin_brokers,
    admin_consumers,
    admin_dead_letters,
    admin_delayed,
    admin_groups,
    admin_messages,
    admin_offsets,
    admin_queries,
    admin_topics,
    admin_transactions,
)
from sluice.client.admin_flags import (
    REFUSED,
    Command,
    Options,
    nearest,
    parser_of,
    read_options,
)
from sluice.client.administration.admin import Admin
from sluice.client.printing import Printer
from sluice.client.simple import Refused, nameserver_address, tls_of
from sluice.errors import ConfigError, NotFound, PartlyDone, TopicMissing

GROUPS: Final[dict[str, tuple[Command, ...]]] = {
    "topics": admin_topics.COMMANDS,
    "consumer groups": admin_groups.COMMANDS,
    "clients": admin_consumers.COMMANDS,
    "offsets": admin_offsets.COMMANDS,
    "messages": (*admin_messages.COMMANDS, *admin_queries.COMMANDS),
    "dead letters": admin_dead_letters.COMMANDS,
    "delayed messages": admin_delayed.COMMANDS,
    "transactions": admin_transactions.COMMANDS,
    "brokers and nameservers": admin_brokers.COMMANDS,
}
COMMANDS: Final = {command.name: command for group in GROUPS.values() for command in group}


def admin(argv: list[str]) -> int:
    """`sluice admin COMMAND [FLAGS]`."""
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        sys.stdout.write(overview())
        return 0
    if argv[0] == "help" and len(argv) > 1:  # as mqadmin has it
        sys.stdout.write(parser_of(_found(argv[1])).format_help())
        return 0
    command = _found(argv[0])
    options = read_options(command, argv[1:])
    printer = Printer(sys.stdout, as_json=options.json)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(command, options, printer))
    except (Refused, NotFound, TopicMissing, PartlyDone) as error:
        sys.stdout.flush()
        sys.stderr.write(f"sluice: {' '.join(str(error).split())}\n")
        return REFUSED


async def _run(command: Command, options: Options, printer: Printer) -> int:
    nameservers = nameserver_address(options.namesrvAddr)
    async with Admin(nameservers, tls=tls_of(options)) as cluster:
        try:
            return await command.run(cluster, options, printer)
        finally:
            printer.end_list()


def _found(name: str) -> Command:
    """A command by its name, in any case as mqadmin takes it."""
    for known, command in COMMANDS.items():
        if known.lower() == name.lower():
            return command
    raise ConfigError(
        f"admin: no command {name}{nearest(name, COMMANDS)}; `sluice admin --help` lists all"
    )


def overview() -> str:
    """All commands, one sentence each."""
    lines = [
        "usage: sluice admin COMMAND [-n HOST:PORT] [--json] [FLAGS]",
        "",
        "Looks at a RocketMQ cluster and changes it, with the commands and flags of mqadmin.",
    ]
    width = max(len(name) for name in COMMANDS)
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += (f"  {command.name:<{width}}  {command.about}" for command in commands)
    lines += ["", "`sluice admin COMMAND --help` shows the flags of one and an example."]
    return "\n".join(lines) + "\n"
