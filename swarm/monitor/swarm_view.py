"""The state of a swarm at one moment, computed from announcements and round trips. Pure.

The dataclasses are also the JSON of `/api/v1/swarm`, field by field: times are seconds, sizes tokens, rates tokens/s;
`[start, end)` are blocks. Fields may be added; `VIEW_VERSION` changes when a field is removed or changes its meaning.

**Only servers that clients would use count as coverage**: they are online, and serve the revision that most peers
serve. A monitor does not know which weights are right; servers that disagree about them all count, and are marked.
Announced rates are capped as the servers themselves cap them
(`swarm.server.placement.initial_blocks`), so a false announcement cannot make the swarm look fast.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from swarm.data_structures import ModelInfo, ServerInfo, ServerState
from swarm.errors import sanitize_text
from swarm.routing.compatibility import compatible_servers, disputed_blocks
from swarm.routing.suspicion import Opinion
from swarm.server.placement.initial_blocks import block_throughputs

VIEW_VERSION = 1

MAX_SERVERS = 1000
"""Maximum number of servers listed per model; all of them are counted."""

MAX_TEXT_LENGTH = 80
"""Maximum number of characters shown of a text that a peer announces."""

NO_OPINIONS: Mapping[str, Opinion] = MappingProxyType({})

DEMO_NAME = "swarm-demo"
"""The model that `swarm server` serves by default."""

ADDRESS_PLACEHOLDER = "ADDRESS"
"""Placeholder in a command for an address that is not known."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FOLDER = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class AnnouncedModel:
    """A model and its servers, as announced in the DHT."""

    model: ModelInfo
    servers: tuple[ServerInfo, ...]


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block: how many `servers` serve it, how many are `joining`, and the `throughput` of all that serve it."""

    servers: int
    joining: int
    throughput: float


@dataclass(frozen=True, slots=True)
class MissingBlocksView:
    """Consecutive blocks without a server.

    Attributes:
        joining: number of servers that are loading some of them.
        command: a command that would serve them; None if the model's name cannot be used in a command.
    """

    start: int
    end: int
    joining: int
    command: str | None


@dataclass(frozen=True, slots=True)
class AuditsView:
    """What a client's audits have said of a server (docs/trust.md).

    Attributes:
        agreed, differed: how many.
        suspicion: probability that it does not compute what it announces.
        quarantined: whether the client does not use it any more.
    """

    agreed: int
    differed: int
    suspicion: float
    quarantined: bool


@dataclass(frozen=True, slots=True)
class ServerView:
    """One server, as it announces itself.

    Attributes:
        state: "joining", "online" or "offline".
        excluded: why clients do not use it although it is online; empty if they use it.
        disputed: in which block its weights differ from others' of the same revision; empty if they do not.
        throughput: tokens/s that it adds to each of its blocks.
        compute: blocks x tokens/s, one token at a time.
        forward: blocks x tokens/s, many tokens at once; 0 if not announced.
        network: tokens/s of hidden states on its link; 0 if not announced.
        queue: seconds that a step waited for its turn lately.
        relayed: whether it is reached through a relay.
        round_trip: seconds from this peer and back; None if it was not measured.
        mobility: "pinned", "cooling" or "free".
        sparse: whether it computes with some neurons only, so that results are approximate.
        perplexity_loss: how much that raises the perplexity, as a share; None if it is not sparse or did not measure.
        exit_blocks: blocks in front of which tokens may leave its span, if their clients ask for it.
        audits: None if it was not audited, as far as is known here.
    """

    peer_id: str
    short_id: str
    name: str
    start: int
    end: int
    state: str
    excluded: str
    disputed: str
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
    sparse: bool
    perplexity_loss: float | None
    exit_blocks: tuple[int, ...]
    audits: AuditsView | None


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model.

    Attributes:
        blocks: number of blocks of the model.
        complete: whether every block is served.
        throughput: tokens/s of the weakest block, 0 if a block is missing.
        median: tokens/s of the median served block, 0 if no block is served.
        weakest: the served block with the least throughput; None if no block is served or all are equal.
        coverage: one entry per block.
        missing: ranges of missing blocks, ascending.
        servers: sorted by span and name, at most `MAX_SERVERS`; `servers_total` counts all of them.
        servers_online: number of servers that clients can use.
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
    """The state of the swarm.

    Attributes:
        version: `VIEW_VERSION`.
        time: Unix time of the poll, in seconds.
        period: seconds until the next poll while clients are watching.
        problem: why the view may be out of date; empty if it is not.
        absent: requested models that no server announces.
        left_out: number of announced models that were not read.
        others: names of models that were not requested, if some that were are absent.
    """

    version: int
    time: float
    period: float
    problem: str
    models: tuple[ModelView, ...]
    absent: tuple[str, ...]
    left_out: int
    others: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether there is a model, and every block of every model is served."""
        return bool(self.models) and not self.absent and all(model.complete for model in self.models)


