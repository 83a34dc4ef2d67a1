"""Whether it is worth looking at a token on its way. Pure: times are handed in.

A look computes the model's head. Where the last server answers soon after the first one, as on a fast network, the
answer is there almost as soon as the look is done, and what a wrong guess makes the servers compute is a loss.
"""

from __future__ import annotations

MIN_GAIN = 3.0
"""How many times as long as a look it has to take from there to the last server's answer."""

KEPT_SHARE = 0.8
"""What the next observation leaves of the average of those before."""

TRIED_EVERY = 16
"""Of the tokens that are not worth a look, one in so many is looked at, to see whether that has changed."""


class LookMeter:
    """Averages of how long looks take, and of how long the answer takes from there."""

    def __init__(self) -> None:
        self._look_s: float | None = None
        self._lag_s: float | None = None
        self._skipped = 0

    def on_look(self, seconds: float) -> None:
        """A token was looked at."""
        self._look_s = _averaged(self._look_s, seconds)

    def on_answer(self, lag_s: float) -> None:
        """The last server has answered to a token so long after it could be looked at first."""
        self._lag_s = _averaged(self._lag_s, lag_s)

    def is_worth_looking(self) -> bool:
        """Whether to look at the next token."""
        if self._look_s is None or self._lag_s is None or self._lag_s >= MIN_GAIN * self._look_s:
            return True
        self._skipped = (self._skipped + 1) % TRIED_EVERY
        return self._skipped == 0


def _averaged(before: float | None, value: float) -> float:
    return value if before is None else KEPT_SHARE * before + (1 - KEPT_SHARE) * value
