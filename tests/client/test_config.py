"""What options of a client say, and which are refused."""

from __future__ import annotations

import pytest

from swarm.client.config import NetworkOptions, parse_share
from swarm.errors import InvalidOption


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.01", 0.01), (" 2.5 % ", 0.025), ("0", 0.0), ("100%", 1.0)]
)
def test_shares_are_read(text, share):
    assert parse_share("--audit", text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "2", "101%", "-1%", "nan", "a lot"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(InvalidOption, match=r"--audit .* is not a share such as 1% or 0\.01"):
        parse_share("--audit", text)


def test_a_share_in_python_is_checked_too():
    with pytest.raises(InvalidOption, match="for one percent"):
        NetworkOptions(audit=1.5)
