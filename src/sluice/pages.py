"""This module is `python -m sluice.pages NAME [FILE]`: it writes or prints a page of docs/ that is
made from declarations in the code. `script/check --fix` runs it for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from sluice.config import settings_markdown
from sluice.protocol.remoting_schemas import protocols_markdown

PAGES: Final[dict[str, Callable[[], str]]] = {
    "protocols": protocols_markdown,
    "settings": settings_markdown,
}


def main(arguments: list[str]) -> int:
    """Print the page that is named, or write it to a file."""
    make = PAGES.get(arguments[0]) if arguments else None
    if make is None:
        sys.stderr.write(f"name a page: {', '.join(PAGES)}\n")
        return 2
    if arguments[1:]:
        with open(arguments[1], "w", encoding="utf-8") as opened:
            opened.write(make())
    else:
        sys.stdout.write(make())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
