"""Attention over pages, written out: against a loop over single tokens, and as the judge of kernels."""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.attention import paged_kernels
from swarm.models.attention.paged_kernels import agrees_with_reference, reference_kernel


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


@pytest.mark.parametrize(
    "changes",
    [
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
    ],
)
def test_what_a_kernel_would_refuse_or_read_elsewhere_is_an_error(changes):
    call()
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


@pytest.mark.parametrize(
    "kernel",
    [
        wrong(window_size=(-1, 0)),
        wrong(window_size=(-1, -1)),
        wrong(scale=0.1),
        only_the_first_row,
        lambda *args, **kwargs: reference_kernel(*args, **kwargs) * 1.1,
        lambda *args, **kwargs: reference_kernel(args[0], args[2], args[1], *args[3:], **kwargs),
        lambda *args, **kwargs: reference_kernel(*args, **{**kwargs, "block_table": kwargs["block_table"].flip(1)}),
    ],
)
def test_kernels_that_compute_something_else_are_found_out(kernel):
    for dtype in (torch.float32, torch.bfloat16):
        assert not agrees_with_reference(kernel, PAGES.to(dtype))


def test_a_cpu_computes_with_the_reference():
    assert paged_kernels.candidate_kernels(torch.device("cpu")) == (reference_kernel,)


def test_a_gpu_computes_with_torch_s_kernel_in_one_of_two_ways(monkeypatch):
    """With bounds of the keys, which one implementation wants, or without them, as another one does."""
    from torch.nn.attention import varlen as of_torch

    asked = []

    def stands_in(*args, **kwargs):
        inspect.signature(real).bind(*args, **kwargs)
        asked.append(args[4])
        return reference_kernel(*args[:4], None, *args[5:], **kwargs)

    real = of_torch.varlen_attn
    if "block_table" not in inspect.signature(real).parameters:
        pytest.skip("torch reads pages from 2.13 on")
    stands_in.__signature__ = inspect.signature(real)
    monkeypatch.setattr(paged_kernels, "find_spec", lambda name: None)
    monkeypatch.setattr(of_torch, "varlen_attn", stands_in)
    for kernel in paged_kernels.candidate_kernels(torch.device("cuda")):
        asked.clear()
        assert agrees_with_reference(kernel, PAGES)
        assert len(set(map(type, asked))) == 1
    assert isinstance(asked[0], torch.Tensor)


def varlen_without_pages(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """As torch had it before 2.13."""


def test_a_gpu_whose_torch_reads_no_pages_needs_triton(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_without_pages)
    monkeypatch.setattr(paged_kernels, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="Triton is not installed"):
        paged_kernels.candidate_kernels(torch.device("cuda"))


def test_the_fastest_kernel_is_taken(monkeypatch):
    """By a clock that each kernel moves by what it takes."""
    now = 0.0

    def clock() -> float:
        return now

    def taking(first: float, then: float):
        spent = iter([first])

        def kernel(*args, **kwargs):
            nonlocal now
            now += next(spent, then)
            return reference_kernel(*args, **kwargs)

        return kernel

    monkeypatch.setattr(paged_kernels.time, "perf_counter", clock)
    slow, compiles_first, middling = taking(0.1, 3.0), taking(100.0, 1.0), taking(0.1, 2.0)
    assert [paged_kernels.step_seconds(one, PAGES, 2) for one in (slow, compiles_first, middling)] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(("heads", "shared"), [(2, False), (8, True)])
def test_a_kernel_is_timed_with_the_heads_of_the_model(heads, shared):
    asked = set()

    def kernel(query, *args, **kwargs):
        asked.add((query.shape[1], kwargs["enable_gqa"]))
        return reference_kernel(query, *args, **kwargs)

    paged_kernels.step_seconds(kernel, PAGES, heads)
    assert asked == {(heads, shared)}


def test_without_torch_s_module_triton_s_kernel_is_there_and_the_other_way_round(monkeypatch):
    """torch 2.8 has no such module; a Triton may be installed and broken."""
    varlen = ModuleType("torch.nn.attention.varlen")
    triton = ModuleType("swarm.models.attention.triton_attention")
    varlen.varlen_attn = lambda query, key, *, block_table: None
    triton.triton_kernel = reference_kernel
    monkeypatch.setattr(paged_kernels, "find_spec", lambda name: name)
    for of_torch, of_triton, kernels in ((None, triton, 1), (varlen, None, 2), (varlen, triton, 3)):
        monkeypatch.setitem(sys.modules, varlen.__name__, of_torch)
        monkeypatch.setitem(sys.modules, triton.__name__, of_triton)
        assert len(paged_kernels.candidate_kernels(torch.device("cuda"))) == kernels
    monkeypatch.setitem(sys.modules, varlen.__name__, None)
    monkeypatch.setitem(sys.modules, triton.__name__, None)
    with pytest.raises(ImportError, match=r"varlen.*; .*triton"):
        paged_kernels.candidate_kernels(torch.device("cuda"))
