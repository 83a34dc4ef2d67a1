"""Opening prepared blocks: each fault of their files is one error that names the block and the command."""

from __future__ import annotations

import dataclasses
import os

import pytest
import safetensors.torch
import torch

from swarm.data_structures import Span
from swarm.errors import PackedFileError
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.files import record_writing
from swarm.models.flash.files.block_files import PackedModel, flash_root
from swarm.models.flash.files.manifest import encode_sealed, read_manifest
from swarm.models.flash.files.preparation import add_predictor
from swarm.models.flash.files.prepared_block import open_block
from swarm.models.flash.planned_blocks import PlannedBlock
from swarm.models.flash.streaming import plan_streamed
from tests.models.flash.files.preparations import assert_holds_block, make_checkpoint, packed, planned_block, prepare
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
    assert f"Prepare it again: swarm flash prepare {model.source} --blocks 2:3 --dtype float32" in str(caught.value)


ENDINGS = {"records": "records", "resident": "resident.safetensors", "manifest": "json"}


@pytest.mark.parametrize(("part", "length"), [("records", -1), ("records", 1), ("resident", 0)])
def test_another_length_is_found_without_reading(model, monkeypatch, part, length, planned):
    path = getattr(model.files(BLOCK, RecordKind.NEURONS), part)
    size = path.stat().st_size
    os.truncate(path, size + length if length else 0)
    monkeypatch.setattr(os, "preadv", None)
    with pytest.raises(PackedFileError, match=f"has {path.stat().st_size} bytes instead of {size}"):
        open_block(model, BLOCK, planned)


@pytest.mark.parametrize("part", ["records", "resident"])
def test_a_missing_file(model, part, planned):
    getattr(model.files(BLOCK, RecordKind.NEURONS), part).unlink()
    with pytest.raises(PackedFileError, match="No such file"):
        open_block(model, BLOCK, planned)


def test_a_block_that_was_never_prepared(model, planned):
    with pytest.raises(PackedFileError, match=r"block 3 of llama is not prepared for flash: run swarm flash prepare"):
        open_block(model, BLOCK + 1, planned)


def test_a_drive_that_fails_while_it_is_read(model, monkeypatch, planned):
    def fail(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(PackedFileError, match=r"block-0002\.neurons\.records cannot be read \(Input/output error\)"):
        open_block(model, BLOCK, planned)


def test_a_block_under_the_name_of_another(model, planned):
    for part in ENDINGS:
        source, target = (model.files(block, RecordKind.NEURONS) for block in (BLOCK, BLOCK + 1))
        os.rename(getattr(source, part), getattr(target, part))
    with pytest.raises(PackedFileError, match="the files are those of block 2 of llama"):
        open_block(model, BLOCK + 1, planned)


def test_other_weights_than_the_checkpoints(model, planned):
    with pytest.raises(PackedFileError, match="the checkpoint's weights have changed since"):
        open_block(model, BLOCK, planned, digest="0123456789ab")


def test_another_plan_than_todays(model, llama, planned):
    other = dataclasses.replace(planned, layout=dataclasses.replace(planned.layout, stride=2 * planned.layout.stride))
    with pytest.raises(PackedFileError, match="prepared in another way"):
        open_block(model, BLOCK, other)


@pytest.mark.parametrize("change", ["no safetensors", "a tensor is missing", "a record is there too"])
def test_resident_tensors_that_the_plan_does_not_describe(llama, tmp_path, change):
    """With digests that fit: what a faulty program would have written."""
    prepare(llama, Span(BLOCK, BLOCK + 1), dtype=torch.float32, root=tmp_path, plan_of=plan_streamed)
    model = packed(llama, tmp_path)
    files = model.files(BLOCK, RecordKind.BLOCK)
    manifest = read_manifest(files.manifest)
    if change == "no safetensors":
        pieces = iter([torch.zeros(100, dtype=torch.uint8)])
    else:
        tensors = {"mlp.up_proj.weight" if change == "a record is there too" else "other": torch.zeros(2)}
        pieces = record_writing.safetensors_bytes(tensors)
    resident = record_writing.write_file(files.resident, pieces)
    plan = dataclasses.replace(manifest.plan, resident=("input_layernorm.weight",))
    files.manifest.write_bytes(encode_sealed(dataclasses.replace(manifest, plan=plan, resident=resident)))
    planned = planned_block(llama, BLOCK, plan_of=plan_streamed)
    planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, resident=plan.resident))
    with pytest.raises(PackedFileError, match=r"is not a safetensors file|holds other tensors than the plan says"):
        open_block(model, BLOCK, planned)


