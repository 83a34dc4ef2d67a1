"""Describes a group from what its servers announce. Pure.

A server does not announce its memory. The blocks that it holds now and its free cache fit, so it has at least that.
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

FILE_COMMENT = """From the servers' announcements. memory is a lower bound, what the current blocks and free cache take;
replace it with what `swarm server` prints as free. speed, upload and links are as measured by the servers.
link applies to every pair that was not measured, and to the client."""


def describe_servers(
    servers: Sequence[ServerInfo],
    model: ModelSize,
    source: str | None,
    cache_tokens: int | None,
    held: Mapping[str, ModelSize] | None = None,
) -> GroupDescription:
    """Describe online servers of a model as a group.

    Args:
        servers: in the order in which they should be listed.
        source: local folder or hub id of the model; None for the demo model.
        cache_tokens: capacity of the attention cache; None for the default, or less if a server has less.
        held: quantization -> the model's size in it, for servers that hold another quantization than `model`.

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
        link=_default_link(servers),
        links=_links(servers, names),
    )


def common_quantization(servers: Sequence[ServerInfo]) -> str:
    """The `--quant` of all servers; "none", which takes the most memory, if they differ."""
    forms = {"nf4" if server.quantization == "int4" else server.quantization for server in servers}
    return forms.pop() if forms in ({"int8"}, {"nf4"}) else "none"


def _names(servers: Sequence[ServerInfo]) -> dict[str, str]:
    """Peer id -> a name to show: the announced name if it is unique, else with the end of the peer id added."""
    # Much shorter than a peer id, so that no server can take another server's peer id as its name.
    shown = [("".join(filter(str.isprintable, server.name)).strip()[:24], server) for server in servers]
    names: dict[str, str] = {}
    for candidates in ([(s, name) for name, s in shown], [(s, name + s.short_id) for name, s in shown]):
        counts = Counter(name for _, name in candidates)
        for server, name in candidates:
            if counts[name] == 1 and name not in ("", CLIENT, *names.values()):
                names.setdefault(server.peer_id, name)
    return {server.peer_id: names.get(server.peer_id, server.peer_id) for server in servers}


def _memory(server: ServerInfo, model: ModelSize, least_cache: int) -> ByteSize:
    # A server without free cache is busy with sessions; assume that its cache is as large as the others'.
    cache = server.cache_tokens_free or least_cache
    filled = model.memory(server.span.start, server.span.end, cache)
    return ByteSize(min(-(-filled * 100 // round(MAX_MEMORY_SHARE * 100)), 10**18))


def _upload(server: ServerInfo, model: ModelSize) -> BytesPerSecond | None:
    rate = server.network_throughput * model.hidden_bytes
    return BytesPerSecond(min(max(rate, 1.0), 1e18)) if rate else None


def _one_way(servers: Sequence[ServerInfo]) -> dict[frozenset[str], float]:
    """Pair of peers -> one-way seconds: half of the shorter round trip if both peers measured one."""
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


def _default_link(servers: Sequence[ServerInfo]) -> DefaultLink:
    """The link assumed for pairs that were not measured: the median of those that were."""
    measured = sorted(_one_way(servers).values())
    return DefaultLink(latency=Duration(measured[len(measured) // 2])) if measured else DefaultLink()
