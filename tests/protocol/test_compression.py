from __future__ import annotations

import math
import struct
import subprocess
import sys

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
SIZES = [(0, 8), (1, 1), (1, 255), (1, 256), (1, 257), (3, 100), (16, 64)]
ROUNDING = {WireFormat.FLOAT16: 2**-11, WireFormat.BFLOAT16: 2**-8}
BLOCKWISE_ERROR = 0.0072
"""Half of the widest gap of the dynamic 8-bit map, and the distance from -1 to its lowest value, for an absmax of 1."""

finite = st.floats(-(2.0**60), 2.0**60, width=32)


def values(tokens: int, hidden: int, dtype: str, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + hidden)
    return (torch.randn(tokens, hidden, generator=generator) * scale).to(HIDDEN_DTYPES[dtype])


def travelled(hidden: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    tokens, width = hidden.shape
    return decode_tensor(encode_tensor(hidden, wire), tokens, width, wire, dtype_name(hidden.dtype), CPU)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
@pytest.mark.parametrize("wire", WireFormat)
def test_shape_dtype_and_length_for_every_format(wire, dtype, size):
    hidden = values(*size, dtype)
    payload = encode_tensor(hidden, wire)
    assert len(payload) == payload_bytes(hidden.numel(), wire, dtype)
    result = decode_tensor(payload, *size, wire, dtype, CPU)
    assert result.shape == hidden.shape
    assert result.dtype == hidden.dtype


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
def test_uncompressed_loses_nothing(dtype, size):
    hidden = values(*size, dtype)
    assert torch.equal(travelled(hidden, WireFormat.NONE), hidden)


@pytest.mark.parametrize(("wire", "dtype"), [(WireFormat.FLOAT16, "float16"), (WireFormat.BFLOAT16, "bfloat16")])
def test_sixteen_bits_lose_nothing_of_sixteen_bits(wire, dtype):
    hidden = values(4, 33, dtype)
    assert torch.equal(travelled(hidden, wire), hidden)


@pytest.mark.parametrize("wire", ROUNDING)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sixteen_bits_round_once(wire, size):
    hidden = values(*size, "float32")
    assert torch.all((travelled(hidden, wire) - hidden).abs() <= hidden.abs() * ROUNDING[wire] + 1e-7)


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


def test_blockwise_blocks_do_not_spoil_each_other():
    hidden = torch.cat([torch.full((1, VALUES_PER_SCALE), 1e6), torch.full((1, VALUES_PER_SCALE), 1e-6)], dim=1)
    assert torch.allclose(travelled(hidden, WireFormat.BLOCKWISE8), hidden, rtol=1e-6)


def test_blockwise_takes_about_a_quarter_of_float32():
    assert payload_bytes(1 << 20, WireFormat.BLOCKWISE8, "float32") == (1 << 20) + 4 * (1 << 12)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, 0), (1, 5), (255, 259), (256, 260), (257, 265), (512, 520), (513, 525)]
)
def test_blockwise_length(count, expected):
    assert payload_bytes(count, WireFormat.BLOCKWISE8, "bfloat16") == expected


def test_a_layout_that_other_implementations_can_read():
    hidden = torch.tensor([[1.0, -2.0]])
    assert bytes(encode_tensor(hidden, WireFormat.NONE)) == struct.pack("<2f", 1.0, -2.0)
    assert bytes(encode_tensor(hidden, WireFormat.FLOAT16)) == struct.pack("<2e", 1.0, -2.0)
    assert bytes(encode_tensor(hidden, WireFormat.BFLOAT16)) == b"\x80\x3f\x00\xc0"
    assert bytes(encode_tensor(hidden, WireFormat.BLOCKWISE8))[2:] == struct.pack("<f", 2.0)


@pytest.mark.parametrize("wire", WireFormat)
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_a_wrong_length(wire, change):
    payload = bytes(encode_tensor(values(3, 100, "float32"), wire))
    wrong = payload[:change] if change < 0 else payload + b"\0" * change
    with pytest.raises(WrongShape, match=f"3 tokens of 100 values take {len(payload)} bytes"):
        decode_tensor(wrong, 3, 100, wire, "float32", CPU)


def test_bytes_where_none_are_due():
    with pytest.raises(WrongShape):
        decode_tensor(b"\0", 0, 8, WireFormat.NONE, "float32", CPU)


@pytest.mark.parametrize("dtype", ["", "float64", "int8", "torch.float32", "Float32", "x" * 256])
@pytest.mark.parametrize("wire", WireFormat)
def test_an_unknown_dtype(wire, dtype):
    with pytest.raises(WrongDtype):
        payload_bytes(4, wire, dtype)
    with pytest.raises(WrongDtype):
        decode_tensor(b"\0" * 16, 1, 4, wire, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("wire", WireFormat)
def test_what_cannot_be_sent(wire, dtype):
    with pytest.raises(WrongDtype):
        encode_tensor(torch.zeros(1, 4, dtype=dtype), wire)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45])
@pytest.mark.parametrize("wire", WireFormat)
def test_extreme_values_pass_without_an_exception(wire, number):
    if wire is WireFormat.FLOAT16 and math.isfinite(number) and abs(number) > 65504:
        return  # see below
    hidden = torch.full((2, 300), 0.5)
    hidden[0, 3] = number
    result = travelled(hidden, wire)
    assert result.shape == hidden.shape
    # The second row's last values share no scale with the extreme one.
    assert torch.allclose(result[1, -80:], hidden[1, -80:], atol=BLOCKWISE_ERROR)


