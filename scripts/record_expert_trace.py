"""Trains a small mixture of experts on any text files, and records which experts each token of other text needs.

    python scripts/record_expert_trace.py texts/*.txt --minutes 45 --work runs/experts

The model has as many experts a layer, and as many a token, as the large one that `benchmarks/flash` measures: the
trace can be played through a cache of its experts as it is. A model that lies in `--work` already is trained further,
or only traced with `--minutes 0`.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from scripts.train_demo_model import Text, learning_rate, load_texts

LAYERS, EXPERTS, EXPERTS_A_TOKEN = 8, 128, 8
VOCABULARY, CONTEXT, ROWS = 2048, 256, 8
LEARNING_RATE = 2e-3
BALANCE = 0.001
"""Weight of the loss that keeps a router from always choosing the same experts, as published models were trained."""

TRACED_TOKENS = 512
"""Held-out tokens of each text."""


def new_model() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_A_TOKEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=BALANCE,
        dtype="float32",
    )
    return Qwen3MoeForCausalLM(config)


def train(model: Any, texts: list[Text], minutes: float, seed: int) -> None:
    """Train for some minutes on random chunks, long texts more often."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draw, began, step = random.Random(seed), time.monotonic(), 0
    sources = [text.train for text in texts]
    model.train()
    while (spent := (time.monotonic() - began) / 60) < minutes:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, spent / minutes, LEARNING_RATE)
        chosen = draw.choices(sources, [len(ids) for ids in sources], k=ROWS)
        starts = [draw.randrange(len(ids) - CONTEXT) for ids in chosen]
        batch = torch.stack([ids[at : at + CONTEXT] for ids, at in zip(chosen, starts, strict=True)])
        result = model(input_ids=batch, labels=batch, use_cache=False)
        torch.autograd.backward(result.loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(f"{spent:.0f} minutes, step {step}: loss {result.loss - BALANCE * result.aux_loss:.2f}", flush=True)


@torch.no_grad()
def experts_of(model: Any, ids: Tensor) -> np.ndarray:
    """The experts of each token of one text, `[tokens, layers, experts a token]` uint8."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    model.eval()
    model(input_ids=ids[None], use_cache=False, output_router_logits=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).to(torch.uint8).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="UTF-8 text files")
    parser.add_argument("--minutes", type=float, default=45, help="of training")
    parser.add_argument("--work", type=Path, default=Path("runs/experts"), help="folder of the model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/flash/experts/trace.npz"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    _, texts = load_texts(sorted(options.texts), {})
    model = Qwen3MoeForCausalLM.from_pretrained(options.work) if options.work.exists() else new_model()
    if options.minutes:
        train(model, texts, options.minutes, options.seed)
        model.save_pretrained(options.work)
    traces = [experts_of(model, text.held_out[:TRACED_TOKENS]) for text in texts]
    np.savez_compressed(options.out, **{text.name: trace for text, trace in zip(texts, traces, strict=True)})


if __name__ == "__main__":
    main()
