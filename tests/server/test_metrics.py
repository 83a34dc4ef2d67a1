"""What a server counts: at one server by streams in memory, and over real libp2p with exact numbers."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.errors import AddressUnavailable
from swarm.metrics.endpoint import MetricsAddress
from swarm.metrics.registry import Registry, encode_metrics
from swarm.metrics.server import ServerObserver
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.server.compute.engine import Engine
from swarm.server.config import ServerConfig
from swarm.server.lifecycle import Server
from swarm.server.sessions.adapter_store import AdapterStore
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.request_validation import RequestLimits
from swarm.server.sessions.session_table import SessionTable
from tests.metrics.readings import Readings, parse, value
from tests.models.adapters.test_layer_hooks import make_adapter
from tests.server import conversations
from tests.server.conversations import (
    ADAPTERS,
    FORWARD,
    HIDDEN,
    REVISION,
    bytes_of,
    changed,
    with_server,
)
from tests.server.sessions.test_stateless_requests import BACKWARD, kept
from tests.swarms import run_client, run_swarm
from tests.zoo import make_checkpoint

PATIENCE = 60.0
TOKEN = 4 * HIDDEN
"""Bytes of one token's hidden states, as they travel here."""


class Counted(conversations.Server):
    """A server that is measured."""

    def __init__(self, model: SpanModel) -> None:
        super().__init__(model)
        self.registry = Registry()
        metrics = ServerObserver(self.registry)
        self.sessions = SessionTable(64, lambda: self.now, peer_share=1.0, observer=metrics)
        self.adapters = AdapterStore(lambda: self.now, ADAPTERS, metrics)
        engine, limits = Engine(self.runtime, 64, metrics), RequestLimits(step_tokens=16, backward_tokens=12)
        self.handler = MessageHandler(
            self.network, model, REVISION, self.sessions, engine, limits, self.adapters, observer=metrics
        )

    def value(self, name: str, **labels: str) -> float | None:
        return value(parse(encode_metrics(self.registry)[0].decode()), f"swarm_server_{name}", **labels)

    async def until_value(self, expected: float, name: str, **labels: str) -> None:
        """What is counted after an answer has gone may come a moment later."""
        await self.until(lambda: self.value(name, **labels) == expected)


@pytest.fixture(autouse=True)
def counted(monkeypatch) -> None:
    monkeypatch.setattr(conversations, "Server", Counted)


@with_server()
async def test_a_session_from_open_to_close(server):
    assert server.value("cache_capacity_tokens") == 64
    client = await (await server.client()).begin()  # a prompt of two tokens
    assert (server.value("sessions_open"), server.value("cache_used_tokens")) == (1, 8)
    for _ in range(3):
        await client.right_step()
    await client.right_step(2)
    await client.stream.send(messages.CloseSession())
    await client.is_over()
    assert server.value("tokens_total", kind="prefill") == 2
    assert server.value("tokens_total", kind="decode") == 5
    assert server.value("step_seconds_count", kind="prefill") == 1
    assert server.value("step_seconds_count", kind="decode") == 4
    step_seconds = sum(server.value("step_seconds_sum", kind=kind) for kind in ("prefill", "decode"))
    assert step_seconds >= server.value("queue_seconds_sum") > 0
    assert (server.value("iteration_sequences_count"), server.value("iteration_sequences_sum")) == (5, 5)
    assert server.value("iteration_tokens_sum") == 7
    assert server.value("iteration_seconds_sum") > 0
    assert server.value("queue_seconds_count") == 5
    assert server.value("received_bytes_total") == 7 * TOKEN
    await server.until_value(7 * TOKEN, "sent_bytes_total")
    assert server.value("sessions_opened_total") == 1
    assert server.value("sessions_closed_total", reason="closed") == 1
    assert (server.value("sessions_open"), server.value("cache_used_tokens")) == (0, 0)
    assert server.value("errors_total", code="server_fault") is None


@with_server()
async def test_training_and_adapters(server, model):
    client = await server.client()
    digests = await kept(client, make_adapter(model))
    assert len(server.adapters) > 0
    assert server.value("adapter_bytes") == server.adapters.memory > 0
    reply, _ = await client.ask(changed(FORWARD, adapters=digests), bytes_of(3))
    assert isinstance(reply, messages.ForwardReply), reply
    reply, _ = await client.ask(changed(BACKWARD, adapters=digests), bytes_of(3) * 2)
    assert isinstance(reply, messages.BackwardReply), reply
    for kind in ("forward", "backward"):
        assert server.value("tokens_total", kind=kind) == 3
        assert server.value("step_seconds_count", kind=kind) == 1
    assert server.value("iteration_sequences_sum") == 4
    server.now += ADAPTERS.seconds + 1
    server.adapters.expire()
    assert len(server.adapters) == 0


def read(url: str) -> Readings:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return parse(answer.read().decode())


def test_a_server_counts_what_a_client_generates(tmp_path: Path) -> None:
    """The head of a model at a server that is measured, the tail at another one, to which it pushes."""
    folder = make_checkpoint("llama", tmp_path / "model")
    prompt = torch.randint(3, 100, (1, 7), generator=torch.Generator().manual_seed(3))
    with run_swarm(folder, ["3:6"], dtype="float32") as swarm:
        options = ("--host-maddrs", LOOPBACK, "--threads", "1", "--throughput", "100", "--dtype", "float32")
        arguments = ("swarm.server", str(folder), "--blocks", "0:3", "--metrics", "127.0.0.1:0", *options)
        server = PeerProcess((*arguments, "--initial-peers", swarm.address), {"HF_HUB_OFFLINE": "1"})
        try:
            url = server.wait_for(r"^Metrics: (http://127\.0\.0\.1:\d+/metrics)$")[1]
            server.address()
            with run_client(swarm, dtype="float32") as client:
                written = client.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
            deadline = time.monotonic() + PATIENCE
            while value(readings := read(url), "swarm_server_sessions_closed_total", reason="closed") != 1:
                assert time.monotonic() < deadline, readings
                time.sleep(0.05)
        finally:
            assert server.stop() == 0
    local = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = local.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
    assert written.tolist() == expected.tolist()

    def told(name: str, **labels: str) -> float:
        return value(readings, f"swarm_server_{name}", **labels) or 0.0

    assert told("tokens_total", kind="prefill") == 7
    assert told("tokens_total", kind="decode") == 11
    assert told("step_seconds_count", kind="decode") == 11
    assert told("iteration_sequences_sum") == 12
    assert told("sessions_opened_total") == 1
    assert (told("sessions_open"), told("cache_used_tokens")) == (0, 0)
    assert (told("span_start_block"), told("span_end_block")) == (0, 3)
    assert told("throughput_blocks_per_second") == 100
    assert told("cache_capacity_tokens") == 16384
    token = 4 * local.config.hidden_size
    assert told("received_bytes_total") >= 18 * token
    pushed = told("pushes_total", outcome="sent")
    assert 0 < pushed <= 12
    assert told("sent_bytes_total") >= (18 + pushed) * token
    assert value(readings, "process_resident_memory_bytes") > 1e8


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server(ServerConfig(model="/nowhere", metrics=MetricsAddress("127.0.0.1", port)))
        with pytest.raises(AddressUnavailable, match=rf"--metrics: cannot listen on 127.0.0.1:{port}: another program"):
            asyncio.run(server.start())
