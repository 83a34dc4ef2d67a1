"""Forwards, backwards and adapters at one server, by streams in memory, beside a client that goes on working."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
import torch

from swarm.data_structures import StepLayout, WireFormat
from swarm.models.adapters.adapter_batch import NO_ADAPTER, AdapterWeights
from swarm.models.adapters.block_adapter import BlockAdapterWeights
from swarm.models.execution.gradients import compute_gradients
from swarm.models.execution.session_cache import forward_without_cache
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import pack_adapters, unpack_gradients
from swarm.protocol.compression import decode_tensor, encode_tensor
from tests.models.adapters.test_layer_hooks import alone as row_alone
from tests.models.adapters.test_layer_hooks import factors, make_adapter
from tests.server.conversations import (
    ADAPTERS,
    CPU,
    FORWARD,
    HIDDEN,
    OPEN,
    REVISION,
    SPAN,
    Client,
    assert_close,
    beside_good_client,
    changed,
    random,
    scenario,
)

LAYOUT = StepLayout((0, 0), (2, 1))
BACKWARD = messages.BackwardRequest(REVISION, SPAN.start, SPAN.end, [2, 1], WireFormat.NONE, "float32", WireFormat.NONE)


def put(parts: AdapterWeights) -> tuple[messages.PutAdapters, bytes]:
    """What a client sends before it uses an adapter of this server's blocks."""
    blocks, payload = pack_adapters([parts[block] for block in sorted(parts)], torch.float32)
    named = dict(zip(sorted(parts), blocks, strict=True))
    return messages.PutAdapters(
        SPAN.start, [named.get(block) for block in range(SPAN.start, SPAN.end)], "float32"
    ), payload


def names(message: messages.PutAdapters) -> list[bytes]:
    return [block.digest if block is not None else b"" for block in message.blocks]


async def kept(client: Client, parts: AdapterWeights) -> list[bytes]:
    """Have the adapter kept; its digests."""
    message, payload = put(parts)
    reply, _ = await client.ask(message, payload)
    assert reply == messages.AdaptersStored(ADAPTERS.seconds)
    return names(message)


def packed(*tensors: torch.Tensor, wire: WireFormat = WireFormat.NONE) -> bytes:
    return b"".join(bytes(encode_tensor(tensor, wire)) for tensor in tensors)


Check = Callable[[], None]
"""Compares what came with what the blocks compute here; not while the server computes, which has the same blocks."""


async def ask_forward(client: Client, parts: AdapterWeights, digests: list[bytes] | None, seed: int = 3) -> Check:
    hidden, model = random(3, seed), client.model
    reply, payload = await client.ask(changed(FORWARD, adapters=digests), packed(hidden))
    assert isinstance(reply, messages.ForwardReply), reply
    output = decode_tensor(payload, 3, HIDDEN, WireFormat.NONE, "float32", CPU)
    return lambda: assert_close(output, forward_without_cache(model, hidden, LAYOUT, parts))


async def ask_backward(client: Client, parts: AdapterWeights, digests: list[bytes] | None, seed: int = 3) -> Check:
    hidden, ends, model = random(3, seed), random(3, seed + 100), client.model
    reply, payload = await client.ask(changed(BACKWARD, adapters=digests), packed(hidden, ends))
    assert isinstance(reply, messages.BackwardReply), reply
    assert (reply.format, reply.dtype) == (WireFormat.NONE, "float32")
    assert reply.compute_ms > 0
    length = 3 * HIDDEN * 4
    described = [block for block in put(parts)[0].blocks if block is not None] if parts else []
    inputs = decode_tensor(payload[:length], 3, HIDDEN, WireFormat.NONE, "float32", CPU)
    found = unpack_gradients(described, payload[length:], HIDDEN)

    def check() -> None:
        expected = compute_gradients(model, hidden, ends, LAYOUT, parts)
        assert_close(inputs, expected.inputs)
        for one, other in zip(found, [expected.parts[block] for block in sorted(parts)], strict=True):
            for gradient, right in zip(one, other, strict=True):
                assert_close(gradient, right)

    return check


async def forward(client: Client, parts: AdapterWeights, digests: list[bytes] | None) -> None:
    """A forward whose outputs are checked."""
    (await ask_forward(client, parts, digests))()


