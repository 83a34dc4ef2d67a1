"""Any schedule of several clients, through a real handler and engine, against the slow path that knows no others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import StepLayout, WireFormat
from swarm.models.execution.session_cache import SessionCache, forward_without_cache
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from tests.models.execution.test_session_cache import layouts, load, slow
from tests.server.conversations import CPU, HIDDEN, OPEN, REVISION, SPAN, Server, assert_close, changed, on_virtual_time
from tests.slow import slow_except

FAMILIES = {"llama": 40, "mistral": 15, "qwen3_moe": 10, "falcon_alibi": 5}
"""Family to the number of examples."""

MAX_CLIENTS, MAX_STEPS = 4, 5


@dataclass(frozen=True)
class Act:
    """What a client asks for, after so many seconds; without a session it is a forward."""

    pause: float
    layout: StepLayout
    in_session: bool


@st.composite
def plans(draw: st.DrawFn) -> list[Act]:
    """One client's acts."""
    acts: list[Act] = []
    lengths: list[int] = []
    offsets: tuple[int, ...] = ()
    for _ in range(draw(st.integers(1, MAX_STEPS))):
        pause = draw(st.sampled_from([0.0, 0.5, 3.0]))
        if draw(st.integers(0, 4)) == 0:
            counts = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
            acts.append(Act(pause, StepLayout((0,) * len(counts), counts), in_session=False))
            continue
        layout = draw(layouts(lengths, offsets))
        if not layout.tokens:
            continue
        lengths = [start + count for start, count in zip(layout.starts, layout.counts, strict=True)]
        offsets = layout.offsets or (0,) * layout.sequences
        acts.append(Act(pause, layout, in_session=True))
    return acts


def request(act: Act, step: int) -> messages.ClientMessage:
    layout = act.layout
    offsets = list(layout.offsets) if layout.offsets is not None else None
    if not act.in_session:
        return messages.ForwardRequest(
            REVISION, SPAN.start, SPAN.end, list(layout.counts), WireFormat.NONE, "float32", WireFormat.NONE, offsets
        )
    sources = list(layout.sources) if layout.sources is not None else None
    return messages.StepRequest(
        step, list(layout.starts), list(layout.counts), WireFormat.NONE, "float32", sources, offsets
    )


async def follow(server: Server, reference: SpanModel, number: int, acts: list[Act]) -> None:
    """Ask for one thing after the other, and check every answer."""
    client = await server.client(f"client {number}")
    opened, _ = await client.ask(changed(OPEN, max_length=64))
    assert opened == messages.SessionOpened(0)
    expected, chance = SessionCache(reference), torch.Generator().manual_seed(number)
    for step, act in enumerate(acts):
        await asyncio.sleep(act.pause)
        hidden = torch.randn(act.layout.tokens, HIDDEN, generator=chance)
        message, payload = request(act, step), encode_tensor(hidden, WireFormat.NONE)
        # Its client's patience is not what is tested: what the machine computes takes its virtual time.
        await client.stream.send(message, payload)
        frame = await client.stream.receive()
        reply = messages.decode_server(frame.header)
        assert isinstance(reply, messages.StepReply if act.in_session else messages.ForwardReply), reply
        output = decode_tensor(frame.payload, act.layout.tokens, HIDDEN, WireFormat.NONE, "float32", CPU)
        right = (
            expected.step(hidden, act.layout)
            if act.in_session
            else forward_without_cache(reference, hidden, act.layout)
        )
        assert_close(output, right)


@pytest.mark.parametrize("family", slow_except(FAMILIES, "llama", "falcon_alibi"))
def test_any_schedule_of_several_clients_is_as_if_each_were_alone(family, tmp_path_factory):
    model, reference = load(family, tmp_path_factory), load(family, tmp_path_factory, packed=False)
    assert model.strategy.packed == (family != "falcon_alibi")
    assert not reference.strategy.packed

    @given(
        st.lists(plans(), min_size=1, max_size=MAX_CLIENTS),
        st.integers(1, 100),
        st.sampled_from([0.0, 0.2, 1.0]),
    )
    @settings(slow, max_examples=FAMILIES[family])
    def schedule(clients, budget, seconds):
        async def act(server):
            await asyncio.gather(*(follow(server, reference, *numbered) for numbered in enumerate(clients)))
            assert len(server.sessions) == len(clients)

        on_virtual_time(model, act, seconds, budget=budget, capacity=1 << 12, step_tokens=64)

    schedule()
