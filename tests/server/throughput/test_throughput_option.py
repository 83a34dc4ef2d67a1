from __future__ import annotations

import pytest

from swarm.errors import InvalidOption
from swarm.server.throughput.throughput_option import ThroughputOption


def test_what_may_be_asked_for():
    for text, wanted in [
        ("auto", ThroughputOption()),
        ("measure", ThroughputOption(remeasure=True)),
        ("12.5", ThroughputOption(12.5)),
        ("1e3", ThroughputOption(1000.0)),
    ]:
        assert ThroughputOption.parse(text) == wanted


def test_what_may_not():
    for text in [
        "",
        "fast",
        "0",
        "-1",
        "nan",
        "inf",
        "-inf",
        "1e9",
        "1e400",
        "AUTO",
        "1;2",
    ]:
        with pytest.raises(InvalidOption, match="use auto, measure or a number"):
            ThroughputOption.parse(text)
