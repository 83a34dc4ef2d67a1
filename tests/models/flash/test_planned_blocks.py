"""Which kind of records a block becomes; and blocks built without the modules whose weights stay on flash."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from swarm.errors import CheckpointError
from swarm.models.block_loading import load_block
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting import cut_layers
from swarm.models.flash import planned_blocks
from swarm.models.flash.block_plan import RecordKind, TakenOut
from swarm.models.flash.planned_blocks import BlockPlanner, BuiltBlock, build_block, plan_block
from tests import zoo
from tests.models.flash.largest_plan import plan_largest


@pytest.fixture(scope="module", params=zoo.REPRESENTATIVES)
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


def test_every_other_tensor_of_the_block_is_loaded(checkpoint):
    """In the families with experts in some blocks only, the last block has them."""
    block, dtype = zoo.BLOCKS - 1, torch.bfloat16
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


def test_a_tensor_of_the_wrong_shape_is_an_error(llama):
    with pytest.raises(CheckpointError, match=r"has the shape .* config\.json describes"):
        built_from(llama, lambda tensors: tensors.update({"input_layernorm.weight": torch.zeros(3)}))


EXPECTED = {
    "llama": RecordKind.BLOCK,
    "gpt2": RecordKind.BLOCK,
    "opt": RecordKind.NEURONS,
    "mixtral": RecordKind.EXPERTS,
    "llama4_text": RecordKind.EXPERTS,
}


def layers(family: str, device: str) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModel.from_config(zoo.config_of(family)).eval()
    path, _, _ = cut_layers.find_layers(model, zoo.BLOCKS)
    return list(model.get_submodule(path))


@pytest.mark.parametrize("family", EXPECTED)
def test_a_plan_needs_no_weights(family):
    with_weights, without = layers(family, "cpu")[1], layers(family, "meta")[1]
    plan = plan_block(without)
    assert plan.kind is EXPECTED[family]
    assert plan == plan_block(with_weights)
    assert all(tensor.is_meta for tensor in without.parameters()), "the block itself was filled"


def test_exact_servers_stream_what_could_be_selected():
    block = layers("opt", "meta")[0]
    assert plan_block(block, exact=True).kind is RecordKind.BLOCK
    assert plan_block(layers("mixtral", "meta")[0], exact=True).kind is RecordKind.EXPERTS


def test_blocks_that_are_built_alike_are_tried_once_and_others_are_told_apart(monkeypatch):
    tried = []
    real = planned_blocks.plan_block
    monkeypatch.setattr(planned_blocks, "plan_block", lambda *args: tried.append(args) or real(*args))
    planner = BlockPlanner()
    kinds = [planner.plan(layer).kind for layer in layers("deepseek_v3", "meta")]
    assert kinds == [RecordKind.BLOCK] * 4 + [RecordKind.EXPERTS] * 2
    assert len(tried) == 2
