"""What lenses are worth: share of held-out tokens whose early successor is the full model's, before and after training.

    python -m benchmarks.early_exit.lenses [--model FOLDER] [--text texts/*.txt] [--tokens 40000] [--servers 3]

Lenses for every boundary are trained over servers on this machine, with the model as it is. Without `--text`, on texts
that the model itself writes: those are what it meets when it generates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import machine
from benchmarks.common.shapes import split_blocks
from benchmarks.common.tables import table
from swarm import AutoDistributedModelForCausalLM
from swarm.cli.local_swarm import LocalSwarm
from swarm.client.model.train_exits import WINDOW_TOKENS, ExitQuality
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.p2p import quiet_hivemind

BATCH = 16


def write(local: Any, tokens: int) -> torch.Tensor:
    """Texts that the model writes by itself, sampled, `[texts, WINDOW_TOKENS]`."""
    torch.manual_seed(0)
    length = min(WINDOW_TOKENS, local.config.max_position_embeddings - 1)
    start = torch.full((BATCH, 1), local.config.bos_token_id or 0)
    count = -(-tokens // (BATCH * length))
    options = {"do_sample": True, "max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
    return torch.cat([local.generate(start, **options)[:, 1:] for _ in range(count)])


def train(folder: Path, texts: Sequence[torch.Tensor], servers: int) -> tuple[list[ExitQuality], float]:
    """Lenses for every boundary: what they are worth, and the seconds that it took."""
    blocks = AutoConfig.from_pretrained(folder).num_hidden_layers
    spans = split_blocks(blocks, servers)
    with LocalSwarm(str(folder), spans, options=("--threads", "1", "--throughput", "1000")) as swarm:
        model: Any = AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=[swarm.address], wire="none")
        began = time.perf_counter()
        quality = model.train_exits(texts, boundaries=range(1, blocks))
        seconds = time.perf_counter() - began
        model.swarm.close()
    return quality, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER)
    parser.add_argument(
        "--text", type=Path, nargs="+", help="on which lenses are trained; the default: the model's own"
    )
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--servers", type=int, default=3)
    arguments = parser.parse_args()
    quiet_hivemind()
    torch.set_num_threads(1)
    print(", ".join(machine.describe().values()))
    if arguments.text:
        tokenizer, share = AutoTokenizer.from_pretrained(arguments.model), arguments.tokens // len(arguments.text)
        texts = [torch.tensor(tokenizer(path.read_text())["input_ids"][:share]) for path in arguments.text]
    else:
        texts = [write(AutoModelForCausalLM.from_pretrained(arguments.model), arguments.tokens)]
    quality, seconds = train(arguments.model, texts, arguments.servers)
    tokens = sum(text.numel() for text in texts)
    print(f"\nLenses, trained on {tokens} tokens in {seconds:.0f} s\n")
    rows = [[str(one.block), f"{one.before:.1%}", f"{one.after:.1%}"] for one in quality]
    print(table(["in front of block", "without a lens", "with it"], rows))


if __name__ == "__main__":
    main()
