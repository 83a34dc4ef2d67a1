"""Decode steps recorded as CUDA graphs, against the same steps without: whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from benchmarks.gpu import schedules, tiny
from benchmarks.gpu.adapters import random_adapter
from benchmarks.gpu.bench import Bench, Case, Step, WrongResult
from benchmarks.gpu.records import Measured
from benchmarks.gpu.schedules import SESSIONS, Player, Schedule, SessionStep
from swarm.data_structures import StepLayout
from swarm.models.attention import page_pool
from swarm.models.execution.cuda_graphs import CudaGraphRecorder, Replay
from swarm.models.execution.span_model import SpanModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS, PROMPT = 6, 20
BORDER_PROMPT = page_pool.PAGE_POSITIONS
"""Prompts whose next tokens begin a new page."""

SAME = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Error between a graph and the same kernels without it, which may be others for a batch that was filled up."""

LARGEST_FACTOR = 10
"""How much farther off than the median of a round a single token may be."""


@dataclass
class _Pair:
    """A model with recorded decode steps, the same without, and a player for each."""

    recorded: SpanModel
    plain: SpanModel
    counts: Callable[[], tuple[int, int]]

    def __post_init__(self) -> None:
        self.players = Player(self.recorded), Player(self.plain)

    def play(self, schedule: Schedule, what: str) -> float:
        """Play both; the error. Raises `WrongResult` if it is too large."""
        (inputs, found), (_, expected) = (player.play(schedule) for player in self.players)
        off, same = schedules.errors(schedule, inputs, found, expected), SAME[self.recorded.dtype]
        if not (off.of_a_round <= same and off.largest <= LARGEST_FACTOR * same):
            raise WrongResult(
                f"{what}: relative error {off.of_a_round:.2e} of a round and {off.largest:.2e} of a token in recorded "
                f"steps, and {same:.0e} and {LARGEST_FACTOR * same:.0e} are allowed"
            )
        return off.of_a_round


def _pair(bench: Bench, name: str = "bf16", family: str = "llama") -> _Pair:
    dtype = DTYPES[name]
    checkpoint = tiny.checkpoint_of(family, max_position_embeddings=tiny.POSITIONS)
    loaded = tiny.load(checkpoint, dtype, bench.device, "contiguous")
    _, kernel = tiny.right_kernel(bench.device, dtype)
    recorder, counts = tiny.counted(CudaGraphRecorder(bench.device))
    return _Pair(tiny.in_pages(loaded, kernel, recorder), tiny.in_pages(loaded, kernel), counts)


def _cases(bench: Bench) -> list[Case]:
    return [
        *(Case(f"decode steps, {family} {name}", partial(_decode, family=family, name=name), 4.0)
          for family, name in (("llama", "bf16"), ("llama", "fp16"), ("mistral", "bf16"), ("qwen3", "bf16"))),
        Case("a pool that moved", _moved_pool, 3.0),
        Case("a batch that grows", _larger_batch, 3.0),
        Case("LoRA on some sessions", _lora, 3.0),
        Case("rollbacks and guesses", _rollback, 3.0),
        Case("no memory in the middle", _no_memory, 3.0),
        Case("a replay while another thread computes", _other_thread, 3.0),
        Case("a capture that fails", _failed_capture, 3.0),  # last, because a card may not forgive it
    ]  # fmt: skip


STEP = Step("graphs", "Recorded decode steps, against plain ones", 45.0, _cases)


def _measured(pair: _Pair, off: float) -> Measured:
    made, replayed = pair.counts()
    if pair.recorded.graphs is None or not pair.recorded.graphs.works:
        raise WrongResult("decode steps could not be recorded; the log says why")
    if not replayed:
        raise WrongResult("no graph was replayed")
    return Measured({"graphs": made, "replays": replayed, "error": off})


def _decode(bench: Bench, family: str, name: str) -> Measured:
    pair = _pair(bench, name, family)
    off = max(
        pair.play(schedules.decode_schedule(0, ROUNDS, PROMPT), "decode steps"),
        _Pair(pair.recorded, pair.plain, pair.counts).play(
            schedules.decode_schedule(1, ROUNDS, BORDER_PROMPT), "a new page"
        ),
    )
    return _measured(pair, off)


def _moved_pool(bench: Bench) -> Measured:
    pair = _pair(bench)
    schedule = schedules.decode_schedule(2, ROUNDS, PROMPT)
    off = pair.play(schedule[:4], "before the pool moved")
    made = pair.counts()[0]
    paging = pair.recorded.strategy.paging
    assert paging is not None
    before = paging.pool.relocations
    paging.pool.reserve((paging.pool.page_count + 50) * paging.pool.page_size)
    if paging.pool.relocations == before:
        raise WrongResult("the pool did not move")
    off = max(off, pair.play(schedule[4:], "after the pool moved"))
    if pair.counts()[0] == made:
        raise WrongResult("nothing was recorded again")
    return _measured(pair, off)


