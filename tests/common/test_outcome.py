from __future__ import annotations

import pytest

from swarm.common.outcome import result_or_error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_whatever_is_raised_is_returned(error):
    def work() -> None:
        raise error

    assert result_or_error(work) is error
