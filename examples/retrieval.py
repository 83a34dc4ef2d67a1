"""Retrieval with a custom module between the swarm's blocks.

    python examples/retrieval.py [--initial-peers ADDRESS]

After two thirds of the blocks every token looks up what followed in similar places of a library of source code: the
nearest hidden states of `remote_blocks[:8]`, and the tokens that came next there (the idea of kNN-LM, Khandelwal et al.
2020, as an input to the rest of the model instead of to its outputs). A small module, trained here through the swarm,
mixes them in; `remote_blocks[8:]` goes on from there. The baseline is the same module, trained in the same way, with
places that are picked at random instead of by likeness.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from lora_text import chunks
from running import options, peers, plot, train
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm import AutoDistributedModelForCausalLM
from swarm.models.checkpoints.checkpoint import open_checkpoint

BEFORE = 8
"""Number of blocks before the module."""

NEIGHBOURS = 8
BATCH, STEPS = 8, 100
RATE = 3e-3
REMEMBERED = 300
"""Number of chunks of 128 tokens in the library."""

MARGIN = 0.5
"""Required reduction of the held-out loss relative to the baseline, fixed before training: nats per token."""


@dataclass(frozen=True)
class Library:
    """The places that can be retrieved.

    Attributes:
        places: normalized hidden states, `[places, hidden]`.
        following: embeddings of the tokens that came next there, `[places, hidden]`.
        documents: the chunk that each place belongs to.
    """

    places: torch.Tensor
    following: torch.Tensor
    documents: torch.Tensor

    def look_up(
        self, hidden: torch.Tensor, documents: torch.Tensor, at_random: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Likeness `[tokens, n]` of `NEIGHBOURS` places to each hidden state, and what followed `[tokens, n, hidden]`.

        Args:
            documents: a chunk for each token, whose own places are left out; -1 for none.
        """
        likeness = functional.normalize(hidden, dim=-1) @ self.places.T
        likeness = likeness.masked_fill(documents[:, None] == self.documents, -2.0)
        if at_random:
            found = torch.randint(len(self.places), (len(hidden), NEIGHBOURS))
        else:
            found = likeness.topk(NEIGHBOURS).indices
        return likeness.gather(1, found), self.following[found]


class Memory(nn.Module):
    """Adds what followed in similar places, weighted by similarity."""

    def __init__(self, library: Library, at_random: bool) -> None:
        super().__init__()
        size = library.following.shape[1]
        self.sharpness = nn.Parameter(torch.tensor(20.0))
        self.mix = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        nn.init.zeros_(self.mix[-1].weight)
        nn.init.zeros_(self.mix[-1].bias)
        self._library, self._at_random = library, at_random

    def forward(self, hidden: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """`hidden` is `[rows, tokens, hidden]`; `documents` says which chunk of the library each row is, or -1."""
        flat = hidden.flatten(0, 1)
        with torch.no_grad():
            owners = documents.repeat_interleave(hidden.shape[1])
            likeness, following = self._library.look_up(flat, owners, self._at_random)
        weights = (self.sharpness * likeness).softmax(-1)
        return hidden + self.mix((weights[..., None] * following).sum(1)).view_as(hidden)


@torch.no_grad()
def remember(model: Any, rows: torch.Tensor) -> Library:
    """Build the library from chunks `[chunks, tokens]`."""
    states, following = [], []
    for part in rows.split(16):
        embedded = model.word_embeddings(part)
        states.append(model.remote_blocks[:BEFORE](embedded)[:, :-1])
        following.append(embedded[:, 1:])
    documents = torch.arange(len(rows)).repeat_interleave(rows.shape[1] - 1)
    places = functional.normalize(torch.cat(states).flatten(0, 1), dim=-1)
    return Library(places, torch.cat(following).flatten(0, 1), documents)


def loss_of(model: Any, memory: Memory, rows: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Loss in nats per token with the module between the blocks."""
    hidden = model.remote_blocks[:BEFORE](model.word_embeddings(rows))
    hidden = model.remote_blocks[BEFORE:](memory(hidden, documents))
    logits = model.lm_head(model.base_model.norm(hidden))
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def tune(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    library: Library,
    at_random: bool,
    seed: int,
    steps: int,
    most: int | None = None,
) -> tuple[float, list[float]]:
    """Train a module; returns its held-out loss and the losses of all steps."""
    torch.manual_seed(seed)
    memory, chance = Memory(library, at_random), random.Random(seed)
    rows = chunks(tokenizer, held_out=False, characters=600_000)
    data = [{"documents": torch.tensor(chance.sample(range(len(rows)), BATCH))} for _ in range(steps)]

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(model, memory, rows[batch["documents"]], batch["documents"])

    losses = train(memory.parameters(), data, loss, rate=RATE)
    with torch.no_grad():
        parts = chunks(tokenizer, held_out=True, characters=40_000)[:most].split(16)
        held_out = [float(loss_of(model, memory, part, torch.full((len(part),), -1))) * len(part) for part in parts]
    return sum(held_out) / sum(map(len, parts)), losses


def main() -> None:
    arguments = options(__doc__, "retrieval").parse_args()
    steps = arguments.steps or STEPS
    with peers(arguments) as addresses:
        model = AutoDistributedModelForCausalLM.from_pretrained(arguments.model, initial_peers=addresses)
        model.requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(open_checkpoint(arguments.model).source)
        library = remember(model, chunks(tokenizer, held_out=False, characters=600_000)[:REMEMBERED])
        baseline, _ = tune(model, tokenizer, library, True, arguments.seed, steps, arguments.held_out)
        result, losses = tune(model, tokenizer, library, False, arguments.seed, steps, arguments.held_out)
        model.swarm.close()
    print(f"Held-out loss: {baseline:.3f} at random, {result:.3f} by likeness; the margin asked for is {MARGIN}")
    plot(losses, "Retrieval between blocks", arguments.output / "loss.png", ("at random, held-out", baseline))


if __name__ == "__main__":
    main()
