"""Random work of several sessions, the same for every model: prompts, single tokens, guesses, rollbacks and copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from benchmarks.gpu.bench import WrongResult
from swarm.data_structures import StepLayout
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel

SESSIONS = 3
MAX_ROWS = 3

ROUNDING_FACTOR = 3.0
"""How much farther from fp32 than a processor in the same dtype a card may be: it sums in another order."""

ROUNDING_FLOOR = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Error that is always allowed. In fp32 a card's matrix products may round their inputs (TF32), if torch is told so."""


@dataclass(frozen=True)
class SessionStep:
    """One step of one session."""

    session: int
    layout: StepLayout


Schedule = Sequence[Sequence[SessionStep]]
"""Rounds of steps; those of a round are computed together."""


def random_schedule(seed: int, borders: Sequence[int], rounds: int = 8) -> Schedule:
    """A schedule whose prompts end near some of the `borders`, such as those of pages."""
    choice = random.Random(seed)
    lengths: list[list[int]] = [[] for _ in range(SESSIONS)]
    made = []
    for _ in range(rounds):
        steps = []
        for session in choice.sample(range(SESSIONS), choice.randint(1, SESSIONS)):
            layout = _random_layout(choice, lengths[session], borders)
            lengths[session] = [start + count for start, count in zip(layout.starts, layout.counts, strict=True)]
            steps.append(SessionStep(session, layout))
        made.append(steps)
    return made


def _random_layout(choice: random.Random, lengths: list[int], borders: Sequence[int]) -> StepLayout:
    if not lengths:  # prompts
        rows = choice.randint(1, MAX_ROWS)
        return StepLayout((0,) * rows, tuple(_near(choice, borders) for _ in range(rows)))
    kind = choice.choice(("token", "token", "token", "guesses", "rollback", "copies", "longer"))
    if kind == "copies":
        rows = choice.randint(1, MAX_ROWS)
        sources = tuple(choice.randrange(len(lengths)) for _ in range(rows))
        return StepLayout(tuple(lengths[source] for source in sources), (1,) * rows, sources)
    if kind == "rollback":
        starts = tuple(choice.randint(max(1, length - 4), length) for length in lengths)
        return StepLayout(starts, tuple(choice.randint(1, 5) for _ in lengths))
    count = {"token": 1, "guesses": 4, "longer": _near(choice, borders)}[kind]
    return StepLayout(tuple(lengths), (count,) * len(lengths))


def _near(choice: random.Random, borders: Sequence[int]) -> int:
    return max(1, choice.choice(borders) + choice.randint(-2, 2))


def decode_schedule(seed: int, rounds: int, prompt: int) -> Schedule:
    """Prompts, and then single tokens of all sessions at once: what graphs are for."""
    choice = random.Random(seed)
    rows = [choice.randint(1, MAX_ROWS) for _ in range(SESSIONS)]
    lengths = [tuple(choice.randint(1, prompt) for _ in range(count)) for count in rows]
    schedule = [[SessionStep(one, StepLayout((0,) * rows[one], lengths[one])) for one in range(SESSIONS)]]
    for number in range(rounds):
        starts = [tuple(length + number for length in one) for one in lengths]
        schedule.append([SessionStep(one, StepLayout(starts[one], (1,) * rows[one])) for one in range(SESSIONS)])
    return schedule


class Player:
    """Plays a schedule with a model, round by round.

    Args:
        adapters: of each session, if they have any.
    """

    def __init__(self, model: SpanModel, adapters: Sequence[AdapterWeights] = ()) -> None:
        self.model = model
        adapters = adapters or (NO_ADAPTER,) * SESSIONS
        self.sessions = [SessionCache(model, adapter) for adapter in adapters]
        self._noise = torch.Generator().manual_seed(0)

    def play(self, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and outputs of all tokens, `[tokens, hidden]`, fp32 on the processor."""
        inputs, outputs = [], []
        for steps in schedule:
            works = []
            for step in steps:
                hidden = torch.randn(step.layout.tokens, self.model.hidden_size, generator=self._noise)
                inputs.append(hidden)
                packed = hidden.to(self.model.device, self.model.dtype)
                works.append(self.sessions[step.session].start_step(packed, step.layout))
            advance_steps([(work, work.tokens_left) for work in works])
            for work in works:
                work.commit()
                outputs.append(work.output.float().cpu())
        return torch.cat(inputs), torch.cat(outputs)


def play(model: SpanModel, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of a schedule, played from its beginning."""
    return Player(model).play(schedule)


def _kinds(schedule: Schedule) -> torch.Tensor:
    """Of each token: 0 in a prompt, 1 of several that continue a sequence, 2 a single one that does."""
    return torch.tensor(
        [
            0 if start == 0 else 2 if count == 1 else 1
            for steps in schedule
            for step in steps
            for start, count in zip(step.layout.starts, step.layout.counts, strict=True)
            for _ in range(count)
        ]
    )


class Errors(NamedTuple):
    """How far tokens are from what is expected, each relative to what the blocks add to it.

    Attributes:
        median: the largest median of three kinds of tokens (`_kinds`). Each kind by itself: prompts have so many tokens
            that they would hide single ones that are all wrong.
        of_a_round: the same of each round alone, so that later ones do not hide one that is wrong.
        percentile_99: of all tokens.
        largest: of all tokens.
    """

    median: float
    of_a_round: float
    percentile_99: float
    largest: float


ALLOWED_FLOORS = Errors(1.0, 2.0, 5.0, 10.0)
"""How many times `ROUNDING_FLOOR` is always allowed: few tokens are spread farther than many."""


def errors(schedule: Schedule, inputs: torch.Tensor, outputs: torch.Tensor, expected: torch.Tensor) -> Errors:
    """The errors of a schedule's outputs, all infinite if one of them is not a number."""
    if not bool(outputs.isfinite().all()):
        return Errors(*[float("inf")] * 4)
    found = (outputs - expected).norm(dim=1) / (expected - inputs).norm(dim=1)
    kinds, rounds = _kinds(schedule), _rounds(schedule)
    medians = [float(found[kinds == kind].median()) for kind in kinds.unique()]
    both = kinds + 3 * rounds
    of_rounds = [float(found[both == one].median()) for one in both.unique()]
    return Errors(max(medians), max(of_rounds), float(found.quantile(0.99)), float(found.max()))


def _rounds(schedule: Schedule) -> torch.Tensor:
    """The number of the round of each token."""
    numbers = [number for number, steps in enumerate(schedule) for one in steps for _ in range(one.layout.tokens)]
    return torch.tensor(numbers)


def is_mixture(config: PreTrainedConfig) -> bool:
    """Whether a model chooses among experts, so that a rounding error may send a token elsewhere."""
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in config.to_dict().items())


def require_close(found: Errors, of_processor: Errors, dtype: torch.dtype, what: str, *, mixture: bool = False) -> None:
    """Raise `WrongResult` if a card is farther from fp32 than it may be, given how far a processor is.

    Of a mixture of experts only medians of many tokens are judged.
    """
    for name, error, other, floors in zip(Errors._fields, found, of_processor, ALLOWED_FLOORS, strict=True):
        limit = ROUNDING_FACTOR * other + floors * ROUNDING_FLOOR[dtype]
        if not error <= limit and not (mixture and name != "median"):
            raise WrongResult(f"{what}: relative error {error:.2e} ({name}), and {limit:.2e} is allowed")


def shifted(layout: StepLayout, by: int) -> StepLayout:
    """The layout with every start moved."""
    return replace(layout, starts=tuple(start + by for start in layout.starts))
