"""Pools of experts whose content can be told from their numbers."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.flash.memory_store import MemoryStore
from swarm.errors import DriveFailed
from swarm.models.flash.experts.expert_pool import ExpertCache, ExpertPool
from swarm.models.flash.records import RecordLayout
from swarm.models.flash.stay_priority import DecayedFrequency

BLOCKS, EXPERTS = 3, 8


def stores() -> list[MemoryStore]:
    """Expert e of block b holds the numbers 100 * b + e."""
    layout = RecordLayout.of({"w": (EXPERTS, 5)}, {"w": 0}, torch.float32)
    values = [100.0 * block + torch.arange(EXPERTS) for block in range(BLOCKS)]
    return [MemoryStore(layout, {"w": one[:, None].expand(-1, 5)}) for one in values]


class SlowStore(MemoryStore):
    """Delivers only when it is waited for; until then, what a slot held is destroyed."""

    failing = False

    def read(self, records, buffer, slots):
        buffer.data[torch.from_numpy(slots)] = 255
        store = self

        class Pending:
            def wait(self) -> None:
                if store.failing:
                    raise DriveFailed("the drive failed")
                MemoryStore.read(store, records, buffer, slots)

        return Pending()


def slow_stores() -> list[SlowStore]:
    made = stores()
    for one in made:
        one.__class__ = SlowStore
    return made


def pool_of(slots: int, group: int = 1, rule=DecayedFrequency) -> ExpertPool:
    return ExpertPool(slow_stores(), ExpertCache(slots, rule(BLOCKS, EXPERTS), group))


def visit(pool: ExpertPool, block: int, needed: list[int], tokens: int = 1) -> list[int]:
    """Run one forward and check what is in each slot when its turn comes. Returns the experts in that order."""
    seen = []
    wanted = np.array(sorted(needed), dtype=np.int64)
    for part in pool.visit(block, wanted, np.full(len(wanted), 1 / tokens), tokens):
        values = pool.buffer.field("w")[torch.from_numpy(part.slots)]
        expected = 100.0 * block + torch.from_numpy(part.experts).float()
        assert torch.equal(values, expected[:, None].expand_as(values))
        seen += part.experts.tolist()
    return seen
