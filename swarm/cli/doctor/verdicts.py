"""From what was found to a verdict and its remedy. Pure: nothing is looked at here."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from swarm.common.units import human

PYTHON = (3, 11)

CLOCK_TOLERANCE = 3.0
"""Seconds by which clocks may differ: with more, members of the DHT refuse each other."""

CLOCK_WARNING = 1.0
LEAST_DISK = 2 * 10**9
"""Free bytes below which a cache of models is about to fill up."""

FAR = 0.3
"""Seconds of a round trip with which every token is slow."""

INSTALL = "pip install --upgrade swarm"


class Verdict(enum.StrEnum):
    """UNKNOWN: it could not be found out, which is no failure."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at.
        found: what there is.
        remedy: what to do about it; "" where nothing has to be done.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Verdict.OK, found)


def failure(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAILURE, found, remedy)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Verdict.WARNING, found, remedy)


def unknown(check: str, found: str, remedy: str = "") -> Finding:
    return Finding(check, Verdict.UNKNOWN, found, remedy)


def worst(findings: Sequence[Finding]) -> int:
    """Exit code: 1 if something failed."""
    return int(any(finding.verdict is Verdict.FAILURE for finding in findings))


def python(version: tuple[int, int, int]) -> Finding:
    said = ".".join(map(str, version))
    if version[:2] < PYTHON:
        return failure("Python", said, f"use Python {PYTHON[0]}.{PYTHON[1]} or newer")
    return ok("Python", said)


def package(name: str, version: str | None, wanted: str, fits: bool) -> Finding:
    """A package that is needed.

    Args:
        version: None if it is not installed.
        wanted: the range that this program was made for, such as ">=2.8".
        fits: whether the version lies in it.
    """
    if version is None:
        return failure(name, "not installed", f"pip install '{name}{wanted}'")
    if not fits:
        return failure(name, f"{version}; this program needs {wanted}", f"pip install '{name}{wanted}'")
    return ok(name, version)


@dataclass(frozen=True)
class GpuProperties:
    """Attributes:
    memory, free: bytes.
    driver: version of the CUDA driver's interface, such as "12.8"; "" if it does not say.
    """

    name: str
    memory: int
    free: int
    capability: tuple[int, int]
    driver: str


def gpu(found: GpuProperties) -> Finding:
    capability = ".".join(map(str, found.capability))
    said = f"{found.name}, {human(found.free)} of {human(found.memory)} free, compute capability {capability}"
    return ok("GPU", said + (f", driver for CUDA {found.driver}" if found.driver else ""))


def no_gpu(has_card: bool, built_for: str | None) -> Finding:
    """torch uses no GPU.

    Args:
        has_card: whether an NVIDIA driver is loaded.
        built_for: CUDA version that torch was built for; None for a build without.
    """
    if not has_card:
        return ok("GPU", "none: blocks are computed on the CPU")
    if built_for is None:
        return warning("GPU", "there is one, but torch was built for CPUs", "install a build of torch for CUDA")
    return warning(
        "GPU",
        f"there is one, but torch (for CUDA {built_for}) cannot use it",
        "update NVIDIA's driver; in a container, run it with --gpus all",
    )


def memory(free: int, model: str, blocks: int, fitting: int, per_block: int, cache_tokens: int) -> Finding:
    """Room for blocks.

    Args:
        blocks: of the whole model.
        fitting: how many fit, each of `per_block` bytes with an attention cache for `cache_tokens`.
    """
    check = "Memory"
    said = f"{human(free)} free; {fitting} of {blocks} blocks of {model} fit ({human(per_block)} each)"
    if fitting == 0:
        remedy = "end other programs, or serve with --quant nf4 or a lower --cache-tokens; a client needs no blocks"
        return warning(check, f"{said}, with an attention cache of {cache_tokens} tokens", remedy)
    return ok(check, said)


