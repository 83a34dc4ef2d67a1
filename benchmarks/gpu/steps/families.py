"""Every family of the zoo on the card, in each dtype, against a processor."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import schedules, tiny
from benchmarks.gpu.bench import Bench, Case, Step
from benchmarks.gpu.records import Measured
from tests import zoo

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BORDERS = (1, 5, 9)
"""Lengths of prompts: around the zoo's windows."""


def _cases(bench: Bench) -> list[Case]:
    first = zoo.REPRESENTATIVES
    rest = [family for family in zoo.FAMILIES if family not in first]
    families = bench.sized((*first, *rest), first[:4])
    return [Case(family, partial(_family, family=family), 2.0) for family in families]


STEP = Step("families", "Every family, against a processor in fp32", 80.0, _cases)


def _family(bench: Bench, family: str) -> Measured:
    checkpoint = tiny.checkpoint_of(family)
    exact = tiny.load(checkpoint, torch.float32, tiny.CPU)
    mixture = schedules.is_mixture(exact.module.config)
    schedule = schedules.random_schedule(1, BORDERS, rounds=6)
    _, expected = schedules.play(exact, schedule)
    values: dict[str, float | int | str] = {}
    for name, dtype in DTYPES.items():
        rounded = exact if dtype is torch.float32 else tiny.load(checkpoint, dtype, tiny.CPU)
        on_card = tiny.load(checkpoint, dtype, bench.device)
        of_processor = schedules.errors(schedule, *schedules.play(rounded, schedule), expected)
        found = schedules.errors(schedule, *schedules.play(on_card, schedule), expected)
        for where, one in (("", found), (" of a processor", of_processor)):
            values |= {f"{name} error{where}": one.median, f"{name} largest error{where}": one.largest}
        values[f"{name} cache"] = on_card.strategy.layout
        schedules.require_close(found, of_processor, dtype, f"{name}, {on_card.strategy}", mixture=mixture)
    return Measured(values)
