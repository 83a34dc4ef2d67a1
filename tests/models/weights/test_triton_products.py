"""Products with packed weights in Triton against the unpacked weight: on a GPU where there is one, else interpreted.

Triton decides when it is imported whether it interprets, so without a GPU these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS_HERE = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"

from swarm.models.weights import triton_products  # noqa: E402
from swarm.models.weights.gpu_linears import GPU_LINEARS  # noqa: E402
from swarm.models.weights.triton_products import multiply, rows_per_program  # noqa: E402
from tests.models.triton_tools import COMPILED_FOR, compiled_shared_bytes, interpreter_of_today  # noqa: E402

runs_kernels = pytest.mark.skipif(not RUNS_HERE, reason="runs in a process of its own, see test_interpreted")
interpreter = pytest.fixture(autouse=True, scope="module")(interpreter_of_today)

# The interpreter multiplies bfloat16 as integers.
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else []))
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.skipif(RUNS_HERE, reason="the kernels run in this process")
def test_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def dense(layer, form: str) -> torch.Tensor:
    """The weight in fp32, restored without the layer's own code."""
    if form == "int8":
        return layer.values.float() * layer.scales.float().unsqueeze(1)
    levels = torch.stack([layer.values & 15, layer.values >> 4], 2).flatten(1).float()
    scales, offsets = (one.float().repeat_interleave(64, 1) for one in layer.scales)
    return (levels - 8) * scales + offsets


@runs_kernels
@settings(max_examples=20, deadline=None)
@given(
    form=st.sampled_from(["int8", "int4"]),
    tokens=st.sampled_from([1, 2, 15, 16, 17, 40, 70]),
    rows=st.sampled_from([16, 48, 80, 208]),
    groups=st.integers(1, 5),
    processors=st.sampled_from([1, 3, 132]),
    dtype=st.sampled_from(DTYPES),
    step=st.sampled_from(triton_products.STEPS),
)
def test_any_shape_is_as_the_unpacked_weight_computes_it(form, tokens, rows, groups, processors, dtype, step):
    generator = torch.Generator().manual_seed(tokens + rows)
    plain = nn.Linear(64 * groups, rows, bias=False)
    plain.weight.data = torch.randn(rows, 64 * groups, generator=generator)
    layer = GPU_LINEARS[form](plain.to(DEVICE))
    inputs = torch.randn(tokens, 64 * groups, generator=generator).to(DEVICE, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_products, "multiprocessors", lambda device: processors)
        found = multiply(inputs, layer.values, layer.scales, step)
    expected = inputs.float() @ dense(layer, form).T
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert float((found.float() - expected).norm() / expected.norm()) <= ROUNDING[dtype]


@pytest.mark.parametrize("width", [32, 128])
def test_other_widths_are_refused(width):
    with pytest.raises(ValueError, match=f"tokens of {width} inputs"):
        multiply(torch.zeros(1, width), torch.zeros(16, 64, dtype=torch.int8), torch.zeros(16))


@given(st.integers(1, 100_000), st.integers(1, 8), st.integers(1, 200))
def test_there_are_enough_programs_or_they_are_as_small_as_possible(rows, tiles, processors):
    few = rows_per_program(rows, tiles, processors)
    programs = -(-rows // few) * tiles
    assert few in (16, 32, 64)
    assert few == 16 or programs >= 2 * processors
    assert few == 64 or -(-rows // (2 * few)) * tiles < 2 * processors


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", COMPILED_FOR)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_it_compiles_for_cards(form, capability):
    few, many = triton_products.FEW_TOKENS, triton_products.MANY_TOKENS
    for tokens, step in ((few, 128), (few, 256), (many, 128)):
        for rows in triton_products.ROWS:
            types = {"inputs": "*bf16", "output": "*bf16", "scales": "*bf16"}
            types["values"] = "*i8" if form == "int8" else "*u8"
            constants = {"BITS": int(form[3:]), "GROUP": 64, "TOKENS": tokens, "ROWS": rows}
            constants["STEP"] = step
            shared = compiled_shared_bytes(triton_products._multiply, capability, types, constants)
            assert shared <= COMPILED_FOR[capability], (tokens, step, rows)
