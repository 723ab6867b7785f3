"""This module tests the drawings: whole SVG, points where they belong, round numbers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from sluice.replay.plots import Line, chart

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing: str) -> list[str]:
    root = ElementTree.fromstring(drawing)  # noqa: S314 - our own
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def points(drawing: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(drawing)  # noqa: S314 - our own
    return [
        [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in line.attrib["points"].split())
        ]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_a_line_goes_from_corner_to_corner() -> None:
    drawing = chart("Rate", "/s", [0, 1, 2], [Line("reached", "#123456", [0, 50, 100])])
    assert points(drawing) == [[(78, 226), (461, 130), (844, 34)]]
    assert texts(drawing)[:7] == ["Rate", "0", "20 /s", "40 /s", "60 /s", "80 /s", "100 /s"]
    assert texts(drawing)[-1] == "reached"


def test_two_lines_have_one_scale() -> None:
    low, high = Line("low", "#1", [1, 1]), Line("high", "#2", [4, 4], is_dashed=True)
    first, second = points(chart("t", "", [0, 10], [low, high]))
    assert first[0][1] > second[0][1] == 34


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [1e-9, 3e-9], [7e9, 123456789.0]])
def test_odd_numbers_make_a_drawing_too(values: list[float]) -> None:
    seconds = [float(index) for index in range(len(values))]
    drawing = chart("t", "ms", seconds, [Line("a", "#1", values)])
    for line in points(drawing):
        for x, y in line:
            assert 77 <= x <= 845
            assert 33 <= y <= 227


def test_names_are_no_markup() -> None:
    drawing = chart('<b>"', "<i>", [0, 1], [Line("a<b", "#1", [1, 2])])
    assert texts(drawing)[0] == '<b>"'
    assert "a<b" in texts(drawing)
