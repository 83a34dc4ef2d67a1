"""What the tests of early exit share."""

from __future__ import annotations

import pytest

from swarm.client.early_exit import exit_decoder


@pytest.fixture
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens on their way are looked at also where servers are so near that it is not worth it."""
    monkeypatch.setattr(exit_decoder, "MIN_GAIN", 0.0)
