"""What the requests of a model share."""

from __future__ import annotations

import logging
from typing import Any

from swarm.generation.served_model import ServedModel


def test_a_warning_is_in_the_log_once(caplog):
    nothing: Any = None
    served = ServedModel("m", nothing, nothing)
    with caplog.at_level(logging.WARNING):
        for message in ("one", "two", "one"):
            served.warn_once(message)
    assert caplog.messages == ["m: one", "m: two"]
