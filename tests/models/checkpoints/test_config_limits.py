"""Numbers of a config that no model has, and configs and adapters that were changed at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from swarm.errors import SwarmError, UsageError
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, open_checkpoint
from swarm.models.checkpoints.config_limits import MAX_BLOCKS, MAX_ENTRIES, json_problem
from tests import zoo

DEMO = json.loads((DEMO_FOLDER / "config.json").read_text())


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_configs_of_all_families_are_within_the_limits():
    for family in sorted(zoo.TABLE):
        assert json_problem(json.loads(zoo.config_of(family).to_json_string(use_diff=False))) == ""


def test_default_configs_of_transformers_are_within_the_limits():
    """They are those of real models."""
    checked = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        # transformers has no default config of assistants; older versions say that of models with parts, too.
        if kind.model_type.endswith("_assistant") or getattr(kind, "has_no_defaults_at_init", False):
            continue
        config = AutoConfig.for_model(kind.model_type)
        assert json_problem(json.loads(config.to_json_string(use_diff=False))) == "", kind
        checked += 1
    assert checked > 100


def test_a_size_that_no_model_has(tmp_path):
    for name, value in [
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", MAX_BLOCKS + 1),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", "12"),
        ("num_hidden_layers", None),
        ("hidden_size", 10**9),
        ("intermediate_size", 10**9),
        ("num_attention_heads", 10**9),
        ("num_attention_heads", 7),
        ("num_key_value_heads", 0),
        ("head_dim", -4),
        ("vocab_size", 10**10),
        ("max_position_embeddings", 10**12),
        ("num_labels", 10**9),
        ("layer_types", ["full_attention"] * (MAX_ENTRIES + 1)),
        ("rope_scaling", {"factor": 10**80}),
        ("hidden_act", "no such function"),
    ]:
        with pytest.raises(UsageError):
            _ = open_checkpoint(write(tmp_path, {**DEMO, name: value})).structure


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**30, -(2**40), 1e308, -1.5, 0.0]),
    st.sampled_from(["", "llama", "float32", "full_attention", "eager", "../..", "\0"]),
    st.lists(st.integers(-1, 4), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "type", "bits"]), st.integers() | st.text(max_size=4)),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(sorted(DEMO)), VALUES, max_size=3),
    st.sampled_from(["llama", "gpt2", "qwen3", "mixtral", "opt", "gemma2", "mamba", "t5", "no such family"]),
)
def test_a_changed_config_is_used_or_refused(tmp_path_factory, changes, family):
    folder = tmp_path_factory.mktemp("config")
    try:
        checkpoint = open_checkpoint(write(folder, {**DEMO, "model_type": family, **changes}))
        assert len(checkpoint.structure.block_parameters) == checkpoint.blocks <= MAX_BLOCKS
    except SwarmError:
        pass
    finally:
        shutil.rmtree(folder)