def disk(folder: str, free: int, writable: bool) -> Finding:
    """Where files from the model hub are kept."""
    check = "Disk"
    if not writable:
        return failure(check, f"{folder} cannot be written", "name another folder: --cache-dir FOLDER, or HF_HOME")
    if free < LEAST_DISK:
        return warning(
            check, f"{human(free)} free in {folder}", "make room, or name another folder: --cache-dir FOLDER"
        )
    return ok(check, f"{human(free)} free in {folder}")


def peers_time(ahead: Sequence[float]) -> float:
    """By how far most peers' clocks are ahead of ours: the median, so that one that is wrong does not count."""
    return sorted(ahead)[len(ahead) // 2]


def clock(ahead: Sequence[float]) -> Finding:
    """This machine's clock, by how far those of peers are ahead of it (seconds)."""
    check = "Clock"
    if not ahead:
        return unknown(check, "no peer told its time")
    most = peers_time(ahead)
    said = f"{abs(most):.2f} s {'behind' if most > 0 else 'ahead of'} the peers'"
    remedy = "set the clock: timedatectl set-ntp true"
    if abs(most) > CLOCK_TOLERANCE:
        return failure(check, f"{said}; members of a swarm may differ by {CLOCK_TOLERANCE:.0f} s", remedy)
    if abs(most) > CLOCK_WARNING:
        return warning(check, said, remedy)
    return ok(check, said)


def peer(address: str, round_trip: float, off: float) -> Finding:
    """An initial peer that answered.

    Args:
        round_trip: seconds.
        off: seconds by which its clock differs from most peers'.
    """
    check, said = "Peer", f"{address} answers in {round_trip * 1e3:.1f} ms"
    if off > CLOCK_TOLERANCE:
        return warning(check, f"{said}; its clock is {off:.0f} s off the others'", "tell its owner, join by another")
    if round_trip > FAR:
        return warning(check, said, "expect slow answers, or join by a nearer peer")
    return ok(check, said)


def peer_lost(address: str, why: str) -> Finding:
    """An initial peer that did not answer, and what the network said."""
    for sign, (meaning, remedy) in PEER_TROUBLE.items():
        if sign in why.lower():
            return failure("Peer", f"{address}: {meaning}", remedy)
    said = " ".join(why.split())[-200:]
    return failure("Peer", f"{address}: {said}", "check that it runs, and that its address, port and peer id are right")


PEER_TROUBLE = {
    "refused": ("nobody listens there", "start that peer (swarm dht), or correct the port"),
    "mismatch": ("another peer answers there", "its identity is new: copy the address that it prints now"),
    "negotiate security": ("what listens there is no peer of a swarm", "correct the address or the port"),
    "no such host": ("the name is not known", "correct the name, or use the peer's /ip4/ address"),
    "no good addresses": ("the name is not known", "correct the name, or use the peer's /ip4/ address"),
    "no answer within": ("it does not answer in time", "a firewall may drop the packets: open its port there"),
    "no route to host": ("there is no way to it", "check this machine's network"),
    "network is unreachable": ("there is no way to it", "check this machine's network"),
}
"""What the libp2p daemon says, and what it means."""


def is_public(address: str) -> bool:
    """Whether everybody could dial a multiaddress that begins with an IP address."""
    _, kind, host, *_ = address.split("/", 3)
    return kind in ("ip4", "ip6") and ip_address(host).is_global


def reachable(addresses: Sequence[str], public: Sequence[str]) -> Finding:
    """Whether others can dial this machine, as far as it can know.

    Args:
        addresses: all that it would announce.
        public: those that everybody could dial if no firewall is in between.
    """
    check = "From outside"
    if public:
        return unknown(
            check, f"{public[0]} is a public address", "to be sure, run `swarm doctor` with it on another machine"
        )
    if not addresses:
        return failure(check, "no address at all", "check this machine's network, and --host-maddrs")
    return unknown(
        check,
        f"{addresses[0]} is reached from the same network only",
        "forward a port and give servers --announce-maddrs, or let peers of the swarm relay, which is slower",
    )
