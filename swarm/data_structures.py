"""The nouns that every room shares. Frozen dataclasses, standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from swarm.errors import InvalidSpan


class ServerState(enum.IntEnum):
    """Life of a server as it is announced. Only ONLINE servers are routed to."""

    OFFLINE = 0
    JOINING = 1
    ONLINE = 2


class Mobility(enum.IntEnum):
    """Whether a server would move to other blocks, as it announces.

    PINNED: never; somebody asked for these blocks. COOLING: only to close a gap, because it came a short while ago.
    """

    PINNED = 0
    COOLING = 1
    FREE = 2


class WireFormat(enum.StrEnum):
    """How hidden states travel. NONE sends them in the dtype the server computes in, which loses nothing."""

    NONE = "none"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    BLOCKWISE8 = "blockwise8"


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """The contiguous blocks `[start, end)`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidSpan(f"{self.start}:{self.end} is not a range of blocks: use START:END with START < END")

    @property
    def length(self) -> int:
        return self.end - self.start

    def __contains__(self, block: int) -> bool:
        return self.start <= block < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What one server announces about itself, checked (see `swarm.dht.records`).

    Attributes:
        peer_id: base58 libp2p peer id; also the owner of the announcement's signature.
        span: the blocks it holds.
        throughput: blocks that it computes for one token, per second, in steps of one token (a span of n blocks does
            throughput / n decode steps/s).
        cache_tokens_free: how many more tokens its attention cache can hold (one token = one row position, all blocks).
        revision: which version of the checkpoint it loaded.
        digests: one digest a block, in order, of the weights it loaded (see `swarm.models.checkpoints.block_digest`).
        compute_dtype: name of the torch dtype it computes in, such as "bfloat16".
        quantization: "none", "int8", "int4" or "nf4".
        forward_throughput: blocks x tokens per second where many tokens are computed at once (prefill, training); 0 if
            it did not say.
        network_throughput: tokens/s of hidden states that its link to other peers carries; 0 if it did not say.
        queue_delay: seconds that a step waited for its compute thread lately.
        round_trips: (peer id, seconds) of servers that hold the blocks behind its own, as it measured them.
        mobility: whether it would move to other blocks.
        relayed: whether others reach it through a relay only (see `swarm.dht.reachability`).
        adapters: names of the adapters that every client may use there.
    """

    peer_id: str
    span: Span
    state: ServerState
    throughput: float
    cache_tokens_free: int
    revision: str
    digests: tuple[str, ...]
    compute_dtype: str
    quantization: str
    version: str
    name: str = ""
    forward_throughput: float = 0.0
    network_throughput: float = 0.0
    queue_delay: float = 0.0
    round_trips: tuple[tuple[str, float], ...] = ()
    mobility: Mobility = Mobility.FREE
    relayed: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def short_id(self) -> str:
        return "…" + self.peer_id[-6:]

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s that it adds to each of its blocks: what it computes, or what its link carries if that is less."""
        computed = self.throughput / self.span.length
        return min(computed, self.network_throughput) if self.network_throughput else computed


@dataclass(frozen=True, order=True, slots=True)
class ModelInfo:
    """A model that the swarm runs, as its servers announce it.

    Attributes:
        name: what the swarm calls it.
        blocks: number of blocks of the whole model.
        revision: which version of the checkpoint.
    """

    name: str
    blocks: int
    revision: str


@dataclass(frozen=True, slots=True)
class Hop:
    """One server's part of a route: it computes the blocks of `span`, which lie inside what it holds."""

    server: ServerInfo
    span: Span


@dataclass(frozen=True, slots=True)
class Route:
    """The ordered hops that cover all blocks of a request exactly once."""

    hops: tuple[Hop, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        return "route: " + " → ".join(f"{hop.span} {hop.server.short_id}" for hop in self.hops)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens a step carries: packed rows, never a padded rectangle.

    Row `r` brings `counts[r]` new tokens, the first at position `starts[r]` of its sequence. A start below what the
    server has for that row is a rollback. With `sources`, row `r` first becomes a copy of the former row `sources[r]`
    (beam search). With `offsets`, the model is told that the row's new tokens begin at `starts[r] + offsets[r]`: a
    padded batch without explicit positions counts its padding, as transformers does.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sources: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None

    @property
    def sequences(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class HopTiming:
    """Where one step's time went at one server, in seconds.

    Attributes:
        total: from the request to the reply, as the client saw it.
        compute: what the server spent in its blocks.
    """

    total: float
    compute: float

    @property
    def overhead(self) -> float:
        """The cost of the hop itself: the way there and back, decoding, waiting."""
        return self.total - self.compute
