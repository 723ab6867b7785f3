"""This module runs the examples as their README does, and compares what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_docs import pattern_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "examples" / "README.md"
BLOCKS = re.findall(
    r"^<!-- example -->\n```console\n\$ python (.*?)\n(.*?)^```$",
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


def test_every_example_is_on_the_page() -> None:
    shown = {command.split()[1].removeprefix("examples.") for command, _ in BLOCKS}
    assert shown == {path.stem for path in PAGE.parent.glob("[a-z]*.py")}


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[block[0] for block in BLOCKS])
def test_an_example_prints_what_the_page_says(namesrv: str, command: str, output: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *shlex.split(command)],
        cwd=ROOT,
        env={**os.environ, "NAMESRV_ADDR": namesrv, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done
    assert "Traceback" not in done.stderr
    assert pattern_of(output).fullmatch(done.stdout), done


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#\s]+)\)", PAGE.read_text(encoding="utf-8"))
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []
