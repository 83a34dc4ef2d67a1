"""Experts in packed files, and drives that fail."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from benchmarks.flash.memory_store import MemoryStore
from swarm.errors import DriveFailed
from swarm.models.flash.reading import FlashStore
from swarm.models.flash.records import RecordBuffer
from tests import zoo
from tests.models.flash.experts.flash_zoo import flash_model, resident_model


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_text_from_packed_files_is_that_of_the_resident_model(family, tmp_path):
    numbers = itertools.count()

    def packed(store: MemoryStore) -> FlashStore:
        everything = RecordBuffer(store.layout, store.layout.count)
        records = np.arange(store.layout.count)
        store.read(records, everything, records).wait()
        path = tmp_path / f"{next(numbers)}.bin"
        everything.data.numpy().tofile(path)
        return FlashStore.open(path, store.layout)

    resident = resident_model(family)
    flash = flash_model(resident, 0.3, stored=packed)
    assert zoo.greedy_texts(flash.model) == zoo.greedy_texts(resident)
    for store in flash.stores:
        store.close()


class FailingStore:
    """Fails every so many reads: at once, or when they are waited for."""

    def __init__(self, store: MemoryStore, every: int) -> None:
        self.layout, self.counters = store.layout, store.counters
        self._store, self._every, self._reads = store, every, 0

    def read(self, records, buffer, slots):
        self._reads += 1
        if self._reads % self._every:
            return self._store.read(records, buffer, slots)
        buffer.data[torch.from_numpy(slots)] = 255  # NaN, for every dtype
        if self._reads % (2 * self._every):
            raise DriveFailed("the drive does not take reads")
        return FailedRead()

    def close(self) -> None:
        self._store.close()


class FailedRead:
    def wait(self) -> None:
        raise DriveFailed("the drive does not answer")


@pytest.mark.parametrize(("family", "every"), [("mixtral", 5), ("llama4_text", 7)])
def test_a_forward_fails_by_name_and_the_next_one_computes_right(family, every):
    resident = resident_model(family)
    flash = flash_model(resident, 0.5, stored=lambda store: FailingStore(store, every))
    failed = right = 0
    with torch.inference_mode():
        for number in range(60):
            tokens = torch.tensor([zoo.PROMPTS[number % 2][: 1 + number % 5]])
            try:
                logits = flash.model(tokens).logits
            except DriveFailed:
                failed += 1
                continue
            assert torch.equal(logits, resident(tokens).logits)
            right += 1
    assert failed
    assert right
