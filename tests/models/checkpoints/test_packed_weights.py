"""Packed weights: each layout that is published is read right, and everything else is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from swarm.data_structures import Span, StepLayout
from swarm.errors import CheckpointError, InvalidOption
from swarm.models.block_loading import load_block
from swarm.models.blockless_model import load_blockless_model
from swarm.models.checkpoints import packed_weights
from swarm.models.checkpoints.checkpoint import SINGLE_FILE, open_checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.models.execution.gradients import compute_gradients
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from tests import zoo
from tests.models.checkpoints import packed_layouts
from tests.models.checkpoints.packed_layouts import E4M3, LAYOUTS, UINT8

torch.set_num_threads(1)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Mixin:
    """In place of what clients add to a family's class."""


def loaded(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All parameters of a checkpoint, as servers and clients load them, by their names in the whole model."""
    checkpoint = open_checkpoint(folder)
    layers = checkpoint.structure.layers_path
    found = dict(load_blockless_model(checkpoint, nn.Identity(), Mixin, dtype=dtype).model.state_dict())
    for block in range(checkpoint.blocks):
        model, _ = load_block(checkpoint, block, dtype)
        for name, tensor in model.get_submodule(f"{layers}.0").state_dict().items():
            found[f"model.{layers}.{block}.{name}"] = tensor
    return found


def unpack(tensors: dict[str, torch.Tensor], quantization: Any) -> dict[str, torch.Tensor]:
    """The tensors, with the packed weights as plain ones in float32."""
    left = dict(tensors)
    found = packed_weights.take_packed(left, quantization)
    return left | {name: one.dense(torch.float32) for name, one in found.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_it_is_defined(tmp_path, layout, dtype):
    packed, plain = packed_layouts.make(layout, tmp_path, dtype=dtype)
    assert_equal(loaded(packed, dtype), loaded(plain, dtype))


@DTYPES
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "layout",
    [
        "fp8 blocks",
        "ModelOpt FP8",
        "compressed-tensors int4",
        "compressed-tensors fp8 with float32",
        "ModelOpt NVFP4",
        "AWQ",
    ],
)
def test_experts_are_unpacked_before_they_are_fused(tmp_path, family, layout, dtype):
    packed, plain = packed_layouts.make(layout, tmp_path, family, dtype)
    assert_equal(loaded(packed, dtype), loaded(plain, dtype))


@DTYPES
@pytest.mark.parametrize(
    ("layout", "family"),
    [("fp8 blocks of 32", "qwen3_moe"), ("fp8 whole tensors", "llama"), ("MXFP8", "llama"), ("MXFP4", "gpt_oss")],
)
def test_weights_are_those_of_transformers(tmp_path, layout, family, dtype):
    """Bit for bit, where it can read a layout without a package or a device of its own."""
    if layout == "MXFP4":
        folder = packed_layouts.make_mxfp4(tmp_path / "packed", dtype)
    else:
        folder, _ = packed_layouts.make(layout, tmp_path, family, dtype)
    assert_equal(loaded(folder, dtype), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


@pytest.mark.parametrize("layout", ["fp8 blocks", "ModelOpt FP8 without a config", "GPTQ desc_act"])
def test_a_span_computes_what_the_dense_model_does(tmp_path, layout):
    packed, plain = packed_layouts.make(layout, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(plain)
    with torch.inference_mode():
        states = model(torch.tensor([zoo.PROMPTS[0]]), output_hidden_states=True).hidden_states
        span = load_span(open_checkpoint(packed), Span(0, 1), dtype=torch.float32, device=torch.device("cpu"))
        found = span.forward(states[0])
    assert (found - states[1]).norm() <= 1e-5 * states[1].norm()


def make_any(layout: str, folder: Path, family: str) -> Path:
    return (
        packed_layouts.make_mxfp4(folder, torch.float32)
        if family == "gpt_oss"
        else (packed_layouts.make(layout, folder, family)[0])
    )


def span_of(folder: Path, dtype: torch.dtype, quant: str) -> SpanModel:
    return load_span(open_checkpoint(folder), Span(0, 2), dtype=dtype, device=torch.device("cpu"), quant=quant)


@pytest.mark.parametrize(
    ("layout", "family"),
    [*((layout, "llama") for layout in LAYOUTS), *((one, "qwen3_moe") for one in list(LAYOUTS)[::3]), ("", "gpt_oss")],
)
def test_weights_that_stay_packed(tmp_path, layout, family):
    """They compute the same, experts too, in no more memory than their file and what is counted beforehand."""
    folder = make_any(layout, tmp_path, family)
    inputs = torch.randn(1, 70, 128, generator=torch.Generator().manual_seed(0))
    plain = span_of(folder, torch.float32, "none").forward(inputs)
    found = span_of(folder, torch.float32, "packed")
    assert (found.forward(inputs) - plain).norm() <= 1e-6 * plain.norm()
    checkpoint = open_checkpoint(folder)
    stored = sum(size for name, (_, size) in checkpoint.stored_tensors.items() if checkpoint.locate(name))
    in_16_bits = span_of(folder, torch.bfloat16, "packed")
    assert in_16_bits.weight_bytes <= 1.15 * stored
    counted = sum(memory_footprint(checkpoint, torch.bfloat16, "packed").block_bytes)
    assert in_16_bits.weight_bytes <= 1.02 * counted <= 1.4 * in_16_bits.weight_bytes
    errors = [
        float((span.forward(inputs.bfloat16()) - plain).norm())
        for span in (in_16_bits, span_of(folder, torch.bfloat16, "none"))
    ]
    assert errors[0] <= 1.1 * errors[1], "rounding in another way must not lose more"


def test_gradients_pass_packed_weights(tmp_path):
    inputs, ends = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0))
    for family, layout in (("llama", "fp8 blocks"), ("qwen3_moe", "AWQ"), ("gpt_oss", "")):
        folder = make_any(layout, tmp_path / family, family)
        plain, packed = (
            compute_gradients(span_of(folder, torch.float32, quant), inputs, ends, StepLayout((0,), (5,))).inputs
            for quant in ("none", "packed")
        )
        assert (packed - plain).norm() <= 1e-5 * plain.norm()


def test_plain_weights_cannot_stay_packed(tmp_path):
    _, plain = packed_layouts.make("fp8 blocks", tmp_path)
    with pytest.raises(InvalidOption, match="nothing here says that the weights of plain are packed; use auto or none"):
        memory_footprint(open_checkpoint(plain), torch.float32, "packed")


def test_experts_of_other_shapes_are_refused(tmp_path):
    folder, _ = packed_layouts.make("fp8 blocks", tmp_path, "qwen3_moe")
    expert = "model.layers.1.mlp.experts.2."
    weight = load_file(folder / SINGLE_FILE)[f"{expert}up_proj.weight"]
    for changes, words in (
        ({"up_proj.weight": weight[:, :64].clone(), "up_proj.weight_scale_inv": torch.ones(1, 1)}, "different shapes"),
        (
            {f"{one}_proj.weight{end}": None for one in ("up", "gate", "down") for end in ("", "_scale_inv")},
            "the shape",
        ),
        ({"up_proj.weight": None, "up_proj.weight_scale_inv": None}, "different shapes|the shape"),
    ):
        copy = Path(shutil.copytree(folder, tmp_path / str(len(changes)), dirs_exist_ok=True))
        changed(copy, {expert + name: one for name, one in changes.items()})
        with pytest.raises(CheckpointError, match=words):
            load_block(open_checkpoint(copy), 1, torch.float32)


def test_no_layer_of_transformers_keeps_float8(tmp_path, monkeypatch):
    """On a GPU that has products of float8, transformers kept them for kernels that are not installed."""
    packed, _ = packed_layouts.make("fp8 blocks", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    model, _ = load_block(open_checkpoint(packed), 0, torch.bfloat16)
    kinds = {type(module) for name, module in model.named_modules() if name.endswith("_proj")}
    assert kinds == {nn.Linear}
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}


def changed(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """The checkpoint, with some tensors replaced or removed."""
    tensors: dict[str, Any] = load_file(folder / SINGLE_FILE) | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / SINGLE_FILE, {"format": "pt"})
    return folder


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("fp8 blocks", {"weight_scale_inv": None}, r"up_proj\.weight is float8_e4m3fn .* no scales"),
        ("fp8 blocks", {"weight_scale_inv": torch.ones(3, 1)}, r"does not fit its scales of the shape \[3, 1\]"),
        ("ModelOpt NVFP4", {"weight_scale_2": None}, r"up_proj\.weight lacks .*up_proj\.weight_scale_2"),
        ("ModelOpt NVFP4", {"pre_quant_scale": torch.ones(128)}, r"up_proj\.pre_quant_scale looks like a part"),
        ("compressed-tensors int4", {"weight_scale": None}, r"up_proj\.weight lacks .*up_proj\.weight_scale"),
        ("compressed-tensors int4", {"weight_scale": torch.ones(192, 3)}, r"does not fit its scales of the shape"),
        ("compressed-tensors int4", {"weight_shape": torch.tensor([192, 1 << 40])}, "number of bits does not follow"),
        ("compressed-tensors W8A8", {"weight_scale": None}, r"up_proj\.weight is int8 .* no scales"),
        ("AWQ", {"weight": torch.ones(192, 128)}, "twice, in different forms"),
        ("GPTQ", {"g_idx": torch.full((128,), 4, dtype=torch.int32)}, "does not fit its groups of columns"),
        ("GPTQ", {"qzeros": None}, r"up_proj\.weight lacks .*up_proj\.qzeros"),
        ("MLX 4", {"biases": None}, r"up_proj\.weight lacks .*up_proj\.biases"),
        ("fp8 blocks", {"weight.absmax": torch.ones(3)}, r"weight\.absmax looks like a part"),
        ("fp8 blocks", {"codebook": torch.ones(3)}, r"up_proj\.codebook looks like a part"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused_by_name(tmp_path, layout, changes, words):
    folder, _ = packed_layouts.make(layout, tmp_path)
    changed(folder, {UP + name: one for name, one in changes.items()})
    with pytest.raises(CheckpointError, match=rf"block 0 cannot be loaded: .*{words}.*bfloat16"):
        load_block(open_checkpoint(folder), 0, torch.float32)


def test_float8_and_integers_among_plain_weights_are_refused(tmp_path):
    _, folder = packed_layouts.make("fp8 blocks", tmp_path)
    weight = load_file(folder / SINGLE_FILE)["lm_head.weight"]
    for stored in (weight.to(E4M3), weight.to(torch.int8), weight.to(UINT8), weight.to(torch.int32)):
        changed(folder, {"lm_head.weight": stored})
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is \w+ of the shape .* no scales"):
            load_blockless_model(open_checkpoint(folder), nn.Identity(), Mixin, dtype=torch.float32)
    folder = zoo.make_checkpoint("gpt_oss", tmp_path / "experts")
    fused = "model.layers.0.mlp.experts.down_proj"
    for dtype in (torch.int8, E4M3):
        changed(folder, {fused: load_file(folder / SINGLE_FILE)[fused].to(dtype)})
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj is "):
            load_block(open_checkpoint(folder), 0, torch.float32)


def test_float8_that_is_said_to_be_packed_by_bitsandbytes(tmp_path):
    packed, _ = packed_layouts.make("fp8 blocks", tmp_path)
    packed_layouts.change_config(packed, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(CheckpointError, match=r"proj\.weight is float8_e4m3fn .* no scales"):
        load_block(open_checkpoint(packed), 0, torch.float32)


def test_names_that_families_have_themselves_are_left_alone():
    plain = {"router.scale": torch.ones(3), "layer_scale": torch.ones(1), "rotary_emb.inv_freq": torch.ones(4)}
    assert unpack(plain, None) == plain
    packed_weights.refuse_companions(
        ["rotary_emb.inv_freq", "rotary_emb.scale", "k_proj.k_scale", "mlp.input_scale", "attn.bias"]
    )


def test_a_packed_checkpoint_that_describes_much_more_than_is_stored(tmp_path):
    folder, _ = packed_layouts.make("compressed-tensors int4", tmp_path)
    packed_layouts.change_config(folder, vocab_size=1 << 26)
    with pytest.raises(CheckpointError, match=r"describes \d+ values, and the checkpoint holds \d+"):
        load_blockless_model(open_checkpoint(folder), nn.Identity(), Mixin, dtype=torch.float32)


def test_fused_experts_of_float8():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(3, 160, 256, generator=generator).to(E4M3)
    blocks, columns, rows = (torch.rand(3, 2, 2), torch.rand(3, 1, 256), torch.rand(3, 256, 1))
    spread = torch.stack([packed_layouts.spread(one, 128, 128, (160, 256)) for one in blocks])
    for method, name, scales, factors in (
        ("fp8", "_scale_inv", blocks, spread),
        ("fbgemm_fp8", "_scale", columns, columns),
        ("fbgemm_fp8", "_scale", rows, rows.transpose(1, 2)),
        ("modelopt", "_weight_scale", torch.tensor(0.5), torch.tensor(0.5)),
        ("modelopt", "_weight_scale", blocks[:, 0, 0], blocks[:, :1, :1]),
    ):
        stored = {"experts.up": data, f"experts.up{name}": scales}
        found = unpack(stored, {"quant_method": method})
        assert found.keys() == {"experts.up"}
        assert torch.equal(found["experts.up"], data.float() * factors)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        *(
            ({"quant_method": method}, f"packed by '{method}', which is not read here; use the model's checkpoint in")
            for method in ("aqlm", "quip", "hqq", "eetq", "higgs", "spqr", "vptq", "torchao", "quanto", "bitnet")
        ),
        ({"bits": 4}, "an unnamed method"),
        ({"quant_method": ["gptq"]}, r"packed by \"\['gptq'\]\""),
        ({"quant_method": "awq", "version": "gemv"}, "'awq' with version 'gemv'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}, "sparse"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"r": {}}}}, "rotations"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "mode 'mxfp4'"),
        ({"bits": 4, "group_size": 64, "model.layers.0": {"bits": 4, "group_size": 32}}, "groups of several sizes"),
        ("fp8", "is not an object"),
    ],
)
def test_a_config_says_what_cannot_be_read(quantization, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(packed_weights.format_problem(quantization))


def test_gptq_without_a_config_is_refused(tmp_path):
    """Its tensors do not say whether zero points are stored as they are, or less one."""
    folder, _ = packed_layouts.make("GPTQ v2", tmp_path)
    packed_layouts.change_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="no quantization_config says in which of two ways"):
        load_block(open_checkpoint(folder), 0, torch.float32)


def test_a_config_of_what_can_be_read_has_no_problem():
    for quantization, _ in LAYOUTS.values():
        assert packed_weights.format_problem(quantization) == ""
    for method in ("bitsandbytes", "mxfp4", "fbgemm_fp8"):
        assert packed_weights.format_problem({"quant_method": method}) == ""


DTYPES_OF_JUNK = [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64]
JUNK_SHAPES = st.sampled_from(
    [(), (0,), (1,), (2,), (4,), (16, 1), (1, 16), (2, 4), (4, 2), (16, 4), (0, 4), (2, 4, 1)]
)
JUNK = st.builds(
    lambda dtype, shape, value: torch.full(shape, value).to(dtype),
    st.sampled_from([*DTYPES_OF_JUNK, UINT8, torch.uint32, E4M3, torch.float8_e8m0fnu]),
    JUNK_SHAPES,
    st.sampled_from([0.0, 1.0, -1.0, 3.0, 127.0, float("nan")]),
)
NUMBERS = st.sampled_from([-1, 0, 1, 3, 4, 8, 32, 64, 10**9, 10**30, 0.5, True, None, "4", [], {}])
SETTINGS = st.dictionaries(
    st.sampled_from(["quant_method", "bits", "group_size", "weight_block_size", "checkpoint_format", "config_groups"]),
    NUMBERS
    | st.sampled_from(["gptq", "awq", "fbgemm_fp8", "compressed-tensors", "gptq_v2"])
    | st.lists(NUMBERS, min_size=2, max_size=2)
    | st.fixed_dictionaries(
        {
            "g": st.fixed_dictionaries(
                {
                    "weights": st.dictionaries(
                        st.sampled_from(["num_bits", "group_size", "block_structure", "type"]), NUMBERS
                    )
                }
            )
        }
    ),
    max_size=3,
)


CHANGES: Any = st.one_of(
    st.none(),
    JUNK.map(lambda junk: lambda tensor: junk),
    st.sampled_from([torch.int8, torch.int32, torch.int64, torch.float16, E4M3, torch.complex64]).map(
        lambda dtype: lambda tensor: tensor.float().to(dtype)
    ),
    st.sampled_from(
        [
            lambda tensor: tensor[:-1] if tensor.ndim else tensor,
            lambda tensor: tensor[..., :-1] if tensor.ndim else tensor,
            lambda tensor: tensor.reshape(-1),
            lambda tensor: tensor[None],
            lambda tensor: tensor.T.contiguous() if tensor.ndim == 2 else tensor,
            lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor,
            lambda tensor: tensor.clone(memory_format=torch.contiguous_format).view(UINT8) if tensor.ndim else tensor,
            lambda tensor: torch.full_like(tensor.float(), -1).to(tensor.dtype),
        ]
    ),
)


@pytest.mark.filterwarnings("ignore:Casting complex values")  # by the changes themselves
@settings(max_examples=400)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.lists(st.tuples(st.integers(0, 9), CHANGES), min_size=1, max_size=2),
    st.none() | SETTINGS,
)
def test_changed_tensors_are_unpacked_or_refused(layout, changes, quantization):
    """And nothing is larger than what its bits can describe."""
    config, pack = LAYOUTS[layout]
    packed, _ = pack(packed_layouts.Drawn((32, 64), torch.Generator().manual_seed(0)))
    stored = {f"a.{name}": one for name, one in packed.items()}
    for place, change in changes:
        name = sorted(stored)[place % len(stored)]
        tensor = stored.pop(name)
        if change is not None or not stored:
            stored[name] = tensor if change is None else change(tensor)
    try:
        found = unpack(stored, quantization or config)
    except CheckpointError:
        return
    assert sum(one.numel() for one in found.values()) <= 4 * sum(one.nbytes for one in stored.values())
    assert all(one.dtype is torch.float32 for name, one in found.items() if name == "a.weight" and name not in stored)
