"""The model card of an adapter: tags by which it can be found, and how to use it."""

from __future__ import annotations

from huggingface_hub import ModelCard, ModelCardData

from swarm.models.adapters.adapter_config import Method

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
