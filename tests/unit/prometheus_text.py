"""This module reads a metrics page with the parser of Prometheus's own Python client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Read(NamedTuple):
    """A page: every sample, and the type and help of every family."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    kinds: Mapping[str, str]
    helps: Mapping[str, str]

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def labelled(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """All samples of one name, by their labels."""
        return {labels: value for (own, labels), value in self.samples.items() if own == name}


def read_page(text: str) -> Read:
    """Everything on a page; a line that says something twice is an error."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    kinds: dict[str, str] = {}
    helps: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        # The parser takes the ending of a counter's name off.
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in kinds, f"{name} stands in two places"
        kinds[name], helps[name] = family.type, family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return Read(samples, kinds, helps)