def test_resident_tensors_do_not_change_with_their_file(model, llama, planned):
    """They are copied: a mapping of the file would change."""
    prepared = open_block(model, BLOCK, planned)
    tensors = prepared.resident_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    prepared.files.resident.write_bytes(b"\xff" * prepared.files.resident.stat().st_size)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_files_that_vanish_in_use_are_an_error(model, planned):
    prepared = open_block(model, BLOCK, planned)
    prepared.files.resident.unlink()
    with pytest.raises(PackedFileError, match="cannot be read"):
        prepared.resident_tensors()


def test_a_folder_that_may_only_be_read_can_be_used(model, llama, monkeypatch, planned):
    """Locks cannot be written there, and are not needed: no file can be removed either."""
    monkeypatch.setattr(os, "open", refuse_to_write(os.open))
    prepared = open_block(model, BLOCK, planned)
    assert_holds_block(prepared, llama, torch.float32)
    prepared.close()


def refuse_to_write(opened):
    def open_to_read(path, flags, *args, **kwargs):
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return opened(path, flags, *args, **kwargs)

    return open_to_read


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
    model = PackedModel(tmp_path, name, "0123abcd", torch.float16, name)
    assert model.folder_name == folder
    assert model.folder.parent == tmp_path


def test_the_command_says_what_the_user_said(tmp_path, monkeypatch):
    model = PackedModel(flash_root(tmp_path / "my cache"), "org/model", "0123", torch.bfloat16, "org/model")
    assert model.prepare_command(7, RecordKind.NEURONS) == (
        "swarm flash prepare org/model --blocks 7:8 --dtype bfloat16 --revision 0123 "
        f"--cache-dir '{tmp_path / 'my cache'}'"
    )
    model = PackedModel(flash_root(None), "folder", "folder-0123", torch.bfloat16, str(tmp_path))
    command = f"swarm flash prepare {tmp_path} --blocks 7:8 --dtype bfloat16"
    assert model.prepare_command(7, RecordKind.EXPERTS) == command
    assert model.prepare_command(7, RecordKind.BLOCK) == f"{command} --flash-exact"


@pytest.fixture
def with_predictor(model, planned) -> PackedModel:
    with_block = open_block(model, BLOCK, planned)
    add_predictor(model, with_block, safetensors.torch.save({"first": torch.ones(3)}))
    with_block.close()
    return model


def test_a_predictor_is_found_again(with_predictor, planned):
    found = open_block(with_predictor, BLOCK, planned).predictor()
    assert safetensors.torch.load_file(found)["first"].tolist() == [1, 1, 1]


def test_most_blocks_have_no_predictor(model, planned):
    assert open_block(model, BLOCK, planned).predictor() is None


def test_a_newer_predictor_replaces_an_older_one(with_predictor, planned):
    prepared = open_block(with_predictor, BLOCK, planned)
    add_predictor(with_predictor, prepared, safetensors.torch.save({"first": torch.zeros(2)}))
    assert safetensors.torch.load_file(prepared.predictor())["first"].tolist() == [0, 0]


@pytest.mark.parametrize(("part", "place"), [("predictor", 0.5), ("predictor", 1), ("predictor_entry", 0.5)])
def test_a_flipped_bit_in_a_predictor_is_found(with_predictor, part, place, planned):
    flip_bit(getattr(with_predictor.files(BLOCK, RecordKind.NEURONS), part), place)
    with pytest.raises(PackedFileError):
        open_block(with_predictor, BLOCK, planned).predictor()


def test_a_predictor_of_other_weights_is_refused(with_predictor, llama, planned):
    """As after a block was prepared anew, because its checkpoint had changed."""
    prepared = open_block(with_predictor, BLOCK, planned)
    prepared.digest = "0123456789ab"
    with pytest.raises(PackedFileError, match="was trained for other weights"):
        prepared.predictor()


def test_preparation_keeps_predictors(with_predictor, llama, planned):
    files = with_predictor.files(BLOCK, RecordKind.NEURONS)
    files.records.unlink()
    prepare(llama, Span(BLOCK, BLOCK + 1), dtype=torch.float32, root=with_predictor.root, plan_of=plan_largest)
    assert open_block(with_predictor, BLOCK, planned).predictor() == files.predictor
