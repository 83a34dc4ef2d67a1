"""Attention over pages in Triton against the reference: on a GPU where there is one, else interpreted.

Triton decides when it is imported whether it interprets, so without a GPU these tests run in a process of their own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS_HERE = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"

from swarm.models.attention import triton_attention  # noqa: E402
from swarm.models.attention.paged_kernels import agrees_with_reference, reference_kernel  # noqa: E402
from swarm.models.attention.triton_attention import number_of_parts, tile_size, triton_kernel  # noqa: E402
from tests.models.triton_tools import COMPILED_FOR, compiled_shared_bytes, interpreter_of_today  # noqa: E402

runs_kernels = pytest.mark.skipif(not RUNS_HERE, reason="runs in a process of its own, see test_interpreted")

interpreter = pytest.fixture(autouse=True, scope="module")(interpreter_of_today)

# The interpreter multiplies bfloat16 as integers.
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else []))


@st.composite
def batches(draw):
    """Sequences of any lengths that bring any numbers of tokens, their pages anywhere."""
    page, shared, group = draw(st.sampled_from([16, 32])), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8]))
    dim = draw(st.sampled_from([8, 16, 24]))
    lengths = draw(st.lists(st.integers(1, 3 * page), min_size=1, max_size=3))
    news = [draw(st.sampled_from([1, length, -(-length // 2)])) for length in lengths]
    if draw(st.booleans()):
        news = [1] * len(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    query = torch.randn(sum(news), shared * group, dim, generator=generator)
    keys, values = (torch.randn(8, page, shared, dim, generator=generator) for _ in range(2))
    table = [draw(st.permutations(range(8)))[:3] for _ in lengths]
    return query, keys, values, news, lengths, table


@pytest.mark.skipif(RUNS_HERE, reason="the kernels run in this process")
def test_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@runs_kernels
@settings(max_examples=15)
@given(batches(), st.sampled_from([(-1, 0), (0, 0), (5, 0), (30, 0), (-1, -1)]), st.sampled_from([1, 2, 4]), st.data())
def test_any_batch_is_as_the_reference_computes_it(batch, window, parts, data):
    query, keys, values, news, lengths, table = batch
    if window == (-1, -1):
        news, query = [1] * len(news), query[: len(news)]

    def integers(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    for sequence, (length, pages) in enumerate(zip(lengths, table, strict=True)):
        page = pages[(length - 1) // keys.shape[1]]
        if data.draw(st.booleans()) and not any(page in other for n, other in enumerate(table) if n != sequence):
            keys[page, (length - 1) % keys.shape[1] + 1 :] = values[page, (length - 1) % keys.shape[1] + 1 :] = (
                torch.nan
            )
    arguments = [one.to(DEVICE) for one in (query, keys, values)]
    arguments += [integers([0, *itertools.accumulate(news)]), None, max(news), max(lengths)]
    options = {"scale": 0.3, "window_size": window, "enable_gqa": True, "num_splits": 1}
    options |= {"seqused_k": integers(lengths), "block_table": integers(table)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "STEP_POSITIONS", 16)
        patch.setattr(triton_attention, "number_of_parts", lambda *_: parts)
        found = triton_kernel(*arguments, **options)
    torch.testing.assert_close(found, reference_kernel(*arguments, **options), rtol=1e-4, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_for_pages_of_a_model(dtype):
    pages = torch.zeros(2, 128, 2, 64, dtype=dtype, device=DEVICE)
    assert agrees_with_reference(triton_kernel, pages)


@pytest.mark.parametrize("window", [(-1, 3), (4, -1), (4, 2)])
def test_other_windows_are_refused(window):
    one = torch.zeros(1, dtype=torch.int32)
    keys = torch.zeros(1, 64, 1, 8)
    with pytest.raises(ValueError, match="knows causal windows"):
        triton_kernel(
            torch.zeros(1, 1, 8), keys, keys, one, None, 1, 1, scale=None, window_size=window,
            enable_gqa=False, seqused_k=one, block_table=one.view(1, 1), num_splits=1,
        )  # fmt: skip


@given(st.integers(1, 10_000), st.integers(1, 1 << 20), st.integers(1, 200))
def test_parts_are_no_more_than_are_needed(programs, positions, processors):
    parts = number_of_parts(programs, positions, processors)
    assert parts in {1 << power for power in range(7)}
    assert parts == 1 or parts * programs <= 4 * processors
    assert parts == 1 or positions // parts >= 256


def test_wide_heads_have_smaller_tiles():
    assert tile_size(16, 2 * 128) == tile_size(16, 2 * 256) == (16, 64)
    assert tile_size(17, 2 * 128) == tile_size(17, 4 * 128) == (64, 64)
    assert (tile_size(16, 4 * 256), tile_size(17, 4 * 256)) == ((16, 32), (32, 32))
    assert tile_size(17, 4 * 2048) == (16, 16)


@runs_kernels
@pytest.mark.parametrize("news", [(1, 1), (9, 40)])
def test_heads_of_256_in_fp32(news):
    query, keys, values = (
        torch.randn(*shape, device=DEVICE) for shape in ((sum(news), 2, 256), *[(3, 64, 1, 256)] * 2)
    )

    def integers(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    arguments = (query, keys, values, integers(0, news[0], sum(news)), None, max(news), 100)
    options = {"scale": None, "window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
    options |= {"seqused_k": integers(40, 100), "block_table": integers((0, 0), (2, 1))}
    found, expected = (kernel(*arguments, **options) for kernel in (triton_kernel, reference_kernel))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", COMPILED_FOR)
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("wide", [64, 128, 256])
def test_it_compiles_for_cards(dtype, size, wide, capability):
    """Every tile fits in a multiprocessor's shared memory."""
    for most, parts in ((16, 8), (17, 1)):
        rows, step = tile_size(most, size * wide)
        types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
        types |= dict.fromkeys(("bounds", "lengths", "table"), "*i32")
        types |= {"log_sums": "*fp32", "scale_log2": "fp32", "output": f"*{dtype}" if parts == 1 else "*fp32"}
        constants = {"HEADS": 8, "GROUP": 4, "WIDE": wide, "PADDED": wide, "PAGE": 256, "ROWS": rows, "STEP": step}
        constants |= {"PARTS": parts, "CAUSAL": True, "WINDOWED": True}
        assert compiled_shared_bytes(triton_attention._attend, capability, types, constants) <= COMPILED_FOR[capability]
