"""Experts in memory: a pool of slots that all blocks of a span share, filled from their stores on request.

Blocks whose tokens agree on few experts leave room to the others. For each forward of a block, `ExpertCache.plan` says
which of the needed experts are in memory (hits), and which are read in what order into which slots. Each needed expert
is read at most once a forward, also when there are more of them than slots, as there are for a prompt: those whose
priority is too low to stay take turns in a few slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from swarm.errors import DriveFailed
from swarm.models.flash.records import Indices, PendingRead, RecordBuffer, WeightStore
from swarm.models.flash.stay_priority import StayPriority

ABSENT = -1

TURN_SLOTS = 16
"""Slots in which experts take turns that are not going to stay. More would push out experts that are needed again; with
fewer, a drive has too few reads in flight."""


@dataclass(frozen=True)
class Placed:
    """Some experts of one block, and the slot of each; both of the same length."""

    experts: Indices
    slots: Indices

    def __len__(self) -> int:
        return len(self.experts)

    def part(self, start: int, end: int) -> Placed:
        return Placed(self.experts[start:end], self.slots[start:end])


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward of one block gets the experts that it needs.

    Attributes:
        hits: those that have a slot already.
        reads: the others, in groups, each read at once. Slots may occur again in later groups, and those of hits may
            occur: a group may be begun as soon as whatever lay in its slots was computed.
    """

    hits: Placed
    reads: tuple[Placed, ...]


