"""What blocks on flash really compute a second: the cost model, corrected by the iterations that were served.

The model predicts from a second or two of measurements before there is any text. How often texts come back to the same
experts, what else the machine does, and how hard the drive is used by others show only when it serves. Pure: seconds
are passed in.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from swarm.models.flash.costs.cost_model import FlashCostModel
from swarm.server.throughput.throughput_cache import Throughput

BATCH_TOKENS = 256
"""Tokens of the batch whose rate is announced as that of many tokens at once."""

MIN_ITERATIONS = 8
"""Iterations without which the prediction stands as it is."""

REMEMBERED_ITERATIONS = 64
"""Iterations that count. Their median is taken: a single one may have waited for the drive for long."""

MIN_PROMPT_TOKENS = 64
"""Tokens of an iteration that counts as a batch. In between, neither prediction is for such an iteration."""


class FlashCalibration:
    """Compares what iterations took with what the cost model said.

    One thread may call `on_iteration` while another reads the rest.

    Attributes:
        costs: the model.
    """

    def __init__(self, costs: FlashCostModel) -> None:
        self.costs = costs
        self._decode = _Slowness(lambda sessions: costs.step(sessions=sessions).seconds)
        self._prompt = _Slowness(lambda tokens: costs.prompt(tokens).seconds)

    def on_iteration(self, sequences: int, tokens: int, seconds: float) -> None:
        """Count an iteration that computed `tokens` tokens of so many sequences together."""
        if tokens == sequences:
            self._decode.add(sequences, seconds)
        elif tokens >= MIN_PROMPT_TOKENS:
            self._prompt.add(tokens, seconds)

    @property
    def throughput(self) -> Throughput:
        """What to announce."""
        decode_s, batch_s = self._decode.expected_s(1), self._prompt.expected_s(BATCH_TOKENS)
        blocks = len(self.costs.blocks)
        return Throughput(blocks / decode_s, blocks * BATCH_TOKENS / batch_s)


class _Slowness:
    """How many times as long as predicted iterations of one kind take.

    Args:
        predict: seconds of an iteration of a given size.
    """

    def __init__(self, predict: Callable[[int], float]) -> None:
        self._predict = predict
        self._predicted: dict[int, float] = {}
        self._ratios: deque[float] = deque(maxlen=REMEMBERED_ITERATIONS)

    def add(self, size: int, seconds: float) -> None:
        self._ratios.append(seconds / self._predicted_s(size))

    def expected_s(self, size: int) -> float:
        ratios = tuple(self._ratios)
        return self._predicted_s(size) * (statistics.median(ratios) if len(ratios) >= MIN_ITERATIONS else 1.0)

    def _predicted_s(self, size: int) -> float:
        # Windows of many sessions take a while to work out.
        if size not in self._predicted:
            self._predicted[size] = self._predict(size)
        return self._predicted[size]
