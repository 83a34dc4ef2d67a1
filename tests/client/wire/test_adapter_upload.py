"""Adapters are packed once, go to each server once, and again when it has lost them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.batches.hop_requests import HopRequester
from swarm.client.hops.hop_session import HopSession
from swarm.client.wire import adapter_upload as adapter_upload
from swarm.client.wire.adapter_upload import PackedAdapter, UploadLedger, pack_adapter
from swarm.data_structures import Span
from swarm.errors import NotFinite, PeerLost, UnknownAdapter
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.protocol import messages
from swarm.protocol.adapter_encoding import unpack_adapters
from tests.client.fakes import (
    HIDDEN,
    INPUT,
    KEPT,
    LAYOUT,
    MANNER,
    OPENED,
    OUTPUT,
    context,
    forward_reply,
    hop,
    refusal,
    run,
)
from tests.memory_hub import MemoryNetwork

UNKNOWN = refusal(UnknownAdapter("it has left"))
PUT, FORWARD = messages.PutAdapters, messages.ForwardRequest


def part(value: float, dtype: torch.dtype = torch.float32) -> BlockAdapterWeights:
    down, up = torch.full((2, HIDDEN), value, dtype=dtype), torch.full((HIDDEN, 2), -value, dtype=dtype)
    return BlockAdapterWeights(torch.full((3, HIDDEN), value, dtype=dtype), (LoraFactors("linear", down, up),))


ADAPTER = pack_adapter({0: part(1.0), 2: part(2.0)})


def forward(requester: HopRequester, adapter: PackedAdapter = ADAPTER) -> Any:
    return requester.forward(hop(), INPUT, LAYOUT, adapter)


def test_a_packed_adapter_unpacks_to_the_same_tensors():
    assert list(ADAPTER.parts) == [0, 2]
    (put, payload), *others = ADAPTER.upload_messages(ADAPTER.keys(Span(0, 3)))
    assert not others
    assert (put.start, len(put.blocks), put.blocks[1]) == (0, 3, None)
    described = [block for block in put.blocks if block is not None]
    first, second = unpack_adapters(described, payload, put.dtype, HIDDEN, torch.device("cpu"))
    for found, right in ((first, part(1.0)), (second, part(2.0))):
        torch.testing.assert_close(found.tensors, right.tensors)
    assert ADAPTER.digests(Span(0, 3)) == [described[0].digest, b"", described[1].digest]
    assert ADAPTER.digests(Span(1, 2)) is None
    assert ADAPTER.payload_bytes(ADAPTER.keys(Span(1, 3))) == len(payload) // 2


def test_an_adapter_has_16_bits_only_if_all_its_tensors_have():
    for dtypes, travels in [
        ((torch.float32, torch.float32), "float32"),
        ((torch.bfloat16, torch.bfloat16), "bfloat16"),
        ((torch.float16, torch.float16), "float16"),
        ((torch.float16, torch.bfloat16), "float32"),
        ((torch.float64, torch.float64), "float32"),
    ]:
        assert pack_adapter({block: part(1.0, dtype) for block, dtype in enumerate(dtypes)}).dtype == travels


def test_nan_is_not_sent():
    bad = part(1.0)
    bad.factors[0].up[0, 0] = torch.nan
    with pytest.raises(NotFinite, match="adapter of block 7"):
        pack_adapter({1: part(1.0), 7: bad})


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 500))
def test_large_adapters_go_in_several_messages(prompts, limit):
    adapter = pack_adapter({2 * n: BlockAdapterWeights(torch.ones(rows, HIDDEN)) for n, rows in enumerate(prompts)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_upload, "MAX_PUT_BYTES", limit)
        puts = list(adapter.upload_messages(adapter.keys(Span(0, 20))))
    blocks = [number for put, _ in puts for number, block in enumerate(put.blocks, put.start) if block is not None]
    assert blocks == list(adapter.parts)
    assert b"".join(payload for _, payload in puts) == b"".join(one.payload for one in adapter.parts.values())
    for put, payload in puts:
        assert len(payload) <= limit or sum(block is not None for block in put.blocks) == 1


def test_each_server_is_sent_an_adapter_once_and_other_parts_when_they_change():
    async def scenario(swarm):
        server = await swarm.add(KEPT, forward_reply(), forward_reply(), KEPT, forward_reply())
        requester = HopRequester(swarm.network, MANNER)
        assert (await forward(requester)).payload == OUTPUT
        assert (await forward(requester)).payload == OUTPUT
        changed = pack_adapter({0: part(1.0), 2: part(3.0)})
        assert (await forward(requester, changed)).payload == OUTPUT
        assert server.asked == [PUT, FORWARD, FORWARD, PUT, FORWARD]
        second = server.requests[3][0]
        assert (second.start, len(second.blocks)) == (2, 1)  # block 0 is as before

    run(scenario)


def test_concurrent_requests_upload_the_adapter_once():
    async def scenario(swarm):
        swarm.hub.delay = lambda source, target: 0.1
        server = await swarm.add(KEPT, forward_reply())

        async def answer(stream):
            asked = []
            while True:
                message = messages.decode_client((await stream.receive()).header)
                asked.append(type(message))
                server.requests.append((message, b""))
                await stream.send(*(KEPT if type(message) is PUT else forward_reply()))

        await MemoryNetwork(swarm.hub, "server").serve(answer)
        requester, place = HopRequester(swarm.network, MANNER), hop()
        await asyncio.gather(*(requester.forward(place, INPUT, LAYOUT, ADAPTER) for _ in range(5)))
        assert sorted(kind.__name__ for kind in server.asked) == ["ForwardRequest"] * 5 + ["PutAdapters"]

    run(scenario)


def test_a_server_that_has_lost_an_adapter_gets_it_again_once():
    async def scenario(swarm):
        server = await swarm.add(KEPT, forward_reply(), UNKNOWN, KEPT, forward_reply(), UNKNOWN, KEPT, UNKNOWN)
        requester = HopRequester(swarm.network, MANNER)
        await forward(requester)
        await forward(requester)
        assert server.asked == [PUT, FORWARD, FORWARD, PUT, FORWARD]
        with pytest.raises(UnknownAdapter, match="it has left"):
            await forward(requester)
        assert server.asked[5:] == [FORWARD, PUT, FORWARD]

    run(scenario)


def test_after_a_broken_connection_the_adapter_is_sent_again():
    async def scenario(swarm):
        server = await swarm.add(KEPT, forward_reply(), "hang up")
        requester = HopRequester(swarm.network, MANNER)
        await forward(requester)
        server.answers = ("hang up",)
        with pytest.raises(PeerLost):
            await forward(requester)
        server.answers = (KEPT, forward_reply())
        await forward(requester)
        assert server.asked[-2:] == [PUT, FORWARD]

    run(scenario)


def test_the_ledger_is_bounded(monkeypatch):
    monkeypatch.setattr(adapter_upload, "MAX_LEDGER_SERVERS", 3)
    monkeypatch.setattr(adapter_upload, "MAX_PARTS_PER_SERVER", 2)
    sent = UploadLedger()
    for peer in "abcd":
        sent.record(peer, [(0, b"x"), (1, b"x")], 60.0)
        sent.record(peer, [(2, b"x")], 60.0)
    assert sent.missing("a", [(2, b"x")]) == [(2, b"x")]
    assert sent.missing("d", [(0, b"x"), (1, b"x"), (2, b"x")]) == [(0, b"x")]


def test_a_session_uploads_its_adapter_and_again_if_it_was_lost():
    async def scenario(swarm):
        server = await swarm.add(KEPT, UNKNOWN, KEPT, OPENED)
        carried = adapter_upload.AdapterUpload(ADAPTER)
        one = HopSession(context(swarm, adapter=carried), hop(), lambda *_: None, lambda: None)
        assert await one.open() == 0
        assert server.asked == [PUT, messages.OpenSession] * 2
        opened = server.requests[-1][0]
        assert opened.adapters == ADAPTER.digests(Span(0, 3))
        await one.close()

    run(scenario)
