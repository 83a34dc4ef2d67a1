from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.neurons.feed_forward_site import find_sparse_feed_forward, put_in_place

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
PLAIN = {"up": "up_proj", "activation": "act_fn", "down": "down_proj"}
GATED = {**PLAIN, "gate": "gate_proj"}


def block_of(family: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    width = "ffn_dim" if family == "opt" else "intermediate_size"
    model = AutoModel.from_config(AutoConfig.for_model(family, **{**SMALL, width: 48, **options})).eval()
    layers = model.decoder.layers if family == "opt" else model.layers if hasattr(model, "layers") else model.h
    return layers[0]


SPARSE = {
    "opt": ({}, {"up": "fc1", "activation": "activation_fn", "down": "fc2"}),
    "nemotron": ({}, {role: f"mlp.{name}" for role, name in PLAIN.items()}),
    "arcee": ({}, {role: f"mlp.{name}" for role, name in PLAIN.items()}),
    "jais2": ({}, {role: f"mlp.{name}" for role, name in PLAIN.items()}),
    "persimmon": ({}, {"up": "mlp.dense_h_to_4h", "activation": "mlp.act", "down": "mlp.dense_4h_to_h"}),
    "nanochat": ({}, {"up": "mlp.fc1", "activation": "mlp.activation_fn", "down": "mlp.fc2"}),
    "llama": ({"hidden_act": "relu"}, {role: f"mlp.{name}" for role, name in GATED.items()}),
    "mistral": ({"hidden_act": "relu"}, {role: f"mlp.{name}" for role, name in GATED.items()}),
    "phi": ({"hidden_act": "relu"}, {"up": "mlp.fc1", "activation": "mlp.activation_fn", "down": "mlp.fc2"}),
    "falcon": (
        {"activation": "relu", "ffn_hidden_size": 48},
        {"up": "mlp.dense_h_to_4h", "activation": "mlp.act", "down": "mlp.dense_4h_to_h"},
    ),
}


@pytest.mark.parametrize("family", SPARSE)
def test_an_activation_with_exact_zeros_is_found_with_its_linear_layers(family: str) -> None:
    options, paths = SPARSE[family]
    block = block_of(family, **options)
    plan = find_sparse_feed_forward(block)
    assert plan is not None
    assert plan.kind is RecordKind.NEURONS
    assert dict(plan.modules) == paths
    assert plan.axes == {
        f"{paths[role]}.weight": int(role == "down") for role in ("up", "gate", "down") if role in paths
    }
    biases = {f"{paths[role]}.bias" for role in ("up", "gate", "down") if role in paths}
    assert set(plan.resident) == biases & set(block.state_dict())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("llama", {"hidden_act": name}) for name in ("silu", "gelu", "gelu_pytorch_tanh", "leaky_relu")),
        ("opt", {"activation_function": "gelu"}),
        ("phi3", {"hidden_act": "relu"}),  # gate and up are one product
        ("bitnet", {}),  # a norm between activation and down projection
        ("qwen3_moe", {"hidden_act": "relu"}),
    ],
)
def test_other_blocks_have_none(family: str, options: dict[str, object]) -> None:
    assert find_sparse_feed_forward(block_of(family, **options)) is None


class ThresholdedReLU(nn.Module):
    """ReLU that is zero up to a threshold (FATReLU of ProSparse)."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.tensor(threshold))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * (values > self.threshold)


@pytest.mark.parametrize("threshold", [0.01, 4.0])
def test_an_activation_with_a_threshold_is_found_whatever_its_class(threshold: float) -> None:
    block = block_of("llama", hidden_act="relu")
    block.set_submodule("mlp.act_fn", ThresholdedReLU(threshold))
    plan = find_sparse_feed_forward(block)
    assert plan is not None
    assert plan.resident == ("mlp.act_fn.threshold",)


@pytest.mark.parametrize("family", ["opt", "llama", "persimmon"])
def test_one_module_in_place_receives_the_input_and_its_result_is_the_blocks(family: str) -> None:
    options, _ = SPARSE[family]
    block = block_of(family, **options)
    plan = find_sparse_feed_forward(block)
    assert plan is not None
    owner = block if family == "opt" else block.get_submodule("mlp")
    hidden = torch.randn(1, 3, 32)
    seen: list[torch.Tensor] = []

    class Zero(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            return torch.full_like(hidden, 7.0)

    put_in_place(block, plan, Zero())
    result = owner(hidden)
    assert len(seen) == 1
    assert seen[0].shape[-1] == 32
    if family != "opt":  # whose layer adds the residual
        assert torch.equal(result, torch.full_like(hidden, 7.0))
