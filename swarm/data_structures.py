"""Data types that all packages share. Frozen dataclasses, standard library only."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from swarm.errors import InvalidSpan

ExitConfidence = Literal["softmax", "similarity", "classifier"]
"""How it is measured how sure a token is of its successor (early exit).

softmax: the difference of the two largest probabilities. similarity: the cosine of successive hidden states.
classifier: what `model.train_exits(kind="classifier")` has learned.
"""

ExitBatchRule = Literal["row", "all"]
"""Which sequences of a batch leave together. row: each one by itself. all: a step leaves when all of its sequences have
been sure."""


@dataclass(frozen=True, slots=True)
class ExitThresholds:
    """When the new token of a sequence leaves inside a span, instead of passing all blocks.

    Attributes:
        confidence: what is measured.
        thresholds: blocks, ascending, and the confidence above which a token leaves in front of each, 0 to 1.
        batch: which sequences leave together.
    """

    confidence: ExitConfidence
    thresholds: tuple[tuple[int, float], ...]
    batch: ExitBatchRule = "row"


class ServerState(enum.IntEnum):
    """The state that a server announces. Routes use only ONLINE servers."""

    OFFLINE = 0
    JOINING = 1
    ONLINE = 2


class Mobility(enum.IntEnum):
    """Whether a server would move to other blocks. Servers announce it.

    PINNED: never, because its blocks were configured. COOLING: only to close a gap, because it moved here recently.
    """

    PINNED = 0
    COOLING = 1
    FREE = 2


class WireFormat(enum.StrEnum):
    """Format of hidden states on the wire. NONE sends them in the dtype that the server computes in, without loss."""

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
class Whereabouts:
    """The ways to one peer. All addresses are multiaddresses that do not name the peer itself.

    Attributes:
        addresses: for everybody, directly or through a relay, in the order in which they should be tried.
        lan_addresses: for peers in the same network.
        outer_host: IP address under which the peer's network is seen from outside; empty if it is not known.
    """

    addresses: tuple[str, ...] = ()
    lan_addresses: tuple[str, ...] = ()
    outer_host: str = ""

    def seen_from(self, outer_host: str) -> tuple[str, ...]:
        """The addresses for a peer whose own network is seen as `outer_host`; empty if that is not known."""
        return self.lan_from(outer_host) + self.addresses

    def lan_from(self, outer_host: str) -> tuple[str, ...]:
        """Those of them that are in the same network."""
        return self.lan_addresses if outer_host and outer_host == self.outer_host else ()


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What one server announces about itself, after validation (see `swarm.dht.server_records`).

    Attributes:
        peer_id: base58 libp2p peer id; also the owner of the announcement's signature.
        span: the blocks that the server holds.
        throughput: blocks that it computes per second in decode steps of one token (a span of n blocks does
            throughput / n decode steps/s).
        cache_tokens_free: tokens that its attention cache can still hold (one token: one position of one sequence, all
            blocks).
        revision: version of the checkpoint that it loaded.
        digests: one digest per block, in order, of the loaded weights (see `swarm.models.checkpoints.block_digest`).
        compute_dtype: name of the torch dtype in which it computes, such as "bfloat16".
        quantization: "none", "packed", "int8", "int4" or "nf4".
        forward_throughput: blocks x tokens per second when many tokens are computed at once (prefill, training); 0 if
            unknown.
        network_throughput: tokens/s of hidden states that its link to other peers carries; 0 if unknown.
        queue_delay: seconds that recent steps waited for its compute thread.
        round_trips: (peer id, seconds) for servers that hold the blocks after its own, as it measured them.
        mobility: whether it would move to other blocks.
        relayed: whether other peers can reach it only through relays (see `swarm.transport.reach`).
        whereabouts: where it can be dialed; no addresses where libp2p finds it by itself, as on one machine.
        relayed_peers: how many peers behind routers may hold a place at it; 0 if it does not relay.
        shares_weights: whether other peers can get the model's weights from it (see `swarm.shared_weights`).
        adapters: names of the adapters that every client may use on this server.
        sparse: whether it computes a token with some neurons of its feed-forward layers only, which is approximate.
        perplexity_loss: how much that raises the perplexity, relative to all neurons, as it measured; None if it is not
            sparse or did not measure.
        exit_blocks: blocks in front of which tokens may leave its span, ascending; none unless it was started for that.
        exit_confidences: which of `ExitConfidence` it can measure there.
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
    whereabouts: Whereabouts = Whereabouts()
    relayed_peers: int = 0
    shares_weights: bool = False
    adapters: tuple[str, ...] = ()
    sparse: bool = False
    perplexity_loss: float | None = None
    exit_blocks: tuple[int, ...] = ()
    exit_confidences: tuple[ExitConfidence, ...] = ()

    @property
    def short_id(self) -> str:
        return "…" + self.peer_id[-6:]

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s that it adds to each of its blocks: what it computes, or what its link carries if that is lower."""
        computed = self.throughput / self.span.length
        return min(computed, self.network_throughput) if self.network_throughput else computed


