"""Predictors: which neurons of a feed-forward layer a token will need, told from the layer's input.

"LLM in a flash", section 3.1: a product of two small matrices tells which neurons the activation will not make zero,
before their weights are read. Its input is that of the layer itself, after attention and norm of the same block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn import functional

from swarm.common.files.checked_json import fields, mapping, number, parse_json, text, to_json
from swarm.errors import PackedFileError

_FORMAT = "swarm neuron predictor 2"
_METADATA_KEY = "predictor"
_MAX_LOSS = 1e3
_DTYPES = frozenset({"BF16", "F16", "F32"})
"""What predictors are made in, as safetensors names it."""


class NeuronPredictor(Protocol):
    """Selects neurons for tokens, each token by itself.

    Attributes:
        memory_bytes: memory that it takes.
    """

    @property
    def memory_bytes(self) -> int: ...

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """The neurons that each token needs, `[tokens, neurons]` bool."""


class LowRankPredictor:
    """Scores neurons by a product of two small matrices, and selects those whose score is above a threshold.

    Args:
        first: `[rank, hidden]`.
        second: `[neurons, rank]`.
        bias: `[neurons]`.
        threshold: calibrated to a recall, see `predictor_training.threshold_for`.
    """

    def __init__(self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor, threshold: float) -> None:
        self.first, self.second, self.bias, self.threshold = first, second, bias, threshold

    @property
    def rank(self) -> int:
        return len(self.first)

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.first, self.second, self.bias))

    def scores(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """`[tokens, neurons]`, in the dtype of `hidden_TH`."""
        return functional.linear(functional.linear(hidden_TH, self.first), self.second, self.bias)

    def select(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return self.scores(hidden_TH) > self.threshold

    def truncated(self, rank: int) -> LowRankPredictor:
        """The same with a smaller rank, if what comes first in the rank matters most."""
        return LowRankPredictor(self.first[:rank], self.second[:, :rank], self.bias, self.threshold)

    def to(self, dtype: torch.dtype) -> LowRankPredictor:
        """The same with matrices of another dtype."""
        return LowRankPredictor(self.first.to(dtype), self.second.to(dtype), self.bias.to(dtype), self.threshold)


@dataclass(frozen=True)
class CalibratedPredictor:
    """A predictor, and what was found out about it.

    Attributes:
        two_tokens: share of the neurons that it selects for one or the other of two consecutive tokens.
        recall: share that it selects of what neurons contribute, see `predictor_training.energy`.
        perplexity_loss: by how much this block's selection raises the model's perplexity, as a share; None if it was
            not measured. Losses of blocks are so small that they add up.
    """

    predictor: LowRankPredictor
    two_tokens: float
    recall: float
    perplexity_loss: float | None = None


def encode_predictor(calibrated: CalibratedPredictor, digest: str) -> bytes:
    """A predictor as the content of a safetensors file, of which a changed bit is found.

    A loss that is not finite counts as not measured.

    Args:
        digest: of the block that it was made for, see `swarm.models.checkpoints.block_digest`.
    """
    predictor, loss = calibrated.predictor, calibrated.perplexity_loss
    metadata = {
        "format": _FORMAT,
        "block_digest": digest,
        "threshold": predictor.threshold,
        "recall": calibrated.recall,
        "two_tokens": calibrated.two_tokens,
        "perplexity_loss": loss if loss is not None and math.isfinite(loss) else None,
    }
    tensors = {"first": predictor.first, "second": predictor.second, "bias": predictor.bias}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    sealed = {**metadata, "sha256": _content_digest(metadata, contiguous.values())}
    data: bytes = save(contiguous, metadata={_METADATA_KEY: to_json(sealed).decode()})
    return data


def _content_digest(metadata: Mapping[str, object], tensors: Iterable[torch.Tensor]) -> str:
    state = hashlib.sha256(to_json(metadata))
    for tensor in tensors:
        state.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def load_predictor(path: Path, digest: str, hidden: int, neurons: int) -> CalibratedPredictor:
    """Read a predictor from a file with what `encode_predictor` returned.

    Args:
        digest, hidden, neurons: of the block that it is for.

    Raises:
        PackedFileError: the file cannot be read, or is for another block or another revision of it.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = _parsed(path, (file.metadata() or {}).get(_METADATA_KEY), digest)
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            rank = shapes.get("first", (0,))[0]
            expected = {"first": (rank, hidden), "second": (neurons, rank), "bias": (neurons,)}
            if shapes != expected or not 0 < rank <= hidden:
                raise _refusal(path, f"it holds {shapes}, and no predictor for a layer of {neurons} neurons")
            if {file.get_slice(name).get_dtype() for name in expected} - _DTYPES:
                raise _refusal(path, f"its values are of none of the types {', '.join(sorted(_DTYPES))}")
            first, second, bias = (file.get_tensor(name) for name in ("first", "second", "bias"))
    except (OSError, SafetensorError) as error:
        raise _refusal(path, str(error)) from error
    tensors = (first, second, bias)
    if len({tensor.dtype for tensor in tensors}) != 1 or not all(tensor.isfinite().all() for tensor in tensors):
        raise _refusal(path, "its values are not finite, or of several types")
    if metadata.sha256 not in (None, _content_digest(metadata.content, tensors)):
        raise _refusal(path, "it was changed after it was written")
    predictor = LowRankPredictor(first, second, bias, metadata.threshold)
    return CalibratedPredictor(predictor, metadata.two_tokens, metadata.recall, metadata.perplexity_loss)


@dataclass(frozen=True)
class _Metadata:
    """What stands beside the matrices: `content`, and its digest with theirs, which older files lack."""

    content: Mapping[str, object]
    sha256: object
    threshold: float
    recall: float
    two_tokens: float
    perplexity_loss: float | None


def _parsed(path: Path, metadata: str | None, digest: str) -> _Metadata:
    names = ("format", "block_digest", "threshold", "recall", "two_tokens", "perplexity_loss")
    try:
        content = parse_json(metadata or "")
        form, block_digest, threshold, recall, two_tokens, loss, sha256 = fields(content, names, ["sha256"])
        if text(form, len(_FORMAT)) != _FORMAT:
            raise ValueError("another format")
        if block_digest != digest:
            raise _refusal(path, "it was made for another block, or another revision of it")
        share = number(two_tokens, 0, 1)
        if not share:
            raise ValueError("tokens that need no neurons")
        checked_loss = None if loss is None else number(loss, -1, _MAX_LOSS)
        said = {name: value for name, value in mapping(content).items() if name != "sha256"}
        return _Metadata(said, sha256, number(threshold), number(recall, 0, 1), share, checked_loss)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, f"it holds no neuron predictor of this version ({error})") from error


def _refusal(path: Path, reason: str) -> PackedFileError:
    return PackedFileError(f"the predictor {path} cannot be used: {reason}")
