"""Stop sequences: where a text has to end, though its pieces come one by one."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Lets text through until one of `stops` comes, which does not get through any more.

    Args:
        stops: texts that are not empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What of the text so far may be shown now. What may be the beginning of a stop is held back."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        text = self._held + text
        # The one that ends first, so that it does not matter in which pieces the text comes.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        held = max(_overlap(text, stop) for stop in self._stops)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return shown

    def end(self) -> str:
        """What was held back and turned out to be no stop."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
