"""What announcements say of weights that servers share."""

from __future__ import annotations

import msgspec
import pytest

from swarm.dht.server_records import decode_announcement, encode_announcement
from swarm.errors import ProtocolViolation
from tests.infos import server_info

RECORD = msgspec.msgpack.decode(encode_announcement("model", server_info(2, 4)))


@pytest.mark.parametrize("shares", [True, False])
def test_whether_a_server_shares_arrives(shares):
    info = server_info(2, 4, shares_weights=shares)
    assert decode_announcement(encode_announcement("model", info)) == ("model", info)


def test_who_says_nothing_of_it_does_not_share():
    assert "shares_weights" not in RECORD
    assert not decode_announcement(msgspec.msgpack.encode(RECORD))[1].shares_weights


def test_what_is_no_truth_value_breaks_the_schema():
    for value in [
        0,
        1,
        "yes",
        None,
        [True],
        {},
    ]:
        with pytest.raises(ProtocolViolation):
            decode_announcement(msgspec.msgpack.encode({**RECORD, "shares_weights": value}))
