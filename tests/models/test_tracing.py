"""Traces against the functions that they were made of, for other numbers of tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from swarm.models.tracing import EXAMPLES, NotTraceable, trace

WIDTH = 6
HELD = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))


def make_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, WIDTH, generator=generator), torch.arange(tokens)


def sizes(hidden, positions):
    heads = hidden.view(hidden.shape[0], 2, -1).transpose(0, 1).reshape(2 * len(hidden), 3)
    return heads.new_ones(hidden.size(0) * 2, 1) * heads


def several_results(hidden, positions):
    first, second = hidden.chunk(2, -1)
    values, places = torch.cat([second, first], -1).topk(k=2, dim=-1)
    return values * torch.unbind(hidden, 1)[0][:, None] + places


def in_place(hidden, positions):
    out = torch.zeros_like(hidden)
    out[:, 1:] = hidden[:, :-1]
    out += HELD[0]
    out.index_add_(0, positions, hidden)
    return out.clamp_(-1, 1)


def tables(hidden, positions):
    angles = torch.outer(positions.float(), HELD[0])
    return functional.linear(hidden, HELD).to(torch.float32) * angles.cos().mT.mT + 1 / (2 + angles.sin())


@pytest.mark.parametrize("function", [sizes, several_results, in_place, tables])
def test_a_trace_is_what_was_traced(function):
    traced = trace(lambda recorder, *inputs: function(*inputs), make_inputs).function()
    for tokens in (1, 2, *EXAMPLES, 30):
        assert traced(*make_inputs(tokens)).equal(function(*make_inputs(tokens)))


def test_only_what_the_result_needs_is_called():
    def forward(recorder, hidden, positions):
        torch.ones(10_000).cumsum(0)
        return (hidden * 2 - hidden * 2, hidden * 2)

    found = trace(forward, make_inputs)
    assert found.bound == {}
    calls = [node for node in found.graph.nodes if node.op == "call_function"]
    shared = found.function(share=True)
    assert (len(calls), sum(node.op == "call_function" for node in found.graph.nodes)) == (4, 2)
    assert [one.tolist() for one in shared(*make_inputs(1))] == [one.tolist() for one in forward(None, *make_inputs(1))]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda hidden, positions: hidden * hidden.sum().item(), "looks into a tensor .item."),
        (lambda hidden, positions: hidden if (hidden > 0).any() else -hidden, "looks into a tensor .__bool__."),
        (lambda hidden, positions: torch.stack([row * 2 for row in hidden]), "something else if there are more tokens"),
        (lambda hidden, positions: hidden.new_ones(len(hidden) + 1), "3 of 2 tokens are 4 of 3"),
        (lambda hidden, positions: HELD.mul_(1), "changes a tensor that it has not made .mul_."),
        (lambda hidden, positions: torch.add(hidden, 1, out=torch.empty(0)), "writes results into tensors .add."),
        (lambda hidden, positions: hidden + torch.as_tensor(hidden.tolist()), "looks into a tensor .tolist."),
    ],
)
def test_what_cannot_be_written_down(forward, reason):
    with pytest.raises(NotTraceable, match=reason):
        trace(lambda recorder, *inputs: forward(*inputs), make_inputs)
