"""GGUF files are read as their format is defined, alone and beside a config.json, and refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.models.checkpoints import gguf_layouts
from tests.models.test_wrappers import assert_same, logits_of, logits_of_whole

torch.set_num_threads(1)

BY_TRANSFORMERS = ("qwen3_5_text", "lfm2")


@pytest.mark.parametrize("family", [one for one in gguf_layouts.FAMILIES if one not in BY_TRANSFORMERS])
def test_logits_are_those_of_the_model_that_was_written(family, tmp_path):
    path = tmp_path / "model.gguf"
    model = gguf_layouts.make(family, path)
    expected = logits_of_whole(model)
    assert_same(logits_of(path), expected)
    model.config.save_pretrained(tmp_path)
    assert_same(logits_of(tmp_path), expected)


@pytest.mark.parametrize("family", BY_TRANSFORMERS)
def test_logits_are_those_of_transformers(family, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_layouts.make(family, path)
    assert_same(logits_of(path), logits_of_whole(gguf_layouts.transformers_load(path)))
