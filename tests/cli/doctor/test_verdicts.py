"""From what was found to a verdict."""

from __future__ import annotations

import click
from hypothesis import given
from hypothesis import strategies as st

from swarm.cli.doctor import verdicts
from swarm.cli.doctor.verdicts import Verdict

OK, WARNING, FAILURE, UNKNOWN = Verdict.OK, Verdict.WARNING, Verdict.FAILURE, Verdict.UNKNOWN
ADDRESS = "/ip4/192.0.2.1/tcp/31337/p2p/QmPeer"


def test_verdicts():
    for finding, verdict, found, remedy in [
        (verdicts.python((3, 11, 0)), OK, "3.11.0", ""),
        (verdicts.python((3, 10, 9)), FAILURE, "3.10.9", "use Python 3.11"),
        (verdicts.python((4, 0, 0)), OK, "4.0.0", ""),
        (verdicts.package("torch", "2.13.0", ">=2.8", True), OK, "2.13.0", ""),
        (verdicts.package("torch", "2.1", ">=2.8", False), FAILURE, "needs >=2.8", "pip install 'torch>=2.8'"),
        (verdicts.package("torch", None, ">=2.8", True), FAILURE, "not installed", "pip install 'torch>=2.8'"),
        (
            verdicts.gpu("H100", 80 * 10**9, 79 * 10**9, (9, 0), "12.8"),
            OK,
            "9.0, driver for CUDA 12",
            "",
        ),
        (verdicts.gpu("H100", 80 * 10**9, 79 * 10**9, (9, 0), ""), OK, "79 GB of 80 GB free", ""),
        (verdicts.no_gpu(False, None), OK, "on the CPU", ""),
        (verdicts.no_gpu(True, None), WARNING, "built for CPUs", "build of torch for CUDA"),
        (verdicts.no_gpu(True, "12.8"), WARNING, "for CUDA 12.8", "NVIDIA's driver"),
        (
            verdicts.model("demo", "qwen3 packed by awq", 12, {"bfloat16": 5, "int8": 9}, 8 * 10**9, 16384),
            OK,
            "demo (qwen3 packed by awq) can be served; 8 GB are free for 5 in bfloat16, 9 in int8 of 12 blocks",
            "",
        ),
        (
            verdicts.model("demo", "llama", 12, {"float32": 0}, 10**6, 16384),
            WARNING,
            "0 in float32",
            "--cache-tokens 16384",
        ),
        (verdicts.disk("/cache", 10**12, True), OK, "in /cache", ""),
        (verdicts.disk("/cache", 10**9, True), WARNING, "1 GB free", "HF_HOME"),
        (verdicts.disk("/cache", 10**12, False), FAILURE, "cannot be written", "HF_HOME"),
        (verdicts.drive("/cache", True, 0.9e9, 2.5e9), OK, "2.5 GB/s in large pieces, 900 MB/s in small", ""),
        (verdicts.drive("/cache", False, 1e6, 0.1e9), OK, "too slow for weights on flash", ""),
        (verdicts.clock([]), UNKNOWN, "no peer", ""),
        (verdicts.clock([0.5]), OK, "0.50 s behind", ""),
        (verdicts.clock([-2.0]), WARNING, "2.00 s ahead of", "timedatectl"),
        (verdicts.clock([-3600.0]), FAILURE, "may differ by 3 s", "timedatectl"),
        (verdicts.clock([0.0, 0.1, 9999.0]), OK, "0.10 s behind", ""),
        (verdicts.peer(ADDRESS, 0.02, 0.1), OK, "answers in 20.0 ms", ""),
        (verdicts.peer(ADDRESS, 0.02, 9.0), WARNING, "its clock is 9 s off the others'", "tell its owner"),
        (verdicts.peer(ADDRESS, 0.5, 0.1), WARNING, "answers in 500.0 ms", "nearer peer"),
        (verdicts.peer_lost(ADDRESS, "dial tcp4: connect: connection REFUSED"), FAILURE, "nothing listens", "start"),
        (verdicts.peer_lost(ADDRESS, "negotiate security: peer id mismatch"), FAILURE, "another peer", "copy"),
        (verdicts.peer_lost(ADDRESS, "failed to negotiate security protocol"), FAILURE, "not a peer of a s", "port"),
        (verdicts.peer_lost(ADDRESS, "no answer within 15 s"), FAILURE, "in time", "firewall"),
        (verdicts.peer_lost(ADDRESS, "some\n * thing"), FAILURE, f"{ADDRESS}: some * thing", "peer id are right"),
        (verdicts.reachable([], []), FAILURE, "no address", "--host-maddrs"),
        (verdicts.reachable(["/ip4/10.0.0.1/tcp/1"], []), UNKNOWN, "same network only", "--announce-maddrs"),
        (verdicts.reachable(["/ip4/8.8.8.8/tcp/1"], ["/ip4/8.8.8.8/tcp/1"]), UNKNOWN, "public", "another machine"),
    ]:
        assert finding.verdict is verdict
        assert found in finding.found
        assert remedy in finding.remedy
        assert bool(finding.remedy) == bool(remedy)


def test_public_addresses():
    for address, public in [
        ("/ip4/8.8.8.8/tcp/31337", True),
        ("/ip6/2606:4700::1/tcp/31337", True),
        ("/ip4/192.168.1.7/tcp/31337", False),
        ("/ip4/100.64.0.1/tcp/31337", False),
        ("/ip4/127.0.0.1/tcp/31337", False),
        ("/ip6/fe80::1/tcp/31337", False),
        ("/dns4/swarm.example/tcp/31337", False),
    ]:
        assert verdicts.is_public(address) is public


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_one_peer_with_a_wrong_clock_is_not_believed_against_two(ahead: list[float]):
    many = [0.0] * (len(ahead) + 1) + ahead
    assert verdicts.clock(many).verdict is OK


def test_report():
    findings = [
        verdicts.ok("CPU", "8 cores"),
        verdicts.failure("Disk", "full", "make room"),
        verdicts.unknown("DHT", "?"),
    ]
    shown = click.unstyle("\n".join(verdicts.format_finding(finding) for finding in findings)).splitlines()
    assert shown == [
        "ok       CPU           8 cores",
        "failure  Disk          full",
        "                       → make room",
        "unknown  DHT           ?",
    ]
    warned = [verdicts.warning("Disk", "small", "grow")]
    assert [verdicts.format_summary(some) for some in (findings, findings[:1], warned)] == [
        "1 of 3 checks failed.",
        "No problems found.",
        "No check failed; 1 of 1 checks warn.",
    ]
    assert [verdicts.exit_code(some) for some in (findings, findings[:1], [])] == [1, 0, 0]
