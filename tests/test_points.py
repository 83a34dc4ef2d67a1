"""Service is repaid, over real processes: who served an owner's clients has points at that owner's server."""

from __future__ import annotations

from typing import Any

from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.transport.identity import load_or_create
from swarm.transport.p2p import P2PConfig
from swarm.trust.points import points_path, read_owners
from tests.disturbances import demo_prompt, demo_text, greedy
from tests.swarms import LOOPBACK, ServerProcess, TestSwarm, run_client, run_swarm

NEW = 12


def test_service_is_repaid_in_kind(tmp_path):
    """Anna's client is served by Ben and signs for it. Then Ben's client has points at Anna's server, and spends them
    there; Carl's has none, and is served all the same."""
    prompt = demo_prompt()
    expected = demo_text(prompt, NEW)
    anna, ben, carl = (load_or_create(tmp_path / name) for name in ("anna", "ben", "carl"))
    blocks = 12

    def start(swarm: TestSwarm, path: Any, **options: Any) -> ServerProcess:
        p2p = P2PConfig(initial_peers=swarm.addresses, host_maddrs=LOOPBACK, identity_path=path)
        return swarm.start(f"0:{blocks}", p2p=p2p, dtype="float32", **options)

    def generate(swarm: TestSwarm, points: Any, server: ServerProcess) -> int:
        """What a text takes of one server, in token-blocks."""
        with run_client(swarm, dtype="float32", points=points, allowed_servers=[server.peer_id]) as model:
            assert greedy(model, prompt, NEW) == expected
        return (prompt.shape[1] + NEW - 1) * blocks

    with run_swarm(DEMO_FOLDER, [f"0:{blocks}"], dtype="float32") as swarm:
        ours, theirs = start(swarm, anna.path).wait_ready(), start(swarm, ben.path).wait_ready()
        served = sum(generate(swarm, anna.path, theirs) for _ in range(2))
        theirs.stop()
        owed = read_owners(points_path(ben.path))
        assert {peer: (one.served, one.signed) for peer, one in owed.items()} == {anna.peer_id: (served, served)}
        spent = generate(swarm, ben.path, ours)
        free = generate(swarm, carl.path, ours)
        ours.stop()
        known = read_owners(points_path(anna.path))
    assert (known[ben.peer_id].given, known[ben.peer_id].spent, known[ben.peer_id].signed) == (served, spent, spent)
    assert (known[carl.peer_id].worth, known[carl.peer_id].served, known[carl.peer_id].signed) == (0, free, free)
