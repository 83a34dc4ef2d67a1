"""What a session is told before there is any network."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swarm.client.session import InferenceSession
from swarm.data_structures import WireFormat

CONNECTION = SimpleNamespace(config=SimpleNamespace(wire=WireFormat.NONE))


def test_a_session_needs_room():
    with pytest.raises(ValueError, match="max_length is 0"):
        InferenceSession(None, CONNECTION, 0)
