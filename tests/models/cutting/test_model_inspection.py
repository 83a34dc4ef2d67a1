"""What the meta model tells must be what the real model has."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from swarm.data_structures import Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting.model_inspection import inspect_model
from swarm.models.loading.span_loading import load_span
from tests.zoo import BLOCKS, REPRESENTATIVES, make_checkpoint


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_the_structure_of_a_family(family, tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(family, tmp_path))
    structure = inspect_model(checkpoint.config)
    layers = AutoModel.from_config(checkpoint.config).get_submodule(structure.layers_path)
    assert structure.block_parameters == tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)

    span = load_span(checkpoint, Span(0, BLOCKS), dtype=torch.float32, device=torch.device("cpu"))
    cache = span.new_padded_kv()
    span.forward(torch.randn(1, 3, span.hidden_size), cache)
    stored = [layer.keys.shape[1] * layer.keys.shape[3] + layer.values.shape[1] * layer.values.shape[3]
              for layer in cache.layers]  # fmt: skip
    assert structure.cached_values == tuple(stored)
    assert not any(structure.state_values)
    assert span.weight_bytes == 4 * sum(structure.block_parameters)
