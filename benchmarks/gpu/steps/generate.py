"""transformers' own generate, with a model of the same blocks: what a user of a single machine has."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import spans
from benchmarks.gpu.bench import Bench, Case, Step
from benchmarks.gpu.records import Measured
from benchmarks.gpu.steps.card import read_bandwidth
from swarm.models.loading.random_span import llama_config

TOKENS = 24


def _cases(bench: Bench) -> list[Case]:
    pairs = bench.sized(((1, 128), (8, 128), (1, 4096), (32, 128)), ((1, 16),))
    return [
        Case(f"7B bf16, batch {batch}, context {past}", partial(_generate, batch=batch, past=past), 4.0)
        for batch, past in pairs
    ]


STEP = Step("generate", "transformers' generate, for comparison", 20.0, _cases)


def _generate(bench: Bench, batch: int, past: int) -> Measured:
    model, blocks = bench.keep("generate", lambda: _load(bench))
    prompt = torch.randint(1, 255, (batch, past), device=bench.device)
    seconds = [_seconds(bench, model, prompt, tokens) for tokens in (TOKENS, TOKENS, 2 * TOKENS)]
    step = (seconds[2] - seconds[1]) / TOKENS  # the first one warms up; the prompt is in both
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    reading = weights / bench.rate("memory", "bandwidth", read_bandwidth)
    values: dict[str, float | int | str] = {
        "blocks": blocks,
        "ms a token": step * 1e3,
        "ms to read the weights": reading * 1e3,
        "ratio": step / reading,
        "tokens/s": batch / step,
    }
    return Measured(values, note="the cache is not part of what is read")


def _load(bench: Bench) -> tuple[Any, int]:
    shape = spans.shape_of(bench, "7B")
    blocks = min(shape.blocks, int(bench.free_bytes() / 3 // (2 * shape.block_weights)))
    config = llama_config(shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, blocks)
    config.eos_token_id = None
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval(), blocks


def _seconds(bench: Bench, model: Any, prompt: torch.Tensor, tokens: int) -> float:
    torch.cuda.synchronize(bench.device)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    torch.cuda.synchronize(bench.device)
    return time.perf_counter() - began
