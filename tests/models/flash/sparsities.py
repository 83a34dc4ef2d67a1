"""Shares that could have been measured."""

from __future__ import annotations

from hypothesis import strategies as st

from swarm.models.flash.sparsity import Sparsity

shares = st.floats(0.001, 1.0)
curves = st.lists(shares, min_size=1, max_size=8).map(lambda values: tuple(sorted(values)))


@st.composite
def sparsities(draw: st.DrawFn) -> Sparsity:
    tokens = draw(curves)
    counts = draw(st.lists(st.integers(2, 32), max_size=4, unique=True))
    together = sorted(draw(st.lists(st.floats(tokens[0], 1.0), min_size=len(counts), max_size=len(counts))))
    return Sparsity(tokens, dict(zip(sorted(counts), together, strict=True)), draw(measured_reads(tokens[0])))


@st.composite
def measured_reads(draw: st.DrawFn, most: float) -> dict[int, tuple[tuple[float, float], ...]]:
    """For some numbers of sessions, what is read with some amounts of memory."""
    found = {}
    for sessions in draw(st.sampled_from([(), (1,), (1, 4)])):
        memory = sorted(draw(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4, unique=True)))
        read = sorted(draw(st.lists(st.floats(0, most), min_size=len(memory), max_size=len(memory))), reverse=True)
        found[sessions] = tuple(zip(memory, read, strict=True))
    return found
