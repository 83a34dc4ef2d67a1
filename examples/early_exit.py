"""Early exit: lenses are trained over a swarm, and a text is written with them and without.

    python examples/early_exit.py [--initial-peers ADDRESS]

The lenses learn from texts that the model itself writes over the swarm, unless `--text` names others. They are written
to a folder that `model.load_exits` and `swarm gateway --exits-from` read. With servers on this machine there is no
delay to save, so the text comes no sooner; over the Internet it does.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from running import options, peers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import swarm
from swarm.client.routes.events import ExitTaken, ExitVerified, SessionEvent
from swarm.models.checkpoints.checkpoint import open_checkpoint

PROMPT = "Once upon a time"
TRAIN_TOKENS = 16_384
TEXTS, LENGTH = 32, 256
"""Texts that the model writes at once, and tokens of each."""


class ExitCounts:
    """Counts the tokens that left early, and those whose successor stood."""

    def __init__(self) -> None:
        self.left = self.judged = self.stood = 0

    def __call__(self, event: SessionEvent) -> None:
        """Count an event of a session."""
        self.left += isinstance(event, ExitTaken)
        if isinstance(event, ExitVerified):
            self.judged += 1
            self.stood += event.stands


def training_text(model: Any, tokenizer: PreTrainedTokenizerBase, path: Path | None, tokens: int) -> torch.Tensor:
    """Token ids of the file, or of texts that the model writes."""
    if path is not None:
        ids: torch.Tensor = tokenizer(path.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
        return ids[:tokens]
    start = torch.full((TEXTS, 1), tokenizer.bos_token_id or 0)
    length = min(LENGTH, -(-tokens // TEXTS))
    settings = {"do_sample": True, "min_new_tokens": length, "max_new_tokens": length, "pad_token_id": 0}
    rounds = -(-tokens // (TEXTS * length))
    print(f"The model writes {rounds * TEXTS} texts of {length} tokens to learn from ...")
    mask = torch.ones_like(start)
    return torch.cat([model.generate(start, attention_mask=mask, **settings)[:, 1:] for _ in range(rounds)]).flatten()


def timed_text(model: Any, prompt: torch.Tensor, tokens: int, exits: swarm.EarlyExit | None) -> tuple[Any, float, Any]:
    """A greedy text, its tokens/s behind the prompt, and what left early."""
    counts = ExitCounts()
    with model.inference_session(max_length=prompt.shape[1] + tokens, listener=counts, early_exit=exits):
        model.generate(prompt, max_new_tokens=1, do_sample=False)
        began = time.perf_counter()
        text = model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        return text, (text.shape[1] - prompt.shape[1]) / (time.perf_counter() - began), counts


def main() -> None:
    parser = options(__doc__, "exits", trains_by_steps=False)
    parser.add_argument("--text", type=Path, help="to learn from; default: the model's own texts")
    parser.add_argument("--train-tokens", type=int, default=TRAIN_TOKENS, help="how much of it")
    parser.add_argument("--tokens", type=int, default=120, help="length of the text that is written")
    parser.add_argument("--threshold", type=float, default=0.1, help="a token leaves if its confidence is above it")
    arguments = parser.parse_args()
    with peers(arguments) as addresses:
        torch.manual_seed(arguments.seed)
        model: Any = swarm.AutoDistributedModelForCausalLM.from_pretrained(arguments.model, initial_peers=addresses)
        tokenizer = AutoTokenizer.from_pretrained(open_checkpoint(arguments.model).source)
        text = training_text(model, tokenizer, arguments.text, arguments.train_tokens)
        for one in model.train_exits([text]):
            print(
                f"In front of block {one.block}, {one.after:.0%} say what the full model says, {one.before:.0%} before"
            )
        model.save_exits(arguments.output)
        model.load_exits(arguments.output)
        prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        plain, plain_rate, _ = timed_text(model, prompt, arguments.tokens, None)
        exits = swarm.EarlyExit(threshold=arguments.threshold)
        early, early_rate, counts = timed_text(model, prompt, arguments.tokens, exits)
        model.swarm.close()
    print(tokenizer.decode(early[0], skip_special_tokens=True))
    print(f"Without exits: {plain_rate:.1f} tokens/s")
    print(f"With exits: {early_rate:.1f} tokens/s; {counts.left} tokens left, {counts.stood} of {counts.judged} stood")
    print("The texts are equal" if early.equal(plain) else "The texts differ")


if __name__ == "__main__":
    main()
