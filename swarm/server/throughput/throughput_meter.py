"""What a server announces that it computes: measured at its start, then corrected by what its iterations take. Pure."""

from __future__ import annotations

import logging
import statistics

from swarm.server.throughput.compute_measurement import Throughput

logger = logging.getLogger(__name__)

SAMPLES = 32
"""Iterations of a kind whose median corrects what is announced."""

TOLERANCE = 1.25
"""A median corrects what is announced if the two differ by more than this factor. Routes and blocks depend on it, so it
does not follow every program that runs for a moment."""

BATCH_TOKENS = 64
"""Tokens of an iteration from which on it tells how fast batches are."""

BUSY_SHARE = 0.2
"""A measurement during which other programs used more than this share of the processors is repeated."""


class ThroughputMeter:
    """The throughput of some blocks. Iterations are recorded in one thread, and read in others.

    Args:
        measured: at the start.
        blocks: how many there are.
        is_given: whether the user has said what to announce, which stays.

    Attributes:
        current: what to announce.
    """

    def __init__(self, measured: Throughput, blocks: int, is_given: bool = False) -> None:
        self.current = measured
        self._blocks, self._is_given = blocks, is_given
        self._decode: list[float] = []
        self._forward: list[float] = []

    @property
    def should_repeat(self) -> bool:
        """Whether other programs disturbed the latest measurement, and no iterations have corrected it."""
        return not self._is_given and self.current.others > BUSY_SHARE

    def measured_again(self, found: Throughput) -> None:
        """Announce what was measured while other programs used less."""
        logger.info("Throughput: %.0f blocks/s, %.0f in batches; measured again", found.decode, found.forward)
        self.current = found

    def record(self, blocks: int, tokens: int, seconds: float) -> None:
        """An iteration of one request's tokens through so many blocks. Those through a part of them tell nothing."""
        if self._is_given or blocks != self._blocks or seconds <= 0:
            return
        if tokens == 1:
            decode = _corrected(self.current.decode, self._decode, self._blocks / seconds)
            if decode is not None:
                self._correct(Throughput(decode, max(decode, self.current.forward)))
        elif tokens >= BATCH_TOKENS:
            forward = _corrected(self.current.forward, self._forward, tokens * self._blocks / seconds)
            if forward is not None:
                self._correct(Throughput(self.current.decode, max(forward, self.current.decode)))

    def _correct(self, found: Throughput) -> None:
        logger.info("Throughput: %.0f blocks/s, %.0f in batches, as iterations show", found.decode, found.forward)
        self.current = found


def _corrected(announced: float, samples: list[float], rate: float) -> float | None:
    """What to announce instead, if the latest iterations agree that it is something else."""
    samples.append(rate)
    if len(samples) < SAMPLES:
        return None
    median = statistics.median(samples)
    samples.clear()  # the next ones are counted anew: a median for each step would slow down every hop
    return None if announced / TOLERANCE <= median <= announced * TOLERANCE else median
