"""Reading what Prometheus would read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Readings = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by name and sorted labels."""


def parse(text: str) -> Readings:
    """All samples of an exposition."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(readings: Readings, name: str, **labels: str) -> float | None:
    """One sample; None if there is none."""
    return readings.get((name, tuple(sorted(labels.items()))))
