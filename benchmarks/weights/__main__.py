"""Weights that peers get from each other over real libp2p: rate, memory, cost for clients, resuming.

    python -m benchmarks.weights [--only rate|memory|inference|resume] [--rounds 3] [--quick] [--folder FOLDER]

`rate`: a peer receives a model of random weights over a link of 100 Mbit/s, of 1 Gbit/s, and over loopback. In each
round, one bare TCP stream and one bare libp2p stream are measured on the same link. Limited links are network
namespaces with the kernel's token bucket, which needs root.
`memory`: peak of resident memory beyond what there was before the model was opened, for two sizes.
`inference`: a client generates while the server sends weights, and while it does not.
`resume`: the receiver is killed when half of the model is there, and started again.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.common import machine
from benchmarks.common.tables import spread, table, times
from benchmarks.weights.inference import NOTHING, SENDERS, Uploads, measure_inference, slowdowns
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


@dataclass(frozen=True)
class Rates:
    """Bytes a second on one link, in one round."""

    tcp: float
    libp2p: float
    fetch: float


@contextmanager
def sharing(link: Link, model: Path) -> Iterator[tuple[PeerProcess, PeerProcess, dict[str, str]]]:
    """A holder and a receiver at the ends of a link, and the digests of the model's parts."""
    with ExitStack() as ends:
        holder, receiver = _start(ends, link.holder, link.receiver)
        digests = holder.join().share(model, NAME)
        receiver.join(holder.address)
        yield holder, receiver, digests


def measure_rates(link: Link, stream_bytes: int, model: Path, rounds: int) -> list[Rates]:
    """Bare TCP, a bare libp2p stream, and weights, in turns."""
    found = []
    with sharing(link, model) as (holder, receiver, digests):
        for _ in range(rounds):
            tcp = link.tcp_bytes_per_s(stream_bytes)
            libp2p = receiver.receive_stream(holder.peer_id, stream_bytes // CHUNK_BYTES)
            with tempfile.TemporaryDirectory(dir=model.parent) as root:
                fetched = receiver.fetch(order(holder, Path(root), model, digests))
            found.append(Rates(tcp, libp2p, fetched.bytes_per_s))
    return found


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


def measure_resume(model: Path, rounds: int) -> list[Resumed]:
    """A receiver is killed at half, and another one goes on with what there is."""
    found = []
    for _ in range(rounds):
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
            found.append(Resumed(fetched, holder.sent_bytes() - fetched.size))
    return found


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


def rates_row(name: str, size: float, found: Sequence[Rates]) -> list[str]:
    tcp, libp2p, fetch = ([getattr(one, field) for one in found] for field in ("tcp", "libp2p", "fetch"))
    in_mb = [spread([value / MB for value in values], 0) for values in (tcp, libp2p, fetch)]
    return [name, f"{size / MB:.0f}", *in_mb, times(fetch, tcp), times(fetch, libp2p)]


def inference_rows(found: Uploads) -> list[list[str]]:
    rows = []
    for name in SENDERS:
        rate = spread(found.rates[name], 1) if name != NOTHING else "0"
        slower = spread([100 * one for one in slowdowns(found, name)], 0) if name != NOTHING else ""
        rows.append([name, rate, spread(found.milliseconds[name], 1), slower])
    return rows


@click.command()
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Measure only this.")
@click.option("--rounds", default=3, show_default=True, help="Of each measurement.")
@click.option("--quick", is_flag=True, help="Small models and one round, to see that it works.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="For temporary files: a local drive.")
def main(only: tuple[str, ...], rounds: int, quick: bool, folder: Path | None) -> None:
    """Print the tables."""
    print("; ".join(f"{name}: {value}" for name, value in machine.describe().items()), flush=True)
    sizes = QUICK if quick else FULL
    rounds = 1 if quick else rounds
    show: dict[str, Callable[[Sizes, int, Path], str]] = {
        "rate": _rate_table,
        "memory": _memory_table,
        "inference": _inference_table,
        "resume": _resume_table,
    }
    for part in only or PARTS:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            print(f"\n{show[part](sizes, rounds, Path(temporary))}", flush=True)


def _rate_table(sizes: Sizes, rounds: int, folder: Path) -> str:
    rows = []
    for mbit, size in sizes.rates.items():
        if mbit and not can_limit():
            print(f"{mbit} Mbit/s: not measured, because limited links need root and iproute2", flush=True)
            continue
        model = make_random_model(folder / str(mbit), size)
        made: AbstractContextManager[Link] = limited_link(mbit) if mbit else loopback()
        with made as link:
            written = (model / "model.safetensors").stat().st_size
            stream_bytes = int((mbit or LOOPBACK_MBIT) * 1e6 / 8 * sizes.stream_s)
            rows.append(rates_row(link.name, written, measure_rates(link, stream_bytes, model, rounds)))
    heading = ["link", "model, MB", "bare TCP, MB/s", "bare libp2p stream, MB/s", "weights, MB/s"]
    return table([*heading, "of TCP", "of the libp2p stream"], rows)


def _memory_table(sizes: Sizes, rounds: int, folder: Path) -> str:
    rows = []
    for size in sizes.memory:
        model = make_random_model(folder / f"{size:.0f}", size)
        found = [measure_memory(model) for _ in range(rounds)]
        for name in found[0]:
            process, daemon = ([getattr(one[name], field) / MB for one in found] for field in ("process", "daemon"))
            together = [one + other for one, other in zip(process, daemon, strict=True)]
            written = (model / "model.safetensors").stat().st_size / MB
            rows.append([f"{written:.0f}", name, spread(process, 0), spread(daemon, 0), spread(together, 0)])
    return table(["model, MB", "peer", "process, MB more", "its daemon, MB more", "together"], rows)


def _inference_table(sizes: Sizes, rounds: int, folder: Path) -> str:
    found = measure_inference(sizes.shape, sizes.tokens, sizes.texts, folder)
    return table(["who sends", "MB/s", "ms a token", "% slower than the same round's"], inference_rows(found))


def _resume_table(sizes: Sizes, rounds: int, folder: Path) -> str:
    model = make_random_model(folder / "model", sizes.resume)
    found = measure_resume(model, rounds)
    size = (model / "model.safetensors").stat().st_size / MB
    rows = [
        ["seconds until the first new chunk", spread([one.after.first_s for one in found])],
        ["seconds until the rest was there", spread([one.after.seconds for one in found])],
        ["chunks sent twice", spread([one.twice / CHUNK_BYTES for one in found], 1)],
        ["the same, of the model", f"{statistics.median(one.twice for one in found) / MB / size:.2%}"],
    ]
    return table([f"killed at half of {size:.0f} MB, started again", ""], rows)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.weights")
