"""`swarm doctor` against a real bootstrap peer: what is right, and each thing that can be wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import uvloop
from click.testing import CliRunner
from huggingface_hub import constants

from swarm.cli.doctor import command as doctor
from swarm.cli.doctor import machine_checks as machine
from swarm.cli.doctor import network_checks as network
from swarm.cli.doctor import verdicts
from swarm.cli.doctor.verdicts import Finding, Verdict
from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.data_structures import ModelInfo
from swarm.dht import probe
from swarm.dht.directory import fetch_models, fetch_servers
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import DriveFailed, NotEnoughSpace, PeerLost
from swarm.models.flash import drive_measurement
from swarm.transport.p2p import P2PConfig, Peer

OTHER = "QmY4ace2YSgwDm1DQrKEGDpaMrgCLAJojTmtYUW2iDykrN"
NAMES = {"Python", "swarm", "torch", "transformers", "hivemind", "CPU", "GPU", "Model", "Disk", "Drive", "Listening"}


@pytest.fixture(scope="module")
def bootstrap():
    process = PeerProcess(("swarm.dht", "--host-maddrs", LOOPBACK))
    try:
        yield process.address()
    finally:
        process.stop()


def port_of(address: str) -> str:
    return address.split("/")[4]


def verdict_of(findings: list[Finding], check: str) -> list[Verdict]:
    return [finding.verdict for finding in findings if finding.check == check]


def test_all_is_well(bootstrap: str):
    command = [sys.executable, "-m", "swarm.cli", "doctor", "--initial-peers", bootstrap, "--host-maddrs", LOOPBACK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {line[9:].partition("  ")[0]: line for line in done.stdout.splitlines() if line[:1].strip()}
    assert set(shown) >= NAMES | {"From outside", "Peer", "Clock", "DHT"}
    first = done.stdout.splitlines()[0]
    assert first.startswith("ok       Model         swarm-demo (llama) can be served; ")
    assert first.endswith(" are free for 12 in float32, 12 in int8, 12 in nf4 of 12 blocks")
    assert f"{bootstrap} answers in " in shown["Peer"]
    assert shown["Clock"].startswith("ok ")
    assert shown["DHT"].endswith("a signed record was written and read back")


def test_what_is_wrong_comes_with_its_remedy(bootstrap: str, tmp_path: Any):
    taken = f"/ip4/127.0.0.1/tcp/{port_of(bootstrap)}"
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{OTHER}"
    arguments = ("--initial-peers", dead, "--host-maddrs", taken, "--device", "cuda:99")
    done = CliRunner().invoke(doctor.main, [str(tmp_path), *arguments])
    assert done.exit_code == 1
    shown = done.stdout.splitlines()
    assert shown[0].startswith("failure  Model         ")
    assert f"failure  Listening     cannot listen on {taken}: another program is listening there" in done.stdout
    assert shown[shown.index(f"failure  Peer          {dead}: nothing listens there") + 1].strip() == (
        "→ start that peer (swarm dht), or correct the port"
    )
    assert "failure  GPU           --device cuda:99: torch cannot use it here" in done.stdout
    assert "unknown  DHT           not tried: no initial peer answers" in done.stdout
    assert shown[-1] == "4 of 14 checks failed."
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_what_is_no_address_is_refused_before_anything_is_checked():
    for arguments, message in [
        (["--initial-peers", "/ip4/127.0.0.1/tcp/1"], "does not end in /p2p/PEER_ID"),
        (["--initial-peers", "nonsense"], "is not a valid multiaddress"),
        (["--host-maddrs", "nonsense"], "is not a valid multiaddress"),
        (["--host-maddrs", "/dns4/localhost/tcp/1"], "it is not an IP address; use one of this machine"),
    ]:
        result = CliRunner(env={"SWARM_INITIAL_PEERS": ""}).invoke(doctor.main, arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert result.output.count("\n") == 1


def test_each_peer_is_looked_at_by_itself(bootstrap: str):
    where, _, peer_id = bootstrap.rpartition("/p2p/")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [
            f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}",  # the right peer, where it does not listen
            bootstrap,
            f"{where}/p2p/{OTHER}",
            f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{OTHER}",
        ]
        findings, answering = uvloop.run(_peers(addresses, limit=3.0))
    found = [finding.found.removeprefix(address) for finding, address in zip(findings, addresses, strict=False)]
    assert found[0] == ": nothing listens there"
    assert found[1].startswith(" answers in ")
    assert found[2] == ": another peer answers there"
    assert found[3] == ": it does not answer in time"
    assert answering == [bootstrap]
    assert verdict_of(findings, "Clock") == [Verdict.OK]


async def _peers(addresses: list[str], limit: float) -> tuple[list[Finding], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "CHECK_TIMEOUT_S", limit)
        return await network.check_peers(P2PConfig(tuple(addresses)))


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_wrong_clock_is_found_where_joining_would_only_fail(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch, ahead: float
):
    class Clock:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def time() -> float:
            return time.time() + ahead

    monkeypatch.setattr(probe, "time", Clock)
    findings, answering = uvloop.run(network.check_peers(P2PConfig((bootstrap,))))
    assert answering == [bootstrap]
    assert verdict_of(findings, "Clock") == [Verdict.FAILURE]
    assert f"3600.00 s {'ahead of' if ahead > 0 else 'behind'} the peers'" in findings[-1].found
    assert uvloop.run(network.check_dht(P2PConfig(tuple(answering)), clock_is_right=False)) == verdicts.unknown(
        "DHT", "not tried: see Clock"
    )


def test_nobodys_picture_changes(bootstrap: str):
    async def look() -> None:
        peer = await Peer.create(P2PConfig(initial_peers=(bootstrap,)), AnnouncementValidator())
        other = await Peer.create(P2PConfig(initial_peers=(bootstrap,)), AnnouncementValidator())
        try:
            assert await probe.write_record(peer)
            assert await probe.read_record(peer)
            assert not await probe.read_record(other)  # its own was never written
            assert await fetch_models(other.dht) == list[ModelInfo]()
            assert await fetch_servers(other.dht, "swarm-demo", 12) == []
        finally:
            await peer.shutdown()
            await other.shutdown()

    uvloop.run(look())


def test_a_dht_that_loses_what_it_is_given(bootstrap: str, monkeypatch: pytest.MonkeyPatch):
    async def no(peer: Peer) -> bool:
        return False

    monkeypatch.setattr(network, "read_record", no)
    assert uvloop.run(network.check_dht(P2PConfig((bootstrap,)), clock_is_right=True)).verdict is Verdict.FAILURE
    monkeypatch.setattr(network, "write_record", no)
    assert "no peer stored" in uvloop.run(network.check_dht(P2PConfig((bootstrap,)), clock_is_right=True)).found


def test_one_peer_with_a_wrong_clock_is_left_out(bootstrap: str, monkeypatch: pytest.MonkeyPatch):
    clocks = {"/a": 0.0, "/b": 0.1, "/c": 60.0}

    async def echo(address: str, membership: object) -> probe.ProbeResult:
        return probe.ProbeResult(0.01, clocks[address])

    monkeypatch.setattr(network, "_probe_peer", echo)
    findings, usable = uvloop.run(network.check_peers(P2PConfig(tuple(clocks))))
    assert usable == ["/a", "/b"]
    assert [finding.verdict for finding in findings] == [Verdict.OK, Verdict.OK, Verdict.WARNING, Verdict.OK]


def test_a_join_that_fails_in_ways_of_its_own(monkeypatch: pytest.MonkeyPatch):
    async def refuse(config: P2PConfig, validator: object) -> Peer:
        raise ValueError("local time must be within 3 seconds of others\n(more)")

    monkeypatch.setattr(Peer, "create", refuse)
    finding = uvloop.run(network.check_dht(P2PConfig(("/a",)), clock_is_right=True))
    assert (finding.verdict, finding.found) == (Verdict.FAILURE, "local time must be within 3 seconds of others")


def test_without_peers():
    findings, answering = uvloop.run(network.check_peers(P2PConfig()))
    assert [finding.verdict for finding in findings] == [Verdict.UNKNOWN] * 2
    assert answering == []
    assert uvloop.run(network.check_dht(P2PConfig(), clock_is_right=True)).verdict is Verdict.UNKNOWN


def test_a_daemon_that_does_not_start(monkeypatch: pytest.MonkeyPatch):
    async def broken(config: P2PConfig, validator: object) -> Peer:
        raise PeerLost("the libp2p daemon did not start: no such file")

    monkeypatch.setattr(Peer, "create", broken)
    (finding,) = uvloop.run(network.check_listening([LOOPBACK]))
    assert (finding.verdict, finding.remedy) == (Verdict.FAILURE, network.REINSTALL)


def test_packages_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine.metadata, "version", {"torch": "1.0", "transformers": "5.20", "hivemind": "9"}.get)
    wanted = ["torch>=2.8", "transformers>=5.20,<6", "hivemind==1.1.12", "matplotlib>=3; extra == 'plot'", "§"]
    monkeypatch.setattr(machine.metadata, "requires", lambda name: wanted)
    found = {finding.check: finding.verdict for finding in machine.check_software()}
    assert (found["torch"], found["transformers"], found["hivemind"]) == (
        Verdict.FAILURE, Verdict.OK, Verdict.FAILURE
    )  # fmt: skip


def test_a_look_that_hangs_or_breaks_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "CHECK_TIMEOUT_S", 0.05)

    over = threading.Event()

    def hang() -> Finding:
        over.wait()
        return verdicts.ok("CPU", "late")

    def broken() -> Finding:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    assert "no result within" in uvloop.run(doctor._run_check("CPU", hang)).found
    over.set()
    assert "ImportError: libcudart" in uvloop.run(doctor._run_check("GPU", broken)).found


def test_the_drive_is_measured_where_packed_files_would_lie(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drive_measurement, "SCRATCH_BYTES", 8 << 20)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "not" / "yet"))
    found = machine.check_drive()
    assert found.verdict is Verdict.OK
    assert str(tmp_path) in found.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DriveFailed("the drive delivered nothing"), Verdict.FAILURE),
        (PermissionError(13, "Permission denied"), Verdict.UNKNOWN),
        (NotEnoughSpace("the drive is full"), Verdict.UNKNOWN),
    ],
)
def test_a_drive_that_cannot_be_measured(error: Exception, expected: Verdict, monkeypatch: pytest.MonkeyPatch):
    def fail(folder: Any) -> Any:
        raise error

    monkeypatch.setattr(drive_measurement, "measure_folder", fail)
    assert machine.check_drive().verdict is expected


def test_a_full_or_forbidden_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    assert machine.check_disk().verdict in (Verdict.OK, Verdict.WARNING)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "below"))
    assert machine.check_disk().verdict is Verdict.FAILURE
