"""Comparing what two servers have computed: rounding is tolerated, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.routing.suspicion import Agreement
from swarm.trust.comparison import TOLERANCE, Difference, difference, tolerance_of

TOKENS, HIDDEN, BLOCKS = 128, 256, 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISE = {"float32": 2.0**-16, "bfloat16": 2.0**-9, "float16": 2.0**-12}


def outputs(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(TOKENS, 1, generator=generator) * 10 + 0.1  # tokens of very different sizes
    return torch.randn(TOKENS, HIDDEN, generator=generator) * sizes


def rounded(hidden: torch.Tensor, dtype: str, seed: int) -> torch.Tensor:
    """What an honest machine might give: each block adds rounding of its own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(BLOCKS):
        noise = torch.randn(hidden.shape, generator=generator) * PRECISE[dtype] / 2
        hidden = (hidden * (1 + noise)).to(DTYPES[dtype]).float()
    return hidden


def sent(hidden: torch.Tensor, dtype: str, wire: WireFormat) -> torch.Tensor:
    hidden = hidden.to(DTYPES[dtype])
    return decode_tensor(encode_tensor(hidden, wire), *hidden.shape, wire, dtype, torch.device("cpu")).float()


def compare(one: torch.Tensor, other: torch.Tensor, dtype: str, wire: WireFormat) -> Difference:
    return difference(sent(one, dtype, wire), sent(other, dtype, wire), BLOCKS, dtype, "none", wire)


@pytest.mark.parametrize("wire", WireFormat)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_tolerated_and_systematic_differences_are_not(dtype, wire):
    true = outputs()
    one, other = rounded(true, dtype, 1), rounded(true, dtype, 2)
    assert compare(one, other, dtype, wire).agreement is Agreement.SAME
    assert compare(one, one, dtype, wire) == Difference(TOKENS, 0.0, 0.0, 0.0, tolerance_of("none", wire, HIDDEN))
    # Weights with 4 bits: an error of a tenth, in the same directions for all tokens.
    wrong = one @ (torch.eye(HIDDEN) + 0.1 / math.sqrt(HIDDEN) * torch.randn(HIDDEN, HIDDEN))
    assert compare(wrong, other, dtype, wire).agreement is not Agreement.SAME


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_all_tokens_share_is_found_below_the_rounding(dtype):
    """A shift of as little as the rounding of one machine, the same for all tokens."""
    true = outputs()
    shift = torch.randn(HIDDEN) * PRECISE[dtype] * math.sqrt(BLOCKS)
    one = rounded(true + shift * true.abs().mean(1, keepdim=True), dtype, 1)
    found = compare(one, rounded(true, dtype, 2), dtype, WireFormat.NONE)
    assert found.coherence > TOLERANCE.coherence
    assert found.agreement is Agreement.DIFFERENT


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_token_may_have_taken_another_expert_or_be_a_lie(dtype):
    """Whatever the dtype, because a rounding can choose the expert."""
    one = outputs()
    for share, expected in ((0.05, Agreement.SAME), (0.3, Agreement.DOUBTFUL), (1.0, Agreement.DIFFERENT)):
        other = one.clone()
        other[5] *= 1 + share
        assert compare(other, one, dtype, WireFormat.NONE).agreement is expected


def test_tokens_that_share_their_scale_with_others_are_rounded_in_another_way():
    """Over a wire of 8 bits, single tokens of a narrow model and a whole prompt of them."""
    whole = outputs()[:, : HIDDEN * 3 // 4]
    alone = [sent(token, "float32", WireFormat.BLOCKWISE8) for token in whole.split(1)]
    together = sent(whole, "float32", WireFormat.BLOCKWISE8)
    found = difference(torch.cat(alone), together, BLOCKS, "float32", "none", WireFormat.BLOCKWISE8)
    assert found.agreement is Agreement.SAME
    assert found.typical > 0.5, "this is what would be tested"


def test_weights_in_few_bits_are_compared_with_each_other_only():
    """What their kernels round besides is far above what 16 bits round."""
    one = outputs()
    other = one + 0.02 * one.norm(dim=1, keepdim=True) * torch.randn(one.shape) / math.sqrt(HIDDEN)
    for form, expected in (("none", False), ("int8", True), ("int4", True)):
        found = difference(one, other, BLOCKS, "float32", form, WireFormat.NONE)
        assert (found.agreement is Agreement.SAME) is expected
    assert difference(one, one * 1.5, BLOCKS, "float32", "int8", WireFormat.NONE).agreement is not Agreement.SAME


@given(st.integers(0, TOKENS - 1), st.sampled_from([0.0, -1.0, 1.2, 1e30]))
def test_one_wrong_token_is_enough(token, factor):
    true = outputs()
    claimed = rounded(true, "bfloat16", 1)
    claimed[token] *= factor
    found = compare(claimed, rounded(true, "bfloat16", 2), "bfloat16", WireFormat.NONE)
    assert found.agreement is not Agreement.SAME


def test_other_texts_are_unrelated():
    found = compare(outputs(1), outputs(2), "bfloat16", WireFormat.NONE)
    assert found.agreement is Agreement.UNRELATED


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_agrees_with_nothing(value):
    claimed = outputs()
    claimed[3, 5] = value
    for one, other in ((claimed, outputs()), (outputs(), claimed), (claimed, claimed)):
        assert difference(one, other, BLOCKS, "float32", "none", WireFormat.NONE).agreement is Agreement.UNRELATED


def test_few_tokens_and_zeros():
    one = outputs()[:3]
    assert difference(one, one, BLOCKS, "float32", "none", WireFormat.NONE).agreement is Agreement.SAME
    zeros = torch.zeros(4, HIDDEN)
    assert difference(zeros, zeros, BLOCKS, "float32", "none", WireFormat.NONE).agreement is Agreement.SAME
    assert difference(zeros + 1, zeros, BLOCKS, "float32", "none", WireFormat.NONE).agreement is not Agreement.SAME
