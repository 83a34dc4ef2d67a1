"""Models that wrap a language model, to add images or sound: a text is computed as the whole wrapper computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from swarm.data_structures import Span
from swarm.errors import UnsupportedModel
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.checkpoints.footprint import packed_bytes
from swarm.models.cutting.families import WRAPPERS
from swarm.models.loading.span_loading import load_span
from swarm.models.weights.quantization import NONE, PACKED
from tests import wrappers, zoo

torch.set_num_threads(1)

TOKENS = torch.tensor([zoo.PROMPTS[1]])
SPANS = (Span(0, 2), Span(2, 3), Span(3, 6))


class Mixin:
    """In place of what clients add to a family's class."""


class Chain(nn.Module):
    """The blocks in three spans, as the client's only layer. Weights that are packed stay so."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        checkpoint, device = open_checkpoint(folder), torch.device("cpu")
        quant = NONE if packed_bytes(checkpoint, torch.float32) is None else PACKED
        self._spans = [load_span(checkpoint, span, dtype=torch.float32, device=device, quant=quant) for span in SPANS]
        self._outputs = checkpoint.structure.layer_outputs

    def forward(self, hidden_states: torch.Tensor, *args: object, **more: object) -> Any:
        for span in self._spans:
            hidden_states = span.forward(hidden_states)
        return (hidden_states, *[None] * (self._outputs - 1)) if self._outputs else hidden_states


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    model = load_blockless_model(open_checkpoint(folder), Chain(folder), Mixin, dtype=torch.float32).model.eval()
    return model(input_ids=TOKENS).logits


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def logits_of_whole(model: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=TOKENS).logits
    return logits


@pytest.mark.parametrize("kind", wrappers.TABLE)
def test_a_text_is_computed_as_the_wrapper_does(kind, tmp_path):
    for tie in (False, True):
        model = wrappers.make_wrapper(kind, tie)
        folder = wrappers.save(model, tmp_path / str(tie))
        assert_same(logits_of(folder), logits_of_whole(model))


def test_every_wrapper_is_compared_with_its_own_class():
    assert {kind.partition(" ")[0] for kind in wrappers.TABLE} == WRAPPERS


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "qwen2_5_vl", "kimi_k25"])
@pytest.mark.parametrize("names", wrappers.NAMES)
def test_names_of_all_published_forms(kind, names, tmp_path):
    model = wrappers.make_wrapper(kind)
    folder = wrappers.save(model, tmp_path, names)
    assert_same(logits_of(folder), logits_of_whole(model))
    checkpoint = open_checkpoint(folder)
    own = {name for name in checkpoint.weight_map if checkpoint.is_client_tensor(name)}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in own} == {"embed_tokens", "norm", "lm_head"}


def test_experts_that_are_published_the_other_way_round(tmp_path):
    """Qwen3-VL's experts are stored as `[experts, inputs, outputs]`."""
    model = wrappers.make_wrapper("qwen3_vl_moe")
    (file,) = wrappers.save(model, tmp_path).glob("*.safetensors")
    tensors = load_file(file)
    turned = {
        name: one.mT.contiguous() if one.ndim == 3 and ".experts." in name else one for name, one in tensors.items()
    }
    save_file(turned, file, metadata={"format": "pt"})
    assert_same(logits_of(tmp_path), logits_of_whole(model))


def test_a_type_with_code_of_its_own_that_transformers_computes(tmp_path):
    """Kimi K2 is DeepSeek V3 under another name."""
    model = zoo.make_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    change_config(tmp_path, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    assert_same(logits_of(tmp_path), logits_of_whole(model))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mimo_v2", "auto_map": {"AutoConfig": "x.Y"}}, "never runs a repository's code"),
        ({"model_type": "paligemma"}, "'paligemma' adds images or sound to a model of the family 'gemma'"),
        ({"model_type": "aya_vision"}, "whether it computes a text as that one does is not known"),
        (
            {"model_type": "mllama"},
            "the 'mllama_text_model' in this 'mllama' cannot be served",
        ),
        (
            {"model_type": "gemma4", "text_config": {"num_kv_shared_layers": 2}},
            "shares keys .* Gemma 4 are served",
        ),
        ({"model_type": "gemma3n"}, "the 'gemma3n_text' in this 'gemma3n' .* Gemma 3 is served"),
        ({"model_type": "gemma4_unified_assistant"}, "it drafts for another model.* serve that one"),
        (
            {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2},
            "attend to what an earlier layer chose.* GLM-5 and GLM-5.1 are served",
        ),
        ({"model_type": "minimax"}, "a cache of its own kind.* MiniMax-M2 to M2.7 are served"),
        ({"model_type": "openai-gpt"}, "it keeps nothing of a text.* GPT-2 is served"),
        ({"model_type": "rwkv"}, "a cache of its own kind"),
        ({"model_type": "zamba2"}, "get the tokens' embeddings .* Bamba, Jamba and Falcon-H1 are served"),
        ({"model_type": "gemma4", "text_config": {"num_kv_shared_layers": 0}}, "embeddings of its own"),
    ],
)
def test_what_is_refused_says_why(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=words):
        open_checkpoint(tmp_path)
