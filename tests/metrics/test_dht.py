"""A bootstrap peer that tells what it knows."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from tests.metrics.readings import Readings, parse, value
from tests.swarms import run_swarm
from tests.zoo import make_checkpoint

PATIENCE = 60.0


def read(url: str) -> Readings:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return parse(answer.read().decode())


def test_a_bootstrap_peer_tells_whom_it_knows(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    arguments = ("swarm.dht", "--host-maddrs", LOOPBACK, "--metrics", "0", "--log-format", "json")
    with run_swarm(folder, ["0:6"], update_period=1.0) as swarm:
        peer = PeerProcess((*arguments, "--initial-peers", swarm.address))
        try:
            url = peer.wait_for(r'"message": "Metrics: (http://\S+/metrics)"')[1]
            peer.wait_for('"message": "Join: ')
            deadline = time.monotonic() + PATIENCE
            while (readings := read(url)) and not value(readings, "swarm_dht_records"):
                assert time.monotonic() < deadline, readings
                time.sleep(0.1)
            assert value(readings, "swarm_dht_known_peers") == 1
        finally:
            assert peer.stop() == 0
        assert all(json.loads(line)["level"] == "INFO" for line in peer.lines)
