"""Prompt tuning for classification: what is a sentence of Python's documentation about, windows or messages?

    python examples/prompt_tuning.py [--initial-peers ADDRESS] [--mode deep_ptune|ptune]

Trained are 16 virtual tokens, in front of the text and at every block, and a linear head. They stay here; the swarm's
blocks stay as they are. The sentences come from the docstrings of the standard library (`standard_library.py`).
Held-out accuracy has to beat the untrained model's, which is about one half, by `MARGIN`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from running import options, peers, plot, prepared, train
from standard_library import TOPICS, docstrings
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm import AutoDistributedModelForSequenceClassification, TuningOptions
from swarm.models.checkpoints.checkpoint import open_checkpoint

ASKED = " It is about"
"""Appended to each text, so that the last token, from which the class is read, is always the same."""

BATCH, EPOCHS, LONGEST = 16, 4, 64
RATE = 1e-2
VIRTUAL_TOKENS = 16
MARGIN = 0.15
"""Required gain in held-out accuracy, fixed before training."""

Example = tuple[str, int]


def encoded(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Make a batch, padded on the right."""
    texts = [text + ASKED for text, _ in examples]
    batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=LONGEST)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": torch.tensor([topic for _, topic in examples]),
    }


def batches(
    tokenizer: PreTrainedTokenizerBase, seed: int, steps: int | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the training data in an order that depends on the seed."""
    examples, chance = docstrings(held_out=False), random.Random(seed)
    left = steps if steps is not None else EPOCHS * (len(examples) // BATCH)
    while left > 0:
        chance.shuffle(examples)
        for first in range(0, min(left, len(examples) // BATCH) * BATCH, BATCH):
            yield encoded(tokenizer, examples[first : first + BATCH])
        left -= len(examples) // BATCH


@torch.no_grad()
def accuracy(model: nn.Module, tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> float:
    """Fraction of held-out texts that are classified correctly, of at most so many."""
    examples, right = docstrings(True, most), 0
    for first in range(0, len(examples), 64):
        batch = encoded(tokenizer, examples[first : first + 64])
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(examples)


def tune(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, seed: int, steps: int | None = None, most: int | None = None
) -> tuple[float, float, list[float]]:
    """Train; returns the held-out accuracy before and after, and the losses of all steps."""
    before = accuracy(model, tokenizer, most)
    losses = train(
        model.parameters(), list(batches(tokenizer, seed, steps)), lambda batch: model(**batch).loss, rate=RATE
    )
    return before, accuracy(model, tokenizer, most), losses


def main() -> None:
    parser = options(__doc__, "prompt-tuned")
    parser.add_argument("--mode", choices=("ptune", "deep_ptune"), default="deep_ptune")
    arguments = parser.parse_args()
    with peers(arguments) as addresses:
        torch.manual_seed(arguments.seed)
        model = AutoDistributedModelForSequenceClassification.from_pretrained(
            arguments.model,
            initial_peers=addresses,
            num_labels=len(TOPICS),
            tuning_mode=arguments.mode,
            tuning=TuningOptions(pre_seq_len=VIRTUAL_TOKENS),
        )
        tokenizer = prepared(AutoTokenizer.from_pretrained(open_checkpoint(arguments.model).source))
        model.config.pad_token_id = tokenizer.pad_token_id
        before, after, losses = tune(model, tokenizer, arguments.seed, arguments.steps, arguments.held_out)
        model.save_pretrained(arguments.output)
        model.swarm.close()
    print(f"Held-out accuracy: {before:.3f} before, {after:.3f} after; the margin asked for is {MARGIN}")
    plot(losses, f"{arguments.mode}: windows or messages?", arguments.output / "loss.png")


if __name__ == "__main__":
    main()
