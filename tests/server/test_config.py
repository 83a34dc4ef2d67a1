from __future__ import annotations

import pytest

from swarm.errors import InvalidOption, InvalidSpan
from swarm.server.config import BlocksOption


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
