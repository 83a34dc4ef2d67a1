"""Results of the examples over the swarm, compared with the same training of the local model, by seed.

    python -m benchmarks.training.finetuning [--seeds 3] [--only prompts|lora] [--json FILE]

Data, steps, learning rate and initial values are the same; only the blocks are elsewhere. Three local servers hold the
demo model. The local models are transformers' own: with `peft` for LoRA, with a hook on each layer for deep prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.common import machine
from swarm import AutoDistributedModelForCausalLM, AutoDistributedModelForSequenceClassification, TuningOptions
from swarm.cli.local_swarm import LocalSwarm
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import lora_text
import prompt_tuning
from running import BLOCKS, prepared
from standard_library import TOPICS

Result = tuple[float, float]
"""The metric on held-out data before and after training."""


class LocalDeepPrompts(nn.Module):
    """The local classification model with virtual tokens before the text and prompts at every block."""

    def __init__(self, model: Any, count: int) -> None:
        super().__init__()
        self.model, self.count = model.requires_grad_(False), count
        self.model.score.requires_grad_(True)
        embeddings = model.get_input_embeddings()
        with torch.no_grad():
            words = embeddings(torch.randint(embeddings.weight.shape[0], (count,)))
        self.prompts = nn.Parameter(words.clone())
        self.deep_prompts = nn.Parameter(torch.zeros(model.config.num_hidden_layers, count, model.config.hidden_size))
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(self._adding(number))

    def _adding(self, number: int) -> Callable[..., Any]:
        def add(module: nn.Module, args: tuple[Any, ...]) -> Any:
            hidden = args[0]
            prompted = hidden[:, : self.count] + self.deep_prompts[number]
            return torch.cat([prompted, hidden[:, self.count :]], dim=1), *args[1:]

        return add

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> SequenceClassifierOutput:
        rows = len(input_ids)
        words = self.model.get_input_embeddings()(input_ids)
        embedded = torch.cat([self.prompts.expand(rows, -1, -1), words], dim=1)
        mask = torch.cat([attention_mask.new_ones(rows, self.count), attention_mask], dim=1)
        hidden = self.model.model(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        logits = self.model.score(hidden[torch.arange(rows), mask.sum(1) - 1])
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def prompts(address: str | None, seed: int) -> Result:
    """Accuracy of the prompt-tuned model, over the swarm at `address`, or locally without an address."""
    torch.manual_seed(seed)
    tokenizer = prepared(AutoTokenizer.from_pretrained(DEMO_FOLDER))
    count = prompt_tuning.VIRTUAL_TOKENS
    if address is None:
        whole = AutoModelForSequenceClassification.from_pretrained(DEMO_FOLDER, num_labels=len(TOPICS))
        return prompt_tuning.tune(LocalDeepPrompts(whole, count), tokenizer, seed)[:2]
    model = AutoDistributedModelForSequenceClassification.from_pretrained(
        DEMO_FOLDER,
        initial_peers=[address],
        num_labels=len(TOPICS),
        tuning_mode="deep_ptune",
        tuning=TuningOptions(pre_seq_len=count),
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    try:
        return prompt_tuning.tune(model, tokenizer, seed)[:2]
    finally:
        model.swarm.close()


def lora(address: str | None, seed: int) -> Result:
    """Held-out loss of the model with LoRA, over the swarm at `address`, or locally without an address."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    if address is None:
        local = get_peft_model(AutoModelForCausalLM.from_pretrained(DEMO_FOLDER), LoraConfig(**lora_text.LORA))
        return lora_text.tune(local, tokenizer, seed)[:2]
    model = AutoDistributedModelForCausalLM.from_pretrained(
        DEMO_FOLDER, initial_peers=[address], tuning_mode="lora", tuning=TuningOptions(lora_config=lora_text.LORA)
    )
    try:
        return lora_text.tune(model, tokenizer, seed)[:2]
    finally:
        model.swarm.close()


TASKS: dict[str, tuple[str, Callable[[str | None, int], Result]]] = {
    "prompts": ("deep prompts, held-out accuracy", prompts),
    "lora": ("LoRA, held-out loss", lora),
}


def table(results: dict[str, dict[str, list[Result]]]) -> str:
    """Format the results in Markdown."""

    def cell(values: list[float]) -> str:
        return f"{statistics.mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"

    lines = ["| | untrained | over the swarm | local |", "| --- | --- | --- | --- |"]
    for name, by_place in results.items():
        before = [one[0] for one in by_place["swarm"]]
        after = [cell([one[1] for one in by_place[place]]) for place in ("swarm", "local")]
        lines.append(f"| {TASKS[name][0]} | {cell(before)} | {after[0]} | {after[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=TASKS)
    parser.add_argument("--json", type=Path, help="write the raw figures here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = machine.describe()
    results: dict[str, dict[str, list[Result]]] = {}
    with LocalSwarm(str(DEMO_FOLDER), BLOCKS, options=("--threads", "1", "--throughput", "1000")) as swarm:
        for name in [arguments.only] if arguments.only else TASKS:
            run = TASKS[name][1]
            results[name] = {
                place: [run(address, seed) for seed in range(arguments.seeds)]
                for place, address in (("swarm", swarm.address), ("local", None))
            }
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print("mean (of each seed)\n")
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
