"""Measures the effect of a wire format on a model: a whole chain in this process that encodes and decodes every hop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarm.common.dtypes import dtype_name
from swarm.data_structures import Span, WireFormat
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.models.loading.span_loading import load_span
from swarm.protocol.compression import decode_tensor, encode_tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """One way of sending hidden states.

    Attributes:
        wire: the format.
        hops: servers in the chain; the hidden states are packed `hops` + 1 times.
        outliers: how many times as large the channels of `STRESSED` are while they travel. A model whose weights
            write these channels that much larger and read them that much smaller computes the same, and sends this.
    """

    wire: WireFormat
    hops: int
    outliers: float = 1.0


EXACT = Variant(WireFormat.NONE, 1)
STRESSED = (7, 50, 101)
"""Channels that the stress makes large: in models as narrow as these every block of 256 values holds some."""


class ChainLayer(nn.Module):
    """Replaces all blocks in the client's model, as a chain of servers does."""

    def __init__(self, span: Any, outputs: int) -> None:
        super().__init__()
        self.variant = EXACT
        self.largest, self.typical = 0.0, 0.0
        self._whole = span
        self._outputs = outputs

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = self._travel(hidden_states)
        for span in spans(self._whole.span.length, self.variant.hops):
            hidden = self._travel(self._whole.narrowed(span).forward(hidden))
        return (hidden,) + (None,) * (self._outputs - 1) if self._outputs else hidden

    def _travel(self, hidden_RTH: Tensor) -> Tensor:
        rows, slots, width = hidden_RTH.shape
        flat = hidden_RTH.reshape(rows * slots, width).clone()
        if self.variant.wire is WireFormat.NONE:
            self.largest = max(self.largest, float(flat.abs().max()))
            self.typical = max(self.typical, float(flat.abs().float().median()))
        grown = [channel % width for channel in STRESSED]
        flat[:, grown] *= self.variant.outliers
        payload = encode_tensor(flat, self.variant.wire)
        flat = decode_tensor(payload, rows * slots, width, self.variant.wire, dtype_name(flat.dtype), CPU)
        flat[:, grown] /= self.variant.outliers
        return flat.view(rows, slots, width)


def spans(blocks: int, hops: int) -> list[Span]:
    """The blocks of each server, divided as evenly as possible."""
    edges = [round(blocks * number / hops) for number in range(hops + 1)]
    return [Span(start, end) for start, end in itertools.pairwise(edges)]


class _Plain:
    """An empty mix-in for the client's model, which needs none in a single process."""


class InProcess:
    """A model cut as client and servers cut it, and the layer that stands for the servers."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        checkpoint = open_checkpoint(str(folder))
        chosen = resolve_dtype(dtype, checkpoint.config)
        whole = load_span(checkpoint, Span(0, checkpoint.blocks), dtype=chosen, device=CPU)
        self.layer = ChainLayer(whole, checkpoint.structure.layer_outputs)
        self.model = load_blockless_model(checkpoint, self.layer, _Plain, dtype=chosen).model
        self.family, self.blocks = checkpoint.config.model_type, checkpoint.blocks
        self.hidden_size = whole.hidden_size

    @torch.inference_mode()
    def log_probabilities(self, ids_RT: Tensor, variant: Variant) -> Tensor:
        """Of every next token, `[rows, tokens, vocabulary]`, float32."""
        self.layer.variant = variant
        logits = self.model(input_ids=ids_RT, use_cache=False).logits.float()
        return logits.log_softmax(-1)


@dataclass
class Damage:
    """Differences from exact transport, over windows of text.

    Attributes:
        losses: change of the mean loss in each window, nats a token.
        divergences: mean Kullback-Leibler divergence of the next token's distribution in each window, nats.
        changed: share of greedy tokens that changed in each window.
    """

    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)

    def add(self, exact: Tensor, came: Tensor, targets: Tensor) -> None:
        """Log probabilities `[rows, tokens, vocabulary]` of both ways, and the tokens that the text goes on with."""
        loss = (_taken(exact, targets) - _taken(came, targets)).mean(-1)
        divergence = (exact.exp() * (exact - came)).sum(-1).mean(-1)
        changed = (exact.argmax(-1) != came.argmax(-1)).float().mean(-1)
        self.losses += loss.tolist()
        self.divergences += divergence.tolist()
        self.changed += changed.tolist()

    @property
    def perplexity(self) -> float:
        """Change of the perplexity in percent."""
        return 100 * math.expm1(sum(self.losses) / len(self.losses))

    @property
    def uncertainty(self) -> float:
        """Two standard errors of `perplexity`, from the differences between windows, in percent."""
        deviation = float(torch.tensor(self.losses).std()) if len(self.losses) > 1 else math.inf
        return 200 * deviation / len(self.losses) ** 0.5

    @property
    def divergence(self) -> float:
        return sum(self.divergences) / len(self.divergences)

    @property
    def greedy_changed(self) -> float:
        """In percent."""
        return 100 * sum(self.changed) / len(self.changed)


def _taken(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def measure(
    model: InProcess, windows: Tensor, variants: Sequence[Variant], rows: int = 4
) -> tuple[float, dict[Variant, Damage]]:
    """Perplexity of exact transport, and the damage of each variant on the same text.

    Args:
        windows: token ids `[windows, tokens + 1]`.
        rows: windows computed at once.
    """
    found = {variant: Damage() for variant in variants}
    nats = 0.0
    for batch in windows.split(rows):
        ids, targets = batch[:, :-1], batch[:, 1:]
        exact = model.log_probabilities(ids, EXACT)
        nats -= float(_taken(exact, targets).mean(-1).sum())
        for variant, damage in found.items():
            damage.add(exact, model.log_probabilities(ids, variant), targets)
    return math.exp(nats / len(windows)), found