async def backward(client: Client, parts: AdapterWeights, digests: list[bytes] | None) -> None:
    """A backward whose gradients are checked."""
    (await ask_backward(client, parts, digests))()


@beside_good_client()
async def test_forwards_and_backwards_with_an_adapter(server, model):
    client = await server.client()
    for parts in (make_adapter(model, 1), {2: make_adapter(model, 2)[2]}):
        digests = await kept(client, parts)
        await forward(client, parts, digests)
        await backward(client, parts, digests)
    await forward(client, NO_ADAPTER, None)
    await backward(client, NO_ADAPTER, [b""] * 3)
    assert len(server.adapters) == 4


@pytest.mark.parametrize("wire", WireFormat)
@beside_good_client()
async def test_gradients_in_every_format(server, model, wire):
    client = await server.client()
    hidden, ends = random(3), random(3, 9)
    request = changed(BACKWARD, format=wire, reply_format=wire)
    reply, payload = await client.ask(request, packed(hidden, wire=wire) + packed(ends, wire=wire))
    assert reply.format is wire
    found = decode_tensor(payload, 3, HIDDEN, wire, reply.dtype, CPU)
    expected = compute_gradients(model, hidden, ends, LAYOUT).inputs
    assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


@beside_good_client()
async def test_a_session_keeps_its_adapter(server, model):
    """Also when it is replayed, and when the server has let the adapter go."""
    client = await server.client()
    parts = make_adapter(model, 1)
    digests = await kept(client, parts)
    reply, _ = await client.ask(changed(OPEN, adapters=digests))
    assert reply == messages.SessionOpened(0)
    hidden = random(6, 4)
    expected = row_alone(model, hidden, parts)
    request = messages.StepRequest(0, [0], [3], WireFormat.NONE, "float32")
    _, payload = await client.ask(request, packed(hidden[:3]))
    assert_close(decode_tensor(payload, 3, HIDDEN, WireFormat.NONE, "float32", CPU), expected[:3])
    server.now += ADAPTERS.seconds + 1
    server.adapters.expire()
    assert len(server.adapters) == 0
    assert server.adapters.memory > 0
    request = messages.StepRequest(1, [3], [1], WireFormat.NONE, "float32")
    _, payload = await client.ask(request, packed(hidden[3:4]))
    assert_close(decode_tensor(payload, 1, HIDDEN, WireFormat.NONE, "float32", CPU), expected[3:4])
    replay = messages.ReplayRequest(3, [0], [6], WireFormat.NONE, "float32", None, True)
    _, payload = await client.ask(replay, packed(hidden))
    assert_close(decode_tensor(payload, 6, HIDDEN, WireFormat.NONE, "float32", CPU), expected)
    await client.stream.send(messages.CloseSession())
    await client.is_over()
    await server.until(lambda: gc.collect() is not None and server.adapters.memory == 0)


def poisoned(parts: AdapterWeights) -> AdapterWeights:
    """One NaN in the last block."""
    changed_parts = {block: part.map_tensors(torch.clone) for block, part in parts.items()}
    changed_parts[3].factors[-1].up[0, 0] = float("nan")
    return changed_parts


@pytest.mark.parametrize(
    ("code", "parts", "words"),
    [
        ("adapter_refused", {1: factors(down=(2, HIDDEN - 1))}, "the module needs A [rank, 32]"),
        ("adapter_refused", {1: factors("self_attn.nothing")}, "no linear module"),
        ("adapter_refused", {1: factors("self_attn")}, "no linear module"),
        ("adapter_refused", {1: factors(down=(9, HIDDEN), up=(HIDDEN, 9))}, "rank 9; this server takes up to 8"),
        ("adapter_refused", {1: BlockAdapterWeights(torch.zeros(1000, HIDDEN))}, "takes 129 KB"),
        ("adapter_refused", {1: BlockAdapterWeights(None, factors().factors * 2)}, "twice"),
    ],
)
@beside_good_client()
async def test_adapters_that_do_not_fit(server, model, code, parts, words):
    client = await server.client()
    message, payload = put(parts)
    assert words in await client.refused(code, message, payload)
    assert (len(server.adapters), server.adapters.memory) == (0, 0)
    await client.refused("unknown_adapter", changed(FORWARD, adapters=names(message)), packed(random(3)))
    right = make_adapter(model, 1)
    await forward(client, right, await kept(client, right))


