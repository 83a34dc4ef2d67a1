"""Selects the announced servers that may be chained: those with the same weights, in an accepted precision.

A client that has the blocks' weights on its own disk knows their digests and trusts only those. Any other client goes
by the revision. Where servers of one revision announce different digests for a block, the majority decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from swarm.data_structures import ServerInfo, ServerState


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
    digests: Sequence[str] | None = None,
    quant: Collection[str] | None = None,
    exact: bool = False,
) -> CompatibleServers:
    """Divide the online servers of a model into usable and excluded ones.

    Args:
        servers: as fetched from the DHT, in any state.
        revision: the client's own revision of the model.
        digests: the right digest of every block of the model, if the client knows them.
        quant: the quantizations that the client accepts ("none", "int8", "int4", "nf4"); None for any. A digest is
            always that of the checkpoint, whatever the weights were quantized to.
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
    expected = digests if digests is not None else _majority_digests(same_revision)
    usable = []
    for server in same_revision:
        different = [b for b, digest in enumerate(server.digests, server.span.start) if digest != expected[b]]
        if different:
            excluded[server.peer_id] = f"its weights of block {different[0]} are not those that this model has"
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


def _majority_digests(servers: Sequence[ServerInfo]) -> dict[int, str]:
    votes: dict[int, Counter[str]] = {}
    for server in servers:
        for block, digest in enumerate(server.digests, server.span.start):
            votes.setdefault(block, Counter())[digest] += 1
    # Ties go to the smallest digest, so that all clients decide alike.
    return {block: min(counter, key=lambda d: (-counter[d], d)) for block, counter in votes.items()}
