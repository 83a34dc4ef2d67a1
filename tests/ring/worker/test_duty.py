"""The server that a worker runs for an assignment."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import WorkerFailed
from swarm.protocol.messages import Assign
from swarm.ring.worker.duty import ServerProcess, WorkerDuty, server_arguments
from swarm.server.__main__ import main as server_command

ASSIGN = Assign(
    *(3, "org/model", "r1", 12, 2, 7, {"files": bytes(32)}, 5, "bfloat16", "int8", 2048, 2),
    *(("/ip4/1.2.3.4/tcp/1/p2p/Qm", "/ip4/5.6.7.8/tcp/1/p2p/Qm"), ()),
)


def options_of(assignment, tmp_path, device="auto"):
    arguments = server_arguments(assignment, tmp_path, "pi", device, ["/ip4/0.0.0.0/tcp/0"])
    return server_command.make_context("server", list(arguments)).params


def test_an_assignment_becomes_the_options_of_a_server(tmp_path):
    found = options_of(ASSIGN, tmp_path)
    expected = {
        "model": str(tmp_path),
        "blocks": "2:7",
        "initial_peers": ASSIGN.initial_peers,
        "host_maddrs": ("/ip4/0.0.0.0/tcp/0",),
        "dtype": "bfloat16",
        "quant": "int8",
        "cache_tokens": 2048,
        "threads": 2,
        "name": "pi",
        "flash": "off",
        "relay": False,
        "share_weights": "off",
    }
    assert {name: found[name] for name in expected} == expected


def test_why_a_server_does_not_start_is_said():
    async def scenario():
        server = await ServerProcess.start(["--blocks", "nonsense", "--new-swarm"], {})
        try:
            with pytest.raises(WorkerFailed, match="--blocks 'nonsense': use auto"):
                await server.ready()
        finally:
            await server.stop()

    asyncio.run(scenario())


def test_a_server_keeps_its_blocks_until_the_weights_of_others_are_there(tmp_path):
    """Where weights cannot be had, what ran before still runs."""

    class NoWeights:
        def know(self, assignment):
            pass

        async def receive(self, assignment, on_progress):
            on_progress(1, 5)
            raise WorkerFailed("nobody has them")

    class Running:
        pid, peer_id = 1, "QmServer"
        stopped = False

        async def stop(self):
            self.stopped = True

    async def scenario():
        duty = WorkerDuty(None, NoWeights(), (), {})
        running = duty._server = Running()
        events = []
        with pytest.raises(WorkerFailed):
            await duty.carry_out(ASSIGN, events.append)
        assert not running.stopped
        assert [(event.state, event.done, event.server_id) for event in events] == [("receiving", 1, "QmServer")]
        await duty.stop()
        assert running.stopped

    asyncio.run(scenario())
