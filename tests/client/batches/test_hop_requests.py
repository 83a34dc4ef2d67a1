"""One request to one server that keeps nothing of it, its reply, and the streams that carry both."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.batches.hop_requests import (
    IDLE_TIMEOUT_S,
    MAX_IDLE_STREAMS_PER_SERVER,
    MAX_REQUESTS_IN_FLIGHT,
    HopRequester,
    StreamPool,
    pack_scaled,
    unpack_scaled,
)
from swarm.client.config import RequestOptions
from swarm.client.wire.adapter_upload import PackedAdapter, pack_adapter
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.errors import PeerLost, PeerTimeout, ProtocolViolation, WrongDtype
from swarm.models.adapters.block_adapter import BlockAdapterWeights
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, pack_gradients
from tests.client.fakes import (
    BAD_REPLIES,
    HIDDEN,
    INPUT,
    KEPT,
    LAYOUT,
    MANNER,
    OUTPUT,
    backward_reply,
    bad_payloads,
    forward_reply,
    hop,
    refusal,
    reply,
    run,
)
from tests.client.hops.test_hop_session import cases
from tests.memory_hub import MemoryNetwork

NOTHING = PackedAdapter()
PROMPTED = pack_adapter({1: BlockAdapterWeights(torch.arange(8.0).view(2, HIDDEN))})
GRADIENT = torch.arange(12.0).view(3, HIDDEN) / 1e6
SPLIT = StepLayout((0, 0), (2, 1), None, (4, 0))


def forward(
    swarm: Any, name: str = "server", adapter: PackedAdapter = NOTHING, requester: HopRequester | None = None
) -> Any:
    return (requester or HopRequester(swarm.network, MANNER)).forward(hop(name), INPUT, LAYOUT, adapter)


def backward(swarm: Any, adapter: PackedAdapter = NOTHING, manner: RequestOptions = MANNER) -> Any:
    return HopRequester(swarm.network, manner).backward(hop(), INPUT, GRADIENT, SPLIT, adapter)


async def ended(server: Any) -> None:
    await asyncio.sleep(0.1)
    assert server.open_streams == 0


def test_a_forward_request_and_its_end():
    async def scenario(swarm):
        server = await swarm.add(forward_reply())
        requester = HopRequester(swarm.network, MANNER)
        output = await requester.forward(hop(), INPUT, SPLIT, NOTHING)
        assert output == PackedHidden(OUTPUT, 3, HIDDEN, WireFormat.FLOAT16, "float32")
        requester.close()
        await ended(server)
        request = messages.ForwardRequest(
            "main", 0, 3, [2, 1], WireFormat.NONE, "float32", WireFormat.FLOAT16, offsets=[4, 0]
        )
        assert server.requests == [(request, INPUT.payload)]

    run(scenario)


@pytest.mark.parametrize(
    ("wire", "gradients"),
    [
        (WireFormat.NONE, WireFormat.NONE),
        (WireFormat.FLOAT16, WireFormat.FLOAT16),
        (WireFormat.BFLOAT16, WireFormat.FLOAT16),
        (WireFormat.BLOCKWISE8, WireFormat.FLOAT16),
    ],
)
def test_a_backward_sends_inputs_and_scaled_gradients_and_scales_the_answer_back(wire, gradients):
    """The largest gradient, 1.1e-5, travels as something near 1; all that comes back is as much too large."""

    async def scenario(swarm):
        parts = pack_gradients([torch.full((2, HIDDEN), 2.0)])
        answer = torch.arange(12).to(torch.float32 if gradients is WireFormat.NONE else torch.float16)
        payload = answer.numpy().tobytes() + parts
        server = await swarm.add(KEPT, backward_reply(payload, format=gradients))
        found = await backward(swarm, PROMPTED, RequestOptions("main", wire, 60.0))
        assert server.asked == [messages.PutAdapters, messages.BackwardRequest]
        request, sent = server.requests[1]
        assert request == messages.BackwardRequest(
            "main", 0, 3, [2, 1], WireFormat.NONE, "float32", gradients, [4, 0], PROMPTED.digests(Span(0, 3))
        )
        assert sent[:48] == INPUT.payload
        scaled = decode_tensor(sent[48:], 3, HIDDEN, gradients, "float32", torch.device("cpu"))
        assert 0.5 <= scaled.max() < 1
        factor = GRADIENT.max() / scaled.max()
        torch.testing.assert_close(scaled * factor, GRADIENT, rtol=1e-3, atol=0)
        torch.testing.assert_close(found.inputs, torch.arange(12.0).view(3, HIDDEN) * factor)
        torch.testing.assert_close(found.parts, {1: [torch.full((2, HIDDEN), 2.0) * factor]})

    run(scenario)


def test_gradients_that_outgrow_float16_travel_as_bfloat16():
    async def scenario(swarm):
        server = await swarm.add(refusal(WrongDtype("they reach 1e5")), backward_reply(format=WireFormat.BFLOAT16))
        await backward(swarm)
        formats = [request.reply_format for request, _ in server.requests]
        assert formats == [WireFormat.FLOAT16, WireFormat.BFLOAT16]
        exact = RequestOptions("main", WireFormat.NONE, 60.0)
        await swarm.add(refusal(WrongDtype("not mine")))
        with pytest.raises(WrongDtype):
            await backward(swarm, manner=exact)

    run(scenario)


@cases([("a step", reply(), "unexpected StepReply"), *bad_payloads(forward_reply)])
def test_a_server_that_answers_a_forward_wrongly(answer, why):
    async def scenario(swarm):
        server = await swarm.add(answer)
        requester = HopRequester(swarm.network, MANNER)
        with pytest.raises(ProtocolViolation, match=why):
            await forward(swarm, requester=requester)
        requester.close()
        await ended(server)

    run(scenario)


@cases([*BAD_REPLIES, ("a forward", forward_reply(), "unexpected ForwardReply")])
def test_a_server_that_answers_a_backward_wrongly(answer, why):
    async def scenario(swarm):
        await swarm.add(answer)
        with pytest.raises(ProtocolViolation, match=why):
            await backward(swarm)

    run(scenario)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (OUTPUT, "0 bytes where 24"),
        (OUTPUT + b"p" * 31, "23 bytes where 24"),
        (OUTPUT + b"p" * 33, "25 bytes where 24"),
        (OUTPUT + b"\xff" * 32, "wrong gradients: an adapter's gradients hold NaN"),
    ],
)
def test_gradients_of_the_adapter_that_are_wrong(payload, why):
    async def scenario(swarm):
        await swarm.add(KEPT, backward_reply(payload))
        with pytest.raises(ProtocolViolation, match=why):
            await backward(swarm, PROMPTED)

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "kind", "why"), [(None, PeerTimeout, "did not answer within"), ("hang up", PeerLost, "is gone")]
)
def test_a_server_that_does_not_answer(answer, kind, why):
    async def scenario(swarm):
        await swarm.add(answer)
        with pytest.raises(PeerLost, match=why) as caught:
            await forward(swarm)
        assert type(caught.value) is kind
        assert asyncio.get_running_loop().time() < 10
        with pytest.raises(PeerLost, match="cannot be reached"):
            await forward(swarm, "nobody")

    run(scenario)


def test_a_long_request_may_take_as_long_as_was_announced():
    """A server that computes 10 tokens a second is not given up after a few seconds of a long batch; and a backward
    takes three times as long."""

    async def scenario(swarm):
        async def slow(stream):
            frame = await stream.receive()
            is_forward = isinstance(messages.decode_client(frame.header), messages.ForwardRequest)
            await asyncio.sleep(30 if is_forward else 70)
            await stream.send(*(forward_reply() if is_forward else backward_reply()))

        await MemoryNetwork(swarm.hub, "server").serve(slow)
        patient = hop("server", throughput=0.1, forward_throughput=0.1)
        requester = HopRequester(swarm.network, RequestOptions("main", WireFormat.FLOAT16, 100.0))
        assert (await requester.forward(patient, INPUT, LAYOUT, NOTHING)).payload == OUTPUT
        assert (await requester.backward(patient, INPUT, GRADIENT, LAYOUT, NOTHING)).inputs.shape == (3, HIDDEN)

    run(scenario)


def test_few_requests_are_under_way_at_one_server_and_each_may_wait_for_those_before_it():
    """One second each, one after the other: nobody is given up, though each alone would be due in four seconds."""

    async def scenario(swarm):
        under_way, most = 0, 0
        busy = asyncio.Lock()

        async def one_by_one(stream):
            nonlocal under_way, most
            while True:
                await stream.receive()
                under_way += 1
                most = max(most, under_way)
                async with busy:
                    await asyncio.sleep(1.0)
                under_way -= 1
                await stream.send(*forward_reply())

        await MemoryNetwork(swarm.hub, "server").serve(one_by_one)
        place = hop("server", forward_throughput=3.0 * 3 / 1.0, throughput=9.0)
        requester = HopRequester(swarm.network, MANNER)
        work = [requester.forward(place, INPUT, LAYOUT, NOTHING) for _ in range(3 * MAX_REQUESTS_IN_FLIGHT)]
        assert len(await asyncio.gather(*work)) == 3 * MAX_REQUESTS_IN_FLIGHT
        assert most == MAX_REQUESTS_IN_FLIGHT
        assert not requester._queues

    run(scenario)


def test_requests_that_wait_for_a_lost_server_fail_at_once():
    async def scenario(swarm):
        server = await swarm.add(None)
        requester = HopRequester(swarm.network, MANNER)
        work = [forward(swarm, requester=requester) for _ in range(3 * MAX_REQUESTS_IN_FLIGHT)]
        found = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(error, PeerLost) for error in found)
        assert len(server.requests) == MAX_REQUESTS_IN_FLIGHT
        assert asyncio.get_running_loop().time() < 10
        assert not requester._queues

    run(scenario)


PRECISION = {WireFormat.NONE: 0.0, WireFormat.FLOAT16: 2**-11, WireFormat.BFLOAT16: 2**-8}


@pytest.mark.parametrize("wire", list(PRECISION))
@given(exponent=st.integers(-80, 60))
def test_gradients_of_any_magnitude_keep_their_precision(wire, exponent):
    gradient = torch.tensor([[1.0, -0.75], [0.3, 1e-3]]) * 2.0**exponent
    packed, factor = pack_scaled(gradient, wire, "float32")
    torch.testing.assert_close(unpack_scaled(packed, factor), gradient, rtol=PRECISION[wire], atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_uncompressed_gradients_have_the_dtype_of_the_inputs(dtype):
    packed, factor = pack_scaled(torch.tensor([[3e-12, 1e-12]]), WireFormat.NONE, dtype)
    assert len(packed.payload) == 4
    torch.testing.assert_close(unpack_scaled(packed, factor), torch.tensor([[3e-12, 1e-12]]), rtol=2**-8, atol=0)


def test_extreme_gradients_stay_finite():
    for value in (0.0, 1e-45, 3.4e38):
        packed, factor = pack_scaled(torch.tensor([[value]]), WireFormat.NONE, "float32")
        assert float(unpack_scaled(packed, factor)) == pytest.approx(value, rel=1e-6)


INFO = messages.InfoRequest()
REPLY = (messages.InfoReply(0, 1, 0, 0, "1"), b"")


async def ask(stream: Any) -> Any:
    await stream.send(INFO)
    return await stream.receive()


def test_a_stream_is_used_again():
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)
        for _ in range(5):
            await pool.exchange("server", ask)
        assert len(server.streams) == 1
        pool.close()
        await asyncio.sleep(0.1)
        assert server.open_streams == 0

    run(scenario)


def test_each_conversation_has_a_stream_of_its_own_and_few_are_kept():
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)
        await asyncio.gather(*(pool.exchange("server", ask) for _ in range(MAX_IDLE_STREAMS_PER_SERVER + 4)))
        await asyncio.sleep(0.1)
        assert server.open_streams == MAX_IDLE_STREAMS_PER_SERVER
        await asyncio.gather(*(pool.exchange("server", ask) for _ in range(MAX_IDLE_STREAMS_PER_SERVER)))
        assert len(server.streams) == MAX_IDLE_STREAMS_PER_SERVER + 4

    run(scenario)


def test_idle_streams_are_closed():
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)
        await pool.exchange("server", ask)
        await asyncio.sleep(IDLE_TIMEOUT_S - 1)
        await pool.exchange("server", ask)
        await asyncio.sleep(IDLE_TIMEOUT_S - 1)
        assert server.open_streams == 1
        await asyncio.sleep(2)
        assert server.open_streams == 0
        assert not pool._idle

    run(scenario)


def test_a_stream_that_the_server_has_closed_is_replaced():
    async def scenario(swarm):
        server = await swarm.add(REPLY, "hang up")
        pool = StreamPool(swarm.network)
        await asyncio.gather(*(pool.exchange("server", ask) for _ in range(3)))
        for stream in server.streams:
            stream.close()
        await asyncio.sleep(0.1)
        await pool.exchange("server", ask)
        assert len(server.streams) == 4  # the others were closed as well, and are not tried

    run(scenario)


@pytest.mark.parametrize("error", [PeerTimeout("it is slow"), ValueError("a mistake"), asyncio.CancelledError()])
def test_a_stream_is_not_used_again_after_an_error(error):
    async def scenario(swarm):
        server = await swarm.add(*[REPLY] * 5)
        pool = StreamPool(swarm.network)

        async def fail(stream: Any) -> None:
            await ask(stream)
            raise error

        for _ in range(2):  # over a new stream, and over one that was kept
            with pytest.raises(type(error)):
                await pool.exchange("server", fail)
            await asyncio.sleep(0.1)
            assert server.open_streams == 0
            await pool.exchange("server", ask)
        assert len(server.streams) == 3

    run(scenario)


def test_a_server_that_is_gone_is_tried_once_more():
    async def scenario(swarm):
        server = await swarm.add(REPLY, "hang up")
        pool = StreamPool(swarm.network)
        await pool.exchange("server", ask)
        server.answers = ("hang up",)
        with pytest.raises(PeerLost):
            await pool.exchange("server", ask)
        assert len(server.streams) == 2

    run(scenario)