@dataclass(frozen=True, slots=True)
class WeightDigests:
    """The digests that blocks must have.

    Attributes:
        by_block: of each block for which one is known.
        origin: where they come from, for messages: "those in FOLDER".
    """

    by_block: Mapping[int, str]
    origin: str


@dataclass(frozen=True, order=True, slots=True)
class ModelInfo:
    """A model that the swarm runs, as its servers announce it.

    Attributes:
        name: the model's name in the swarm.
        blocks: number of blocks of the whole model.
        revision: version of the checkpoint.
    """

    name: str
    blocks: int
    revision: str


@dataclass(frozen=True, slots=True)
class Hop:
    """One server's part of a route: the server computes the blocks of `span`, which are among those it holds."""

    server: ServerInfo
    span: Span


@dataclass(frozen=True, slots=True)
class Route:
    """The ordered hops of a request, which cover each of its blocks exactly once.

    Successive hops may be at the same server.
    """

    hops: tuple[Hop, ...] = field(default_factory=tuple)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The blocks at which a hop begins, in order, without block 0."""
        return tuple(hop.span.start for hop in self.hops if hop.span.start)

    def __str__(self) -> str:
        return "route: " + " → ".join(f"{hop.span} {hop.server.short_id}" for hop in self.hops)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which tokens a step carries: packed sequences, never a padded rectangle.

    Sequence `r` brings `counts[r]` new tokens, the first of them at position `starts[r]`. If the server has cached more
    than `starts[r]` tokens of the sequence, it rolls back. With `sources`, sequence `r` first becomes a copy of the
    former sequence `sources[r]` (beam search). With `offsets`, the model sees the new tokens at positions from
    `starts[r] + offsets[r]` on: a padded batch without explicit positions counts its padding, as in transformers.
    With `rope_lengths`, the rotary frequencies of the new tokens are those of a text of at least so many tokens, where
    they depend on that (`swarm.models.rope_lengths`); without, those of the text up to each token.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sources: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    rope_lengths: tuple[int, ...] | None = None
    sequences: int = field(init=False, repr=False, compare=False)
    tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Both are asked for dozens of times a step.
        object.__setattr__(self, "sequences", len(self.counts))
        object.__setattr__(self, "tokens", sum(self.counts))

    @property
    def ends(self) -> tuple[int, ...]:
        """For each sequence, the position behind its last new token, as the model sees it."""
        offsets = self.offsets or (0,) * self.sequences
        return tuple(map(sum, zip(self.lengths, offsets, strict=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each sequence has behind its last new token."""
        return tuple(map(sum, zip(self.starts, self.counts, strict=True)))

    def moved_back(self, tokens: Sequence[int]) -> StepLayout:
        """The step with so many tokens more in front of each sequence's own."""
        starts = tuple(start - more for start, more in zip(self.starts, tokens, strict=True))
        counts = tuple(count + more for count, more in zip(self.counts, tokens, strict=True))
        return replace(self, starts=starts, counts=counts)


@dataclass(frozen=True, slots=True)
class FlashUse:
    """What blocks on flash read and selected.

    Attributes:
        read_bytes, reads: from the drive.
        wait_seconds: time that computing stood still for the drive.
        needed: experts or neurons that forwards needed, summed over blocks.
        hits: those of them that were in memory.
        selected: neurons selected for tokens, of `selectable`, summed over tokens and blocks.
    """

    read_bytes: int = 0
    reads: int = 0
    wait_seconds: float = 0.0
    needed: int = 0
    hits: int = 0
    selected: int = 0
    selectable: int = 0

    def since(self, earlier: FlashUse) -> FlashUse:
        """What was read and selected after `earlier`."""
        return FlashUse(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class HopTiming:
    """How long one step took at one server, in seconds.

    Attributes:
        total: from the request to the reply, as measured by the client.
        compute: time that the server spent in its blocks.
        sessions: for how many it computes at present.
    """

    total: float
    compute: float
    sessions: int = 1
