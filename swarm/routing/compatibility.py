"""Selects the announced servers that may be chained: those with the same weights, in an accepted precision.

A client compares revisions, and the digest of each block that it knows (`swarm.models.checkpoints.known_digests`).
Servers have no vote, because an attacker can start any number of them. A program that only looks at a swarm knows no
digests. So it excludes no server for its weights, but shows which ones disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm.data_structures import ServerInfo, ServerState, WeightDigests


@dataclass(frozen=True)
class CompatibleServers:
    """The servers of a model, divided into usable and excluded ones.

    Attributes:
        servers: those that can be used together.
        excluded: peer id -> why the server cannot be used.
    """

    servers: tuple[ServerInfo, ...]
    excluded: dict[str, str]


def compatible_servers(
    servers: Iterable[ServerInfo],
    revision: str,
    digests: WeightDigests | None = None,
    quant: Collection[str] | None = None,
    exact: bool = False,
) -> CompatibleServers:
    """Divide the online servers of a model into usable and excluded ones.

    Args:
        servers: as fetched from the DHT, in any state.
        revision: the client's own revision of the model.
        digests: that blocks must have, where they are known; servers of blocks with others are excluded.
        quant: the quantizations that the client accepts ("none", "packed", "int8", "int4", "nf4"); None for any. A
            digest is always that of the checkpoint, whatever the weights were quantized to.
        exact: whether the client refuses servers that compute with some neurons only.
    """
    online = [server for server in servers if server.state is ServerState.ONLINE]
    excluded: dict[str, str] = {}
    same_revision: list[ServerInfo] = []
    for server in online:
        if server.revision == revision:
            same_revision.append(server)
        else:
            excluded[server.peer_id] = f"it serves revision {server.revision}, this client has {revision}"
    usable = []
    for server in same_revision:
        problem = _wrong_weights(server, digests) if digests is not None else ""
        if problem:
            excluded[server.peer_id] = problem
        elif quant is not None and server.quantization not in quant:
            held = "not quantized" if server.quantization == "none" else server.quantization
            excluded[server.peer_id] = f"its weights are {held}, this client accepts {' or '.join(sorted(quant))}"
        elif exact and server.sparse:
            excluded[server.peer_id] = (
                "it computes with some neurons only, which is approximate; NetworkOptions(exact=False) accepts that"
            )
        else:
            usable.append(server)
    return CompatibleServers(tuple(usable), excluded)


def _wrong_weights(server: ServerInfo, digests: WeightDigests) -> str:
    """Why the server's weights are not the right ones; empty if they are."""
    for block, digest in enumerate(server.digests, server.span.start):
        expected = digests.by_block.get(block)
        if expected is not None and digest != expected:
            return f"its weights of block {block} are not {digests.origin}"
    return ""


def disputed_blocks(servers: Iterable[ServerInfo]) -> dict[str, int]:
    """The servers that do not agree with others of the same revision: peer id -> the first block that is disputed."""
    online = [server for server in servers if server.state is ServerState.ONLINE]
    announced: dict[tuple[str, int], set[str]] = {}
    for server in online:
        for block, digest in enumerate(server.digests, server.span.start):
            announced.setdefault((server.revision, block), set()).add(digest)
    found = {}
    for server in online:
        disputed = [
            b for b in range(server.span.start, server.span.end) if len(announced.get((server.revision, b), ())) > 1
        ]
        if disputed:
            found[server.peer_id] = disputed[0]
    return found