@beside_good_client()
async def test_adapters_that_are_no_numbers_or_no_adapters(server, model):
    client = await server.client()
    message, payload = put(make_adapter(model, 1))
    await client.refused("not_finite", *put(poisoned(make_adapter(model, 1))))
    await client.refused("wrong_shape", message, payload[:-4])
    await client.refused("wrong_shape", message, payload + bytes(4))
    await client.refused("wrong_shape", message, bytes(len(payload)))  # of another digest
    await client.refused("wrong_dtype", changed(message, dtype="int8"), payload)
    await client.refused("wrong_span", changed(message, start=0), payload)
    await client.refused("wrong_span", changed(message, start=2), payload)
    assert len(server.adapters) == 0
    await kept(client, make_adapter(model, 1))


@beside_good_client()
async def test_an_adapter_that_is_not_here_or_not_this_peers(server, model):
    mine, thief = await server.client("me"), await server.client("thief")
    parts = make_adapter(model, 1)
    digests = await kept(mine, parts)
    for request, payload in (
        (FORWARD, packed(random(3))),
        (BACKWARD, packed(random(3), random(3))),
        (OPEN, b""),
    ):
        await thief.refused("unknown_adapter", changed(request, adapters=digests), payload)
        await mine.refused("unknown_adapter", changed(request, adapters=[*digests[:2], bytes(16)]), payload)
        await mine.refused("wrong_shape", changed(request, adapters=digests[:2]), payload)
    await forward(mine, parts, digests)
    server.now += ADAPTERS.seconds + 1
    server.adapters.expire()
    await mine.refused("unknown_adapter", changed(FORWARD, adapters=digests), packed(random(3)))
    await forward(mine, parts, await kept(mine, parts))


@beside_good_client()
async def test_backwards_that_are_wrong(server):
    client = await server.client()
    inputs, ends = random(3), random(3, 9)
    bad = ends.clone()
    bad[1, 1] = float("nan")
    for tensors in ((inputs, ends[:2]), (inputs[:2], ends), (inputs,), (inputs, ends, ends)):
        await client.refused("wrong_shape", BACKWARD, packed(*tensors))
    await client.refused("wrong_shape", changed(BACKWARD, reply_format=WireFormat.FLOAT16), packed(inputs, ends))
    await client.refused("wrong_shape", changed(BACKWARD, offsets=[1]), packed(inputs, ends))
    assert "gradients" in await client.refused("not_finite", BACKWARD, packed(inputs, bad))
    assert "hidden" in await client.refused("not_finite", BACKWARD, packed(bad, ends))
    await client.refused("wrong_dtype", changed(BACKWARD, dtype="float17"), packed(inputs, ends))
    await client.refused("wrong_span", changed(BACKWARD, start=0), packed(inputs, ends))
    await client.refused("wrong_span", changed(BACKWARD, revision="other"), packed(inputs, ends))
    await client.refused("too_long", changed(BACKWARD, counts=[13]), packed(random(13), random(13)))
    await client.refused("too_long", changed(BACKWARD, counts=[0]), b"")
    await backward(client, NO_ADAPTER, None)


def test_a_backward_that_fails_is_told_to_its_client_alone(model, monkeypatch, caplog):
    real = compute_gradients

    def fragile(model, inputs, *rest):
        if (inputs == 12345.0).any():
            raise RuntimeError("secret path /home/somebody")
        return real(model, inputs, *rest)

    monkeypatch.setattr("swarm.server.compute.engine.compute_gradients", fragile)

    async def act(server):
        client, other = await server.client(), await server.client("other")
        poison = packed(torch.full((3, HIDDEN), 12345.0), random(3))
        failing = [client.refused("server_fault", BACKWARD, poison)]
        text, check = await asyncio.gather(*failing, ask_backward(other, NO_ADAPTER, None))
        assert "secret" not in text
        check()
        await backward(client, NO_ADAPTER, None)

    scenario(model, act)
    assert "secret path" in caplog.text
