"""What the person who starts a ring says about it, from the command line, from Python, or from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swarm.errors import InvalidOption, PartitionError
from swarm.membership.invite import Invite
from swarm.ring.pairing import WorkerLine, require_same_lock
from swarm.ring.starter.ring_plan import MAX_WORKERS, parse_partition
from swarm.server.limits import DEFAULT_CACHE_TOKENS

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quant = Literal["none", "int8", "nf4"]


@dataclass(frozen=True)
class RingOptions:
    """A ring, before its workers are asked.

    Attributes:
        model: local folder or hub id; None for the demo model.
        workers: their lines, in the order of the partition.
        partition: the starter's blocks, and those of each worker; None for the fastest plan.
        revision: branch, tag or commit of a hub model.
        dtype: in which all devices compute.
        quant: quantization of the workers' weights.
        cache_tokens: attention cache of each worker, in tokens.
        threads: torch threads of the workers; None for their own choice.
        cache_dir: folder for files from the hub.
        membership: an invite to a private swarm; None for an open ring.
        name: shown at the workers; None for this machine's.
        folder: with the starter's identity; None for the usual one.
        host_maddrs: addresses to listen on; empty for all interfaces, at the port of last time.
        announce_maddrs: addresses at which workers should dial this machine, if they differ.
        show_route: print the route of each session.

    Raises:
        WorkerLineError: a worker's line does not go together with the membership.
        InvalidOption, PartitionError: too many workers, or a partition for others.
    """

    model: str | None
    workers: tuple[WorkerLine, ...]
    partition: tuple[int, ...] | None = None
    revision: str | None = None
    dtype: Dtype = "auto"
    quant: Quant = "none"
    cache_tokens: int = DEFAULT_CACHE_TOKENS
    threads: int | None = None
    cache_dir: Path | None = None
    membership: Invite | None = field(default=None, repr=False)
    name: str | None = None
    folder: Path | None = None
    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    show_route: bool = False

    def __post_init__(self) -> None:
        for worker in self.workers:
            require_same_lock(worker, self.membership is not None)
        if len(self.workers) > MAX_WORKERS:
            raise InvalidOption(f"{len(self.workers)} workers are too many: a ring has {MAX_WORKERS} at most")
        if self.partition is not None and len(self.partition) != len(self.workers) + 1:
            raise PartitionError(
                f"--partition {'+'.join(map(str, self.partition))} has {len(self.partition)} numbers, and a ring of "
                f"{len(self.workers)} workers needs {len(self.workers) + 1}: the starter's blocks first (0 for none), "
                "and then those of each worker"
            )


def partition_numbers(value: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """The numbers of a partition, from "2+5+5" or a sequence. Raises `PartitionError`."""
    if value is None or isinstance(value, str):
        return parse_partition(value) if value is not None else None
    return parse_partition("+".join(map(str, value)))
