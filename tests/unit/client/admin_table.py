"""This module writes docs/admin.md out of the table of commands.

python -m tests.unit.client.admin_table [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.client.admin_main import GROUPS

PAGE = Path(__file__).parents[3] / "docs" / "admin.md"

_TOP = """\
<!-- Written by `python -m tests.unit.client.admin_table docs/admin.md`. Edits here are lost. -->
# sluice admin

`sluice admin COMMAND` looks at a cluster and changes it. Commands and flags are those of RocketMQ's
`mqadmin` 5.5, and it works with Apache's brokers too. People get tables; `--json` gives scripts one
document with RocketMQ's field names.

<!-- tested -->
```console
$ script/run admin topicStatus --help
usage: sluice admin topicStatus ...
...
Shows the first and the next offset of each queue of a topic.
...
example:
  sluice admin topicStatus -t orders
```

| | |
|---|---|
| Nameserver | `-n host:port;host:port`, else `NAMESRV_ADDR`, else `127.0.0.1:9876` |
| Exit code 0 | done |
| Exit code 1 | done, but the answer is no: refused by a broker, not found, members disagree |
| Exit code 2 | it could not be done: a wrong command line, nobody answers |
| Errors | one line on standard error; standard output has what was done before |
| TLS | `--tls` and its relatives, as for `sluice send` |
| Access control | `SLUICE_CLIENT_ACCESS_KEY` and `SLUICE_CLIENT_SECRET_KEY`: requests are signed |

"""

_END = """
## Where it differs from mqadmin

* `subscriptions` is not mqadmin's. Members of a group that subscribe differently lose messages for
  each other; `consumerStatus`, `consumerConnection` and `consumerProgress` say so too.
  `consumerStatus` and `subscriptions` ask the consumers themselves, so they find it with Apache's
  brokers as well; the other two show what Sluice's broker has heard.
* `deadLetters` and `resendDeadLetters` are not mqadmin's, and only Sluice's brokers serve them.
* `delayed` and `transactions` neither. `resumeCheckHalfMessage` is a request of mqadmin's library,
  which has no command for it.
* Nothing is written to files: bodies and what consumers say of themselves are printed.
* A value that is neither `true` nor `false`, or a number out of its limits, is refused instead of
  taken for `false` or 0.
* `updateTopicPerm` changes the permission and nothing else. `cloneGroupOffset` copies the topic
  that is named, and nothing from a group that has no offsets. `sendMessage -b` without `-i` sends
  to that broker.
* `-b` and `-c` together are refused. On a cluster of several brokers all are tried, and each one's
  result is shown.
* With `clusterList -i` each round is a document of its own. `sendMessage -m true` (traces) is
  refused.
"""


def page() -> str:
    lines = [_TOP, "| Command | What it does | Example |\n", "|---|---|---|\n"]
    for commands in GROUPS.values():
        for command in commands:
            example = f"sluice admin {command.example}".replace("|", "\\|")
            lines.append(f"| `{command.name}` | {command.about} | `{example}` |\n")
    return "".join([*lines, _END])


def main(arguments: list[str]) -> int:
    """Print the page, or write it to the file that is named."""
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
