"""Attention over pages: the card's kernel against the reference, and sessions in pages against a processor."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import schedules, tiny
from benchmarks.gpu.bench import Bench, Case, Step, WrongResult
from benchmarks.gpu.records import Measured
from swarm.models.attention.page_pool import PAGE_POSITIONS
from swarm.models.attention.paged_kernels import MAX_RELATIVE_ERROR, PagedKernel, reference_kernel
from swarm.models.execution.strategy import ExecutionStrategy

HEADS = ((4, 4, 64), (8, 2, 128), (8, 1, 96), (4, 2, 256))
"""Heads, heads of keys and width of a head."""

BORDERS = (1, 16, PAGE_POSITIONS - 1, PAGE_POSITIONS, PAGE_POSITIONS + 1, 2 * PAGE_POSITIONS)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _cases(bench: Bench) -> list[Case]:
    kernels = [
        Case(f"kernel {name}, {'/'.join(map(str, heads))}", partial(_kernel, name=name, heads=heads), 3.0)
        for name, heads in itertools.product(DTYPES, HEADS)
    ]
    families = ("llama", "mistral", "qwen3")
    sessions = [
        Case(f"sessions {family} {name}", partial(_sessions, family=family, name=name), 4.0)
        for family, name in itertools.product(families, DTYPES)
    ]
    return bench.sized(kernels + sessions, [*kernels[:2], *sessions[:3]])


STEP = Step("pages", "Attention over pages, against the reference", 45.0, _cases)


def _kernel(bench: Bench, name: str, heads: tuple[int, int, int]) -> Measured:
    query_heads, key_heads, width = heads
    dtype = DTYPES[name]
    which, kernel = tiny.right_kernel(bench.device, dtype, width, key_heads)
    worst, batches = 0.0, bench.sized(40, 4)
    for seed in range(batches):
        arguments = _random_batch(seed, query_heads, key_heads, width)
        worst = max(worst, _kernel_error(bench, kernel, dtype, arguments))
        if not worst < MAX_RELATIVE_ERROR[dtype]:
            raise WrongResult(f"batch {seed} of {which}: relative error {worst:.2e}")
    return Measured({"batches": batches, "largest error": worst}, note=which)


def _random_batch(seed: int, query_heads: int, key_heads: int, width: int) -> dict[str, Any]:
    """Arguments of a kernel: sequences of any lengths around the borders of pages, pages in any order."""
    choice, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [max(1, choice.choice(BORDERS) + choice.randint(-2, 2)) for _ in range(choice.randint(1, 6))]
    single = choice.random() < 0.5
    news = [1 if single else choice.randint(1, length) for length in lengths]
    needed = [-(-length // PAGE_POSITIONS) for length in lengths]
    order = list(range(1, 1 + sum(needed)))
    choice.shuffle(order)
    table = [[order.pop() for _ in range(count)] + [0] * (max(needed) + 1 - count) for count in needed]
    window = choice.choice((None, None, 5, PAGE_POSITIONS // 2, PAGE_POSITIONS + 3))
    return {
        "query": torch.randn(sum(news), query_heads, width, generator=noise),
        "key": torch.randn(1 + sum(needed), PAGE_POSITIONS, key_heads, width, generator=noise),
        "value": torch.randn(1 + sum(needed), PAGE_POSITIONS, key_heads, width, generator=noise),
        "bounds": list(itertools.accumulate(news, initial=0)),
        "max_q": max(news),
        "max_k": max(lengths),
        "window_size": (-1, 0) if window is None else (window, 0),
        "seqused_k": lengths,
        "block_table": table,
        "enable_gqa": query_heads != key_heads,
    }


def _kernel_error(bench: Bench, kernel: PagedKernel, dtype: torch.dtype, batch: dict[str, Any]) -> float:
    """How far the card's kernel is from the reference in fp32 on the processor, for the same rounded numbers."""
    tensors = [batch[name].to(dtype) for name in ("query", "key", "value")]
    outputs = []
    for function, device, of_dtype in ((kernel, bench.device, dtype), (reference_kernel, tiny.CPU, torch.float32)):
        integers = [
            torch.tensor(batch[name], dtype=torch.int32, device=device)
            for name in ("bounds", "seqused_k", "block_table")
        ]
        output = function(
            *(one.to(device, of_dtype) for one in tensors), integers[0], None, batch["max_q"], batch["max_k"],
            scale=None, window_size=batch["window_size"], enable_gqa=batch["enable_gqa"], seqused_k=integers[1],
            block_table=integers[2], num_splits=1,
        )  # fmt: skip
        outputs.append(output.float().cpu())
    return float((outputs[0] - outputs[1]).norm() / outputs[1].norm())


def _sessions(bench: Bench, family: str, name: str) -> Measured:
    dtype, windows = DTYPES[name], {"mistral": {"sliding_window": 100}}
    checkpoint = tiny.checkpoint_of(family, max_position_embeddings=tiny.POSITIONS, **windows.get(family, {}))
    on_card = tiny.load(checkpoint, dtype, bench.device, "contiguous")
    width = on_card.module.config.hidden_size // on_card.module.config.num_attention_heads
    which, kernel = tiny.right_kernel(bench.device, dtype, getattr(on_card.module.config, "head_dim", None) or width)
    paged = tiny.in_pages(on_card, kernel)
    rounded, exact = (tiny.load(checkpoint, of, tiny.CPU) for of in (dtype, torch.float32))
    worst, played = 0.0, bench.sized(6, 1)
    for seed in range(played):
        schedule = schedules.random_schedule(seed, BORDERS)
        _, expected = schedules.play(exact, schedule)
        found = schedules.errors(schedule, *schedules.play(paged, schedule), expected)
        other = schedules.errors(schedule, *schedules.play(rounded, schedule), expected)
        schedules.require_close(found, other, dtype, f"schedule {seed} in pages")
        plain = paged.with_strategy(ExecutionStrategy("contiguous"))
        contiguous = schedules.errors(schedule, *schedules.play(plain, schedule), expected)
        schedules.require_close(contiguous, other, dtype, f"schedule {seed} in contiguous caches")
        worst = max(worst, found.largest)
    assert paged.strategy.paging is not None
    left = paged.strategy.paging.pool.in_use
    if left:
        raise WrongResult(f"{left} pages are still held although no session is left")
    return Measured({"schedules": played, "largest error": worst}, note=which)
