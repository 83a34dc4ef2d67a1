"""Weights that peers get from each other over real libp2p: rate, memory, cost for clients, resuming.

    python -m benchmarks.weights [--only rate memory inference resume] [--quick] [--folder FOLDER]

`rate`: a peer receives a model of random weights over a link of 100 Mbit/s, of 1 Gbit/s, and over loopback. In each
round, one bare TCP stream and one bare libp2p stream are measured on the same link. Limited links are network
namespaces with the kernel's token bucket, which needs root.
`memory`: peak of resident memory beyond what there was before the model was opened, for two sizes.
`inference`: a client generates while the server sends weights, and while it does not.
`resume`: the receiver is killed when half of the model is there, and started again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.report import Report, report_parser
from benchmarks.weights.inference import measure_inference
from benchmarks.weights.links import LOOPBACK, Link, can_limit, limited_link, loopback
from benchmarks.weights.peers import Fetched, FetchOrder, Memory, PeerProcess
from benchmarks.weights.random_model import NAME, make_random_model
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.shared_weights.manifest import CHUNK_BYTES
from tests.homes.laboratory import Host

PARTS = ("rate", "memory", "inference", "resume")
MB = 1e6
LOOPBACK_MBIT = 8000
"""Decides how much a bare stream carries there."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Models in bytes; `rates` has the model of each link, by its Mbit/s (0: loopback).

    Attributes:
        stream_s: for about so long a bare stream is measured.
    """

    rates: dict[int, float]
    memory: tuple[float, ...]
    shape: str
    tokens: int
    texts: int
    resume: float
    stream_s: float


FULL = Sizes({100: 0.3e9, 1000: 1e9, 0: 2e9}, (0.3e9, 2e9), "small", 48, 9, 1e9, 2.0)
QUICK = Sizes({1000: 24e6, 0: 24e6}, (12e6, 24e6), "tiny", 16, 1, 24e6, 0.1)


@contextmanager
def sharing(link: Link, model: Path) -> Iterator[tuple[PeerProcess, PeerProcess, dict[str, str]]]:
    """A holder and a receiver at the ends of a link, and the digests of the model's parts."""
    with ExitStack() as ends:
        holder, receiver = _start(ends, link.holder, link.receiver)
        digests = holder.join().share(model, NAME)
        receiver.join(holder.address)
        yield holder, receiver, digests


