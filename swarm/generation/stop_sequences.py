"""Stop sequences in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopSequenceFilter:
    """Passes text on until one of the stop sequences occurs. The stop sequence itself is not passed on.

    Args:
        stops: texts that are not empty.

    Attributes:
        hit: a stop sequence has occurred.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """Add text, and return what may be shown now. What may be the beginning of a stop sequence is held back."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        text = self._held + text
        # The one that ends first, so that the result does not depend on how the text is divided into pieces.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        held = max(_overlap(text, stop) for stop in self._stops)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return shown

    def preview(self, text: str) -> str:
        """The text that would be shown in the end if `text` came next; nothing is added."""
        copy = StopSequenceFilter(self._stops)
        copy.hit, copy._held = self.hit, self._held
        return copy.feed(text) + copy.finish()

    def finish(self) -> str:
        """The text that was held back and is not a stop sequence."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
