"""The `--throughput` option, read before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import InvalidOption


@dataclass(frozen=True)
class ThroughputOption:
    """Where a server's throughput comes from: measured once and then remembered, unless a field says otherwise.

    Attributes:
        rate: blocks x tokens per second as given; nothing is measured.
        remeasure: measure even if an earlier result is known.
    """

    rate: float | None = None
    remeasure: bool = False

    @classmethod
    def parse(cls, text: str) -> ThroughputOption:
        """Read `auto`, `measure` or a number. Raises `InvalidOption`."""
        if text in ("auto", "measure"):
            return cls(remeasure=text == "measure")
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1e9:
            raise InvalidOption(f"--throughput {text!r}: use auto, measure or a number of blocks per second above 0")
        return cls(rate)
