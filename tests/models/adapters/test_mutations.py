"""Adapters' files that were changed at random: they are read, or refused with an error of ours."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from swarm.errors import AdapterError
from swarm.models.adapters.adapter_files import read_adapter
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint

CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([10**9, 10**30, 1e300, -0.5, "", "LORA", "PROMPT_TUNING", "\0", [], {}, [1], {"a": 1}, {"": {}}]),
)
NAMES = [
    *CONFIG,
    "rank_pattern",
    "alpha_pattern",
    "num_virtual_tokens",
    "revision",
    "use_rslora",
    "bias",
    "modules_to_save",
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint()


@pytest.fixture(scope="module")
def original(tmp_path_factory, checkpoint) -> Path:
    folder: Path = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    size = checkpoint.config.hidden_size
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{place}.lora_A.weight": torch.ones(1, size), f"{place}.lora_B.weight": torch.ones(size, 1)}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert read_adapter(folder, checkpoint).lora
    return folder


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_a_changed_config(tmp_path_factory, original, checkpoint, changes):
    folder = shutil.copytree(original, tmp_path_factory.mktemp("changed") / "adapter")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    with suppress(AdapterError):
        read_adapter(folder, checkpoint)
    shutil.rmtree(folder)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6), st.integers(1, 5000))
def test_changed_and_missing_bytes(tmp_path_factory, original, checkpoint, changes, length):
    folder = shutil.copytree(original, tmp_path_factory.mktemp("changed") / "adapter")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        data = bytearray((original / name).read_bytes())
        for place, value in changes:
            data[place % len(data)] = value
        (folder / name).write_bytes(data[:length])
        with suppress(AdapterError):
            read_adapter(folder, checkpoint)
        shutil.copy(original / name, folder)
    shutil.rmtree(folder)
