"""This module holds the rules of style that ruff cannot: sizes, docstrings, forbidden words.

EXCEPTIONS may shrink and never grow: an entry that is no longer needed fails the test too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tidy.source_tree import ALL_FILES, SourceFile, python_files, report

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600

# Problems that are known and tolerated for now, as the checks below spell them.
EXCEPTIONS: frozenset[str] = frozenset()

PRINTERS = (
    *("src/sluice/cli.py", "src/sluice/demo.py", "src/sluice/storage/inspect.py"),
    *("bench/", "examples/"),
)

# Spelled in pieces, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(
    "|".join(["/ro" + "ot/", "/ho" + "me/[a-z]", "/Us" + "ers/", "/wo" + "rk/"])
)
REGISTRIES = re.compile(
    "|".join(
        [
            r"py" + r"pi\.org",
            "python" + "hosted",
            r"repo1?\.mav" + "en",
            r"mav" + r"en\.org",
            r"npm" + r"js\.",
            r"crates" + r"\.io",
            r"proxy\.go" + "lang",
            "artifact" + "ory",
        ]
    )
)
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
LOCK_FILE = re.compile(r"(^|/)(.*\.lock|package-lock\.json|pnpm-lock\.yaml)$")


def line_problems(file: SourceFile) -> Iterator[str]:
    for number, line in enumerate(file.lines, 1):
        if len(line) > COLUMNS_MAX:
            yield f"{file.path}:{number}: {len(line)} columns"
        if line != line.rstrip():
            yield f"{file.path}:{number}: blanks at the end of the line"


def size_problems(file: SourceFile) -> Iterator[str]:
    if len(file.lines) > MODULE_LINES_MAX:
        yield f"{file.path}: {len(file.lines)} lines"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{file.path}: {node.name}() has {lines} lines"


def docstring_problems(file: SourceFile) -> Iterator[str]:
    words = ("This module ", "This package ") if "__init__" in file.path else ("This module ",)
    if not (ast.get_docstring(file.tree) or "").startswith(words):
        yield f"{file.path}: the docstring must start with {words[-1].strip()!r}"


def code_problems(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{file.path}:{node.lineno}: bare except"
        prints = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        if prints and not file.path.startswith(PRINTERS):
            assert isinstance(node, ast.Call)
            yield f"{file.path}:{node.lineno}: print()"


def text_problems(file: SourceFile) -> Iterator[str]:
    if LOCK_FILE.search(file.path):
        yield f"{file.path}: lock files name hosts; use requirements/"
    for number, line in enumerate(file.lines, 1):
        for what, pattern in (
            ("a path of one machine", MACHINE_PATHS),
            ("the host of a package registry", REGISTRIES),
            ("an unfinished place", UNFINISHED),
        ):
            if pattern.search(line):
                yield f"{file.path}:{number}: names {what}"
        if file.path.startswith("requirements/") and "://" in line:
            yield f"{file.path}:{number}: names the host of a package registry"


def all_problems() -> Iterator[str]:
    for file in python_files():
        yield from line_problems(file)
        yield from size_problems(file)
        yield from code_problems(file)
    for file in python_files("src", "bench", "examples", "peers"):
        yield from docstring_problems(file)
    for file in ALL_FILES:
        if file.path != "LICENSE":
            yield from text_problems(file)


def test_style() -> None:
    report(set(all_problems()) - EXCEPTIONS)


def test_no_exception_is_kept_for_nothing() -> None:
    report(f"no longer needed: {entry}" for entry in EXCEPTIONS - set(all_problems()))


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("src/sluice/x.py", '"""This module is long."""\n# ' + "x" * 99, "101 columns"),
        ("src/sluice/x.py", "x = 1 \n", "blanks at the end"),
        ("src/sluice/x.py", "x = 1\n" * 601, "601 lines"),
        ("src/sluice/x.py", "def f():\n" + "    x = 1\n" * 70, "f() has 71 lines"),
        ("src/sluice/x.py", '"""Does things."""', "docstring"),
        ("src/sluice/x.py", "", "docstring"),
        ("src/sluice/x.py", "try:\n    x = 1\nexcept:\n    x = 2", "bare except"),
        ("src/sluice/x.py", "print('x')", "print()"),
        ("docs/x.md", "see /ro" + "ot/x", "a path of one machine"),
        ("docs/x.md", "from https://py" + "pi.org/simple", "registry"),
        ("docs/x.md", "TO" + "DO: write", "unfinished"),
        ("requirements/x.txt", "--index-url https://host/", "registry"),
        ("uv.lock", "", "lock files"),
    ],
)
def test_the_checks_find_each_kind_of_mistake(path: str, text: str, found: str) -> None:
    file = SourceFile(path, text)
    problems = list(text_problems(file))
    if path.endswith(".py"):
        for check in (line_problems, size_problems, docstring_problems, code_problems):
            problems += check(file)
    assert found in " ".join(problems)


def test_a_clean_file_has_no_problem() -> None:
    file = SourceFile("src/sluice/x.py", '"""This module is clean."""\n\nVALUE = 1\n')
    for check in (line_problems, size_problems, docstring_problems, code_problems, text_problems):
        assert list(check(file)) == []
