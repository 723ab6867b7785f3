"""This module is the command line: `python -m bench NAME [--quick] [--json FILE]`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import Failed, Run, Unusable, machine_facts, table, write_json
from bench.registry import BENCHMARKS
from peers.errors import PeerFailed, PeerUnavailable


def arguments(words: list[str]) -> argparse.Namespace:
    names = "\n".join(f"  {row.name:12} {row.sentence}" for row in BENCHMARKS.values())
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measures Sluice beside its peers. Without a name it lists the benchmarks.",
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS), help="which to run")
    parser.add_argument("--quick", action="store_true", help="less data; ends within 3 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--only", metavar="FIGURE,FIGURE", help="measure these figures and leave the rest out"
    )
    parser.add_argument("--ours-only", action="store_true", help="measure Sluice without its peer")
    parser.add_argument("--seconds", type=float, help="how long one measurement takes")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on which disk to measure (default: %(default)s)",
    )
    chosen = parser.parse_args(words)
    parts = chosen.only is not None or chosen.ours_only or chosen.seconds is not None
    if parts and not (chosen.name and BENCHMARKS[chosen.name].has_parts):
        parser.error(f"{chosen.name} is measured as a whole: no --only, --ours-only, --seconds")
    if chosen.seconds is not None and chosen.seconds <= 0:
        parser.error("--seconds must be more than 0")
    return chosen


def main(words: list[str]) -> int:
    chosen = arguments(words)
    if chosen.name is None:
        for row in BENCHMARKS.values():
            print(f"{row.name:12} {row.sentence}")
        return 0
    benchmark = BENCHMARKS[chosen.name]
    for fact, value in machine_facts(chosen.directory).items():
        print(f"{fact:12} {value}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=chosen.directory) as directory:
        run = Run(
            directory=Path(directory),
            quick=chosen.quick,
            only=frozenset(chosen.only.split(",") if chosen.only else ()),
            ours_only=chosen.ours_only,
            seconds=chosen.seconds,
        )
        try:
            figures = benchmark.measure(run)
        except (Failed, PeerFailed) as error:
            print(f"bench: {benchmark.name} failed: {error}", file=sys.stderr)
            return 1
        except (Unusable, PeerUnavailable) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
    kind = "quick" if chosen.quick else "full"
    print(f"{'run':12} {benchmark.name}, {kind}, {time.monotonic() - begin:.0f} s\n")
    print(table(figures))
    if chosen.json is not None:
        write_json(chosen.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
