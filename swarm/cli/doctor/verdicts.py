"""Turns what the checks found into verdicts with remedies, and these into the report (pure)."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address

import click
import msgspec

from swarm.common.units import format_bytes
from swarm.transport.reach.reach_estimate import Reach

MIN_PYTHON = (3, 11)

MAX_CLOCK_OFFSET_S = 3.0
"""Difference between clocks above which members of the DHT refuse each other's records."""

CLOCK_WARNING_S = 1.0
MIN_FREE_DISK_BYTES = 2 * 10**9
"""Below this, the cache of models is about to fill up."""

MIN_FLASH_BYTES_PER_S = 0.3e9
"""Below this, blocks whose weights stay on flash are hardly worth having: a hard disk, a memory card."""

SLOW_ROUND_TRIP_S = 0.3
"""Round trip above which every token is noticeably slow."""

FROM_OUTSIDE = "From outside"
"""The check of whether other peers can dial this machine."""

UPGRADE_COMMAND = "pip install --upgrade swarm"


class Verdict(enum.StrEnum):
    """The result of a check. UNKNOWN means that it could not be determined, which is not a failure."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was checked.
        found: what was found.
        remedy: what to do about it; "" if nothing has to be done.
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


def exit_code(findings: Sequence[Finding]) -> int:
    """The exit code: 1 if a check failed, else 0."""
    return int(any(finding.verdict is Verdict.FAILURE for finding in findings))


def python(version: tuple[int, int, int]) -> Finding:
    said = ".".join(map(str, version))
    if version[:2] < MIN_PYTHON:
        return failure("Python", said, f"use Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer")
    return ok("Python", said)


def package(name: str, version: str | None, required: str, fits: bool) -> Finding:
    """Judge a required package.

    Args:
        version: None if it is not installed.
        required: the range of supported versions, such as ">=2.8".
        fits: whether the version is in that range.
    """
    if version is None:
        return failure(name, "not installed", f"pip install '{name}{required}'")
    if not fits:
        return failure(name, f"{version}; this program needs {required}", f"pip install '{name}{required}'")
    return ok(name, version)


def gpu(name: str, memory: int, free: int, capability: tuple[int, int], driver: str) -> Finding:
    """Report what torch says about a GPU.

    Args:
        memory, free: bytes.
        driver: CUDA version that the driver supports, such as "12.8"; "" if unknown.
    """
    room = f"{format_bytes(free)} of {format_bytes(memory)} free"
    said = f"{name}, {room}, compute capability {capability[0]}.{capability[1]}"
    return ok("GPU", said + (f", driver for CUDA {driver}" if driver else ""))


def execution(chosen: str, recorded: bool) -> Finding:
    """Judge how a GPU computes blocks.

    Args:
        chosen: the strategy.
        recorded: whether decode steps are recorded as CUDA graphs, which is the fastest way.
    """
    if recorded:
        return ok("Execution", chosen)
    return warning("Execution", chosen, "it works, but slower than this card could; use torch 2.13 or newer")


def no_gpu(has_card: bool, built_for: str | None) -> Finding:
    """Judge a machine on which torch cannot use a GPU.

    Args:
        has_card: whether an NVIDIA driver is loaded.
        built_for: CUDA version that torch was built for; None for a build without CUDA.
    """
    if not has_card:
        return ok("GPU", "none: blocks are computed on the CPU")
    if built_for is None:
        return warning("GPU", "present, but torch was built for CPUs", "install a build of torch for CUDA")
    return warning(
        "GPU",
        f"present, but torch (built for CUDA {built_for}) cannot use it",
        "update NVIDIA's driver; in a container, run it with --gpus all",
    )


def model(name: str, kind: str, blocks: int, fitting: Mapping[str, int], free: int, cache_tokens: int) -> Finding:
    """Judge whether a model can be served here. One that is refused gets here with an error instead.

    Args:
        kind: its family, and the format of its weights.
        blocks: number of blocks of the whole model.
        fitting: form of the weights to how many blocks fit, with an attention cache for `cache_tokens`.
        free: bytes of memory.
    """
    counts = ", ".join(f"{count} in {form}" for form, count in fitting.items())
    said = f"{name} ({kind}) can be served; {format_bytes(free)} are free for {counts} of {blocks} blocks"
    if not any(fitting.values()):
        remedy = f"end other programs, or serve with less than --cache-tokens {cache_tokens}; a client needs no blocks"
        return warning("Model", said, remedy)
    return ok("Model", said)


def disk(folder: str, free: int, writable: bool) -> Finding:
    """Judge the folder for files from the model hub."""
    check = "Disk"
    if not writable:
        return failure(check, f"{folder} cannot be written", "set HF_HOME to another folder")
    found = f"{format_bytes(free)} free in {folder}"
    if free < MIN_FREE_DISK_BYTES:
        return warning(
            check,
            found,
            "free disk space, or set HF_HOME to a folder on another drive",
        )
    return ok(check, found)


def drive(folder: str, direct: bool, small: float, large: float) -> Finding:
    """Judge the drive on which packed files would lie. A slow one keeps no machine from joining a swarm.

    Args:
        direct: whether it was read past the page cache.
        small: bytes/s of random reads of a few KB, about a neuron each.
        large: bytes/s of random reads of a MB.
    """
    how = "direct" if direct else "cached"
    said = f"reads {format_bytes(large)}/s in large pieces, {format_bytes(small)}/s in small ones ({how}), in {folder}"
    return ok("Drive", said if large >= MIN_FLASH_BYTES_PER_S else f"{said}: too slow for weights on flash (--flash)")


def median_clock_offset(ahead: Sequence[float]) -> float:
    """Seconds by which the peers' clocks are ahead of ours: the median, so that a single wrong clock does not count."""
    return sorted(ahead)[len(ahead) // 2]


def clock(ahead: Sequence[float]) -> Finding:
    """Judge this machine's clock. `ahead` is by how many seconds each peer's clock is ahead of it."""
    check = "Clock"
    if not ahead:
        return unknown(check, "no peer reported its time")
    most = median_clock_offset(ahead)
    said = f"{abs(most):.2f} s {'behind' if most > 0 else 'ahead of'} the peers'"
    remedy = "set the clock: timedatectl set-ntp true"
    if abs(most) > MAX_CLOCK_OFFSET_S:
        return failure(check, f"{said}; members of a swarm may differ by {MAX_CLOCK_OFFSET_S:.0f} s", remedy)
    if abs(most) > CLOCK_WARNING_S:
        return warning(check, said, remedy)
    return ok(check, said)


def peer(address: str, round_trip: float, off: float) -> Finding:
    """Judge an initial peer that answered.

    Args:
        round_trip: seconds.
        off: seconds by which its clock differs from the median of the peers' clocks.
    """
    check, said = "Peer", f"{address} answers in {round_trip * 1e3:.1f} ms"
    if off > MAX_CLOCK_OFFSET_S:
        return warning(check, f"{said}; its clock is {off:.0f} s off the others'", "tell its owner, join by another")
    if round_trip > SLOW_ROUND_TRIP_S:
        return warning(check, said, "expect slow answers, or join by a nearer peer")
    return ok(check, said)


def peer_lost(address: str, why: str) -> Finding:
    """Judge an initial peer that did not answer. `why` is the network's error message."""
    for sign, (meaning, remedy) in PEER_ERRORS.items():
        if sign in why.lower():
            return failure("Peer", f"{address}: {meaning}", remedy)
    said = " ".join(why.split())[-200:]
    return failure("Peer", f"{address}: {said}", "check that it runs, and that its address, port and peer id are right")


PEER_ERRORS = {
    "refused": ("nothing listens there", "start that peer (swarm dht), or correct the port"),
    "mismatch": ("another peer answers there", "its identity is new: copy the address that it prints now"),
    "negotiate security": (
        "the program that listens there is not a peer of a swarm",
        "correct the address or the port",
    ),
    "no such host": ("the host name is unknown", "correct the name, or use the peer's /ip4/ address"),
    "no good addresses": ("the host name is unknown", "correct the name, or use the peer's /ip4/ address"),
    "no answer within": ("it does not answer in time", "a firewall may drop the packets: open its port there"),
    "no route to host": ("it cannot be reached from this network", "check this machine's network"),
    "network is unreachable": ("it cannot be reached from this network", "check this machine's network"),
}
"""Part of the libp2p daemon's message -> (what it means, remedy)."""


def is_public(address: str) -> bool:
    """Whether a multiaddress that begins with an IP address can be dialled from the Internet."""
    _, kind, host, *_ = address.split("/", 3)
    return kind in ("ip4", "ip6") and ip_address(host).is_global


def reached(reach: Reach, is_reachable: bool, described: str, advice: str) -> Finding:
    """Judge how other peers reach this machine, after they have tried.

    Args:
        described: as the end of a sentence.
        advice: what would be better.
    """
    said = f"this machine is {described}"
    match reach:
        case Reach.DIRECT:
            return ok(FROM_OUTSIDE, said)
        case Reach.HIDDEN:
            return warning(FROM_OUTSIDE, said, advice) if is_reachable else failure(FROM_OUTSIDE, said, advice)
        case Reach.UNKNOWN:
            return unknown(FROM_OUTSIDE, said, "try again, or join by another peer")


def reachable(addresses: Sequence[str], public: Sequence[str]) -> Finding:
    """Judge whether other peers can dial this machine, as far as it can tell.

    Args:
        addresses: all addresses that it would announce.
        public: those that can be dialled from the Internet if no firewall is in between.
    """
    check = FROM_OUTSIDE
    if public:
        return unknown(
            check, f"{public[0]} is a public address", "to be sure, run `swarm doctor` with it on another machine"
        )
    if not addresses:
        return failure(check, "no address", "check this machine's network, and --host-maddrs")
    return unknown(
        check,
        f"{addresses[0]} can be reached from the same network only",
        "forward a port and give servers --announce-maddrs, or let peers of the swarm relay, which is slower",
    )


COLORS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red", Verdict.UNKNOWN: "cyan"}
MARK_WIDTH = max(map(len, Verdict))
CHECK_WIDTH = 12


def format_finding(finding: Finding) -> str:
    """Format one finding in color, with its remedy on a second line."""
    mark = click.style(f"{finding.verdict:<{MARK_WIDTH}}", fg=COLORS[finding.verdict])
    first = f"{mark}  {finding.check:<{CHECK_WIDTH}}  {finding.found}"
    return f"{first}\n{'':{MARK_WIDTH + CHECK_WIDTH + 4}}→ {finding.remedy}" if finding.remedy else first


def format_summary(findings: Sequence[Finding]) -> str:
    """Format the last line of the report."""
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    if counts[Verdict.FAILURE]:
        return f"{counts[Verdict.FAILURE]} of {len(findings)} checks failed."
    if counts[Verdict.WARNING]:
        return f"No check failed; {counts[Verdict.WARNING]} of {len(findings)} checks warn."
    return "No problems found."


def to_json(findings: Sequence[Finding]) -> bytes:
    """Encode a list of objects with `check`, `verdict`, `found` and `remedy`."""
    return msgspec.json.encode([asdict(finding) for finding in findings])
