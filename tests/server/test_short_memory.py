"""Honest clients of a server that has little memory for requests."""

from __future__ import annotations

import asyncio

from swarm.data_structures import WireFormat
from swarm.protocol import messages
from swarm.protocol.framing import encode_prefix
from swarm.server.memory import IDLE_AFTER_S
from tests.server.conversations import (
    FORWARD,
    OPEN,
    Client,
    Server,
    bytes_of,
    changed,
    in_virtual_time,
    on_virtual_time,
)

MEMORY_BYTES = 1 << 20
PAYLOAD_BYTES = 1 << 19
"""More than one peer gets of that, because it counts twice."""

PIECE_BYTES = 1 << 14


async def send_slowly(client: Client, pieces: int) -> None:
    """A request whose payload comes at 16 KiB/s, by a client that listens only once it has sent all."""
    header = messages.encode(FORWARD)
    client.stream._writer.write(encode_prefix(len(header), PAYLOAD_BYTES) + header)
    for _ in range(pieces):
        client.stream._writer.write(bytes(PIECE_BYTES))
        await asyncio.sleep(1)


@in_virtual_time(memory=MEMORY_BYTES)
async def test_a_client_with_a_slow_uplink_hears_why_it_is_refused(server: Server):
    client = await server.client()
    await send_slowly(client, PAYLOAD_BYTES // PIECE_BYTES)
    refusal, _ = await client.hear()
    assert isinstance(refusal, messages.Refusal)
    assert refusal.code == "memory_full"
    client.stream.close()
    await asyncio.sleep(0)
    assert not server.handler._streams


def test_a_session_whose_client_sends_slowly_is_not_idle(model):
    """A prompt that takes longer to arrive than the time after which sessions have to leave for others."""
    tokens = 2000

    async def act(server: Server) -> None:
        server.sessions._now = asyncio.get_running_loop().time
        client, other = await server.client("slow"), await server.client("other")
        await client.ask(changed(OPEN, max_length=tokens))
        step = messages.StepRequest(0, [0], [tokens], WireFormat.NONE, "float32")
        header, payload = messages.encode(step), bytes_of(tokens)
        client.stream._writer.write(encode_prefix(len(header), len(payload)) + header)
        await asyncio.sleep(IDLE_AFTER_S + 5)
        await other.refused("cache_full", changed(OPEN, max_length=tokens))
        client.stream._writer.write(payload)
        reply, _ = await client.hear()
        assert isinstance(reply, messages.StepReply)
        await asyncio.sleep(IDLE_AFTER_S + 5)
        assert await other.ask(changed(OPEN, max_length=tokens)) == (messages.SessionOpened(0), b"")

    on_virtual_time(model, act, capacity=tokens, step_tokens=tokens)
