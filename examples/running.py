"""What the examples share: a swarm to train on, a training loop, and a picture of the loss."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, get_cosine_schedule_with_warmup

from swarm.cli.local_swarm import LocalSwarm

BLOCKS = ("0:4", "4:8", "8:12")
"""Blocks of the demo model, one entry per server."""


def options(description: str | None, output: str, trains_by_steps: bool = True) -> argparse.ArgumentParser:
    """Make a parser with the options of every example; with `--steps` and `--held-out` if it trains by steps."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", help="local folder or hub id; default: the demo model")
    parser.add_argument("--initial-peers", nargs="+", help="a swarm to train on; default: three local servers")
    parser.add_argument("--seed", type=int, default=0)
    if trains_by_steps:
        parser.add_argument("--steps", type=int, help="number of optimizer steps; use fewer for a quick test")
        parser.add_argument("--held-out", type=int, help="the most held-out examples; use fewer for a quick test")
    parser.add_argument("--output", type=Path, default=Path(output), help="folder for what was trained")
    return parser


@contextmanager
def peers(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield addresses to join by: the given ones, or those of three local servers that run during the example."""
    given = arguments.initial_peers or os.environ.get("SWARM_INITIAL_PEERS", "").split()
    if given:
        yield given
        return
    print("Starting three servers on this machine ...")
    with LocalSwarm(arguments.model, BLOCKS, options=("--threads", "1", "--throughput", "1000")) as swarm:
        yield [swarm.address]


def prepared(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with padding on the right."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def train(
    parameters: Iterable[nn.Parameter],
    batches: Sequence[dict[str, torch.Tensor]],
    loss_of: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    rate: float,
) -> list[float]:
    """Train with one optimizer step per batch, warm-up and cosine decay; returns the losses."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, len(batches) // 20, len(batches))
    losses = []
    with tqdm(batches, unit="step") as bar:
        for batch in bar:
            loss = loss_of(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{sum(losses[-20:]) / len(losses[-20:]):.3f}")
    return losses


def plot(losses: Sequence[float], title: str, path: Path, baseline: tuple[str, float] | None = None) -> None:
    """Plot the loss by step, and its mean over 20 steps, as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(losses, color="tab:blue", alpha=0.3, label="loss of a batch")
    smooth = [sum(losses[max(0, end - 20) : end]) / min(end, 20) for end in range(1, len(losses) + 1)]
    axes.plot(smooth, color="tab:blue", label="mean of 20")
    if baseline is not None:
        axes.axhline(baseline[1], color="tab:gray", linestyle="--", label=baseline[0])
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"The loss is drawn in {path}")