@given(st.binary(min_size=308, max_size=308))
@settings(deadline=None)
def test_any_bytes_of_the_right_length_can_be_decoded(payload):
    for wire, size in ((WireFormat.NONE, (1, 77)), (WireFormat.BFLOAT16, (2, 77)), (WireFormat.BLOCKWISE8, (3, 100))):
        assert decode_tensor(payload, *size, wire, "float32", CPU).shape == size


@pytest.mark.parametrize("wire", WireFormat)
def test_what_came_in_is_writable_and_not_shared(wire):
    payload = bytes(encode_tensor(values(2, 10, "float32"), wire))
    result = decode_tensor(payload, 2, 10, wire, "float32", CPU)
    result.zero_()
    assert torch.any(decode_tensor(payload, 2, 10, wire, "float32", CPU) != 0)


@pytest.mark.parametrize("wire", WireFormat)
def test_rows_that_do_not_lie_one_behind_the_other(wire):
    hidden = values(6, 50, "float32")
    assert bytes(encode_tensor(hidden.t(), wire)) == bytes(encode_tensor(hidden.t().contiguous(), wire))
    assert bytes(encode_tensor(hidden[::2], wire)) == bytes(encode_tensor(hidden[::2].contiguous(), wire))


def test_packing_needs_no_gradient():
    hidden = values(1, 4, "float32").requires_grad_()
    for wire in WireFormat:
        assert len(encode_tensor(hidden, wire)) == payload_bytes(4, wire, "float32")


def test_loading_what_8_bits_need_says_nothing():
    code = "import torch; from swarm.protocol.compression import load_quantizer; load_quantizer(torch.device('cpu'))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == ended.stderr == ""


anything = st.floats(width=32) | st.sampled_from([math.inf, -math.inf, math.nan, 65504.0, 65519.0, 65520.0, -3.39e38])


@given(st.lists(anything, max_size=300), st.sampled_from(WireFormat), st.sampled_from(list(HIDDEN_DTYPES)))
def test_whether_what_was_sent_is_finite_once_it_has_come(numbers, wire, dtype):
    hidden = torch.tensor(numbers).view(1, -1).to(HIDDEN_DTYPES[dtype])
    if wire is WireFormat.FLOAT16 and hidden.isfinite().all() and not hidden.half().isfinite().all():
        return  # see the next test
    payload = encode_tensor(hidden, wire)
    came = decode_tensor(payload, 1, len(numbers), wire, dtype, CPU)
    assert is_finite(payload, len(numbers), wire, dtype) == bool(torch.isfinite(came).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [65536.0, -7e4, 3e38])
def test_what_float16_cannot_hold_is_said_instead_of_sent_as_infinity(number, dtype):
    hidden = values(3, 300, dtype)
    hidden[2, 7] = number
    with pytest.raises(WrongDtype, match=r'float16 ends at 65504; use wire="bfloat16"'):
        encode_tensor(hidden, WireFormat.FLOAT16)
    for wire in (WireFormat.BFLOAT16, WireFormat.BLOCKWISE8):
        assert torch.allclose(
            travelled(hidden, wire)[2, 7].double(), hidden[2, 7].double(), rtol=BLOCKWISE_ERROR + 2**-8
        )


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_blamed_on_float16(number):
    hidden = values(1, 300, "float32")
    hidden[0, :2] = torch.tensor([7e4, number])
    assert not is_finite(encode_tensor(hidden, WireFormat.FLOAT16), 300, WireFormat.FLOAT16, "float32")


def test_infinities_of_both_signs_are_no_nan():
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
def test_whether_any_bytes_are_finite(data, wire, dtype):
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


@pytest.mark.parametrize("hidden_size", [256, 768, 1024, 4096, 8192])
def test_blockwise_halves_sixteen_bits(hidden_size):
    """But for a scale, four bytes, every 256 values."""
    half = payload_bytes(hidden_size, WireFormat.BFLOAT16, "float32") / 2
    assert payload_bytes(hidden_size, WireFormat.BLOCKWISE8, "float32") == half * (1 + 4 / VALUES_PER_SCALE)


def test_what_is_finite_is_found_in_every_sixteen_bits_there_are():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for wire, dtype in ((WireFormat.FLOAT16, torch.float16), (WireFormat.BFLOAT16, torch.bfloat16)):
        finite = bits.view(dtype).isfinite()
        assert is_finite(bits[finite].numpy().tobytes(), int(finite.sum()), wire, dtype_name(dtype))
        others = bits[~finite].tolist()
        for number in (*others[::37], others[0], others[-1], 0x7FFF, 0x8000 | others[0]):
            assert not is_finite(struct.pack("<HH", 0, number), 2, wire, dtype_name(dtype))


@pytest.mark.parametrize("wire", WireFormat)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_one_bad_value_among_many_is_found(wire, number):
    hidden = values(3, 300, "float32")
    assert is_finite(encode_tensor(hidden, wire), hidden.numel(), wire, "float32")
    hidden[1, 7] = number
    assert not is_finite(encode_tensor(hidden, wire), hidden.numel(), wire, "float32")
