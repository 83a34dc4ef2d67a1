"""What a session has computed, for later sessions that begin with the same tokens.

The servers keep their caches until other sessions need the room. They know a session by a random id, from which no one
can tell its tokens. This client keeps what went into each server, and replays it to one that has lost its cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swarm.client.hops.input_history import InputHistory, TokenRuns, run_bytes
from swarm.client.local_blocks import LocalSession
from swarm.data_structures import Hop

AdapterDigests = tuple[list[bytes] | None, list[bytes] | None]
"""Digests of what is added to the servers' blocks, and to the client's own; None for nothing."""


@dataclass(frozen=True)
class PrefixHop:
    """One server's part.

    Attributes:
        hop: the server and its blocks.
        session_id: of the session there that has the cache.
        inputs: what went into the blocks.
    """

    hop: Hop
    session_id: bytes
    inputs: TokenRuns


@dataclass
class PrefixSource:
    """What the prefixes of one session share.

    Attributes:
        length: how many tokens the session had.
        hops: the servers, in the order of the route.
        outputs: of the last one; None if they are not known.
        adapter: what is added to the blocks.
        local: the caches of the client's own blocks; None if it has none.
        connection: of the client that made it. Another one cannot use it.
    """

    length: int
    hops: tuple[PrefixHop, ...]
    outputs: TokenRuns | None
    adapter: AdapterDigests
    local: LocalSession | None
    connection: object

    def move_to(self, later: PrefixSource, begun: int) -> None:
        """A session that began with so much of this is parked. If that has all of it, servers keep only that."""
        if begun == self.length <= later.length:
            sessions = {(one.hop.server.peer_id, one.hop.span): one.session_id for one in later.hops}
            self.hops = tuple(
                replace(one, session_id=sessions.get((one.hop.server.peer_id, one.hop.span), one.session_id))
                for one in self.hops
            )


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a session, made by `InferenceSession.park`.

    Attributes:
        tokens: their ids, `[length]`.
        source: where they are computed.
    """

    tokens: torch.Tensor
    source: PrefixSource

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, length: int) -> Prefix:
        """The first `length` of them."""
        return replace(self, tokens=self.tokens[:length])

    @property
    def bytes(self) -> int:
        """What it takes in this client's memory."""
        runs = [*(hop.inputs for hop in self.source.hops), self.source.outputs or ()]
        return sum(map(run_bytes, runs))


@dataclass(frozen=True)
class ChainState:
    """What a chain has computed: for each hop its server, its session there and its inputs; and the last outputs."""

    hops: tuple[tuple[Hop, bytes, InputHistory], ...]
    outputs: InputHistory | None


def prefix_source(
    state: ChainState, length: int, adapter: AdapterDigests, local: LocalSession | None, connection: object
) -> PrefixSource | None:
    """The source of a prefix of `length` tokens; None if the chain has several sequences, or not so many tokens."""
    inputs = [history.only_sequence(length) for _, _, history in state.hops]
    outputs = state.outputs.only_sequence(length) if state.outputs is not None else None
    hops = [
        PrefixHop(hop, session_id, runs)
        for (hop, session_id, _), runs in zip(state.hops, inputs, strict=True)
        if runs is not None
    ]
    return PrefixSource(length, tuple(hops), outputs, adapter, local, connection) if len(hops) == len(inputs) else None
