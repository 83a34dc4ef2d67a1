"""Forward and backward passes of a batch while servers fail, against torch's own gradients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm.client.batches.hop_requests import HopRequester
from swarm.client.batches.passes import ForwardTrace, MicroBatch, PassContext, backward_batches, forward_batches
from swarm.client.wire.adapter_upload import pack_adapter
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Hop, Route, Span, StepLayout, WireFormat
from swarm.errors import NotFinite
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.models.execution.gradients import forward_with_graph
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from tests import virtual_time
from tests.client.chains import BLOCKS, HIDDEN, Swarm

SERVERS = {"a": (0, 3), "b": (3, 6), "a2": (0, 3), "b2": (3, 6)}
TOLERANCE = 1e-4
BACKWARD = messages.BackwardRequest


def adapter() -> dict[int, BlockAdapterWeights]:
    """A prompt or factors for most blocks."""
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(shape, generator=generator)).requires_grad_()

    return {
        block: BlockAdapterWeights(
            leaf(2, HIDDEN) if block != 4 else None,
            (LoraFactors("self_attn.q_proj", leaf(3, HIDDEN), leaf(HIDDEN, 3)),) if block % 2 else (),
        )
        for block in (0, 1, 3, 5)
    }


class Batch:
    """Micro-batches, and their gradients as torch has them.

    Attributes:
        first: gradients are wanted from this block on.
    """

    def __init__(self, swarm: Swarm, parts: dict[int, BlockAdapterWeights]) -> None:
        self.swarm, self.parts, self.first = swarm, parts, 0
        self.packed = pack_adapter(parts)
        self.requester = HopRequester(swarm.network, swarm.manner)
        self.batches: list[MicroBatch] = []
        self.hidden: list[torch.Tensor] = []
        self.ends: list[torch.Tensor] = []

    def add(self, counts: tuple[int, ...], *names: str) -> None:
        """Sequences that should go by these servers."""
        generator = torch.Generator().manual_seed(len(self.batches))
        hidden = torch.randn(sum(counts), HIDDEN, generator=generator)
        packed = PackedHidden(encode_tensor(hidden, WireFormat.NONE), sum(counts), HIDDEN, WireFormat.NONE, "float32")
        infos = [self.swarm.announced[name] for name in names]
        layout = StepLayout((0,) * len(counts), counts)
        self.batches.append(MicroBatch(packed, layout, Route(tuple(Hop(info, info.span) for info in infos))))
        self.hidden.append(hidden.requires_grad_())
        self.ends.append(1e-6 * torch.randn(hidden.shape, generator=generator))

    async def forward(self) -> list[ForwardTrace]:
        return await forward_batches(self.work(), Span(0, BLOCKS), self.batches)

    async def compute(self) -> None:
        """A forward pass of which nothing is kept but the outputs, which are compared."""
        context = PassContext(self.requester, self.swarm.planner, self.packed, keep_inputs=False)
        try:
            traces = await forward_batches(context, Span(0, BLOCKS), self.batches)
        finally:
            self.requester.close()
        for trace, batch, hidden in zip(traces, self.batches, self.hidden, strict=True):
            assert not trace.hop_inputs
            result = trace.outputs
            found = decode_tensor(result.payload, result.tokens, HIDDEN, result.wire, result.dtype, torch.device("cpu"))
            close(found, forward_with_graph(self.swarm.model, hidden.detach(), batch.layout, self.parts))

    async def backward(self, traces: list[ForwardTrace]) -> None:
        """Go back and compare."""
        found = await backward_batches(self.work(), traces, self.ends, self.first)
        tensors = [tensor for part in self.parts.values() for tensor in part.tensors]
        totals = [torch.zeros_like(tensor) for tensor in tensors]
        for batch, hidden, end, ours in zip(self.batches, self.hidden, self.ends, found, strict=True):
            outputs = forward_with_graph(self.swarm.model, hidden, batch.layout, self.parts)
            wanted = [hidden, *tensors]
            right, *others = torch.autograd.grad(outputs, wanted, end, allow_unused=True, materialize_grads=True)
            if not self.first:
                close(ours.inputs, right)
            totals = [total + other for total, other in zip(totals, others, strict=True)]
        places = [(block, n) for block, part in self.parts.items() for n in range(len(part.tensors))]
        for (block, number), total in zip(places, totals, strict=True):
            if block >= self.first:
                close(sum(ours.parts[block][number] for ours in found if block in ours.parts), total)

    def work(self) -> PassContext:
        return PassContext(self.requester, self.swarm.planner, self.packed)

    async def run(self, between: Callable[[], object] = lambda: None) -> None:
        traces = await self.forward()
        between()
        await self.backward(traces)


def close(found: Any, right: torch.Tensor) -> None:
    assert bool(right.any())
    torch.testing.assert_close(found, right, rtol=0, atol=TOLERANCE * float(right.abs().max()))


def play(span_model: Any, act: Any, parts: dict[int, BlockAdapterWeights] | None = None, **options: Any) -> None:
    async def scenario() -> None:
        swarm = Swarm(span_model, SERVERS, **options)
        await swarm.start()
        batch = Batch(swarm, adapter() if parts is None else parts)
        await act(swarm, batch)
        batch.requester.close()
        for name in SERVERS:
            swarm.hub.resume(name)  # one that hung has not heard yet that nobody waits for it
        await asyncio.sleep(1)
        assert not swarm.hub.tasks

    virtual_time.run(scenario)


def counts(swarm: Swarm, kind: type = BACKWARD) -> list[int]:
    return [server.count(kind) for server in swarm.servers.values()]


@pytest.mark.parametrize("parts", [None, {}])
def test_gradients_return_by_the_same_route(span_model, parts):
    async def act(swarm, batch):
        batch.add((5, 3), "a", "b")
        batch.add((3,), "a2", "b2")
        batch.add((2, 7, 1), "a2", "b")
        await batch.run()
        assert counts(swarm) == [1, 2, 2, 1]
        puts = [server.count(messages.PutAdapters) for server in swarm.servers.values()]
        assert puts == ([1] * 4 if parts is None else [0] * 4)

    play(span_model, act, parts)


def test_blocks_before_the_first_that_is_trained_are_left_alone(span_model):
    async def act(swarm, batch):
        batch.add((5, 3), "a", "b")
        batch.first = 5
        await batch.run()
        assert counts(swarm) == [0, 1, 0, 0]

    play(span_model, act)


def test_zero_gradients_need_no_request(span_model):
    async def act(swarm, batch):
        batch.add((5,), "a", "b")
        batch.ends[0].zero_()
        (found,) = await backward_batches(batch.work(), await batch.forward(), batch.ends, 0)
        assert not found.inputs.any()
        assert not found.parts
        assert counts(swarm) == [0, 0, 0, 0]

    play(span_model, act)


def spoiled(message: messages.Message, payload: Any) -> Any:
    return message, b"\xff" * len(payload)


def shortened(message: messages.Message, payload: Any) -> Any:
    return message, payload[:-4]


def misplaced(message: messages.Message, payload: Any) -> Any:
    if isinstance(message, messages.BackwardReply):
        message = messages.ForwardReply(message.format, message.dtype, 1.0)
    return message, payload


FAULTS: dict[str, Callable[[Swarm, str], object]] = {
    "killed": lambda swarm, name: swarm.kill(name),
    "silent": lambda swarm, name: swarm.hub.hang(name),
    "not finite": lambda swarm, name: setattr(swarm.servers[name], "tamper", spoiled),
    "wrong size": lambda swarm, name: setattr(swarm.servers[name], "tamper", shortened),
    "out of place": lambda swarm, name: setattr(swarm.servers[name], "tamper", misplaced),
    "leaves": lambda swarm, name: setattr(swarm.servers[name].handler, "closing", True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["b"])
def test_a_server_that_fails_between_the_passes_is_replaced(span_model, name, fault):
    """Only what it had is redone: the other servers compute each micro-batch once."""

    async def act(swarm, batch):
        batch.add((5, 3), "a", "b")
        batch.add((4,), "a2", "b2")
        await batch.run(lambda: FAULTS[fault](swarm, name))
        assert [peer for peer, _ in swarm.planner.failures] == [name]
        assert {
            other: server.count(messages.ForwardRequest) for other, server in swarm.servers.items()
        } == dict.fromkeys(SERVERS, 1)
        asked = {other: server.count(BACKWARD) for other, server in swarm.servers.items()}
        asked.pop(name)
        assert asked == {other: 2 if other == name + "2" else 1 for other in asked}

    play(span_model, act)


def test_a_server_that_fails_several_micro_batches_is_reported_once(span_model):
    async def act(swarm, batch):
        for _ in range(12):
            batch.add((4,), "a", "b")
        await batch.run(lambda: swarm.kill("b"))
        assert [peer for peer, _ in swarm.planner.failures] == ["b"]
        assert swarm.servers["b2"].count(BACKWARD) == 12

    play(span_model, act)


def test_a_replacement_may_have_other_spans(span_model):
    """Blocks 3 to 6 are then held by two servers: the inputs of the second are computed again by the first."""

    async def act(swarm, batch):
        batch.add((5, 3), "a", "b")
        batch.add((4,), "a", "b2")
        traces = await batch.forward()
        swarm.kill("b")
        swarm.kill("b2")
        await swarm.add("c", 2, 5)
        await swarm.add("d", 4, 6)
        await batch.backward(traces)
        inner, last = swarm.servers["c"], swarm.servers["d"]
        assert (inner.count(messages.ForwardRequest), inner.count(BACKWARD)) == (2, 2)
        assert (last.count(messages.ForwardRequest), last.count(BACKWARD)) == (0, 2)

    play(span_model, act)


def test_a_server_that_has_forgotten_the_adapter_gets_it_again(span_model):
    async def act(swarm, batch):
        batch.add((5, 3), "a", "b")
        await batch.run(swarm.servers["b"].handler._stateless.adapters.clear)
        assert swarm.servers["b"].count(messages.PutAdapters) == 2
        assert swarm.planner.failures == []

    play(span_model, act)


def test_nan_is_not_sent(span_model):
    async def act(swarm, batch):
        bad = torch.full((2, HIDDEN), torch.nan)
        packed = PackedHidden(encode_tensor(bad, WireFormat.NONE), 2, HIDDEN, WireFormat.NONE, "float32")
        info = swarm.announced["a"]
        batch.batches = [MicroBatch(packed, StepLayout((0,), (2,)), Route((Hop(info, info.span),)))]
        with pytest.raises(NotFinite, match="check the inputs of the model"):
            await batch.forward()
        assert counts(swarm, messages.ForwardRequest) == [0, 0, 0, 0]

    play(span_model, act)


def test_servers_of_a_route_work_at_the_same_time(span_model):
    """Four micro-batches of half a second at each of two servers: five turns there, five turns back, not eight."""

    async def act(swarm, batch):
        for _ in range(4):
            batch.add((4,), "a", "b")
        for server in swarm.servers.values():
            server.runtime._seconds = 0.5
        began = asyncio.get_running_loop().time()
        traces = await batch.forward()
        there = asyncio.get_running_loop().time()
        await batch.backward(traces)
        back = asyncio.get_running_loop().time() - there
        assert back < 5 * 0.5 + 0.3
        assert there - began < 4 * 0.5 + 0.3  # forwards of the same blocks are computed together, as far as they go

    play(span_model, act)


def test_adapters_reach_servers_while_those_before_them_compute(span_model):
    async def act(swarm, batch):
        batch.add((5,), "a", "b")
        swarm.servers["a"].runtime._seconds = 1.0
        task = asyncio.ensure_future(batch.forward())
        await asyncio.sleep(0.9)
        assert swarm.servers["b"].count(messages.PutAdapters) == 1
        await task
        assert swarm.servers["b"].count(messages.PutAdapters) == 1

    play(span_model, act)


def test_an_interrupted_pass_leaves_nothing_behind(span_model):
    async def act(swarm, batch):
        batch.add((5,), "a", "b")
        batch.add((4,), "a2", "b2")
        traces = await batch.forward()
        task = asyncio.ensure_future(batch.backward(traces))
        await asyncio.sleep(0.025)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(5)
        asked = counts(swarm)
        await asyncio.sleep(5)
        assert counts(swarm) == asked
        assert not batch.requester._queues

    play(span_model, act)
