from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.common.dtypes import HIDDEN_DTYPES, dtype_name
from swarm.data_structures import WireFormat
from swarm.errors import WrongDtype, WrongShape
from swarm.protocol.compression import VALUES_PER_SCALE, decode_tensor, encode_tensor, is_finite, payload_bytes

torch.set_num_threads(1)

CPU = torch.device("cpu")
ROUNDING = {WireFormat.FLOAT16: 2**-11, WireFormat.BFLOAT16: 2**-8}
BLOCKWISE_ERROR = 0.0072
"""Half of the widest gap of the dynamic 8-bit map, and the distance from -1 to its lowest value, for an absmax of 1."""

formats, dtypes = st.sampled_from(WireFormat), st.sampled_from(list(HIDDEN_DTYPES))
finite = st.floats(-(2.0**60), 2.0**60, width=32)


def values(tokens: int, hidden: int, dtype: str, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + hidden)
    return (torch.randn(tokens, hidden, generator=generator) * scale).to(HIDDEN_DTYPES[dtype])


def travelled(hidden: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    tokens, width = hidden.shape
    return decode_tensor(encode_tensor(hidden, wire), tokens, width, wire, dtype_name(hidden.dtype), CPU)


@given(st.integers(0, 4), st.integers(1, 600), formats, dtypes)
@settings(deadline=None)
def test_what_arrives_is_what_was_sent_but_for_rounding(tokens, width, wire, dtype):
    hidden = values(tokens, width, dtype)
    payload = encode_tensor(hidden, wire)
    assert len(payload) == payload_bytes(hidden.numel(), wire, dtype)
    result = decode_tensor(payload, tokens, width, wire, dtype, CPU)
    assert (result.shape, result.dtype) == (hidden.shape, hidden.dtype)
    if wire is WireFormat.NONE or wire.value == dtype:
        assert torch.equal(result, hidden)
    elif dtype == "float32" and wire in ROUNDING:
        assert torch.all((result - hidden).abs() <= hidden.abs() * ROUNDING[wire] + 1e-7)
    result.zero_()  # it is writable, and does not share the payload's memory
    assert torch.equal(decode_tensor(payload, tokens, width, wire, dtype, CPU), travelled(hidden, wire))


@given(st.integers(0, 3), st.integers(1, 300), formats, st.integers(1, 8), st.booleans())
def test_a_wrong_length_is_refused(tokens, width, wire, change, longer):
    payload = bytes(encode_tensor(values(tokens, width, "float32"), wire))
    wrong = payload + b"\0" * change if longer or not tokens else payload[:-change]
    with pytest.raises(WrongShape, match=f"{tokens} tokens of {width} values take {len(payload)} bytes"):
        decode_tensor(wrong, tokens, width, wire, "float32", CPU)


@given(formats, st.text(max_size=256).filter(lambda name: name not in HIDDEN_DTYPES))
def test_an_unknown_dtype_is_refused(wire, dtype):
    with pytest.raises(WrongDtype):
        payload_bytes(4, wire, dtype)
    with pytest.raises(WrongDtype):
        decode_tensor(b"\0" * 16, 1, 4, wire, dtype, CPU)
    for other in (torch.float64, torch.int32, torch.bool, torch.complex64):
        with pytest.raises(WrongDtype):
            encode_tensor(torch.zeros(1, 4, dtype=other), wire)


@given(formats, st.sampled_from([math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45]))
@settings(deadline=None)
def test_an_extreme_value_is_noticed_and_harms_no_other(wire, number):
    hidden = torch.full((2, 300), 0.5)
    hidden[0, 3] = number
    if wire is WireFormat.FLOAT16 and math.isfinite(number) and abs(number) > 65504:
        with pytest.raises(WrongDtype, match=r'float16 ends at 65504; use wire="bfloat16"'):
            encode_tensor(hidden, wire)
        return
    result = travelled(hidden, wire)
    # The last values of the second row share no scale with the extreme one.
    assert torch.allclose(result[1, -80:], hidden[1, -80:], atol=BLOCKWISE_ERROR)
    assert is_finite(encode_tensor(hidden, wire), hidden.numel(), wire, "float32") == math.isfinite(number)


@given(formats)
def test_any_memory_layout_can_be_sent_and_needs_no_gradient(wire):
    hidden = values(6, 50, "float32").requires_grad_()
    assert bytes(encode_tensor(hidden.t(), wire)) == bytes(encode_tensor(hidden.t().contiguous(), wire))
    assert bytes(encode_tensor(hidden[::2], wire)) == bytes(encode_tensor(hidden[::2].contiguous(), wire))


def test_a_value_beyond_float16_is_sent_in_other_formats():
    hidden = values(3, 300, "bfloat16")
    hidden[2, 7] = -7e4
    with pytest.raises(WrongDtype, match="float16 ends at 65504"):
        encode_tensor(hidden, WireFormat.FLOAT16)
    for wire in (WireFormat.BFLOAT16, WireFormat.BLOCKWISE8):
        assert math.isclose(travelled(hidden, wire)[2, 7], -7e4, rel_tol=BLOCKWISE_ERROR + 2**-8)
    hidden[0, 0] = math.nan  # what is not finite is not blamed on float16
    assert not is_finite(encode_tensor(hidden, WireFormat.FLOAT16), 900, WireFormat.FLOAT16, "bfloat16")


@given(st.lists(finite, min_size=1, max_size=700))
@settings(deadline=None)
def test_blockwise_error_is_small_beside_the_largest_value_of_the_block(numbers):
    hidden = torch.tensor([numbers])
    result = travelled(hidden, WireFormat.BLOCKWISE8)
    for begin in range(0, len(numbers), VALUES_PER_SCALE):
        sent, came = (
            hidden[0, begin : begin + VALUES_PER_SCALE].double(),
            result[0, begin : begin + VALUES_PER_SCALE].double(),
        )
        absmax = float(sent.abs().max())
        assert float((sent - came).abs().max()) <= absmax * BLOCKWISE_ERROR + 1e-37


def test_a_layout_that_other_implementations_can_read():
    hidden = torch.tensor([[1.0, -2.0]])
    assert bytes(encode_tensor(hidden, WireFormat.NONE)) == struct.pack("<2f", 1.0, -2.0)
    assert bytes(encode_tensor(hidden, WireFormat.FLOAT16)) == struct.pack("<2e", 1.0, -2.0)
    assert bytes(encode_tensor(hidden, WireFormat.BFLOAT16)) == b"\x80\x3f\x00\xc0"
    assert bytes(encode_tensor(hidden, WireFormat.BLOCKWISE8))[2:] == struct.pack("<f", 2.0)


anything = st.floats(width=32) | st.sampled_from([math.inf, -math.inf, math.nan, 65504.0, 65519.0, 65520.0, -3.39e38])


@given(st.lists(anything, max_size=300), st.sampled_from(WireFormat), st.sampled_from(list(HIDDEN_DTYPES)))
def test_is_finite_agrees_with_the_decoded_tensor(numbers, wire, dtype):
    hidden = torch.tensor(numbers).view(1, -1).to(HIDDEN_DTYPES[dtype])
    if wire is WireFormat.FLOAT16 and hidden.isfinite().all() and not hidden.half().isfinite().all():
        return  # see the next test
    payload = encode_tensor(hidden, wire)
    came = decode_tensor(payload, 1, len(numbers), wire, dtype, CPU)
    assert is_finite(payload, len(numbers), wire, dtype) == bool(torch.isfinite(came).all())


def test_infinities_of_both_signs_are_not_nan():
    hidden = torch.cat([values(1, 2 * VALUES_PER_SCALE, "float32"), torch.tensor([[math.inf, -math.inf, 0.5]])], dim=1)
    scales = torch.tensor(struct.unpack("<3f", encode_tensor(hidden, WireFormat.BLOCKWISE8)[-12:]))
    assert scales.isfinite().tolist() == [True, True, False]
    assert not scales.isnan().any()
    hidden[0, 3] = math.nan
    scales = torch.tensor(struct.unpack("<3f", encode_tensor(hidden, WireFormat.BLOCKWISE8)[-12:]))
    assert scales.isnan().tolist() == [True, False, False]


@given(
    st.data(),
    st.sampled_from([WireFormat.NONE, WireFormat.FLOAT16, WireFormat.BFLOAT16]),
    st.sampled_from([*HIDDEN_DTYPES]),
)
def test_is_finite_agrees_for_arbitrary_bytes(data, wire, dtype):
    """Also bytes that no honest peer sends, such as a bfloat16 that is too large for the float16 it stands for."""
    values = data.draw(st.integers(0, 20))
    length = payload_bytes(values, wire, dtype)
    payload = data.draw(st.binary(min_size=length, max_size=length))
    came = decode_tensor(payload, 1, values, wire, dtype, CPU)
    assert is_finite(payload, values, wire, dtype) == bool(torch.isfinite(came).all())


@given(st.integers(1, 600), st.data(), st.sampled_from([*HIDDEN_DTYPES]))
def test_blockwise_bytes_that_pass_are_finite(values, data, dtype):
    """The other way round, a scale too large for the dtype is enough to be turned away, whatever its shares are."""
    blocks = math.ceil(values / VALUES_PER_SCALE)
    scales = data.draw(st.lists(anything, min_size=blocks, max_size=blocks))
    indices = data.draw(st.binary(min_size=values, max_size=values))
    payload = memoryview(indices + struct.pack(f"<{blocks}f", *scales))
    assert len(payload) == payload_bytes(values, WireFormat.BLOCKWISE8, dtype)
    passes = is_finite(payload, values, WireFormat.BLOCKWISE8, dtype)
    assert passes == all(abs(scale) <= torch.finfo(HIDDEN_DTYPES[dtype]).max for scale in scales)
    if passes:
        assert torch.isfinite(decode_tensor(payload, 1, values, WireFormat.BLOCKWISE8, dtype, CPU)).all()
