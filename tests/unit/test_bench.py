"""The harness of the benchmarks: what a ratio means, in which order rounds run, what is written."""

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.harness import Figure, Run, machine_facts, rounds, table, write_json
from bench.limits import PlainFile, copy_rate, private_bytes, slice_copy_rate
from bench.registry import BENCHMARKS


@pytest.mark.parametrize(
    ("unit", "ours", "peer", "ratio"),
    [
        ("msg/s", 200.0, 100.0, 2.0),
        ("s", 1.0, 4.0, 4.0),
        ("MB", 80.0, 20.0, 0.25),
        ("msg/s", 200.0, None, None),
    ],
)
def test_a_ratio_above_one_means_that_ours_is_better(
    unit: str, ours: float, peer: float | None, ratio: float | None
) -> None:
    assert Figure("figure", unit, ours, peer).ratio == ratio


def test_contestants_take_turns_and_the_median_counts() -> None:
    order: list[str] = []
    values = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 4.0, 30.0])}

    def contestant(name: str) -> float:
        order.append(name)
        return next(values[name])

    medians = rounds({"a": lambda: contestant("a"), "b": lambda: contestant("b")}, 3)
    assert "".join(order) == "ababab"
    assert medians == {"a": 2.0, "b": 5.0}


def test_figures_are_written_for_people_and_programs(tmp_path: Path) -> None:
    figures = [Figure("append", "msg/s", 12_345.6, 24_691.2, "the disk"), Figure("kept", "MB", 7.5)]
    assert table(figures).splitlines() == [
        "figure  unit     ours    peer  ratio  peer is",
        "append  msg/s  12,346  24,691   0.50  the disk",
        "kept    MB        7.5       -      -  -",
    ]
    write_json(tmp_path / "figures.json", figures)
    assert json.loads((tmp_path / "figures.json").read_text(encoding="utf-8")) == {
        "figures": [
            {
                "name": "append",
                "unit": "msg/s",
                "ours": 12_345.6,
                "peer": 24_691.2,
                "ratio": 0.5,
                "peer_name": "the disk",
            },
            {
                "name": "kept",
                "unit": "MB",
                "ours": 7.5,
                "peer": None,
                "ratio": None,
                "peer_name": None,
            },
        ]
    }


def test_without_a_name_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(BENCHMARKS)


def test_progress_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, quick=True).progress("reading")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("s  reading\n")


def test_the_machine_is_named(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert set(facts) == {"cpu", "memory", "system", "filesystem", "python", "commit"}
    assert all(facts.values())


def test_limits_move_the_bytes_they_count(tmp_path: Path) -> None:
    turn = [b"x" * 100] * 4
    plain = PlainFile(tmp_path / "plain")
    assert plain.write_rate(turn, sync=True, seconds=0.01) > 0
    with (tmp_path / "plain").open("rb") as file:
        assert file.read(400) == b"".join(turn)
    plain.close()
    assert list(tmp_path.iterdir()) == []
    assert copy_rate(turn, seconds=0.01) > 0
    assert slice_copy_rate(memoryview(bytes(1000)), 100, 4, seconds=0.01) > 0
    assert private_bytes() > 1_000_000