def measure_rates(report: Report, link: Link, stream_bytes: int, model: Path) -> None:
    """Bare TCP, a bare libp2p stream, and weights, in turns."""
    size = (model / "model.safetensors").stat().st_size
    with sharing(link, model) as (holder, receiver, digests):
        for _ in report.rounds(f"{link.name}, model of {size / MB:.0f} MB"):
            tcp = link.tcp_bytes_per_s(stream_bytes)
            libp2p = receiver.receive_stream(holder.peer_id, stream_bytes // CHUNK_BYTES)
            with tempfile.TemporaryDirectory(dir=model.parent) as root:
                fetched = receiver.fetch(order(holder, Path(root), model, digests))
            rate = fetched.bytes_per_s
            report.add("bare TCP, MB/s", tcp / MB)
            report.add("bare libp2p stream, MB/s", libp2p / MB)
            report.add("weights, MB/s", rate / MB, "more")
            report.add("of TCP", rate / tcp, "more", decides=True)
            report.add("of the libp2p stream", rate / libp2p, "more")


def measure_memory(model: Path) -> dict[str, Memory]:
    """How much more the holder and the receiver take at most than before, with the holder's computing of digests."""
    with ExitStack() as ends, tempfile.TemporaryDirectory(dir=model.parent) as root:
        holder, receiver = _start(ends, LOOPBACK, LOOPBACK)
        holder.join()
        receiver.join(holder.address)
        peers = {"holder": holder, "receiver": receiver}
        before = {name: peer.memory() for name, peer in peers.items()}
        for peer in peers.values():
            peer.forget_peak()
        digests = holder.share(model, NAME)
        receiver.fetch(order(holder, Path(root), model, digests))
        return {name: peer.peak() - before[name] for name, peer in peers.items()}


@dataclass(frozen=True)
class Resumed:
    """A receiver that was killed and started again.

    Attributes:
        twice: bytes that the holder has sent more than the model has.
    """

    after: Fetched
    twice: int


def measure_resume(model: Path) -> Resumed:
    """A receiver is killed at half, and another one goes on with what there is."""
    link = Link("loopback", LOOPBACK, LOOPBACK)
    with tempfile.TemporaryDirectory(dir=model.parent) as root, sharing(link, model) as peers:
        holder, receiver, digests = peers
        wanted = order(holder, Path(root), model, digests)
        half = (model / "model.safetensors").stat().st_size // 2
        receiver.die_in_fetch(wanted, half)
        receiver.close()
        again = PeerProcess(LOOPBACK).join(holder.address)
        fetched = again.fetch(wanted)
        again.close()
        return Resumed(fetched, holder.sent_bytes() - fetched.size)


def order(holder: PeerProcess, root: Path, model: Path, digests: dict[str, str]) -> FetchOrder:
    """To receive the whole random model from a holder."""
    return FetchOrder(holder.peer_id, root, NAME, open_checkpoint(model, name=NAME).revision, digests)


def _start(ends: ExitStack, *hosts: Host) -> list[PeerProcess]:
    """A process on each machine, started at once."""
    with ThreadPoolExecutor() as threads:
        peers = list(threads.map(PeerProcess, hosts))
    for peer in peers:
        ends.callback(peer.close)
    return peers


def main() -> None:
    parser = report_parser(__doc__, repeats=3)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="measure only this")
    parser.add_argument("--quick", action="store_true", help="small models, to see that it works")
    parser.add_argument("--folder", type=Path, help="for temporary files: a local drive")
    arguments = parser.parse_args()
    measure: dict[str, Callable[[Report, Sizes, Path], None]] = {
        "rate": _rate,
        "memory": _memory,
        "inference": _inference,
        "resume": _resume,
    }
    with Report(arguments) as report:
        for part in arguments.only:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
                measure[part](report, QUICK if arguments.quick else FULL, Path(temporary))


def _rate(report: Report, sizes: Sizes, folder: Path) -> None:
    for mbit, size in sizes.rates.items():
        if mbit and not can_limit():
            report.note(f"{mbit} Mbit/s: not measured, because limited links need root and iproute2")
            continue
        model = make_random_model(folder / str(mbit), size)
        made: AbstractContextManager[Link] = limited_link(mbit) if mbit else loopback()
        with made as link:
            measure_rates(report, link, int((mbit or LOOPBACK_MBIT) * 1e6 / 8 * sizes.stream_s), model)


def _memory(report: Report, sizes: Sizes, folder: Path) -> None:
    for size in sizes.memory:
        model = make_random_model(folder / f"{size:.0f}", size)
        written = (model / "model.safetensors").stat().st_size / MB
        for _ in report.rounds(f"memory, model of {written:.0f} MB"):
            for name, found in measure_memory(model).items():
                where = f"{name} of {written:.0f} MB"
                report.add("process, MB more", found.process / MB, "less", where=where)
                report.add("its daemon, MB more", found.daemon / MB, "less", where=where)
                report.add("together", (found.process + found.daemon) / MB, "less", where=where)


def _inference(report: Report, sizes: Sizes, folder: Path) -> None:
    measure_inference(report, sizes.shape, sizes.tokens, folder)


def _resume(report: Report, sizes: Sizes, folder: Path) -> None:
    model = make_random_model(folder / "model", sizes.resume)
    size = (model / "model.safetensors").stat().st_size
    for _ in report.rounds(f"killed at half of {size / MB:.0f} MB, started again"):
        found = measure_resume(model)
        report.add("s to the first new chunk", found.after.first_s, "less")
        report.add("s to the rest", found.after.seconds, "less")
        report.add("chunks sent twice", found.twice / CHUNK_BYTES, "less")
        report.add("the same, % of the model", 100 * found.twice / size, "less")


if __name__ == "__main__":
    main()
