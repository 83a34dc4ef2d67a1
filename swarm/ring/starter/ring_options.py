"""What the person who starts a ring says about it, from the command line, from Python, or from a YAML file.

`swarm ring --save` writes the file, and `swarm ring FILE` starts the ring again. It holds the workers' lines, which are
secrets, so only its owner may read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from swarm.common.files import yaml_file
from swarm.common.files.atomic_file import replace_file
from swarm.errors import InvalidOption, PartitionError, RingFileError
from swarm.membership.invite import Invite
from swarm.ring.pairing import WorkerLine, parse_lines, require_same_lock
from swarm.ring.starter.ring_plan import MAX_WORKERS, parse_partition
from swarm.server.limits import DEFAULT_CACHE_TOKENS

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quant = Literal["none", "packed", "int8", "nf4"]


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


HEADING = (
    "# A ring of devices: `swarm ring THIS_FILE` starts it. The lines of the workers are secrets, like passwords.\n"
)


class RingFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The whole file; see `RingOptions`."""

    model: str | None = None
    revision: str | None = None
    partition: list[Annotated[int, msgspec.Meta(ge=0, le=9999)]] | None = None
    workers: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_WORKERS)]
    dtype: Dtype = "auto"
    quant: Quant = "none"
    cache_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = DEFAULT_CACHE_TOKENS
    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    cache_dir: str | None = None


def is_ring_file(argument: str | None) -> bool:
    """Whether an argument that may be a model is the name of such a file."""
    return argument is not None and argument.endswith((".yaml", ".yml")) and not Path(argument).is_dir()


def read_ring_file(path: Path) -> RingFile:
    """Read and check a file. Raises `RingFileError`, which names the field."""
    return yaml_file.read_file(path, parse_ring_file, "description of a ring", RingFileError)


def parse_ring_file(data: bytes) -> RingFile:
    """Read and check the content of a file. Raises `RingFileError`, which names the field."""
    return yaml_file.parse_yaml(data, RingFile, RingFileError)


def write_ring_file(path: Path, options: RingOptions) -> None:
    """Write what starts a ring again; a file that is there is replaced. Raises `RingFileError`."""
    described = RingFile(
        model=options.model,
        revision=options.revision,
        partition=list(options.partition) if options.partition is not None else None,
        workers=[worker.to_line() for worker in options.workers],
        dtype=options.dtype,
        quant=options.quant,
        cache_tokens=options.cache_tokens,
        threads=options.threads,
        cache_dir=str(options.cache_dir) if options.cache_dir is not None else None,
    )
    body: str = yaml.safe_dump(msgspec.to_builtins(described), sort_keys=False, allow_unicode=True, width=10_000)
    try:
        replace_file(path, (HEADING + body).encode())
    except OSError as error:
        raise RingFileError(f"--save {path} cannot be written: {error.strerror}") from None


def options_of(described: RingFile, others: Mapping[str, Any] | None = None) -> RingOptions:
    """The ring that a file describes. Raises as `RingOptions`.

    Args:
        others: fields of `RingOptions` that take the place of the file's.
    """
    fields = {name: getattr(described, name) for name in described.__struct_fields__}
    fields["partition"] = tuple(described.partition) if described.partition is not None else None
    fields["workers"] = parse_lines(described.workers)
    fields["cache_dir"] = Path(described.cache_dir) if described.cache_dir is not None else None
    return RingOptions(**(fields | dict(others or {})))
