"""Attention over pages: how a kernel is told of a batch, which masks it supports, and the reference that judges it."""

from __future__ import annotations

import inspect
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from swarm.models.attention import paged_attention
from swarm.models.attention.multi_session_attention import PackingUnsupported
from swarm.models.attention.paged_attention import (
    BatchSequence,
    agrees_with_reference,
    build_index,
    reference_kernel,
    window_of,
)

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5), st.integers(1, 6))
def test_every_token_has_the_slot_of_its_position(rows, page):
    members, pages = [], iter(range(1, 1000))
    for start, new in rows:
        members.append(BatchSequence([next(pages) for _ in range(-(-(start + new) // page))], start, new))
    index = build_index(members, page, CPU)
    token = 0
    for row, member in enumerate(members):
        assert index.bounds[row] == token
        assert index.lengths[row] == member.end
        for position in range(member.start, member.end):
            place = int(index.slots_N[token])
            assert (int(index.table[row, position // page]), position % page) == divmod(place, page)
            token += 1
    assert index.bounds[-1] == token == len(index.slots_N) == len(set(index.slots_N.tolist()))
    assert index.most_new == max(new for _, new in rows)
    assert index.longest == max(member.end for member in members)
    assert {index.bounds.dtype, index.lengths.dtype, index.table.dtype} == {torch.int32}


def test_the_rules_that_the_kernel_knows():
    assert window_of(causal_mask_function) == (-1, 0)
    for size in (1, 2, 6, 4096):
        assert window_of(sliding_window_causal_mask_function(size)) == (size - 1, 0)


def test_other_rules_are_not_taken_for_them():
    for function in (
        chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        sliding_window_bidirectional_mask_function(4),
        or_masks(sliding_window_overlay(4), causal_mask_function),
        and_masks(sliding_window_overlay(4), causal_mask_function, sliding_window_overlay(2)),
        and_masks(causal_mask_function, sliding_window_overlay(4)),
        and_masks(sliding_window_overlay(4)),
        sliding_window_overlay(4),
        sliding_window_causal_mask_function(torch.tensor(4)),
        sliding_window_causal_mask_function(0),
        lambda batch, head, query, key: key <= query,
        print,
    ):
        with pytest.raises(PackingUnsupported):
            window_of(function)


def test_a_window_that_means_something_else_is_found_out(monkeypatch):
    """Such as one that a later transformers counts without the token itself."""

    def another(size):
        return and_masks(sliding_window_overlay(size + 1), causal_mask_function)

    monkeypatch.setattr(paged_attention, "sliding_window_causal_mask_function", another)
    paged_attention._is_window.cache_clear()
    with pytest.raises(PackingUnsupported):
        window_of(another(5))
    monkeypatch.undo()
    paged_attention._is_window.cache_clear()
    assert window_of(sliding_window_causal_mask_function(5)) == (4, 0)


def integers(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def batches(draw):
    """Sequences of any lengths, their pages in any order, some of them shared."""
    page, shared, group, dim = (draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), 4)
    lengths = draw(st.lists(st.integers(1, 11), min_size=1, max_size=4))
    news = [draw(st.integers(1, length)) for length in lengths]
    pages = 8
    width = max(-(-length // page) for length in lengths) + draw(st.integers(0, 2))
    table = [[draw(st.integers(0, pages - 1)) for _ in range(width)] for _ in lengths]
    window = draw(st.sampled_from(((-1, 0), (0, 0), (2, 0), (5, 0), (-1, -1))))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    query = torch.randn(sum(news), shared * group, dim, generator=noise)
    keys, values = (torch.randn(pages, page, shared, dim, generator=noise) for _ in range(2))
    return query, keys, values, news, lengths, table, window


def one_by_one(query, keys, values, news, lengths, table, window):
    """What each token of each head sees, and its weighted sum."""
    page, shared = keys.shape[1:3]
    group = query.shape[1] // shared
    output, token = torch.empty_like(query), 0
    for new, length, pages in zip(news, lengths, table, strict=True):
        for position in range(length - new, length):
            seen = [
                other
                for other in range(length)
                if (window[0] < 0 or position - other <= window[0]) and (window[1] < 0 or other <= position)
            ]
            for head in range(query.shape[1]):
                place = [(pages[other // page], other % page, head // group) for other in seen]
                scores = [float(query[token, head] @ keys[one]) / math.sqrt(query.shape[2]) for one in place]
                weights = torch.softmax(torch.tensor(scores), 0)
                output[token, head] = sum(weight * values[one] for weight, one in zip(weights, place, strict=True))
            token += 1
    return output


def bounds_of(news):
    return torch.tensor([0, *news], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@given(batches())
def test_every_token_sees_its_sequence_up_to_itself_as_far_as_the_window(batch):
    query, keys, values, news, lengths, table, window = batch
    output = reference_kernel(
        query,
        keys,
        values,
        bounds_of(news),
        None,
        max(news),
        max(lengths),
        scale=None,
        window_size=window,
        enable_gqa=True,
        seqused_k=integers(*lengths),
        block_table=integers(*table),
        num_splits=1,
    )
    torch.testing.assert_close(output, one_by_one(*batch), rtol=1e-4, atol=1e-5)


def call(**changes):
    """Two sequences of 3 and 5 positions that bring 1 and 2 tokens, unless changed."""
    arguments = {
        "query": torch.randn(3, 4, 8),
        "key": torch.randn(6, 2, 2, 8),
        "value": torch.randn(6, 2, 2, 8),
        "cu_seq_q": integers(0, 1, 3),
        "cu_seq_k": None,
        "max_q": 2,
        "max_k": 6,
        "scale": None,
        "window_size": (-1, 0),
        "enable_gqa": True,
        "seqused_k": integers(3, 5),
        "block_table": integers((0, 1, 2), (3, 4, 5)),
        "num_splits": 1,
    } | changes
    return reference_kernel(**arguments)


def test_what_lies_behind_a_sequence_is_not_read():
    """Infinities of another session, for instance."""
    key, value = torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8)
    query = torch.randn(3, 4, 8)
    expected = call(query=query, key=key, value=value)
    for storage in (key, value):
        storage[1, 1], storage[2], storage[5, 1] = math.nan, math.inf, math.nan
    assert torch.equal(call(query=query, key=key, value=value), expected)


def test_what_a_kernel_would_refuse_or_read_elsewhere_is_an_error():
    call()
    for changes in (
        {"cu_seq_q": torch.tensor([0, 1, 3])},  # 64 bits
        {"seqused_k": torch.tensor([3, 5])},
        {"block_table": torch.tensor([[0, 1, 2], [3, 4, 5]])},
        {"cu_seq_q": integers(0, 1, 4)},
        {"cu_seq_q": integers(0, 3)},
        {"max_q": 1},
        {"max_k": 4},
        {"seqused_k": integers(3, 1)},  # fewer positions than tokens
        {"block_table": integers((0, 1, 2), (3, 4, 6))},
        {"block_table": integers((0, 1), (3, 4))},
        {"enable_gqa": False},
        {"query": torch.randn(3, 3, 8)},
    ):
        with pytest.raises(ValueError, match=" "):
            call(**changes)


PAGES = torch.zeros(3, 8, 2, 16)


def test_the_reference_agrees_with_itself_in_any_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert agrees_with_reference(reference_kernel, PAGES.to(dtype))


def wrong(**forced):
    return lambda *args, **kwargs: reference_kernel(*args, **{**kwargs, **forced})


def only_the_first_row(*args, **kwargs):
    """As FlashAttention 2 does where it divides sequences (pytorch issue 194167)."""
    output = reference_kernel(*args, **kwargs)
    output[int(args[3][1]) :] = math.nan
    return output


def test_kernels_that_compute_something_else_are_found_out():
    for kernel in (
        wrong(window_size=(-1, 0)),
        wrong(window_size=(-1, -1)),
        wrong(scale=0.1),
        only_the_first_row,
        lambda *args, **kwargs: reference_kernel(*args, **kwargs) * 1.1,
        lambda *args, **kwargs: reference_kernel(args[0], args[2], args[1], *args[3:], **kwargs),
        lambda *args, **kwargs: reference_kernel(*args, **{**kwargs, "block_table": kwargs["block_table"].flip(1)}),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            assert not agrees_with_reference(kernel, PAGES.to(dtype))


def test_a_cpu_computes_with_the_reference():
    assert paged_attention.paged_kernel(torch.device("cpu")) is reference_kernel


def test_a_gpu_computes_with_torch_s_kernel(monkeypatch):
    """With bounds of the keys, which FlashAttention 2 wants to be given but does not read."""
    from torch.nn.attention import varlen as of_torch

    def stands_in(*args, **kwargs):
        inspect.signature(real).bind(*args, **kwargs)
        assert args[4] is args[3]
        return reference_kernel(*args[:4], None, *args[5:], **kwargs)

    real = of_torch.varlen_attn
    if "block_table" not in inspect.signature(real).parameters:
        pytest.skip("torch reads pages from 2.13 on")
    stands_in.__signature__ = inspect.signature(real)
    monkeypatch.setattr(of_torch, "varlen_attn", stands_in)
    kernel = paged_attention.paged_kernel(torch.device("cuda"))
    assert kernel is not None
    assert agrees_with_reference(kernel, PAGES)


def varlen_without_pages(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """As torch had it before 2.13."""


def test_a_gpu_whose_torch_reads_no_pages(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_without_pages)
    assert paged_attention.paged_kernel(torch.device("cuda")) is None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)  # as in torch 2.8
    assert paged_attention.paged_kernel(torch.device("cuda")) is None
