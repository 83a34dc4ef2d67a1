"""What an execution strategy may be made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.models.attention.page_pool import PagePool
from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.attention.paged_kernels import reference_kernel
from swarm.models.execution.strategy import PADDED, ExecutionStrategy
from swarm.models.execution.tracing.flat_forward import FlatForward

PAGING = PagedAttention(PagePool(), reference_kernel)


def traced(hidden, positions):
    return hidden


def recorder(function):
    return function


def test_every_layout_but_the_padded_one_is_packed():
    assert not PADDED.packed
    assert not ExecutionStrategy("padded").packed
    assert ExecutionStrategy("contiguous").packed
    assert ExecutionStrategy("paged", PAGING).packed


@pytest.mark.parametrize(
    "parts",
    [
        {"layout": "paged"},
        {"layout": "contiguous", "paging": PAGING},
        {"layout": "contiguous", "forward": "flat"},
        {"layout": "contiguous", "traced": traced},
        {"layout": "padded", "forward": "flat", "traced": traced},
        {"layout": "contiguous", "graph_recorder": recorder},
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts):
    with pytest.raises(ValueError, match=" "):
        ExecutionStrategy(**parts)


def test_what_is_left_of_a_strategy():
    whole = ExecutionStrategy("paged", PAGING, "flat", traced, graph_recorder=recorder)
    assert str(whole) == "paged cache, flat forward, recorded decode steps"
    assert whole.plain() == ExecutionStrategy("paged", PAGING)
    assert whole.narrowed(1, 2) == ExecutionStrategy("paged", PAGING)
    flat = FlatForward(lambda hidden, positions: (), (len, str, repr))
    part = replace(whole, forward="compiled", flat=flat).narrowed(1, 2)
    assert (part.forward, part.graph_recorder, part.traced) == ("flat", None, part.flat)
    assert part.flat.blocks == (str,)
    assert str(PADDED) == "padded cache, plain forward"
