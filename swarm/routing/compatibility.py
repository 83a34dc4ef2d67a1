"""Which of the announced servers may be chained: those that loaded the same weights, in a precision that is wanted.

A client that has the blocks' weights on its own disk knows their digests and believes nobody else. One that has not
goes by the revision, and where servers of one revision disagree about a block, by the majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from swarm.data_structures import ServerInfo, ServerState


@dataclass(frozen=True)
class CompatibleServers:
    """Attributes:
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
) -> CompatibleServers:
    """Split the online servers of a model into usable and unusable ones.

    Args:
        servers: as fetched from the DHT, in any state.
        revision: the client's own revision of the model.
        digests: the right digest of every block of the model, if the client knows them.
        quant: the forms of weights that the client wants ("none", "int8", "int4", "nf4"); None for any. A digest is
            that of the checkpoint, whatever form the weights were brought into.
    """
    online = [server for server in servers if server.state is ServerState.ONLINE]
    excluded: dict[str, str] = {}
    same: list[ServerInfo] = []
    for server in online:
        if server.revision == revision:
            same.append(server)
        else:
            excluded[server.peer_id] = f"it serves revision {server.revision}, this client has {revision}"
    right = digests if digests is not None else _majority(same)
    usable = []
    for server in same:
        odd = [b for b, digest in enumerate(server.digests, server.span.start) if digest != right[b]]
        if odd:
            excluded[server.peer_id] = f"its weights of block {odd[0]} are not those that this model has"
        elif quant is not None and server.quantization not in quant:
            held = "not quantized" if server.quantization == "none" else server.quantization
            excluded[server.peer_id] = f"its weights are {held}, this client wants {' or '.join(sorted(quant))}"
        else:
            usable.append(server)
    return CompatibleServers(tuple(usable), excluded)


def _majority(servers: Sequence[ServerInfo]) -> dict[int, str]:
    votes: dict[int, Counter[str]] = {}
    for server in servers:
        for block, digest in enumerate(server.digests, server.span.start):
            votes.setdefault(block, Counter())[digest] += 1
    # Of equally frequent digests the smallest, so that all clients decide alike.
    return {block: min(counter, key=lambda d: (-counter[d], d)) for block, counter in votes.items()}
