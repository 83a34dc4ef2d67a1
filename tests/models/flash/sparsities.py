"""Sparsities that could have been measured."""

from __future__ import annotations

from hypothesis import strategies as st

from swarm.models.flash.neurons.predictor import Sparsity


@st.composite
def sparsities(draw: st.DrawFn) -> Sparsity:
    memory = [0.0, *sorted(draw(st.lists(st.floats(0.01, 0.99), max_size=4, unique=True)))]
    read = sorted(draw(st.lists(st.floats(0, 1), min_size=len(memory), max_size=len(memory))), reverse=True)
    return Sparsity(draw(st.floats(0.001, 1.0)), tuple(zip(memory, read, strict=True)))
