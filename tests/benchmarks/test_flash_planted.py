"""The planted activations of the benchmark."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.flash.planted import PAPER, Measured, PlantedNeurons

NEURONS = 16_384


@st.composite
def consistent(draw):
    """Measurements of a distribution that exists."""
    real = PlantedNeurons(draw(st.floats(0, 0.05)), draw(st.floats(0.02, 0.2)), draw(st.floats(1, 50)))
    window = draw(st.integers(1, 8))
    needed = real.needed(1)
    return Measured("drawn", needed / 2, needed, window, real.needed(window), real.newly(window))


@given(consistent())
@settings(max_examples=20, deadline=None)
def test_the_distribution_has_the_shares_that_were_measured(measured):
    planted = PlantedNeurons.like(measured)
    assert planted.needed(1) == pytest.approx(measured.selected, rel=1e-3)
    assert planted.newly(measured.window) == pytest.approx(measured.newly, rel=1e-2)
    assert planted.needed(measured.window) == pytest.approx(measured.resident, rel=2e-2)


def test_the_drawn_neurons_have_the_shares_of_the_paper():
    layer = PlantedNeurons.like(PAPER).draw(NEURONS, seed=3)
    tokens = [layer.selected(token) for token in range(60)]
    windows = [np.unique(np.concatenate(tokens[first : first + 5])) for first in range(55)]
    newly = [len(np.setdiff1d(tokens[first + 5], windows[first])) for first in range(55)]
    active = [len(layer.truly_active(token)) for token in range(60)]
    assert np.mean([len(one) for one in tokens]) / NEURONS == pytest.approx(0.1, rel=0.02)
    assert np.mean([len(one) for one in windows]) / NEURONS == pytest.approx(0.24, rel=0.02)
    assert np.mean(newly) / NEURONS == pytest.approx(0.024, rel=0.05)
    assert np.mean(active) / NEURONS == pytest.approx(0.033, rel=0.05)


def test_what_cannot_go_together_reads_as_much_as_was_measured():
    # Five tokens that add 2 % each to the first one's 12 % need at least 20 % together.
    planted = PlantedNeurons.like(Measured("impossible", 0.06, 0.12, 5, 0.13, 0.02))
    assert planted.newly(5) == pytest.approx(0.02, rel=1e-3)
    assert planted.needed(5) == pytest.approx(0.205, rel=0.01)
