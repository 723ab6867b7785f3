"""The pages of docs/ that are made from declarations."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pages import PAGES, main


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_printed_or_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 0
    assert capsys.readouterr().out == PAGES[name]()
    assert main([name, str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == PAGES[name]()


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_an_unknown_page_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "settings" in capsys.readouterr().err
