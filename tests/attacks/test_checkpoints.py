"""Checkpoints and adapters whose authors want the program that opens them to hang, or to break down."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swarm.errors import AdapterError
from swarm.models.adapters.adapter_files import read_adapter
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER, open_checkpoint

TIMEOUT_S = 240.0
MEMORY_BYTES = 6 << 30

OPEN_BOTH = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from swarm.errors import UsageError
from swarm.models.checkpoints.checkpoint import open_checkpoint
try:
    open_checkpoint(sys.argv[2]).structure
except UsageError as error:
    print("refused:", error)
print("bystander:", open_checkpoint().structure.layers_path)
"""


def write_config(folder: Path, **changes: object) -> Path:
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 10**9}, {"num_labels": 10**10}, {"model_type": "qwen3", "num_hidden_layers": 10**12}],
    ids=["blocks", "labels", "lists of layers"],
)
def test_a_config_of_a_model_that_cannot_be(tmp_path, changes):
    """At a254ca2 the process built a thousand million layers or labels until its memory or the time was used up. Tried
    there: none of the three had ended after 110 s on a busy machine, and all were growing; the labels had taken 2.6 GB
    within 6 s of processor time. Now the config is refused, and the next model opens in the same process."""
    command = [sys.executable, "-c", OPEN_BOTH, str(MEMORY_BYTES), str(write_config(tmp_path, **changes))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, bystander = done.stdout.splitlines()
    assert refused.startswith("refused: config.json")
    assert bystander == "bystander: layers"


def test_an_adapter_for_a_block_whose_number_has_thousands_of_digits(tmp_path):
    """At a254ca2 this was a `ValueError` of Python's, outside of the project's errors, which ends whatever reads the
    adapter. Now the adapter is refused."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    key = f"base_model.model.model.layers.{'9' * 5000}.self_attn.q_proj.lora_A.weight"
    save_file({key: torch.ones(1, 1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError):
        read_adapter(tmp_path, open_checkpoint())


def test_a_tensor_of_a_block_whose_number_has_thousands_of_digits(tmp_path):
    """At a254ca2 this was a `ValueError` too, while a checkpoint's index was read. Now the tensor is of no block."""
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.locate(f"model.layers.{'9' * 5000}.mlp.up_proj.weight") is None
    assert checkpoint.locate("model.layers.3.mlp.up_proj.weight") == (3, "mlp.up_proj.weight")
