from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swarm.errors import PackedFileError
from swarm.models.flash.neurons.predictor import (
    CalibratedPredictor,
    LowRankPredictor,
    encode_predictor,
    load_predictor,
)

HIDDEN, NEURONS, RANK = 8, 20, 3


def make_predictor(dtype: torch.dtype = torch.float32) -> LowRankPredictor:
    torch.manual_seed(0)
    return LowRankPredictor(
        torch.randn(RANK, HIDDEN, dtype=dtype), torch.randn(NEURONS, RANK, dtype=dtype), torch.randn(NEURONS), 0.25
    )


def test_neurons_above_the_threshold_are_selected() -> None:
    predictor = make_predictor()
    hidden = torch.randn(5, HIDDEN)
    scores = hidden @ predictor.first.T @ predictor.second.T + predictor.bias
    assert torch.equal(predictor.select(hidden), scores > 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_predictor_is_the_same_when_it_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = make_predictor().to(dtype)
    calibrated = CalibratedPredictor(saved, 0.15, 0.99, 0.001)
    (tmp_path / "predictor").write_bytes(encode_predictor(calibrated, "digest"))
    again = load_predictor(tmp_path / "predictor", "digest", HIDDEN, NEURONS)
    assert (again.two_tokens, again.recall, again.perplexity_loss) == (0.15, 0.99, 0.001)
    loaded = again.predictor
    hidden = torch.randn(5, HIDDEN, dtype=dtype)
    assert torch.equal(loaded.select(hidden), saved.select(hidden))
    assert (loaded.rank, loaded.memory_bytes, loaded.threshold) == (RANK, saved.memory_bytes, 0.25)


def test_a_changed_bit_anywhere_is_found(tmp_path: Path) -> None:
    data = encode_predictor(CalibratedPredictor(make_predictor(), 0.15, 0.99, 0.001), "digest")
    for byte in range(0, len(data), 7):
        changed = bytearray(data)
        changed[byte] ^= 1 << byte % 8
        (tmp_path / "predictor").write_bytes(changed)
        with pytest.raises(PackedFileError, match="cannot be used"):
            load_predictor(tmp_path / "predictor", "digest", HIDDEN, NEURONS)


def write(path: Path, change: dict[str, torch.Tensor], **metadata: object) -> None:
    predictor = make_predictor()
    tensors = {"first": predictor.first, "second": predictor.second, "bias": predictor.bias, **change}
    header = {"format": "swarm neuron predictor 2", "block_digest": "digest", "threshold": 0.25, **metadata}
    header = {"recall": 0.9, "two_tokens": 0.15, "perplexity_loss": None, **header}
    save_file(tensors, path, metadata={"predictor": json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "metadata", "reason"),
    [
        ({}, {"block_digest": "other"}, "another block"),
        ({}, {"format": "swarm neuron predictor 9"}, "of this version"),
        ({}, {"threshold": float("nan")}, "of this version"),
        ({}, {"threshold": "1"}, "of this version"),
        ({}, {"recall": 2}, "of this version"),
        ({}, {"two_tokens": 2}, "of this version"),
        ({}, {"two_tokens": 0}, "need no neurons"),
        ({"first": torch.randn(RANK, HIDDEN + 1)}, {}, "no predictor for"),
        ({"first": torch.randn(RANK)}, {}, "no predictor for"),
        ({"first": torch.zeros(0, HIDDEN), "second": torch.zeros(NEURONS, 0)}, {}, "no predictor for"),
        ({"more": torch.randn(1)}, {}, "no predictor for"),
        ({"bias": torch.full((NEURONS,), float("nan"))}, {}, "not finite"),
        ({"bias": torch.zeros(NEURONS, dtype=torch.float16)}, {}, "several types"),
        ({}, {"sha256": "0" * 64}, "was changed"),
        ({}, {"more": 1}, "of this version"),
    ],
)
def test_a_predictor_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor], metadata: dict[str, object], reason: str
) -> None:
    write(tmp_path / "predictor", change, **metadata)
    with pytest.raises(PackedFileError, match=reason):
        load_predictor(tmp_path / "predictor", "digest", HIDDEN, NEURONS)