class ExpertCache:
    """Which expert of which block lies in which slot.

    Args:
        slots: of the pool.
        priority: the rule that decides which experts stay.
        group_experts: experts that are read at once. Fewer let computing begin earlier, more are fewer calls.
    """

    def __init__(self, slots: int, priority: StayPriority, group_experts: int = 1) -> None:
        if slots < 1:
            raise ValueError("an expert cache needs at least one slot")
        blocks, experts = priority.priority_BE.shape
        self.slots = slots
        self.priority = priority
        self._group_experts = group_experts
        self._experts_a_block = experts
        self._slot_BE = np.full((blocks, experts), ABSENT)
        self._key_S = np.full(slots, ABSENT)  # block * experts + expert

    def slots_of(self, block: int, experts: Indices) -> Indices:
        """The slot of each expert, `ABSENT` if it has none."""
        slots: Indices = self._slot_BE[block, experts]
        return slots

    def plan(self, block: int, needed: Indices, shares: np.ndarray, tokens: int) -> ForwardPlan:
        """Decide for a forward that needs these experts (ascending, each once), and note that they were used.

        Args:
            shares: for each of them, the share of the forward's tokens that needs it.
            tokens: of the forward.
        """
        self.priority.note_use(block, needed, shares, tokens)
        slots = self.slots_of(block, needed)
        present = slots != ABSENT
        hits = Placed(needed[present], slots[present])
        missing = needed[~present]
        if not len(missing):
            return ForwardPlan(hits, ())
        free = self._leaving_first(np.setdiff1d(np.arange(self.slots), hits.slots, assume_unique=True))
        if not len(free):  # hits fill the memory; they make room once they are computed
            free = self._leaving_first(hits.slots)
        reads = self._place(block, missing, free)
        for group in reads:
            self._settle(block, group)
        return ForwardPlan(hits, reads)

    def forget(self, slots: Indices) -> None:
        """What lies in these slots cannot be used: they are free."""
        keys = self._key_S[slots]
        keys = keys[keys != ABSENT]
        self._slot_BE.ravel()[keys] = ABSENT
        self._key_S[slots] = ABSENT

    def _worth(self, slots: Indices) -> np.ndarray:
        """The priority of what lies in each slot; less than any priority if nothing does."""
        keys = self._key_S[slots]
        worth: np.ndarray = np.where(keys == ABSENT, -np.inf, self.priority.priority_BE.ravel()[keys])
        return worth

    def _leaving_first(self, slots: Indices) -> Indices:
        """The slots in the order in which they are given to other experts."""
        return slots[np.argsort(self._worth(slots), kind="stable")]

    def _place(self, block: int, missing: Indices, free: Indices) -> tuple[Placed, ...]:
        """Groups of reads in the order of the experts, which is that of the file.

        Args:
            free: the slots that may be given away, the first ones first.
        """
        turns = min(TURN_SLOTS, max(1, len(free) // 2))
        likeliest = np.argsort(-self.priority.priority_BE[block, missing], kind="stable")
        room = min(len(missing), len(free) - turns)
        worth = self.priority.priority_BE[block, missing[likeliest[:room]]]
        stay = int(np.cumprod(worth > self._worth(free[turns : turns + room])).sum())
        turns = min(turns, len(missing) - stay)
        slots = np.empty_like(missing)
        slots[np.sort(likeliest[:stay])] = np.sort(free[turns : turns + stay])
        passing = np.sort(likeliest[stay:])
        slots[passing] = np.sort(free[:turns])[np.arange(len(passing)) % max(1, turns)]
        size = self._group_experts
        if len(passing) > turns:  # two groups in the same slots: one is read while the other computes
            size = max(1, min(size, turns // 2))
        whole = Placed(missing, slots)
        return tuple(whole.part(start, start + size) for start in range(0, len(missing), size))

    def _settle(self, block: int, group: Placed) -> None:
        """Note that these experts lie in these slots now, instead of what lay there."""
        self.forget(group.slots)
        self._slot_BE[block, group.experts] = group.slots
        self._key_S[group.slots] = block * self._experts_a_block + group.experts


@dataclass
class ExpertCounters:
    """What a pool did since it was made. Each needed expert counts once for each forward of its block.

    Attributes:
        tokens: tokens of all forwards of all blocks.
        hits: needed experts that were in memory.
        misses: needed experts that had to be read.
    """

    tokens: int = 0
    hits: int = 0
    misses: int = 0


class ExpertPool:
    """The slots, and the reads into them. Used by one thread at a time.

    Args:
        stores: one for each block, all of the same layout.
        cache: decides which expert lies in which slot.

    Attributes:
        buffer: the slots.
        counters: what happened.
    """

    def __init__(self, stores: Sequence[WeightStore], cache: ExpertCache) -> None:
        self.stores = list(stores)
        self.cache = cache
        self.buffer = RecordBuffer(stores[0].layout, cache.slots)
        self.counters = ExpertCounters()

    @property
    def bytes_read(self) -> int:
        """Bytes that the stores of all blocks have read."""
        return sum(store.counters.bytes for store in self.stores)

    def visit(self, block: int, needed: Indices, shares: np.ndarray, tokens: int) -> Generator[Placed, None, None]:
        """Yield the needed experts in parts: first those in memory, then the others as they arrive.

        A part stays in memory until the next one is asked for. Close the iterator if it is not used up.

        Args:
            block: its number in the pool.
            needed: experts, ascending, each once.
            shares: for each of them, the share of the forward's tokens that needs it.
            tokens: of the forward.

        Raises:
            DriveFailed: an expert cannot be read. The pool can be used again.
        """
        plan = self.cache.plan(block, needed, shares, tokens)
        missing = sum(map(len, plan.reads))
        self.counters.tokens += tokens
        self.counters.hits += len(plan.hits)
        self.counters.misses += missing
        yield from _Visit(self, self.stores[block], plan).run()


class _Visit:
    """One forward's way through its plan."""

    def __init__(self, pool: ExpertPool, store: WeightStore, plan: ForwardPlan) -> None:
        self._pool, self._store, self._plan = pool, store, plan
        self._waiting = deque(plan.reads)
        self._reading: deque[tuple[Placed, PendingRead]] = deque()
        self._busy = set(plan.hits.slots.tolist())  # slots of experts that were not computed yet

    def run(self) -> Generator[Placed, None, None]:
        finished = False
        try:
            self._begin_reads()
            if len(self._plan.hits):
                yield self._plan.hits
                self._busy.difference_update(self._plan.hits.slots.tolist())
            while self._waiting or self._reading:
                self._begin_reads()
                group, read = self._reading.popleft()
                read.wait()
                yield group
                self._busy.difference_update(group.slots.tolist())
            finished = True
        finally:
            if not finished:
                self._abandon()

    def _begin_reads(self) -> None:
        """Begin all reads, in order, whose slots nothing needs any more."""
        while self._waiting and self._busy.isdisjoint(self._waiting[0].slots.tolist()):
            group = self._waiting[0]
            self._reading.append((group, self._store.read(group.experts, self._pool.buffer, group.slots)))
            self._waiting.popleft()
            self._busy.update(group.slots.tolist())

    def _abandon(self) -> None:
        """After a failure: no read goes on, and no slot is believed to hold what was not read."""
        for _, read in self._reading:
            with suppress(DriveFailed):
                read.wait()
        for group in self._plan.reads:
            self._pool.cache.forget(group.slots)
