"""Which LoRA is wanted, and what is refused; PEFT itself is the reference."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
from transformers import AutoModelForCausalLM

from swarm.client.tuning.lora import LoraSettings, default_targets, lora_settings, new_lora, select_targets
from swarm.errors import InvalidOption
from swarm.models.cutting.cut_layers import find_layers
from swarm.models.cutting.families import causal_lm_class
from swarm.models.cutting.model_inspection import find_lora_targets
from tests.zoo import BLOCKS, FAMILIES, config_of


def wanted(family: str, **entries: Any) -> tuple[dict[int, dict[str, tuple[int, int]]], LoraSettings, str]:
    config = config_of(family)
    with torch.device("meta"):
        path = find_layers(causal_lm_class(config)(config), BLOCKS)[0]
    settings = lora_settings(entries)
    return select_targets(settings, find_lora_targets(config), path, config.model_type), settings, path


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": r".*\.(1|3)\.self_attn\.[qk]_proj"}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 4]}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["2.self_attn.v_proj"]}),
        (
            "llama",
            {"target_modules": ["v_proj"], "rank_pattern": {r"[12]\..*v_proj": 3}, "alpha_pattern": {"v_proj": 5}},
        ),
        ("llama", {"target_modules": ["v_proj"], "use_rslora": True, "r": 16, "lora_alpha": 4}),
        ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
        ("opt", {"target_modules": ["fc1", "self_attn.out_proj"]}),
        ("mixtral", {"target_modules": ["o_proj"]}),
        ("qwen3_moe", {"target_modules": ["k_proj"]}),
    ],
)
def test_the_same_modules_ranks_and_scalings_as_peft(family: str, entries: dict[str, Any]) -> None:
    found, settings, path = wanted(family, **entries)
    mine = {
        f"{path}.{block}.{module}": (one.rank, one.scaling, tuple(one.lora_A.shape), tuple(one.lora_B.shape))
        for block, inside in new_lora(found, settings, path)._by_block.items()
        for module, one in inside.items()
    }
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config_of(family))
    model = peft.get_peft_model(base, peft.LoraConfig(**entries))
    theirs = {
        name.removeprefix("base_model.model."): (
            one.r["default"],
            one.scaling["default"],
            tuple(one.lora_A["default"].weight.shape),
            tuple(one.lora_B["default"].weight.shape),
        )
        for name, one in model.named_modules()
        if isinstance(one, peft.tuners.lora.LoraLayer)
    }
    assert mine == theirs


def test_every_family_has_default_targets_and_they_are_pefts() -> None:
    for family in FAMILIES:
        config = config_of(family)
        chosen = default_targets(find_lora_targets(config), config.model_type)
        if isinstance(known := DEFAULTS.get(config.model_type), list):
            assert set(chosen) == set(known)


@pytest.mark.parametrize("config", [peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"]), None])
def test_a_config_object_a_dict_and_keywords_say_the_same(config: Any) -> None:
    expected = LoraSettings(rank=3, alpha=6, target_modules=("q_proj",))
    if config is None:
        assert lora_settings(None, 3, 6, ["q_proj"]) == expected
        assert lora_settings({"r": 9, "lora_alpha": 6, "target_modules": ["q_proj"]}, rank=3) == expected
    else:
        assert lora_settings(config) == expected
        assert lora_settings(config.to_dict()) == expected


def test_unsupported_entries_are_refused_by_name() -> None:
    for entries, said in [
        ({"lora_dropout": 0.1}, "does not support lora_dropout=0.1"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [(0, 2)]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"something_new": 3}, "something_new"),
        ({"r": 0}, "lora_rank=0"),
        ({"r": 5000}, "lora_rank=5000"),
        ({"lora_alpha": -1}, "lora_alpha=-1"),
        ({"rank_pattern": {"q_proj": 2.5}}, "q_proj=2.5"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [3]}, "target_modules"),
    ]:
        with pytest.raises(InvalidOption, match=said):
            lora_settings(entries)


def test_every_entry_of_pefts_config_is_known_or_empty_by_default() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lora_settings(peft.LoraConfig()) == LoraSettings()


def test_modules_that_servers_cannot_change_are_refused_by_name() -> None:
    for family, entries, said in [
        ("llama", {"target_modules": ["q_proj", "nothing"]}, "'nothing'"),
        ("llama", {"target_modules": ["lm_head", "q_proj"]}, "lm_head is outside"),
        ("llama", {"target_modules": ["input_layernorm"]}, "input_layernorm"),
        ("mixtral", {"target_modules": ["gate_up_proj"]}, "gate_up_proj"),
        ("qwen3_moe", {"target_modules": ["down_proj"]}, "down_proj also match the experts"),
        ("deepseek_v3", {"target_modules": "all-linear"}, "experts"),
        ("opt_projected", {"target_modules": ["project_in"]}, "model.decoder.project_in is outside"),
        ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [6]}, "blocks 0:6"),
    ]:
        with pytest.raises(InvalidOption, match=said):
            wanted(family, **entries)


def test_parameters_are_named_by_their_place() -> None:
    found, settings, path = wanted("llama", target_modules=["q_proj"], layers_to_transform=3)
    lora = new_lora(found, settings, path)
    assert [name for name, _ in lora.named_parameters()] == ["3.self_attn.q_proj.lora_A", "3.self_attn.q_proj.lora_B"]
    assert lora[3]["self_attn.q_proj"].lora_A.any()
    assert not lora[3]["self_attn.q_proj"].lora_B.any()
    assert lora.factors(0) == ()
