"""This module is `python -m sluice.config [FILE]`: it writes or prints the settings page."""

from __future__ import annotations

import sys

from sluice.config import settings_markdown


def main(argv: list[str]) -> int:
    page = settings_markdown()
    if argv:
        with open(argv[0], "w", encoding="utf-8") as opened:
            opened.write(page)
    else:
        sys.stdout.write(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
