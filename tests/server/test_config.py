from __future__ import annotations

import pytest

from swarm.errors import InvalidOption, InvalidSpan
from swarm.server.config import BlocksOption, parse_throughput


def test_auto():
    assert BlocksOption.parse("auto") == BlocksOption(None, None)


def test_no_blocks_at_all():
    for text in [
        "0",
        "00",
        "4:4",
        "5:2",
        "0:0",
    ]:
        with pytest.raises(InvalidSpan):
            BlocksOption.parse(text)


def test_what_cannot_be_read():
    for text in [
        "",
        ":",
        "1:",
        ":4",
        "1:2:3",
        "-1",
        "-1:4",
        "1.5",
        "1-4",
        "0, 4",
        " 4",
        "Auto",
        "all",
        "²",
        "٣",
        "1_0",
    ]:
        with pytest.raises(InvalidOption, match="START:END"):
            BlocksOption.parse(text)


def test_throughput_is_a_number_above_zero_or_measured():
    assert parse_throughput("auto") is None
    assert (parse_throughput("12.5"), parse_throughput("1e3")) == (12.5, 1000.0)
    for text in ["", "0", "-1", "nan", "inf", "1e9", "fast", "measure", "Auto"]:
        with pytest.raises(InvalidOption, match="use auto or a number"):
            parse_throughput(text)
