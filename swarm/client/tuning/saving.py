"""Saving trained parameters: PEFT's files and a model card, in a folder or a repository of the hub."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from safetensors.torch import save_file

from swarm.client.tuning.lora import Lora
from swarm.models.adapters.adapter_config import PEFT_TYPES, Method
from swarm.models.adapters.adapter_files import CONFIG_FILE, DEEP_PROMPTS_KEY, PROMPTS_KEY, WEIGHTS_FILE
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.cutting.model_inspection import LoraTargets, find_lora_targets

METHOD_TAGS: dict[Method, tuple[str, ...]] = {
    "lora": ("lora",),
    "ptune": ("prompt-tuning",),
    "deep_ptune": ("prompt-tuning", "deep-prompt-tuning"),
    "head": ("linear-probing",),
}
METHOD_NAMES: dict[Method, str] = {
    "lora": "LoRA factors",
    "ptune": "a soft prompt (prompt tuning)",
    "deep_ptune": "soft prompts at every block (deep prompt tuning)",
    "head": "a classification head",
}
PIPELINE_TAGS = {"CAUSAL_LM": "text-generation", "SEQ_CLS": "text-classification"}
MODEL_CLASSES = {
    "CAUSAL_LM": ("AutoDistributedModelForCausalLM", "AutoModelForCausalLM"),
    "SEQ_CLS": ("AutoDistributedModelForSequenceClassification", "AutoModelForSequenceClassification"),
}

SWARM_ONLY_TEXT = """
PEFT does not support this method. `adapter_model.safetensors` holds {tensors}.
"""
SWARM_ONLY_TENSORS: dict[Method, str] = {
    "deep_ptune": (
        "`prompt_embeddings` `[positions, width]`, which precede the embedded text, and "
        "`deep_prompt_embeddings` `[blocks, positions, hidden size]`, which are added to the inputs of each block at "
        "these positions"
    ),
    "head": "the weights of the head",
}

STATE_FILE = "model.safetensors"

CARD_FILE = "README.md"


def model_card(base: str, revision: str, method: Method, task: str) -> str:
    """The text of `README.md`.

    Args:
        base, revision: the model for which the adapter was trained.
        method: how it was trained.
        task: "CAUSAL_LM" or "SEQ_CLS".
    """
    is_of_peft = method not in SWARM_ONLY_TENSORS
    data = ModelCardData(
        base_model=base,
        library_name="peft" if is_of_peft else "swarm",
        pipeline_tag=PIPELINE_TAGS[task],
        tags=[f"base_model:adapter:{base}", f"base_model_revision:{revision}", *METHOD_TAGS[method], "swarm"],
        base_model_relation="adapter",
        base_model_revision=revision,
    )
    remote, local = MODEL_CLASSES[task]
    extra = ", num_labels=..." if task == "SEQ_CLS" else ""
    plain = f"""
Without a swarm, on one machine:

```python
from peft import PeftModel
from transformers import {local}

model = {local}.from_pretrained("{base}"{extra})
model = PeftModel.from_pretrained(model, "THIS_REPOSITORY")
```
"""
    own = SWARM_ONLY_TEXT.format(tensors=SWARM_ONLY_TENSORS.get(method, ""))
    what = METHOD_NAMES[method] + (" and a classification head" if task == "SEQ_CLS" and method != "head" else "")
    text = f"""# Adapter of {base}

{what[0].upper()}{what[1:]}, trained over a swarm. The blocks of {base} (revision `{revision}`) were
frozen on servers.

```python
from swarm import {remote}

model = {remote}.from_pretrained("{base}", adapter="THIS_REPOSITORY")
```
{plain if is_of_peft else own}"""
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


@dataclass(frozen=True, eq=False)
class TrainedSnapshot:
    """The values that are saved.

    Attributes:
        checkpoint: the model for which they were trained.
        method: how they were trained.
        path: path of the list of blocks in the model, such as "model.layers".
        prompts, deep_prompts, lora: as in the model.
        heads: tensors of the heads that were trained, by their names in the model.
    """

    checkpoint: Checkpoint
    method: Method
    path: str
    prompts: torch.Tensor | None
    deep_prompts: torch.Tensor | None
    lora: Lora | None
    heads: Mapping[str, torch.Tensor]

    @property
    def task(self) -> str:
        return "SEQ_CLS" if self.heads else "CAUSAL_LM"

    @property
    def base(self) -> str:
        """The model's repository, or the name of its folder without the path, which is private to this machine."""
        is_here = Path(self.checkpoint.source).exists()
        return self.checkpoint.name if is_here else self.checkpoint.source


