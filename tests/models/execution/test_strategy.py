"""What an execution strategy may be made of."""

from __future__ import annotations

import pytest

from swarm.models.attention.page_pool import PagePool
from swarm.models.attention.paged_attention import PagedAttention, reference_kernel
from swarm.models.execution.strategy import PADDED, ExecutionStrategy
from swarm.models.execution.traced_forward import FlatForward

PAGING = PagedAttention(PagePool(), reference_kernel)
FLAT = FlatForward(lambda hidden, positions: (), (len, str, repr))


def recorder(function):
    return function


def test_every_layout_but_the_padded_one_is_packed():
    assert not PADDED.packed
    assert ExecutionStrategy("contiguous").packed
    assert ExecutionStrategy("paged", PAGING).packed


@pytest.mark.parametrize(
    "parts",
    [
        {"layout": "paged"},
        {"layout": "contiguous", "paging": PAGING},
        {"layout": "padded", "flat": FLAT},
        {"layout": "contiguous", "graph_recorder": recorder},
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts):
    with pytest.raises(ValueError, match=" "):
        ExecutionStrategy(**parts)


def test_the_strategy_of_a_part():
    whole = ExecutionStrategy("paged", PAGING, FLAT, print, recorder)
    assert str(whole) == "paged cache, flat forward, recorded decode steps"
    part = whole.narrowed(1, 2)
    assert part.flat.blocks == (str,)
    assert part == ExecutionStrategy("paged", PAGING, part.flat)
    assert str(PADDED) == "padded cache, plain forward"