def _larger_batch(bench: Bench) -> Measured:
    pair, off = _pair(bench), 0.0
    lengths = (5,)
    off = pair.play([[SessionStep(0, StepLayout((0,), lengths))]], "a prompt")
    for rows in (1, 2, 3, 5, 9, 17, 33, 2, 130):  # beyond the largest recording, too
        sources = tuple(row % len(lengths) for row in range(rows))
        starts = tuple(lengths[source] for source in sources)
        off = max(off, pair.play([[SessionStep(0, StepLayout(starts, (1,) * rows, sources))]], f"{rows} sequences"))
        lengths = tuple(start + 1 for start in starts)
    return _measured(pair, off)


def _lora(bench: Bench) -> Measured:
    pair = _pair(bench)
    adapter = pair.recorded.adapted.prepare(random_adapter(pair.recorded, rank=4))
    for player in pair.players:
        player.sessions[0].adapter = adapter
    schedule = schedules.decode_schedule(3, ROUNDS, PROMPT)
    off = pair.play(schedule[:5], "with an adapter")
    if pair.counts()[1]:
        raise WrongResult("a step with an adapter was replayed, and recordings know no adapters")
    alone = [[step for step in steps if step.session != 0] for steps in schedule[5:]]
    off = max(off, pair.play(alone, "sessions without an adapter"))
    return _measured(pair, off)


def _rollback(bench: Bench) -> Measured:
    pair, off = _pair(bench), 0.0
    for seed in range(bench.sized(4, 1)):
        fresh = _Pair(pair.recorded, pair.plain, pair.counts)
        off = max(off, fresh.play(schedules.random_schedule(seed, (3, 17, BORDER_PROMPT)), f"schedule {seed}"))
    off = max(off, pair.play(schedules.decode_schedule(4, 3, PROMPT), "decode steps"))
    back = tuple(tuple(length - 2 for length in session.lengths) for session in pair.players[0].sessions)
    steps = [SessionStep(one, StepLayout(back[one], (1,) * len(back[one]))) for one in range(SESSIONS)]
    off = max(off, pair.play([steps], "after a rollback"))
    return _measured(pair, off)


def _no_memory(bench: Bench) -> Measured:
    pair = _pair(bench)
    schedule = schedules.decode_schedule(5, ROUNDS, PROMPT)
    off = pair.play(schedule[:4], "before")
    session = pair.players[0].sessions[0]
    before = session.lengths

    def refuse(storage: torch.Tensor, pages: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    refused = mock.patch.object(page_pool, "_grown", refuse)
    huge = StepLayout(before, (page_pool.PAGE_POSITIONS * 40,) * len(before))
    hidden = torch.zeros(1, pair.recorded.hidden_size, dtype=pair.recorded.dtype, device=bench.device)
    try:
        with refused:
            session.step(hidden.expand(huge.tokens, -1), huge)
    except torch.OutOfMemoryError:
        pass
    else:
        raise WrongResult("a pool that cannot grow has taken 40 more pages")
    if session.lengths != before:
        raise WrongResult("a step that failed has changed its session")
    if bench.real:
        _fill_card(bench)
    return _measured(pair, max(off, pair.play(schedule[4:], "after memory had run out")))


def _fill_card(bench: Bench) -> None:
    """Ask the card itself for more than it has, so that torch's allocator frees what it keeps for later."""
    total = torch.cuda.mem_get_info(bench.device)[1]
    try:
        torch.empty(2 * total, dtype=torch.uint8, device=bench.device)
    except torch.OutOfMemoryError:
        return
    raise WrongResult("the card has given twice its memory")


def _other_thread(bench: Bench) -> Measured:
    """A capture must not be disturbed by what another thread does on the card meanwhile."""
    import threading

    pair, stop = _pair(bench), threading.Event()
    work = torch.randn(256, 256, device=bench.device)

    def compute() -> None:
        while not stop.wait(0.001):
            (work @ work).sum()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        off = pair.play(schedules.decode_schedule(6, ROUNDS, PROMPT), "beside another thread")
    finally:
        stop.set()
        thread.join()
    return _measured(pair, off)


def _failed_capture(bench: Bench) -> Measured:
    pair = _pair(bench)
    record, number = CudaGraphRecorder(bench.device), torch.ones(1, device=bench.device)

    def waits(function: Callable[[], None]) -> Replay:
        def and_waits() -> None:
            function()
            number.item()  # which is not permitted while a graph is captured

        return record(and_waits)

    failing = _Pair(tiny.recorded(pair.recorded, waits), pair.plain, pair.counts)
    off = failing.play(schedules.decode_schedule(7, ROUNDS, PROMPT), "after a failed capture")
    assert failing.recorded.graphs is not None
    if failing.recorded.graphs.works:
        raise WrongResult("the capture of a step that waits for the card has not failed")
    return Measured({"error": off}, note="steps go on without recordings")
