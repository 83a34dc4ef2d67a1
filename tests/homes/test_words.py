"""What people at home are told."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.homes.laboratory import Host, needs_root
from tests.homes.processes import EVERYWHERE

pytestmark = [pytest.mark.slow, needs_root]


def from_outside(host: Host, address: str) -> dict[str, str]:
    """What `swarm doctor` says about how a machine is reached."""
    command = (sys.executable, "-m", "swarm.cli.doctor.command", "--json", "--initial-peers", address)
    done = subprocess.run(host.command(*command), capture_output=True, text=True, check=False, timeout=300)
    findings = json.loads(done.stdout)
    return next(finding for finding in findings if finding["check"] == "From outside")


def test_a_peer_says_by_which_addresses_others_join_and_doctor_how_this_machine_is_reached(homes):
    bootstrap = homes.bootstrap(homes.lab.host("boot", 2))
    machine, host = homes.lab.home("a", 10).machine, homes.lab.host("public", 3)
    with ThreadPoolExecutor() as pool:  # each waits for others more than it computes
        asked = [pool.submit(from_outside, one, bootstrap.addresses[0]) for one in (machine, host)]
        at_home, public = [one.result() for one in asked]
    assert at_home["verdict"] == "warning"
    assert "reached through relays" in at_home["found"]
    assert "forward TCP port" in at_home["remedy"]
    assert (public["verdict"], public["remedy"]) == ("ok", "")
    assert "reached directly, at /ip4/45.0.0.3/tcp/" in public["found"]
    assert homes.peer(machine, host_maddrs=EVERYWHERE).addresses[0] == bootstrap.addresses[0]
    assert homes.peer(host, host_maddrs=EVERYWHERE).addresses[0].startswith("/ip4/45.0.0.3/tcp/")