def build_model_view(
    found: AnnouncedModel,
    round_trips: Mapping[str, float],
    addresses: Sequence[str] = (),
    opinions: Mapping[str, Opinion] = NO_OPINIONS,
) -> ModelView:
    """Build the view of one model.

    Args:
        round_trips: peer id -> seconds, for each peer that was measured.
        addresses: addresses of peers to join by, for the commands.
        opinions: peer id -> what audits say of a server, for those that were audited.
    """
    model, blocks = found.model, found.model.blocks
    compatible = compatible_servers(found.servers, model.revision)
    coverage = _coverage(found.servers, compatible.servers, blocks)
    served = [block.throughput for block in coverage if block.servers]
    complete = len(served) == blocks
    name = shorten(model.name, 256)
    reasons = {
        server.peer_id: compatible.excluded[server.peer_id]
        if server.revision == model.revision
        else f"it serves revision {server.revision}, most serve {model.revision}"
        for server in found.servers
        if server.peer_id in compatible.excluded
    }
    disputed = {
        peer_id: f"its weights of block {block} differ from those of others; clients know which are right"
        for peer_id, block in disputed_blocks(found.servers).items()
    }
    views = [
        _server_view(server, round_trips, reasons, disputed, opinions.get(server.peer_id)) for server in found.servers
    ]
    views.sort(key=lambda view: (view.state == "offline", view.start, view.end, view.name, view.peer_id))
    return ModelView(
        name=name,
        blocks=blocks,
        revision=shorten(model.revision),
        complete=complete,
        throughput=min(served) if complete else 0.0,
        median=statistics.median(served) if served else 0.0,
        weakest=_weakest(coverage),
        coverage=coverage,
        missing=_missing_ranges(coverage, model.name, addresses),
        servers=tuple(views[:MAX_SERVERS]),
        servers_online=len(compatible.servers),
        servers_total=len(views),
    )


def shorten(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    """Sanitize a peer's text into one line and cut it to `limit` characters."""
    shown = sanitize_text(text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def serve_command(model: str, start: int, end: int, addresses: Sequence[str] = ()) -> str | None:
    """The command that would serve these blocks, or None if the model's name cannot be used in a command.

    Names come from peers and users copy commands, so only names of ordinary characters are accepted.
    """
    if model == DEMO_NAME:
        named = ""
    elif _HUB_ID.fullmatch(model):
        named = f" {model}"
    elif _FOLDER.fullmatch(model):
        named = f" path/to/{model}"
    else:
        return None
    peers = " ".join(shlex.quote(address) for address in addresses) or ADDRESS_PLACEHOLDER
    return f"swarm server{named} --blocks {start}:{end} --initial-peers {peers}"


def _coverage(servers: Sequence[ServerInfo], usable: Sequence[ServerInfo], blocks: int) -> tuple[BlockView, ...]:
    throughputs = block_throughputs(usable, blocks)
    serving = _count_by_block(usable, blocks)
    joining = _count_by_block([server for server in servers if server.state is ServerState.JOINING], blocks)
    return tuple(map(BlockView, serving, joining, throughputs))


def _count_by_block(servers: Sequence[ServerInfo], blocks: int) -> list[int]:
    counts = [0] * blocks
    for server in servers:
        for block in range(server.span.start, min(server.span.end, blocks)):
            counts[block] += 1
    return counts


def _weakest(coverage: Sequence[BlockView]) -> int | None:
    served = [(block.throughput, number) for number, block in enumerate(coverage) if block.servers]
    # A difference of half a percent or less does not matter.
    if not served or min(served)[0] > max(served)[0] * 0.995:
        return None
    return min(served)[1]


def _missing_ranges(
    coverage: Sequence[BlockView], model: str, addresses: Sequence[str]
) -> tuple[MissingBlocksView, ...]:
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
        MissingBlocksView(start, end, joining, serve_command(model, start, end, addresses))
        for start, end, joining in ranges
    )


def _server_view(
    server: ServerInfo,
    round_trips: Mapping[str, float],
    excluded: Mapping[str, str],
    disputed: Mapping[str, str],
    opinion: Opinion | None,
) -> ServerView:
    return ServerView(
        peer_id=server.peer_id,
        short_id=server.short_id,
        name=shorten(server.name),
        start=server.span.start,
        end=server.span.end,
        state=server.state.name.lower(),
        excluded=shorten(excluded.get(server.peer_id, ""), 256),
        disputed=disputed.get(server.peer_id, ""),
        version=shorten(server.version),
        revision=shorten(server.revision),
        dtype=shorten(server.compute_dtype),
        quantization=shorten(server.quantization),
        throughput=server.tokens_per_second,
        compute=server.throughput,
        forward=server.forward_throughput,
        network=server.network_throughput,
        queue=server.queue_delay,
        cache_tokens_free=server.cache_tokens_free,
        relayed=server.relayed,
        round_trip=round_trips.get(server.peer_id),
        adapters=tuple(shorten(adapter) for adapter in server.adapters),
        mobility=server.mobility.name.lower(),
        sparse=server.sparse,
        perplexity_loss=server.perplexity_loss,
        exit_blocks=server.exit_blocks,
        audits=AuditsView(opinion.agreed, opinion.differed, opinion.probability, opinion.is_quarantined)
        if opinion is not None
        else None,
    )
