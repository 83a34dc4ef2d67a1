"""The tests of a GPU: what it computes, against the same on a processor."""

from __future__ import annotations

import atexit
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.bench import Bench, Case, Found, NotHere, WrongResult
from swarm.data_structures import Span, StepLayout
from swarm.errors import InvalidOption
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.models.attention import page_pool
from swarm.models.attention.page_pool import PAGE_POSITIONS, PagePool
from swarm.models.attention.paged_attention import (
    MAX_RELATIVE_ERROR,
    NO_WINDOW,
    PagedKernel,
    agrees_with_reference,
    paged_kernel,
    reference_kernel,
)
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.execution.cuda_graphs import Replay
from swarm.models.execution.gradients import SpanGradients, compute_gradients
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ExecutionStrategy
from swarm.models.execution.strategy_choice import ScheduleRun, choose_forward, run_schedule
from swarm.models.loading.span_loading import load_span
from swarm.models.weights.quantization import NONE, form_for_device
from swarm.models.weights.quantization import PACKED as PACKED_FORM
from tests import zoo
from tests.models.checkpoints import packed_layouts

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

ROUNDING_FACTOR = 3.0
"""How much farther from fp32 than a processor in the same dtype a GPU may be: it sums in another order."""

ROUNDING_FLOOR = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Error that is always allowed, relative to what the blocks add to a token."""

GRADIENT_FLOOR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
SAME = 2e-2
"""Error in bf16 between a recorded step and the same without, whose kernels may be others."""

QUANTIZED_ERROR = {"int8": 0.2, "nf4": 0.8}
"""Median error of a token of the zoo's models, whose weights are spread far wider than real ones."""

PACKED = ("MXFP4", "fp8 blocks", "compressed-tensors int4", "AWQ", "ModelOpt NVFP4")
"""Layouts of checkpoints; the first is of gpt_oss, whose experts are packed, the second one of a mixture too."""

HEADS = ((4, 4, 64), (8, 2, 128), (8, 1, 96), (4, 2, 256))
"""Heads, heads of keys and width of a head."""


def checkpoint_of(family: str, **overrides: Any) -> Checkpoint:
    """A tiny model of a family. Raises `NotHere` if this version of transformers does not know the family."""
    try:
        model = zoo.make_model(family, **overrides)
    except (ValueError, KeyError, ImportError) as error:
        raise NotHere(f"this version of transformers has no {family}") from error
    model.save_pretrained(folder := new_folder())
    return open_checkpoint(folder)


def new_folder() -> Path:
    """A folder for the files of one check, removed when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quant: str = NONE, **options: Any) -> Any:
    return load_span(checkpoint, Span(1, 4), dtype=dtype, device=device, quant=quant, **options)


def _median_error(found: ScheduleRun, exact: ScheduleRun) -> float:
    """Of tokens with a past and of those without, the larger median. A mixture may send a token elsewhere."""
    added_T = (exact.outputs - exact.inputs).norm(dim=1)
    error_T = (found.outputs.cpu() - exact.outputs).norm(dim=1).div(added_T).nan_to_num(float("inf"))
    return max(float(error_T[of].median()) for of in (exact.has_past, ~exact.has_past))


def _require(error: float, limit: float, what: str) -> None:
    if not error <= limit:  # also if it is not a number
        raise WrongResult(f"{what}: error {error:.1e}, and {limit:.1e} is allowed")


def families(bench: Bench) -> list[Case]:
    """Every family of the zoo in each dtype, as a server would compute it."""
    names = bench.sized((*zoo.FAMILIES, *zoo.HYBRIDS), ("llama", "qwen3_next"))
    return [Case(family, partial(_family, bench, family)) for family in names]


def _family(bench: Bench, family: str) -> Found:
    checkpoint = checkpoint_of(family)
    exact, values = run_schedule(_load(checkpoint, torch.float32, CPU)), {}
    for name, dtype in DTYPES.items():
        model = choose_forward(_load(checkpoint, dtype, bench.device))
        of_processor = _median_error(run_schedule(_load(checkpoint, dtype, CPU)), exact)
        values[f"error {name}"] = _median_error(run_schedule(model), exact)
        _require(
            values[f"error {name}"], ROUNDING_FACTOR * of_processor + ROUNDING_FLOOR[dtype], f"{name}, {model.strategy}"
        )
    return Found({**values})


def pages(bench: Bench) -> list[Case]:
    """Attention over pages against the reference: random batches around the borders of pages, and whole models."""
    dtypes = ("bf16", "fp16")
    return [
        *(Case(f"kernel {name} {'/'.join(map(str, heads))}", partial(_kernel, bench, DTYPES[name], heads))
          for name, heads in itertools.product(dtypes, bench.sized(HEADS, HEADS[:1]))),
        *(Case(f"{family} {name} in pages", partial(_in_pages, bench, DTYPES[name], family))
          for family, name in itertools.product(("llama", "mistral", "qwen3"), dtypes)),
    ]  # fmt: skip


def right_kernel(bench: Bench, dtype: torch.dtype, shared: int = 2, width: int = 8) -> PagedKernel:
    """The device's kernel. Raises `NotHere` without one, `WrongResult` if it does not agree with the reference."""
    kernel = paged_kernel(bench.device)
    if kernel is None:
        raise NotHere("torch reads pages from 2.13 on")
    if not agrees_with_reference(
        kernel, torch.zeros(1, PAGE_POSITIONS, shared, width, dtype=dtype, device=bench.device)
    ):
        raise WrongResult("the kernel does not agree with the reference")
    return kernel