def save(snapshot: TrainedSnapshot, folder: str | Path) -> None:
    """Write config, weights and model card into `folder`, which is created if it is missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(peft_tensors(snapshot), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(peft_config(snapshot), indent=2, sort_keys=True) + "\n")
    (folder / CARD_FILE).write_text(
        model_card(snapshot.base, snapshot.checkpoint.revision, snapshot.method, snapshot.task)
    )


def save_state(state: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Write parameters under their names in the model."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(tensors, Path(folder) / STATE_FILE, metadata={"format": "pt"})


def push(
    snapshot: TrainedSnapshot,
    repository: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    **upload: Any,
) -> str:
    """Upload the files of `save` to a repository of the hub, which is created if it is missing.

    Args:
        repository: such as "name/adapter". The other arguments are those of `huggingface_hub.HfApi`.
        upload: of its `upload_folder`.

    Returns:
        the URL of the commit.
    """
    api = HfApi(token=token)
    made = api.create_repo(repository, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save(snapshot, folder)
        commit = api.upload_folder(repo_id=made.repo_id, folder_path=folder, **upload)
    return str(commit.commit_url)


def peft_tensors(snapshot: TrainedSnapshot) -> dict[str, torch.Tensor]:
    """The tensors of `adapter_model.safetensors`, under PEFT's names."""
    found: dict[str, torch.Tensor] = {}
    if snapshot.prompts is not None:
        found[PROMPTS_KEY] = snapshot.prompts
    if snapshot.deep_prompts is not None:
        found[DEEP_PROMPTS_KEY] = snapshot.deep_prompts
    if snapshot.lora is not None:
        for block in snapshot.lora:
            for module, one in snapshot.lora[block].items():
                place = f"base_model.model.{snapshot.path}.{block}.{module}"
                found[f"{place}.lora_A.weight"] = one.lora_A
                found[f"{place}.lora_B.weight"] = one.lora_B
    wrappers = "base_model.model." if snapshot.method == "lora" else "base_model."
    found.update({wrappers + name: tensor for name, tensor in snapshot.heads.items()})
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def peft_config(snapshot: TrainedSnapshot) -> dict[str, Any]:
    """The entries of `adapter_config.json`."""
    config = snapshot.checkpoint.config
    common = {
        "peft_type": PEFT_TYPES[snapshot.method],
        "task_type": snapshot.task,
        "base_model_name_or_path": snapshot.base,
        "revision": snapshot.checkpoint.revision,
        "inference_mode": True,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in snapshot.heads}) or None,
    }
    if snapshot.lora is not None:
        return {**common, **_lora_config(snapshot.lora, snapshot.path, find_lora_targets(config))}
    if snapshot.prompts is None:
        return common
    return {
        **common,
        "num_virtual_tokens": len(snapshot.prompts),
        "token_dim": snapshot.prompts.shape[1],
        "num_layers": snapshot.checkpoint.blocks,
        "num_attention_heads": config.num_attention_heads,
        "num_transformer_submodules": 1,
    }


def _lora_config(lora: Lora, path: str, modules: LoraTargets) -> dict[str, Any]:
    trained = {(block, module): one for block in lora for module, one in lora[block].items()}
    rank = Counter(one.rank for one in trained.values()).most_common(1)[0][0]
    alpha = Counter(one.alpha for one in trained.values()).most_common(1)[0][0]
    places = {place: f"{path}.{place[0]}.{place[1]}" for place in trained}
    return {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": lora.use_rslora,
        "target_modules": _target_modules(trained, places, modules),
        "rank_pattern": _pattern({key: one.rank for key, one in trained.items()}, places, rank),
        "alpha_pattern": _pattern({key: one.alpha for key, one in trained.items()}, places, alpha),
        "fan_in_fan_out": modules.is_transposed,
    }


def _target_modules(
    trained: Mapping[tuple[int, str], Any], places: Mapping[tuple[int, str], str], modules: LoraTargets
) -> list[str]:
    """The module's name if all blocks that have such a module train it, else the full paths."""
    names = []
    for module in {module for _, module in trained}:
        having = {block for block, inside in enumerate(modules.blocks) if module in inside}
        training = {block for block, name in trained if name == module}
        names += [module] if training == having else [places[block, module] for block in training]
    return sorted(names)


def _pattern(
    values: Mapping[tuple[int, str], Any], places: Mapping[tuple[int, str], str], usual: Any
) -> dict[str, Any]:
    """The values that differ from `usual`: by the module's name if it is the same in all blocks, else by full path."""
    pattern = {}
    for module in sorted({module for _, module in values}):
        mine = {key: value for key, value in values.items() if key[1] == module}
        if len(set(mine.values())) == 1:
            pattern[module] = next(iter(mine.values()))
        else:
            pattern.update({places[key]: value for key, value in mine.items()})
    return {name: value for name, value in pattern.items() if value != usual}
