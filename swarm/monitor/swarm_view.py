"""What there is to see of a swarm at one moment, made from announcements and round trips. Pure.

The dataclasses are also the JSON of `/api/v1/swarm`, field by field: times are seconds, sizes tokens, rates tokens/s;
`[start, end)` are blocks. Fields may be added; `VERSION` changes when one is taken away or gets another meaning.

**Only what clients would use counts as coverage**: servers that are online, of the revision that most peers serve, with
the weights that most of them have. And rates are believed as far as the servers themselves believe each other
(`swarm.server.placement.initial_blocks`), so a liar cannot make the swarm look quick.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.data_structures import ModelInfo, ServerInfo, ServerState
from swarm.errors import printable
from swarm.routing.compatibility import compatible_servers
from swarm.server.placement.initial_blocks import block_throughputs

VERSION = 1

MAX_SERVERS = 1000
"""Servers of one model that are listed one by one; all of them are counted."""

MAX_TEXT = 80
"""Characters that are shown of what a peer calls itself."""

DEMO_NAME = "swarm-demo"
"""The model that `swarm server` serves if none is named."""

ADDRESS = "ADDRESS"
"""Stands in a command for an address that is not known here."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FOLDER = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class AnnouncedModel:
    """What the DHT says of one model."""

    model: ModelInfo
    servers: tuple[ServerInfo, ...]


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block. `servers` serve it, `joining` are loading it; `throughput` is that of all who serve it."""

    servers: int
    joining: int
    throughput: float


@dataclass(frozen=True, slots=True)
class MissingBlocksView:
    """Blocks that nobody serves.

    Attributes:
        joining: servers that are loading some of them.
        command: what would help; None if the model's name is none that a command could take.
    """

    start: int
    end: int
    joining: int
    command: str | None


@dataclass(frozen=True, slots=True)
class ServerView:
    """One server, as it announces itself.

    Attributes:
        state: "joining", "online" or "offline".
        excluded: why clients do not use it although it is online; empty if they do.
        throughput: tokens/s that it adds to each of its blocks.
        compute: blocks x tokens/s, one token at a time; `forward` where many are computed at once, 0 if not told.
        network: tokens/s of hidden states that its link carries; 0 if not told.
        queue: seconds that a step waited for its turn lately.
        relayed: whether it is reached through a relay.
        round_trip: seconds from the peer that looks; None if it was not measured.
        mobility: "pinned", "cooling" or "free".
    """

    peer_id: str
    short_id: str
    name: str
    start: int
    end: int
    state: str
    excluded: str
    version: str
    revision: str
    dtype: str
    quantization: str
    throughput: float
    compute: float
    forward: float
    network: float
    queue: float
    cache_tokens_free: int
    relayed: bool
    round_trip: float | None
    adapters: tuple[str, ...]
    mobility: str


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model.

    Attributes:
        blocks: number of blocks of the whole model.
        complete: whether every block is served.
        throughput: tokens/s of the weakest block, 0 if one is missing.
        median: tokens/s of the median block of those that are served, 0 if none is.
        weakest: the served block with the least throughput; None if none is served or all do the same.
        coverage: one entry a block.
        missing: ranges, ascending.
        servers: by span and name; `servers_total` counts those too many to list.
        servers_online: how many clients can use.
    """

    name: str
    blocks: int
    revision: str
    complete: bool
    throughput: float
    median: float
    weakest: int | None
    coverage: tuple[BlockView, ...]
    missing: tuple[MissingBlocksView, ...]
    servers: tuple[ServerView, ...]
    servers_online: int
    servers_total: int


@dataclass(frozen=True, slots=True)
class SwarmView:
    """All that is seen.

    Attributes:
        version: of this form.
        time: Unix time of the look, in seconds.
        period: seconds until the next one while somebody watches.
        problem: why the view may be old; empty if it is not.
        absent: models asked for that nobody announces.
        left_out: models announced beyond those that are looked at.
    """

    version: int
    time: float
    period: float
    problem: str
    models: tuple[ModelView, ...]
    absent: tuple[str, ...]
    left_out: int

    @property
    def complete(self) -> bool:
        """Whether there is a model, and every block of every model is served."""
        return bool(self.models) and not self.absent and all(model.complete for model in self.models)


