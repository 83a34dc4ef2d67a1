"""Which experts lie in which slots: the decisions of the expert cache, without weights and without reading.

All blocks of a span share one pool of slots, so that blocks whose tokens agree on few experts leave room to the others.
For each forward of a block, `ExpertCache.plan` says which of the needed experts are in memory (hits), and which are
read in what order into which slots. Each needed expert is read at most once a forward, also when there are more of
them than slots, as there are for a prompt: those whose priority is too low to stay take turns in a few slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swarm.models.flash.records.record_buffer import Indices
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
        slots = self._slot_BE[block, needed]
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

    def make_room(self, block: int, experts: Indices, chance: float, in_use: Indices) -> Placed:
        """Slots for those experts that are absent, as far as they are likelier to be needed than what leaves.

        Args:
            experts: likeliest first.
            chance: of each of them to be needed next, in the unit of the rule's priorities.
            in_use: slots that keep what they hold.
        """
        slots = self._slot_BE[block, experts]
        absent = experts[slots == ABSENT]
        keep = np.concatenate([in_use, slots[slots != ABSENT]])
        leaving = self._leaving_first(np.setdiff1d(np.arange(self.slots), keep))[: len(absent)]
        leaving = leaving[self._worth(leaving) < chance]
        placed = Placed(absent[: len(leaving)], leaving)
        self._settle(block, placed)
        return placed

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
