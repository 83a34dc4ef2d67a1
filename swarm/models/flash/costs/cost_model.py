"""What a token costs on flash: bytes, seconds, and what follows from them. Pure.

The cost of one block is a sum of three times, after section 2 and appendix C of "LLM in a flash":

    resident   products with the weights that stay in memory (attention, norms, router, predictor)
    reading    the records that are not in memory, as many reads as the drive takes at once
    computing  products with records, of which those in memory are computed while the others are on their way

so a block takes `resident + max(reading, computing of what is there) + computing of what was read`. Blocks follow one
another, because the input of a predictor or a router is the result of what came before. Streamed blocks do not wait for
inputs: the next one is read while this one computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.models.flash.sparsity import Sparsity, interpolated

SLAB_BYTES = 1 << 20
"""Bytes of one read where a whole block is read in order: longer ones are cut (`reading.reads`)."""


TYPICAL_EXPERT_HITS = ((0.0, 0.0), (0.125, 0.56), (0.25, 0.79), (0.5, 0.97), (0.75, 1.0))
"""Share of the experts that memory has room for, and share of a token's experts that is found there: those of a trained
mixture with 128 experts a block, 8 a token (`benchmarks.flash.experts.cache`). For the time before a server has counted
its own; a mixture of few experts has fewer hits, see `typical_hits`."""

TYPICAL_NEEDED = 8 / 128
"""Share of the experts that a token of that mixture needs."""


class ReadingSpeed(Protocol):
    """How fast a drive reads, as measured (`reading.drive_speed`)."""

    def seconds(self, reads: float, bytes_each: float) -> float:
        """Seconds of so many reads, begun together, each of `bytes_each` bytes at a place of its own."""


@dataclass(frozen=True)
class ComputeSpeed:
    """How fast products with weights are, for one data type and one way in which the weights lie.

    Attributes:
        points: tokens that are computed together, and seconds for one byte of weights, in order of tokens.
    """

    points: tuple[tuple[int, float], ...]

    def seconds(self, weight_bytes: float, tokens: int = 1) -> float:
        """Seconds of the products of `tokens` tokens with so many bytes of weights."""
        line = [(float(count), seconds) for count, seconds in self.points]
        return weight_bytes * interpolated(line, tokens)


@dataclass(frozen=True)
class MachineSpeed:
    """What was measured on this machine.

    Attributes:
        drive: reading.
        resident: products with weights that stay in memory.
        records: products with records, which lie side by side with other fields.
        move_s_per_byte: to move a record to another slot.
        block_s: what a block costs beyond its weights, whatever their number: Python, norms, attention scores.
    """

    drive: ReadingSpeed
    resident: ComputeSpeed
    records: ComputeSpeed
    move_s_per_byte: float = 0.0
    block_s: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """What one iteration costs, of a block or of a span.

    Attributes:
        reads, bytes: from the drive, on average.
        reading_s: if nothing else were done.
        computing_s: if nothing had to be read.
        seconds: of both together, one hidden behind the other as far as possible.
    """

    reads: float
    bytes: int
    reading_s: float
    computing_s: float
    seconds: float

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.reads + other.reads,
            self.bytes + other.bytes,
            self.reading_s + other.reading_s,
            self.computing_s + other.computing_s,
            self.seconds + other.seconds,
        )


NO_COST = StepCost(0, 0, 0.0, 0.0, 0.0)


class BlockCosts(Protocol):
    """One block, as the cost model sees it.

    Attributes:
        resident_bytes: weights that stay in memory.
        stride: bytes of a record in its file.
        records: number of records.
    """

    @property
    def resident_bytes(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def records(self) -> int: ...

    def step(self, machine: MachineSpeed, tokens: int, sessions: int) -> StepCost:
        """The cost of `tokens` tokens of each of `sessions` sessions, computed together."""


@dataclass(frozen=True)
class NeuronCosts:
    """A block of which a token needs few neurons.

    Attributes:
        sparsity: of what the predictor selects.
        slots: neurons that memory has room for.
    """

    resident_bytes: int
    stride: int
    records: int
    sparsity: Sparsity
    slots: int

    def step(self, machine: MachineSpeed, tokens: int, sessions: int) -> StepCost:
        needed = self.sparsity.needed(tokens, sessions)
        newly = self.sparsity.read(self.slots / self.records, sessions, tokens)
        new, batch = round(self.records * newly), tokens * sessions
        resident_s = machine.block_s + machine.resident.seconds(self.resident_bytes, batch)
        reading_s = machine.drive.seconds(new, self.stride) if new else 0.0
        moving_s = machine.move_s_per_byte * new * self.stride
        before_s = moving_s + machine.records.seconds((needed - newly) * self.records * self.stride, batch)
        after_s = machine.records.seconds(new * self.stride, batch)
        return _overlapped(new, self.stride, resident_s, reading_s, before_s, after_s)


def typical_hits(needed: float) -> tuple[tuple[float, float], ...]:
    """`TYPICAL_EXPERT_HITS` for a mixture of whose experts a token needs such a share.

    What is found depends on how many tokens' experts memory has room for: a quarter of 128 experts are those of four
    tokens, a quarter of 8 those of one. Never fewer than by chance, and never more than was measured.
    """
    scale = max(1.0, needed / TYPICAL_NEEDED)
    scaled = [(share * scale, max(share * scale, hits)) for share, hits in TYPICAL_EXPERT_HITS]
    return (*(point for point in scaled if point[0] < 1), (1.0, 1.0))


@dataclass(frozen=True)
class ExpertCosts:
    """A mixture of experts.

    Attributes:
        needed: shares of experts that tokens need: (experts a token / experts,) if nothing else was measured.
        slots: experts that memory has room for.
        hits: share of the experts that memory has room for, and share of a token's experts that is found there, in
            order.
        ahead: share of the missing experts that is read while the block before computes.
    """

    resident_bytes: int
    stride: int
    records: int
    needed: Sparsity
    slots: int
    hits: tuple[tuple[float, float], ...] = TYPICAL_EXPERT_HITS
    ahead: float = 0.0

    def step(self, machine: MachineSpeed, tokens: int, sessions: int) -> StepCost:
        needed = self.records * self.needed.needed(tokens, sessions)
        found = 1.0 if self.slots >= self.records else interpolated(list(self.hits), self.slots / self.records)
        hits = min(needed * max(0.0, min(1.0, found)), float(self.slots))
        batch = tokens * sessions
        resident_s = machine.block_s + machine.resident.seconds(self.resident_bytes, batch)
        # Each expert computes its own tokens only.
        each = max(1, round(batch * self.needed.needed(1) * self.records / needed)) if needed else 1
        expert_s = machine.records.seconds(self.stride, each)
        # Tokens that miss many experts wait longer than others gain, so the time of an average token is too short.
        new = reading_s = seconds = 0.0
        trials = max(1, round(needed))
        for count, chance in _binomial(trials, 1 - hits / needed if needed else 0.0):
            missing = count * needed / trials
            one_s = machine.drive.seconds(missing, self.stride) if missing else 0.0
            hidden_s = min(self.ahead * one_s, resident_s)
            before_s, after_s = (needed - missing) * expert_s, missing * expert_s
            cost = _overlapped(missing, self.stride, resident_s, one_s - hidden_s, before_s, after_s)
            new += chance * missing
            reading_s += chance * one_s
            seconds += chance * cost.seconds
        return StepCost(new, round(new * self.stride), reading_s, resident_s + needed * expert_s, seconds)


def _binomial(trials: int, share: float) -> Iterator[tuple[int, float]]:
    """How many of so many independent trials succeed, and how probable that is."""
    share = min(1.0, max(0.0, share))
    for count in range(trials + 1):
        chance = math.comb(trials, count) * share**count * (1 - share) ** (trials - count)
        if chance:
            yield count, chance


@dataclass(frozen=True)
class StreamedCosts:
    """A block that is read whole for each iteration."""

    resident_bytes: int
    stride: int
    records: int = 1

    def step(self, machine: MachineSpeed, tokens: int, sessions: int) -> StepCost:
        return whole_block(self, machine, tokens * sessions)


def whole_block(block: BlockCosts, machine: MachineSpeed, tokens: int) -> StepCost:
    """The cost of reading all records in order, in slabs, and computing `tokens` tokens with them: streamed blocks, and
    prompts in every kind of block."""
    size = block.stride * block.records
    reads = math.ceil(size / SLAB_BYTES)
    reading_s = machine.drive.seconds(reads, min(size, SLAB_BYTES))
    resident_s = machine.block_s + machine.resident.seconds(block.resident_bytes, tokens)
    computing_s = resident_s + machine.records.seconds(size, tokens)
    return StepCost(reads, size, reading_s, computing_s, max(reading_s, computing_s))


def _overlapped(
    reads: float, stride: int, resident_s: float, reading_s: float, before_s: float, after_s: float
) -> StepCost:
    """The cost of a block that computes with records in memory (`before_s`) while others are read, and then with
    those (`after_s`)."""
    seconds = resident_s + max(reading_s, before_s) + after_s
    return StepCost(reads, round(reads * stride), reading_s, resident_s + before_s + after_s, seconds)


@dataclass(frozen=True)
class FlashCostModel:
    """What a span costs.

    Attributes:
        machine: its speed.
        blocks: of the span, in order.
    """

    machine: MachineSpeed
    blocks: Sequence[BlockCosts]

    def step(self, tokens: int = 1, sessions: int = 1) -> StepCost:
        """The cost of an iteration with `tokens` tokens of each of `sessions` sessions."""
        return sum((block.step(self.machine, tokens, sessions) for block in self.blocks), NO_COST)

    def prompt(self, tokens: int) -> StepCost:
        """The cost of an iteration with so many tokens of a prompt, which needs all records."""
        return sum((whole_block(block, self.machine, tokens) for block in self.blocks), NO_COST)

    def tokens_per_second(self, sessions: int = 1) -> float:
        """Tokens a second of all sessions together."""
        return sessions / self.step(sessions=sessions).seconds

    def token_budget(self, limit_s: float, most: int) -> int:
        """Tokens of an iteration: as many of a prompt as are computed within `limit_s`, but at least as many as take
        as long to compute as their weights take to read. Powers of two, up to `most`."""
        tokens = 1
        while tokens * 2 <= most:
            cost = self.prompt(tokens * 2)
            if cost.seconds > limit_s and self.prompt(tokens).computing_s >= self.prompt(tokens).reading_s:
                break
            tokens *= 2
        return tokens


def describe(model: FlashCostModel, memory: int, sessions: int = 8) -> str:
    """One line for the start of a server.

    Args:
        memory: bytes for records.
        sessions: how many at once the second figure is for.
    """
    one, total = model.step(), sum(block.stride * block.records for block in model.blocks)
    each = one.bytes / one.reads if one.reads else 0
    return (
        f"Flash: {len(model.blocks)} blocks, {total / 1e9:.1f} GB on the drive, {memory / 1e9:.1f} GB of them in "
        f"memory; a token reads {one.bytes / 1e6:.1f} MB ({one.bytes / total:.1%}) in {one.reads:.0f} reads of "
        f"{each / 1024:.0f} KiB; {one.reading_s * 1000:.0f} ms reading, {one.computing_s * 1000:.0f} ms computing, "
        f"{one.seconds * 1000:.0f} ms together: {1 / one.seconds:.1f} tokens/s alone, "
        f"{model.tokens_per_second(sessions):.1f} for {sessions} sessions"
    )