def model_view(found: AnnouncedModel, round_trips: Mapping[str, float], addresses: Sequence[str] = ()) -> ModelView:
    """What is to be said of one model.

    Args:
        round_trips: seconds to each peer that was measured.
        addresses: of peers that others can join by, for the commands.
    """
    model, blocks = found.model, found.model.blocks
    compatible = compatible_servers(found.servers, model.revision)
    coverage = _coverage(found.servers, compatible.servers, blocks)
    served = [block.throughput for block in coverage if block.servers]
    complete = len(served) == blocks
    name = shortened(model.name, 256)
    reasons = {
        server.peer_id: compatible.excluded[server.peer_id]
        if server.revision == model.revision
        else f"it serves revision {server.revision}, most serve {model.revision}"
        for server in found.servers
        if server.peer_id in compatible.excluded
    }
    views = [_server_view(server, round_trips, reasons) for server in found.servers]
    views.sort(key=lambda view: (view.state == "offline", view.start, view.end, view.name, view.peer_id))
    return ModelView(
        name=name,
        blocks=blocks,
        revision=shortened(model.revision),
        complete=complete,
        throughput=min(served) if complete else 0.0,
        median=statistics.median(served) if served else 0.0,
        weakest=_weakest(coverage),
        coverage=coverage,
        missing=_missing(coverage, model.name, addresses),
        servers=tuple(views[:MAX_SERVERS]),
        servers_online=len(compatible.servers),
        servers_total=len(views),
    )


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Text of a peer as one `printable` line, cut to `limit` characters."""
    shown = printable(text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def command(model: str, start: int, end: int, addresses: Sequence[str] = ()) -> str | None:
    """The command that would serve these blocks, None if no command can name the model.

    Names come from peers, and people copy commands: only names of the usual letters get one.
    """
    if model == DEMO_NAME:
        named = ""
    elif _HUB_ID.fullmatch(model):
        named = f" {model}"
    elif _FOLDER.fullmatch(model):
        named = f" path/to/{model}"
    else:
        return None
    peers = " ".join(shlex.quote(address) for address in addresses) or ADDRESS
    return f"swarm server{named} --blocks {start}:{end} --initial-peers {peers}"


def _coverage(servers: Sequence[ServerInfo], usable: Sequence[ServerInfo], blocks: int) -> tuple[BlockView, ...]:
    throughputs = block_throughputs(usable, blocks)
    serving = _count(usable, blocks)
    joining = _count([server for server in servers if server.state is ServerState.JOINING], blocks)
    return tuple(map(BlockView, serving, joining, throughputs))


def _count(servers: Sequence[ServerInfo], blocks: int) -> list[int]:
    counts = [0] * blocks
    for server in servers:
        for block in range(server.span.start, min(server.span.end, blocks)):
            counts[block] += 1
    return counts


def _weakest(coverage: Sequence[BlockView]) -> int | None:
    served = [(block.throughput, number) for number, block in enumerate(coverage) if block.servers]
    # Half a percent is no difference that anybody would act on.
    if not served or min(served)[0] > max(served)[0] * 0.995:
        return None
    return min(served)[1]


def _missing(coverage: Sequence[BlockView], model: str, addresses: Sequence[str]) -> tuple[MissingBlocksView, ...]:
    ranges: list[tuple[int, int, int]] = []
    for number, block in enumerate(coverage):
        if block.servers:
            continue
        if ranges and ranges[-1][1] == number:
            start, _, joining = ranges.pop()
            ranges.append((start, number + 1, max(joining, block.joining)))
        else:
            ranges.append((number, number + 1, block.joining))
    return tuple(
        MissingBlocksView(start, end, joining, command(model, start, end, addresses)) for start, end, joining in ranges
    )


def _server_view(server: ServerInfo, round_trips: Mapping[str, float], excluded: Mapping[str, str]) -> ServerView:
    return ServerView(
        peer_id=server.peer_id,
        short_id=server.short_id,
        name=shortened(server.name),
        start=server.span.start,
        end=server.span.end,
        state=server.state.name.lower(),
        excluded=shortened(excluded.get(server.peer_id, ""), 256),
        version=shortened(server.version),
        revision=shortened(server.revision),
        dtype=shortened(server.compute_dtype),
        quantization=shortened(server.quantization),
        throughput=server.tokens_per_second,
        compute=server.throughput,
        forward=server.forward_throughput,
        network=server.network_throughput,
        queue=server.queue_delay,
        cache_tokens_free=server.cache_tokens_free,
        relayed=server.relayed,
        round_trip=round_trips.get(server.peer_id),
        adapters=tuple(shortened(adapter) for adapter in server.adapters),
        mobility=server.mobility.name.lower(),
    )
