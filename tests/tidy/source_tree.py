"""This module finds the files that the tidy tests read: what would be committed, no more."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("src", "bench", "examples", "peers", "tests")

_SKIPPED = {
    ".git",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".venv",
    "__pycache__",
    "build",
    "data",
    "dist",
}


@dataclass(frozen=True)
class SourceFile:
    """One text file of the repository; `path` is relative, with slashes."""

    path: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """The dotted name inside the package: `storage.store`; the package itself is empty."""
        name = self.path.removeprefix("src/sluice/").removesuffix(".py").replace("/", ".")
        return "" if name == "__init__" else name.removesuffix(".__init__")


def text_files() -> Iterator[SourceFile]:
    for directory, folders, names in os.walk(ROOT):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and ".egg-info" not in f)
        for name in sorted(names):
            path = Path(directory, name)
            data = path.read_bytes() if path.is_file() else b"\0"
            if b"\0" not in data[:8192] and not name.endswith((".pyc", ".orig")):
                text = data.decode("utf-8", errors="replace")
                yield SourceFile(path.relative_to(ROOT).as_posix(), text)


def python_files(*folders: str) -> list[SourceFile]:
    wanted = tuple(folder + "/" for folder in folders or CODE)
    return [f for f in ALL_FILES if f.path.endswith(".py") and f.path.startswith(wanted)]


def report(problems: Iterable[str]) -> None:
    """Fail with one problem a line."""
    found = sorted(set(problems))
    if found:
        pytest.fail("\n".join([f"{len(found)} problems:", *found]), pytrace=False)


ALL_FILES = list(text_files())
