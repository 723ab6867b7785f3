"""This module keeps docs/metrics.md true, and the names of metrics as Prometheus wants them."""

from __future__ import annotations

import re

import pytest

from sluice import process_metrics
from sluice.broker import metrics as broker_metrics
from sluice.nameserver import metrics as nameserver_metrics
from sluice.telemetry import Metric
from tests.unit.metrics_table import PAGE, page_text

ALL = (*broker_metrics.METRICS, *nameserver_metrics.METRICS, *process_metrics.METRICS)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(), "run script/check --fix"


def test_a_name_is_given_once() -> None:
    names = [metric.name for metric in ALL]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_follow_one_scheme(metric: Metric) -> None:
    assert re.fullmatch(r"(sluice|process)_[a-z_]+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert metric.kind != "histogram" or metric.name.endswith("_seconds")
    assert metric.help.endswith(".")
    assert all(re.fullmatch(r"[a-z]+", label) and label != "le" for label in metric.labels)
