"""Opening prepared blocks: each fault of their files is one error that names the block."""

from __future__ import annotations

import os

import pytest
import safetensors.torch
import torch

from swarm.data_structures import Span
from swarm.errors import PackedFileError
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.preparation import add_predictor
from swarm.models.flash.files.prepared_block import open_block
from swarm.models.flash.planned_blocks import PlannedBlock
from tests.models.flash.files.preparations import make_checkpoint, packed, planned_block, prepare
from tests.models.flash.largest_plan import plan_largest

BLOCK = 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def model(llama, tmp_path) -> PackedModel:
    prepare(llama, Span(BLOCK, BLOCK + 1), dtype=torch.float32, root=tmp_path, plan_of=plan_largest)
    return packed(llama, tmp_path)


@pytest.fixture
def planned(llama) -> PlannedBlock:
    return planned_block(llama, BLOCK)


def flip_bit(path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize(("part", "place"), [("records", 0), ("records", 1), ("resident", 0.5), ("manifest", 0.2)])
def test_a_flipped_bit_is_found(model, part, place, planned):
    flip_bit(getattr(model.files(BLOCK, RecordKind.NEURONS), part), place)
    with pytest.raises(PackedFileError) as caught:
        open_block(model, BLOCK, planned)
    assert str(caught.value).startswith(
        f"block 2 of llama cannot be read from flash: block-0002.neurons.{ENDINGS[part]} "
    )


ENDINGS = {"records": "records", "resident": "resident.safetensors", "manifest": "json"}


@pytest.mark.parametrize(("part", "length"), [("records", -1), ("records", 1), ("resident", 0)])
def test_another_length_is_found_without_reading(model, monkeypatch, part, length, planned):
    path = getattr(model.files(BLOCK, RecordKind.NEURONS), part)
    size = path.stat().st_size
    os.truncate(path, size + length if length else 0)
    monkeypatch.setattr(os, "preadv", None)
    with pytest.raises(PackedFileError, match=f"has {path.stat().st_size} bytes instead of {size}"):
        open_block(model, BLOCK, planned)


def test_a_block_under_the_name_of_another(model, planned):
    for part in ENDINGS:
        source, target = (model.files(block, RecordKind.NEURONS) for block in (BLOCK, BLOCK + 1))
        os.rename(getattr(source, part), getattr(target, part))
    with pytest.raises(PackedFileError, match="the files are those of block 2 of llama"):
        open_block(model, BLOCK + 1, planned)


def test_resident_tensors_do_not_change_with_their_file(model, llama, planned):
    """They are copied: a mapping of the file would change."""
    prepared = open_block(model, BLOCK, planned)
    tensors = prepared.resident_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    prepared.files.resident.write_bytes(b"\xff" * prepared.files.resident.stat().st_size)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("org/model", "org--model@0123abcd@float16"),
        ("../..", "..--..@0123abcd@float16"),
        ("a b@c%", "a%20b%40c%25@0123abcd@float16"),
        ("модель", "%D0%BC%D0%BE%D0%B4%D0%B5%D0%BB%D1%8C@0123abcd@float16"),
    ],
)
def test_every_name_is_one_folder(tmp_path, name, folder):
    model = PackedModel(tmp_path, name, "0123abcd", torch.float16)
    assert model.folder_name == folder
    assert model.folder.parent == tmp_path


@pytest.fixture
def with_predictor(model, planned) -> PackedModel:
    with_block = open_block(model, BLOCK, planned)
    add_predictor(model, with_block, safetensors.torch.save({"first": torch.ones(3)}))
    return model


def test_preparation_keeps_predictors(with_predictor, llama, planned):
    files = with_predictor.files(BLOCK, RecordKind.NEURONS)
    before = files.predictor.read_bytes()
    files.records.unlink()
    prepare(llama, Span(BLOCK, BLOCK + 1), dtype=torch.float32, root=with_predictor.root, plan_of=plan_largest)
    assert open_block(with_predictor, BLOCK, planned).files.predictor.read_bytes() == before
