"""What a digest notices, and what it does not have to read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.checkpoints.block_digest import (
    DIGEST_HEX_DIGITS,
    MAX_BLOCK_PAGES,
    MAX_FULLY_HASHED_BYTES,
    PAGE_BYTES,
    SAMPLED_PAGES,
    block_digest,
    sampled_ranges,
)

SMALL = {"attention.weight": torch.arange(12.0).view(3, 4), "norm.weight": torch.ones(4)}
LARGE_BYTES = 2 * MAX_FULLY_HASHED_BYTES


def large(changed: int | None = None) -> dict[str, torch.Tensor]:
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    if changed is not None:
        tensor[changed] = 1
    return {"mlp.weight": tensor}


def test_same_weights_have_the_same_digest_in_any_order():
    copies = {name: tensor.clone() for name, tensor in reversed(SMALL.items())}
    assert block_digest(copies) == block_digest(SMALL)
    assert len(block_digest(SMALL)) == DIGEST_HEX_DIGITS


def test_names_shapes_and_dtypes_count():
    for other in [
        {"attention.weight": SMALL["attention.weight"]},
        {"attention.weight": SMALL["attention.weight"], "norm.bias": SMALL["norm.weight"]},
        {"attention.weight": SMALL["attention.weight"].view(4, 3), "norm.weight": SMALL["norm.weight"]},
        {"attention.weight": SMALL["attention.weight"], "norm.weight": SMALL["norm.weight"].view(torch.int32)},
    ]:
        assert block_digest(other) != block_digest(SMALL)


def test_the_first_and_the_last_page_of_a_large_tensor_count():
    for byte in [0, PAGE_BYTES - 1, LARGE_BYTES - PAGE_BYTES, LARGE_BYTES - 1]:
        assert block_digest(large(byte)) != block_digest(large())


@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.empty(0, 4), torch.ones(3, dtype=torch.bfloat16)])
def test_odd_tensors(tensor):
    assert len(block_digest({"w": tensor})) == DIGEST_HEX_DIGITS


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(2**20, 2**34)), max_size=400))
def test_what_is_read_of_a_block_is_bounded_and_lies_inside_its_tensors(sizes):
    named = {f"{number:03}": size for number, size in enumerate(sizes)}
    ranges = sampled_ranges(named)
    assert ranges.keys() == named.keys()
    for name, found in ranges.items():
        assert found == sorted(found)
        assert all(0 <= offset < offset + length <= named[name] for offset, length in found)
    small = {name: size for name, size in named.items() if size <= MAX_FULLY_HASHED_BYTES}
    assert all(sum(length for _, length in ranges[name]) == size for name, size in small.items())
    pages = [len(ranges[name]) for name in named.keys() - small.keys()]
    assert sum(pages) <= MAX_BLOCK_PAGES
    assert sum(pages) >= min(len(pages), MAX_BLOCK_PAGES)
    assert max(pages, default=0) <= SAMPLED_PAGES