def _kernel(bench: Bench, dtype: torch.dtype, heads: tuple[int, int, int]) -> Found:
    kernel, worst = right_kernel(bench, dtype, *heads[1:]), 0.0
    for seed in range(bench.sized(40, 4)):
        found, expected = (
            _random_batch(seed, one, device, of, heads)
            for one, device, of in ((kernel, bench.device, dtype), (reference_kernel, CPU, torch.float32))
        )
        worst = max(worst, float((found - expected).norm() / expected.norm()))
        _require(worst, MAX_RELATIVE_ERROR[dtype], f"batch {seed}")
    return Found({"largest error": worst})


def _random_batch(seed: int, kernel: PagedKernel, device: torch.device, dtype: torch.dtype, heads: Any) -> torch.Tensor:
    """Attention of sequences of any lengths around the borders of pages, pages in any order."""
    choice, noise, (query_heads, shared, width) = random.Random(seed), torch.Generator().manual_seed(seed), heads
    borders = (1, 16, PAGE_POSITIONS - 1, PAGE_POSITIONS, PAGE_POSITIONS + 1, 2 * PAGE_POSITIONS)
    lengths = [max(1, choice.choice(borders) + choice.randint(-2, 2)) for _ in range(choice.randint(1, 6))]
    single = choice.random() < 0.5
    news = [1 if single else choice.randint(1, length) for length in lengths]
    needed = [-(-length // PAGE_POSITIONS) for length in lengths]
    order = list(range(1, 1 + sum(needed)))
    choice.shuffle(order)
    table = [[order.pop() for _ in range(count)] + [0] * (max(needed) - count) for count in needed]
    left = choice.choice((-1, -1, 5, PAGE_POSITIONS // 2, PAGE_POSITIONS + 3))
    window = NO_WINDOW if single and left < 0 else (left, 0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise).to(torch.bfloat16).to(device, dtype)  # the same rounded ones

    def integers(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    query, bounds = numbers(sum(news), query_heads, width), list(itertools.accumulate(news, initial=0))
    keys, values = (numbers(1 + sum(needed), PAGE_POSITIONS, shared, width) for _ in range(2))
    output: torch.Tensor = kernel(
        query, keys, values, integers(bounds), None, max(news), max(lengths), scale=None, window_size=window,
        enable_gqa=query_heads != shared, seqused_k=integers(lengths), block_table=integers(table), num_splits=1,
    )  # fmt: skip
    return output.float().cpu()


def _in_pages(bench: Bench, dtype: torch.dtype, family: str) -> Found:
    window = {"sliding_window": 100} if family == "mistral" else {}
    checkpoint = checkpoint_of(family, max_position_embeddings=4096, **window)
    exact = run_schedule(_load(checkpoint, torch.float32, CPU), PAGE_POSITIONS)
    of_processor = _median_error(run_schedule(_load(checkpoint, dtype, CPU), PAGE_POSITIONS), exact)
    model = _load(checkpoint, dtype, bench.device, layout="paged")
    if model.strategy.paging is None:
        raise (
            NotHere("torch reads pages from 2.13 on") if paged_kernel(bench.device) is None else WrongResult("unused")
        )
    error = _median_error(run_schedule(model, PAGE_POSITIONS), exact)
    _require(error, ROUNDING_FACTOR * of_processor + ROUNDING_FLOOR[dtype], "in pages")
    if model.strategy.paging.pool.in_use:
        raise WrongResult("pages are still held although no session is left")
    return Found({"error": error})


Steps = Sequence[StepLayout]

DECODING: Steps = (
    StepLayout((0, 0), (20, PAGE_POSITIONS)),  # the second one's next token begins a new page
    *(StepLayout((20 + n, PAGE_POSITIONS + n), (1, 1)) for n in range(4)),
)
CHANGING: Steps = (
    StepLayout((22, 250), (1, 1)),  # rolled back
    StepLayout((23, 251), (4, 4)),  # guesses
    *(StepLayout((27,) * rows, (1,) * rows, (0,) * rows) for rows in (3, 9, 17, 130)),  # more than are recorded, too
    StepLayout((28,) * 5, (1,) * 5),
)


def graphs(bench: Bench) -> list[Case]:
    """Recorded decode steps against plain ones, whatever happens in between."""
    checks: dict[str, Callable[[Bench, _Pair], None]] = {
        "decode steps": lambda bench, pair: None,
        "rollbacks, guesses, copies": lambda bench, pair: pair.play(CHANGING),
        "a pool that moved": _moved_pool,
        "LoRA": _lora,
        "no memory in the middle": _no_memory,
        "a capture that fails": _failed_capture,  # last, because a GPU may not forgive it
    }
    return [Case(name, partial(_recorded, bench, check)) for name, check in checks.items()]


class _Pair:
    """A session with recorded decode steps, and the same one without."""

    def __init__(self, bench: Bench) -> None:
        loaded = _load(
            checkpoint_of("llama", max_position_embeddings=4096), torch.bfloat16, bench.device, layout="paged"
        )
        if loaded.strategy.paging is None:
            raise NotHere("torch has no attention over pages, so nothing is recorded")
        own = [replace(loaded.strategy.paging, pool=PagePool()) for _ in range(2)]
        self.models: list[SpanModel] = [
            loaded.with_strategy(ExecutionStrategy("paged", paging, graph_recorder=recorder))
            for paging, recorder in zip(own, (bench.recorder(), None), strict=True)
        ]
        self.sessions = [SessionCache(model) for model in self.models]
        self.noise, self.worst = torch.Generator().manual_seed(0), 0.0

    def play(self, steps: Steps) -> None:
        for layout in steps:
            hidden = torch.randn(layout.tokens, self.models[0].hidden_size, generator=self.noise)
            inputs = hidden.to(self.models[0].device, self.models[0].dtype)
            found, expected = (session.step(inputs, layout).float() - inputs.float() for session in self.sessions)
            self.worst = max(self.worst, float((found - expected).norm() / expected.norm()))
            _require(self.worst, SAME, str(layout.counts))


def _recorded(bench: Bench, check: Callable[[Bench, _Pair], None]) -> Found:
    pair = _Pair(bench)
    pair.play(DECODING)
    recordings = pair.models[0].graphs
    assert recordings is not None
    if not recordings.works:
        raise WrongResult(f"recording failed: {recordings.failure}")
    check(bench, pair)
    return Found({"error": pair.worst})


def _moved_pool(bench: Bench, pair: _Pair) -> None:
    pool = pair.sessions[0].model.strategy.paging.pool  # type: ignore[union-attr]
    before = pool.relocations
    pool.reserve((pool.page_count + 50) * pool.page_size)
    if pool.relocations == before:
        raise WrongResult("the pool did not move")
    pair.play(CHANGING)


def _lora(bench: Bench, pair: _Pair) -> None:
    for session in pair.sessions:
        session.adapter = session.model.adapted.prepare(random_adapter(session.model))
    pair.play(CHANGING)


def _no_memory(bench: Bench, pair: _Pair) -> None:
    def fails(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    session, hidden = pair.sessions[0], torch.zeros(1 << 15, pair.models[0].hidden_size, device=bench.device)
    lengths = session.lengths
    with mock.patch.object(page_pool, "_grown", fails):
        try:
            session.step(hidden.to(pair.models[0].dtype), StepLayout(lengths, (1 << 14,) * 2))
        except torch.OutOfMemoryError:
            pass
        else:
            raise WrongResult("there was memory for a pool that could not grow")
    if session.lengths != lengths:
        raise WrongResult("a step that failed has changed the session")
    pair.play(CHANGING)


def _failed_capture(bench: Bench, pair: _Pair) -> None:
    record, number = bench.recorder(), torch.ones(1, device=bench.device)

    def waits(function: Callable[[], None]) -> Replay:
        def and_waits() -> None:
            function()
            number.item()  # which is not permitted while a graph is captured
            if not bench.real:
                raise RuntimeError("operation not permitted when stream is capturing")

        return record(and_waits)

    model = pair.models[0].with_strategy(replace(pair.models[0].strategy, graph_recorder=waits))
    pair.sessions[0].model = model
    pair.play(CHANGING)
    if model.graphs is None or model.graphs.works:
        raise WrongResult("the capture of a step that waits for the GPU has not failed")


def random_adapter(model: SpanModel, rank: int = 4) -> dict[int, BlockAdapterWeights]:
    """LoRA with random factors on the queries and values of every block."""
    noise = torch.Generator().manual_seed(0)

    def factors(name: str, block: torch.nn.Module) -> LoraFactors:
        linear: Any = block.get_submodule(name)
        down = torch.randn(rank, linear.in_features, generator=noise) / linear.in_features**0.5
        up = 0.3 * torch.randn(linear.out_features, rank, generator=noise) / rank**0.5
        return LoraFactors(name, down.to(model.dtype), up.to(model.dtype))

    names = ("self_attn.q_proj", "self_attn.v_proj")
    blocks = zip(range(model.span.start, model.span.end), model.layers, strict=True)
    return {
        number: BlockAdapterWeights(None, tuple(factors(name, block) for name in names)) for number, block in blocks
    }


def training(bench: Bench) -> list[Case]:
    """Gradients of inputs and of LoRA."""
    pairs = itertools.product(("llama", "gemma2", "mixtral"), ("fp32", "bf16"))
    return [Case(f"{family} {name}", partial(_gradients, bench, family, DTYPES[name])) for family, name in pairs]


def _gradients(bench: Bench, family: str, dtype: torch.dtype) -> Found:
    checkpoint, layout = checkpoint_of(family), StepLayout((0, 0, 0), (7, 12, 3))

    def computed(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        model, noise = _load(checkpoint, dtype, device), torch.Generator().manual_seed(0)
        inputs, ends = (
            torch.randn(layout.tokens, model.hidden_size, generator=noise).to(device, dtype) for _ in range(2)
        )
        found: SpanGradients = compute_gradients(
            model, inputs, ends, layout, model.adapted.prepare(random_adapter(model))
        )
        parts = torch.cat([one.float().cpu().flatten() for part in found.parts.values() for one in part])
        return [found.inputs.float().cpu(), parts]

    exact, rounded, found = computed(torch.float32, CPU), computed(dtype, CPU), computed(dtype, bench.device)
    values: dict[str, float | int | str] = {}
    for name, right, other, one in zip(("inputs", "LoRA"), exact, rounded, found, strict=True):
        error, of_processor = (float((of - right).norm() / right.norm()) for of in (one, other))
        _require(error, ROUNDING_FACTOR * of_processor + GRADIENT_FLOOR[dtype], f"gradients of {name}")
        values[name] = error
    return Found(values)


def quantization(bench: Bench) -> list[Case]:
    """Spans in 8 and 4 bits, and with the weights of packed checkpoints."""
    cases = [Case(form, partial(_quantized, bench, form)) for form in QUANTIZED_ERROR]
    return cases + [Case(f"packed: {layout}", partial(_packed, bench, layout)) for layout in PACKED]


def _quantized(bench: Bench, form: str) -> Found:
    checkpoint = checkpoint_of("llama", hidden_size=128, intermediate_size=256)
    exact = run_schedule(_load(checkpoint, torch.float32, CPU))
    held = form_for_device(bench.device, form)
    try:
        model = choose_forward(_load(checkpoint, torch.bfloat16, bench.device, held))
    except InvalidOption as error:
        raise NotHere(str(error)) from error
    error = _median_error(run_schedule(model), exact)
    _require(error, QUANTIZED_ERROR[form], held)
    return Found({"error": error, "form": held, "strategy": str(model.strategy)})


def _packed(bench: Bench, layout: str) -> Found:
    """Weights that stay packed, against the same weights in fp32 on a processor."""
    if layout == "MXFP4":
        folder = packed_layouts.make_mxfp4(new_folder() / "model", torch.float32)
    else:
        family = "qwen3_moe" if layout == "fp8 blocks" else "llama"
        folder, _ = packed_layouts.make(layout, new_folder(), family)
    span = partial(load_span, open_checkpoint(folder), Span(0, 2))
    exact = run_schedule(span(dtype=torch.float32, device=CPU))
    plain = _median_error(run_schedule(span(dtype=torch.bfloat16, device=bench.device)), exact)
    model = choose_forward(span(dtype=torch.bfloat16, device=bench.device, quant=PACKED_FORM))
    error = _median_error(run_schedule(model), exact)
    _require(error, ROUNDING_FACTOR * plain + ROUNDING_FLOOR[torch.bfloat16], layout)
    return Found({"error": error, "error of plain weights": plain, "strategy": str(model.strategy)})
