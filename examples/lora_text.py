"""LoRA for causal text: the demo model, which knows old English stories, learns to write Python.

    python examples/lora_text.py [--initial-peers ADDRESS]

The factors of all linear layers are trained here and travel with the requests; the servers' blocks stay as they are.
The text is source code of the standard library of the Python that runs (`standard_library.py`); what is held out comes
from other modules. The result is a folder in PEFT's format: `peft` reads it without a swarm.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from running import options, peers, plot, train
from standard_library import sources
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm import AutoDistributedModelForCausalLM, TuningOptions
from swarm.models.checkpoints.checkpoint import open_checkpoint

LENGTH, BATCH, STEPS = 128, 8, 150
RATE = 3e-3
LORA = {
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
MARGIN = 2.0
"""Required reduction of the held-out loss, fixed before training: nats per token."""

PROMPT = "import os\n\n\ndef read(path):\n"


def chunks(tokenizer: PreTrainedTokenizerBase, held_out: bool, characters: int) -> torch.Tensor:
    """Token ids `[chunks, LENGTH]`."""
    tokens = tokenizer(sources(held_out, characters), return_tensors="pt", verbose=False)["input_ids"][0]
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def batches(tokenizer: PreTrainedTokenizerBase, seed: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the training data in an order that depends on the seed."""
    rows, chance = chunks(tokenizer, held_out=False, characters=600_000), random.Random(seed)
    for _ in range(steps):
        batch = rows[chance.sample(range(len(rows)), BATCH)]
        yield {"input_ids": batch, "labels": batch}


@torch.no_grad()
def held_out_loss(model: nn.Module, tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> float:
    """Loss in nats per token on modules that are not in the training data, on at most so many chunks."""
    rows = chunks(tokenizer, held_out=True, characters=40_000)[:most]
    parts = rows.split(16)
    return sum(float(model(input_ids=part, labels=part).loss) * len(part) for part in parts) / len(rows)


def tune(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, seed: int, steps: int | None = None, most: int | None = None
) -> tuple[float, float, list[float]]:
    """Train; returns the held-out loss before and after, and the losses of all steps."""
    before = held_out_loss(model, tokenizer, most)
    data = list(batches(tokenizer, seed, steps or STEPS))
    losses = train(model.parameters(), data, lambda batch: model(**batch).loss, rate=RATE)
    return before, held_out_loss(model, tokenizer, most), losses


def main() -> None:
    arguments = options(__doc__, "lora-text").parse_args()
    with peers(arguments) as addresses:
        torch.manual_seed(arguments.seed)
        model = AutoDistributedModelForCausalLM.from_pretrained(
            arguments.model, initial_peers=addresses, tuning_mode="lora", tuning=TuningOptions(lora_config=LORA)
        )
        tokenizer = AutoTokenizer.from_pretrained(open_checkpoint(arguments.model).source)
        before, after, losses = tune(model, tokenizer, arguments.seed, arguments.steps, arguments.held_out)
        model.save_pretrained(arguments.output)
        written = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=60, do_sample=False)
        print(tokenizer.decode(written[0], skip_special_tokens=True))
        model.swarm.close()
    print(f"Held-out loss: {before:.3f} before, {after:.3f} after; the margin asked for is {MARGIN}")
    plot(losses, "LoRA: stories to Python", arguments.output / "loss.png", ("untrained, held-out", before))


if __name__ == "__main__":
    main()
