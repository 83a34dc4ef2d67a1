"""Gradients are scaled for their way, whatever their size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.batches.hop_requests import pack_scaled, unpack_scaled
from swarm.data_structures import WireFormat

PRECISION = {WireFormat.NONE: 0.0, WireFormat.FLOAT16: 2**-11, WireFormat.BFLOAT16: 2**-8}


@pytest.mark.parametrize("wire", list(PRECISION))
@given(exponent=st.integers(-80, 60))
def test_the_size_of_gradients_is_no_matter(wire, exponent):
    gradient = torch.tensor([[1.0, -0.75], [0.3, 1e-3]]) * 2.0**exponent
    packed, factor = pack_scaled(gradient, wire, "float32")
    torch.testing.assert_close(unpack_scaled(packed, factor), gradient, rtol=PRECISION[wire], atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_unchanged_means_in_the_dtype_of_the_inputs(dtype):
    packed, factor = pack_scaled(torch.tensor([[3e-12, 1e-12]]), WireFormat.NONE, dtype)
    assert len(packed.payload) == 4
    torch.testing.assert_close(unpack_scaled(packed, factor), torch.tensor([[3e-12, 1e-12]]), rtol=2**-8, atol=0)


def test_the_least_and_the_largest_numbers_stay_finite():
    for value in (0.0, 1e-45, 3.4e38):
        packed, factor = pack_scaled(torch.tensor([[value]]), WireFormat.NONE, "float32")
        assert float(unpack_scaled(packed, factor)) == pytest.approx(value, rel=1e-6)
