"""Files of lenses and classifiers: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from swarm.errors import AdapterError, AdapterMismatch
from swarm.models.exits.trained_exits import (
    EXITS_FILE,
    FORMAT,
    BaseModel,
    ExitClassifier,
    ExitLens,
    StoredExits,
    TrainedExits,
)

BASE = BaseModel("model", "abc", 8, 6)
METADATA = {"format": FORMAT, "name": "model", "revision": "abc"}


def lens() -> ExitLens:
    return ExitLens(torch.randn(8, 8), torch.randn(8))


def test_what_is_written_is_read(tmp_path):
    exits = TrainedExits(BASE, {2: lens(), 4: lens()}, {4: ExitClassifier(torch.randn(8), torch.randn(1))})
    exits.save(tmp_path / "exits")
    found = TrainedExits.load(tmp_path / "exits", BASE)
    hidden = torch.randn(3, 8)
    assert list(found.lenses) == [2, 4]
    assert list(found.classifiers) == [4]
    for block, one in exits.lenses.items():
        assert found.lenses[block](hidden).equal(one(hidden))
    assert found.classifiers[4](hidden).equal(exits.classifiers[4](hidden))


def test_some_are_read(tmp_path):
    exits = TrainedExits(BASE, {2: lens(), 4: lens()}, {4: ExitClassifier(torch.randn(8), torch.randn(1))})
    exits.save(tmp_path)
    stored = StoredExits.open(tmp_path, BASE)
    assert (stored.lenses, stored.classifiers) == ({2, 4}, {4})
    assert [stored.weight_bytes(block) for block in (1, 2, 4)] == [0, 4 * 72, 4 * (72 + 9)]
    found = stored.load((3, 4, 5))
    assert list(found.lenses) == list(found.classifiers) == [4]
    assert found.lenses[4].weight_HH.equal(exits.lenses[4].weight_HH)
    assert stored.load(()).lenses == {}


def test_values_are_checked_when_they_are_read_and_the_header_again(tmp_path):
    broken = ExitLens(torch.full((8, 8), float("inf")), torch.zeros(8))
    TrainedExits(BASE, {2: lens(), 4: broken}).save(tmp_path)
    stored = StoredExits.open(tmp_path, BASE)
    assert list(stored.load((2,)).lenses) == [2]
    with pytest.raises(AdapterError, match="weight holds NaN or infinity"):
        stored.load((4,))
    TrainedExits(BaseModel("other", "def", 8, 6), {2: lens()}).save(tmp_path)
    with pytest.raises(AdapterMismatch, match="trained for revision def of other"):
        stored.load((2,))


def test_of_another_model(tmp_path):
    TrainedExits(BASE, {2: lens()}).save(tmp_path)
    with pytest.raises(AdapterMismatch, match="trained for revision abc of model, and this is def of other"):
        TrainedExits.load(tmp_path, BaseModel("other", "def", 8, 6))
    for base in (BaseModel("model", "abc", 9, 6), BaseModel("model", "abc", 8, 2)):
        with pytest.raises(AdapterMismatch):
            TrainedExits.load(tmp_path, base)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lens.2.weight": torch.zeros(8, 8)}, "lens.2.bias is missing"),
        ({"lens.2.bias": torch.zeros(8)}, "lens.2.weight is missing"),
        ({"lens.two.bias": torch.zeros(8)}, "no part of a lens"),
        ({"lens.2.scale": torch.zeros(8)}, "no part of a lens"),
        ({"lens.\u00b2.bias": torch.zeros(8)}, "no part of a lens"),
        ({f"lens.{'2' * 5000}.bias": torch.zeros(8)}, "no part of a lens"),
        ({"head.weight": torch.zeros(8)}, "no part of a lens"),
        ({"lens.2.weight": torch.zeros(8, 8), "lens.2.bias": torch.full((8,), float("nan"))}, "NaN"),
        ({"lens.2.weight": torch.zeros(8, 8).half(), "lens.2.bias": torch.zeros(8)}, "needs F32"),
        ({"lens.2.weight": torch.zeros(8, 9), "lens.2.bias": torch.zeros(8)}, "a model with 8 values"),
        ({"lens.6.weight": torch.zeros(8, 8), "lens.6.bias": torch.zeros(8)}, "does not have"),
        ({"lens.0.weight": torch.zeros(8, 8), "lens.0.bias": torch.zeros(8)}, "does not have"),
        ({f"lens.{block}.bias": torch.zeros(1) for block in range(3000)}, "no model has so many"),
    ],
)
def test_bad_files(tmp_path, tensors, message):
    save_file(tensors, tmp_path / EXITS_FILE, metadata=METADATA)
    with pytest.raises(AdapterError, match=message):
        TrainedExits.load(tmp_path, BASE)


def test_no_such_file_and_other_files(tmp_path):
    with pytest.raises(AdapterError, match="not a readable safetensors"):
        TrainedExits.load(tmp_path, BASE)
    (tmp_path / EXITS_FILE).write_bytes(b"\x80\x04 not safetensors")
    with pytest.raises(AdapterError, match="not a readable safetensors"):
        TrainedExits.load(tmp_path, BASE)
    save_file({"weight": torch.zeros(1)}, tmp_path / EXITS_FILE)
    with pytest.raises(AdapterError, match="does not hold exits"):
        TrainedExits.load(tmp_path, BASE)
