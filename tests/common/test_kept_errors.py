"""Errors that are kept after they were handled."""

from __future__ import annotations

import weakref

import pytest

from swarm.common.kept_errors import without_frames


class Keeper:
    error: Exception | None = None

    def fail(self) -> None:
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise ValueError("second") from None
        except ValueError as error:
            self.error = error


@pytest.mark.parametrize("forget", [True, False])
def test_an_error_without_frames_keeps_no_variables(forget):
    keeper = Keeper()
    keeper.fail()
    assert keeper.error is not None
    if forget:
        assert without_frames(keeper.error) is keeper.error
        assert str(keeper.error) == "second"
    alive = weakref.ref(keeper)
    del keeper
    assert (alive() is None) == forget
