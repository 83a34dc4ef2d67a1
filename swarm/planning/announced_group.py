"""A description of the group from what its servers announce. Pure.

A server does not announce its memory. What it holds now, with the cache that is free, fits; so that much is sure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from swarm.common.units import ByteSize, BytesPerSecond, Duration
from swarm.data_structures import ServerInfo
from swarm.errors import UsageError
from swarm.planning.device_group import ModelSize
from swarm.planning.group_description import (
    CLIENT,
    MAX_DEVICES,
    DefaultLink,
    DeviceDescription,
    DeviceLink,
    GroupDescription,
)
from swarm.server.limits import DEFAULT_CACHE_TOKENS, MAX_MEMORY_SHARE

HEADING = """From what the servers announce. memory is what their present blocks and free cache take, so they have at
least that: put in what `swarm server` prints as free. speed, upload and links are as the servers measured them;
link holds for every pair that was not measured, and for the client."""


def describe(
    servers: Sequence[ServerInfo],
    model: ModelSize,
    source: str | None,
    cache_tokens: int | None,
    held: Mapping[str, ModelSize] | None = None,
) -> GroupDescription:
    """Describe online servers of a model.

    Args:
        servers: in the order in which they shall be listed.
        source: local folder or hub id of the model; None for the demo model.
        cache_tokens: room in the attention cache; None for a server's default, or less where servers have less.
        held: the model's size in the forms of weights that servers announce, where that is not `model`.

    Raises:
        UsageError: there are no servers, or too many.
    """
    if not servers:
        raise UsageError(f"no server of {model.name} is online in this swarm; start some, or describe them in a file")
    if len(servers) > MAX_DEVICES:
        raise UsageError(f"{len(servers)} servers are online; plans are made for {MAX_DEVICES} at most")
    free = [server.cache_tokens_free for server in servers if server.cache_tokens_free]
    least = min(free, default=DEFAULT_CACHE_TOKENS)
    names = _names(servers)
    devices = tuple(
        DeviceDescription(
            name=names[server.peer_id],
            memory=_memory(server, (held or {}).get(server.quantization, model), least),
            speed=min(max(server.throughput, 1e-6), 1e9),
            upload=_upload(server, model),
        )
        for server in servers
    )
    return GroupDescription(
        devices=devices,
        model=source,
        cache_tokens=cache_tokens or min(DEFAULT_CACHE_TOKENS, least),
        link=_usual_link(servers),
        links=_links(servers, names),
    )


def common_quantization(servers: Sequence[ServerInfo]) -> str:
    """The `--quant` that all servers were started with; "none", which takes the most memory, where they differ."""
    forms = {"nf4" if server.quantization == "int4" else server.quantization for server in servers}
    return forms.pop() if forms in ({"int8"}, {"nf4"}) else "none"


def _names(servers: Sequence[ServerInfo]) -> dict[str, str]:
    """peer id -> a name that can be shown: the announced one where nobody else has it, else with the peer id's end."""
    # Much shorter than a peer id, so that nobody can take another's.
    shown = [("".join(filter(str.isprintable, server.name)).strip()[:24], server) for server in servers]
    names: dict[str, str] = {}
    for candidates in ([(s, name) for name, s in shown], [(s, name + s.short_id) for name, s in shown]):
        counts = Counter(name for _, name in candidates)
        for server, name in candidates:
            if counts[name] == 1 and name not in ("", CLIENT, *names.values()):
                names.setdefault(server.peer_id, name)
    return {server.peer_id: names.get(server.peer_id, server.peer_id) for server in servers}


def _memory(server: ServerInfo, model: ModelSize, least_cache: int) -> ByteSize:
    # A server with no free cache has sessions; it is taken to have as much cache as the others.
    cache = server.cache_tokens_free or least_cache
    filled = model.memory(server.span.start, server.span.end, cache)
    return ByteSize(min(-(-filled * 100 // round(MAX_MEMORY_SHARE * 100)), 10**18))


def _upload(server: ServerInfo, model: ModelSize) -> BytesPerSecond | None:
    rate = server.network_throughput * model.hidden_bytes
    return BytesPerSecond(min(max(rate, 1.0), 1e18)) if rate else None


def _one_way(servers: Sequence[ServerInfo]) -> dict[frozenset[str], float]:
    """Pair of peers -> seconds one way: half of the shorter round trip, where both measured one."""
    present = {server.peer_id for server in servers}
    found: dict[frozenset[str], float] = {}
    for server in servers:
        for other, seconds in server.round_trips:
            if other in present and other != server.peer_id:
                pair = frozenset({server.peer_id, other})
                found[pair] = min(found.get(pair, seconds / 2), seconds / 2)
    return found


def _links(servers: Sequence[ServerInfo], names: dict[str, str]) -> tuple[DeviceLink, ...]:
    pairs = sorted((sorted(names[peer] for peer in pair), seconds) for pair, seconds in _one_way(servers).items())
    return tuple(DeviceLink((first, second), latency=Duration(seconds)) for (first, second), seconds in pairs)


def _usual_link(servers: Sequence[ServerInfo]) -> DefaultLink:
    """Pairs that were not measured are taken to be like the middle one of those that were."""
    measured = sorted(_one_way(servers).values())
    return DefaultLink(latency=Duration(measured[len(measured) // 2])) if measured else DefaultLink()
