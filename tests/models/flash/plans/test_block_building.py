"""Blocks of every family, built without the modules whose weights stay on flash."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import CheckpointError
from swarm.models.block_loading import load_block
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.flash.plans.block_building import BuiltBlock, build_block
from swarm.models.flash.plans.block_plan import TakenOut
from tests import zoo
from tests.models.flash.largest_plan import plan_largest


@pytest.fixture(scope="module", params=zoo.FAMILIES)
def checkpoint(request, tmp_path_factory):
    return open_checkpoint(zoo.make_checkpoint(request.param, tmp_path_factory.mktemp("zoo") / request.param))


def assert_same_tensors(model, whole, taken: set[str]) -> None:
    """Every parameter and buffer of `whole`, rotary tables among them, is in `model` bit for bit, but for `taken`."""
    expected = {name: tensor for name, tensor in _tensors(whole).items() if name not in taken}
    found = _tensors(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].device == tensor.device
        assert torch.equal(found[name], tensor), name


def _tensors(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize(("block", "dtype"), [(0, torch.bfloat16), (5, torch.float32)])
def test_every_other_tensor_of_the_block_is_loaded(checkpoint, block, dtype):
    """In the families with experts in some blocks only, the last block has them."""
    whole, _ = load_block(checkpoint, block, dtype)
    path = checkpoint.structure.layers_path
    layer = whole.get_submodule(path)[0]
    plan = plan_largest(layer)
    tensors = {name: tensor.clone() for name, tensor in layer.state_dict().items() if name not in plan.axes}

    built = build_block(checkpoint, block, dtype, plan, tensors)

    taken = {f"{path}.0.{name}" for name in (*plan.axes, *plan.resident)}
    assert_same_tensors(built.model, whole, taken)
    for role, inside in plan.modules.items():
        assert isinstance(built.model.get_submodule(path)[0].get_submodule(inside), TakenOut)
        original = layer.get_submodule(inside)
        assert type(built.taken[role]) is type(original)
        assert {parameter.device.type for parameter in built.taken[role].parameters()} == {"meta"}
        shapes = {name: tensor.shape for name, tensor in original.state_dict().items()}
        assert {name: tensor.shape for name, tensor in built.taken[role].state_dict().items()} == shapes


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return open_checkpoint(zoo.make_checkpoint("llama", tmp_path_factory.mktemp("zoo") / "llama"))


def built_from(llama, change) -> BuiltBlock:
    whole, _ = load_block(llama, 2, torch.float32)
    layer = whole.get_submodule(llama.structure.layers_path)[0]
    plan = plan_largest(layer)
    tensors = {name: tensor for name, tensor in layer.state_dict().items() if name not in plan.axes}
    change(tensors)
    return build_block(llama, 2, torch.float32, plan, tensors)


def test_a_missing_tensor_is_an_error(llama):
    with pytest.raises(CheckpointError, match="lacks 1 tensors that the model needs"):
        built_from(llama, lambda tensors: tensors.pop("input_layernorm.weight"))


def test_a_tensor_of_another_model_is_an_error(llama):
    with pytest.raises(CheckpointError, match="a llama model has no tensor"):
        built_from(llama, lambda tensors: tensors.update({"mlp.other.weight": torch.zeros(2)}))


def test_a_tensor_of_the_wrong_shape_is_an_error(llama):
    with pytest.raises(CheckpointError, match=r"has the shape .* config\.json describes"):
        built_from(llama, lambda tensors: tensors.update({"input_layernorm.weight": torch.zeros(3)}))


def test_tensors_of_the_right_dtype_are_not_copied(llama):
    given = {}
    built = built_from(llama, given.update)
    own = {tensor.data_ptr() for tensor in given.values()}
    layer = built.model.get_submodule(llama.structure.layers_path)[0]
    assert all(parameter.data_ptr() in own for parameter in layer.parameters())
