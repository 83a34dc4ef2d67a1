"""How fast this server computes, measured on the blocks that it has just loaded."""

from __future__ import annotations

import statistics
import time

import torch

from swarm.models.span import SpanModel

WARM_UP = 2
STEPS = 8


def measure_throughput(model: SpanModel) -> float:
    """Blocks that the server computes for one token, per second: the median of a few decode steps."""
    hidden = torch.zeros(1, 1, model.hidden_size, dtype=model.dtype, device=model.device)
    cache = model.new_cache()
    times = []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        model.forward(hidden, cache)
        _synchronize(model.device)
        times.append(time.perf_counter() - began)
    return model.span.length / statistics.median(times[WARM_UP:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
