"""This module keeps the written trail true: README's commands run, and links lead somewhere.

A block of a Markdown file is tested when the line before it is `<!-- tested -->`. Of a console
block, the lines that start with `$ ` are run one after another in the repository; the lines below
each are its output. In them `...` stands for any text within a line, and a line of only `...` for
any number of lines. A python block is run in an empty directory and must end without an error.
After `<!-- tested with a broker -->` it is run beside a nameserver and a broker of its page, whose
address NAMESRV_ADDR has. After `<!-- tested with pytest -->` it is a file of tests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.client.admin_kit import Site

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("requirements/*.md")])

_BLOCK = re.compile(r"^<!-- tested -->\n```([a-z]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BROKER_BLOCK = re.compile(
    r"^<!-- tested with a broker -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_TESTS_BLOCK = re.compile(
    r"^<!-- tested with pytest -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


class Step(NamedTuple):
    command: str
    output: str


def steps(text: str) -> list[Step]:
    """The commands of all tested blocks, with the output that the page promises."""
    found: list[Step] = []
    for _, block in (found for found in _BLOCK.findall(text) if found[0] == "console"):
        for line in block.splitlines(keepends=True):
            if line.startswith("$ "):
                found.append(Step(line[2:].strip(), ""))
            else:
                assert found, "a tested block starts with a command"
                found[-1] = found[-1]._replace(output=found[-1].output + line)
    return found


def pattern_of(output: str) -> re.Pattern[str]:
    lines = []
    for line in output.splitlines():
        if line == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(re.escape(line).replace(re.escape("..."), ".*") + r"\n")
    return re.compile("".join(lines))


def test_the_patterns_match_what_they_should() -> None:
    assert pattern_of("a ... c\n...\nz\n").fullmatch("a b c\nd\ne\nz\n")
    assert not pattern_of("a ... c\nz\n").fullmatch("a b c\nd\nz\n")
    assert not pattern_of("a.c\n").fullmatch("abc\n")


def test_blocks_are_read() -> None:
    page = "x\n<!-- tested -->\n```console\n$ one\nout\n$ two\n```\n```\n$ untested\n```\n"
    assert steps(page) == [Step("one", "out\n"), Step("two", "")]


def test_the_readme_has_a_tested_block_on_its_first_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- tested -->" in "\n".join(text.splitlines()[:40])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_print_what_the_page_says(page: Path) -> None:
    for step in steps(page.read_text(encoding="utf-8")):
        done = subprocess.run(
            shlex.split(step.command),
            cwd=ROOT,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONWARNINGS": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{step.command}: {done.stderr}"
        matches = pattern_of(step.output).fullmatch(done.stdout)
        assert matches, f"{page.name}: `{step.command}` now prints\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_programs_run(page: Path, tmp_path: Path) -> None:
    for language, program in _BLOCK.findall(page.read_text(encoding="utf-8")):
        assert language in {"console", "python"}
        if language == "python":
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, "")


def test_programs_that_need_a_broker_run(tmp_path: Path) -> None:
    pages = [(page, _BROKER_BLOCK.findall(page.read_text(encoding="utf-8"))) for page in PAGES]
    site = Site()
    site.start()
    try:
        for page, programs in pages:
            for program in programs:
                done = subprocess.run(
                    [sys.executable, "-W", "error", "-c", program],
                    cwd=tmp_path,
                    env={
                        **os.environ,
                        "NAMESRV_ADDR": site.nameserver.address,
                        "PYTHONPATH": str(ROOT / "src"),
                    },
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert done.returncode == 0, f"{page.name}: {program}{done.stderr}"
                assert "Traceback" not in done.stderr
    finally:
        site.stop()


def test_tests_pass(tmp_path: Path) -> None:
    count = 0
    for page in PAGES:
        for number, tests in enumerate(_TESTS_BLOCK.findall(page.read_text(encoding="utf-8"))):
            count += tests.count("def test_")
            (tmp_path / f"test_{page.stem}_{number}.py").write_text(tests, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-n0", "--assert=plain"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match[1] for match in _LINK.finditer(page.read_text(encoding="utf-8"))]
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []
