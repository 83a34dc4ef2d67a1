from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import NotFinite, WrongDtype, WrongShape
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.protocol import adapter_encoding
from swarm.protocol.adapter_encoding import pack_adapters, unpack_adapters, unpack_gradients
from swarm.protocol.compression import pack_gradients
from swarm.protocol.messages import ADAPTER_DIGEST_BYTES

HIDDEN = 6
CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def parts(draw) -> BlockAdapterWeights:
    seed = draw(st.integers(0, 99))
    positions = draw(st.none() | st.integers(1, 4))
    sizes = draw(st.lists(st.tuples(*[st.integers(1, 5)] * 3), max_size=3))
    factors = [
        LoraFactors(f"m.{number}", numbers(rank, inputs, seed=seed), numbers(outputs, rank, seed=seed))
        for number, (rank, inputs, outputs) in enumerate(sizes)
    ]
    return BlockAdapterWeights(numbers(positions, HIDDEN, seed=seed) if positions else None, tuple(factors))


@given(st.lists(parts(), min_size=1, max_size=3), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_packed_adapters_unpack_to_the_same_tensors(drawn, dtype):
    blocks, payload = pack_adapters(drawn, dtype)
    found = unpack_adapters(blocks, payload, str(dtype).removeprefix("torch."), HIDDEN, CPU)
    for one, other in zip(found, drawn, strict=True):
        assert [factors.module for factors in one.factors] == [factors.module for factors in other.factors]
        assert (one.prompt is None) == (other.prompt is None)
        for tensor, expected in zip(one.tensors, other.tensors, strict=True):
            assert tensor.dtype is dtype
            assert torch.equal(tensor, expected.to(dtype))


@given(st.lists(parts(), min_size=1, max_size=3))
def test_gradients_have_the_order_of_the_tensors(drawn):
    blocks, _ = pack_adapters(drawn, torch.float32)
    payload = pack_gradients([2 * tensor for part in drawn for tensor in part.tensors])
    assert len(payload) == adapter_encoding.gradient_bytes(blocks, HIDDEN)
    for found, part in zip(unpack_gradients(blocks, payload, HIDDEN), drawn, strict=True):
        assert [tensor.shape for tensor in found] == [tensor.shape for tensor in part.tensors]
        assert all(torch.equal(one, 2 * other) for one, other in zip(found, part.tensors, strict=True))


def part(seed: int = 0, module: str = "q", positions: int = 2) -> BlockAdapterWeights:
    factors = LoraFactors(module, numbers(2, 3, seed=seed), numbers(4, 2, seed=seed))
    return BlockAdapterWeights(numbers(positions, HIDDEN, seed=seed), (factors,))


def digest(one: BlockAdapterWeights, dtype: torch.dtype = torch.float32) -> bytes:
    return pack_adapters([one], dtype)[0][0].digest


def test_a_digest_names_numbers_shapes_modules_and_dtype():
    assert digest(part()) == digest(part())
    assert len(digest(part())) == ADAPTER_DIGEST_BYTES
    others = [
        part(1),
        part(module="k"),
        part(positions=3),
        BlockAdapterWeights(part().prompt),
        BlockAdapterWeights(None, part().factors),
    ]
    others.append(BlockAdapterWeights(part().prompt, (*part().factors, LoraFactors("k", numbers(2, 3), numbers(4, 2)))))
    found = {digest(part()), digest(part(), torch.bfloat16), *map(digest, others)}
    assert len(found) == 2 + len(others)
    # The same bytes, cut in another way.
    flat = numbers(12)
    assert digest(BlockAdapterWeights(flat.view(2, 6))) != digest(
        BlockAdapterWeights(None, (LoraFactors("q", flat[:6].view(1, 6), flat[6:, None]),))
    )


@settings(max_examples=30)
@given(st.data())
def test_another_payload_is_refused(data):
    blocks, payload = pack_adapters([part(), part(1)], torch.float32)
    changed = bytearray(payload)
    place = data.draw(st.integers(0, len(changed) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WrongShape, match="do not match the digest"):
        unpack_adapters(blocks, bytes(changed), "float32", HIDDEN, CPU)
    wrong = data.draw(st.sampled_from([payload[:-4], payload + bytes(4), b""]))
    with pytest.raises(WrongShape, match="take"):
        unpack_adapters(blocks, wrong, "float32", HIDDEN, CPU)
    with pytest.raises(WrongShape):
        unpack_gradients(blocks, wrong, HIDDEN)


def test_nan_and_infinity_are_refused():
    for dtype in ["float32", "bfloat16", "float16"]:
        for value in [float("nan"), float("inf"), -float("inf")]:
            one = part()
            one.factors[0].up[1, 1] = value
            blocks, payload = pack_adapters([part(), one], getattr(torch, dtype))
            with pytest.raises(NotFinite, match="NaN or infinity"):
                unpack_adapters(blocks, payload, dtype, HIDDEN, CPU)
            with pytest.raises(NotFinite):
                unpack_gradients(blocks, pack_gradients([*part().tensors, *one.tensors]), HIDDEN)


def test_an_unknown_dtype():
    for dtype in ["float64", "int8", "nonsense", ""]:
        blocks, payload = pack_adapters([part()], torch.float32)
        with pytest.raises(WrongDtype):
            unpack_adapters(blocks, payload, dtype, HIDDEN, CPU)
