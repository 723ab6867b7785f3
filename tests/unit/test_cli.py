"""This module tests the `sluice` command: its help, its exit codes, its one line for an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sluice import __version__, cli
from sluice.errors import ConfigError, SluiceError, StoreCorrupt


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def command(argv: list[str]) -> int:
        raise error

    monkeypatch.setitem(cli._COMMANDS, "inspect", (command, "fails"))
    return cli.main(["inspect", "x"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"sluice {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name, (_, about) in cli._COMMANDS.items():
        assert name in text
        assert about in text


@pytest.mark.parametrize("argv", [[], ["destroy"], ["--inspec"]])
def test_a_wrong_command_line_ends_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("broker.conf:3: brokerId: 'x' is not a whole number"),
        StoreCorrupt("commitlog/00000000000000000000", 17, "is foreign"),
        SluiceError("two\nlines"),
    ],
)
def test_an_error_is_one_line_and_2(
    error: SluiceError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(monkeypatch, error) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"sluice: {str(error).replace(chr(10), ' ')}\n"


def test_a_mistake_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        run_with(monkeypatch, AssertionError("ours"))


def test_interrupted_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130


def test_a_command_gets_its_arguments_and_gives_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def command(argv: list[str]) -> int:
        seen.append(argv)
        return 1

    monkeypatch.setitem(cli._COMMANDS, "inspect", (command, "looks"))
    assert cli.main(["inspect", "--json", "dir", "--message", "3"]) == 1
    assert seen == [["--json", "dir", "--message", "3"]]


def test_python_m_sluice_and_a_closed_pipe() -> None:
    program = (
        "import os, sys\n"
        "from sluice import cli\n"
        "def command(argv):\n"
        "    sys.stdout.write('x' * 200000)\n"
        "    return 0\n"
        "cli._COMMANDS['inspect'] = (command, 'writes much')\n"
        "sys.exit(cli.main(['inspect']))\n"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 2

    version = subprocess.run(
        [sys.executable, "-m", "sluice", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout == f"sluice {__version__}\n"


def test_the_command_line_starts_without_heavy_imports() -> None:
    heavy = "{'asyncio', 'numpy', 'orjson', 'sluice.config'}"
    program = f"import sys; import sluice.cli; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
