"""The YAML file that describes a closed group: reads, validates and writes it, and builds a `DeviceGroup` from it.

See docs/private-swarm.md for an example. The file is written by hand, or by `swarm plan --write` from what servers
announce. They do not announce their memory: the blocks that they hold now and their free cache fit, so they have at
least that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from swarm.common.files import yaml_file
from swarm.common.units import ByteSize, BytesPerSecond, Duration, format_bytes
from swarm.data_structures import ServerInfo
from swarm.errors import UsageError
from swarm.planning.device_group import DeviceGroup, ModelSize, PlannedDevice, PlannedDrive, link_tables
from swarm.planning.partition import can_try_all_orders
from swarm.server.limits import DEFAULT_CACHE_TOKENS, MAX_MEMORY_SHARE

CLIENT = "client"
"""Name of the client's machine in `links` if the client does not run on one of the devices."""

MAX_DEVICES = 32
MAX_BLOCKS = 256

Name = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f]{1,64}\Z")]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class DefaultLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between two devices without an entry of their own. The defaults are those of a home network.

    Attributes:
        latency: one-way latency.
        bandwidth: bandwidth in each direction.
    """

    latency: Duration = Duration(0.005)
    bandwidth: BytesPerSecond = BytesPerSecond(100e6 / 8)

    def __str__(self) -> str:
        return f"{self.latency * 1000:.3g} ms one way and {format_bytes(self.bandwidth)}/s"


class DeviceLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link that differs from the default link. Omitted fields are those of the default link."""

    between: tuple[Name, Name]
    latency: Duration | None = None
    bandwidth: BytesPerSecond | None = None


class DriveDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A drive on which a device can keep weights that its memory does not hold.

    Attributes:
        space: free space for packed files.
        speed: bandwidth of random reads.
    """

    space: ByteSize
    speed: BytesPerSecond


class DeviceDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device of the group.

    Attributes:
        memory: memory that is free for blocks and their cache.
        speed: blocks per second for one token.
        upload: bandwidth of its own connection, an upper bound for all of its links.
        drive: None if all weights have to be in memory.
    """

    name: Name
    memory: ByteSize
    speed: Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]
    upload: BytesPerSecond | None = None
    drive: DriveDescription | None = None


class ModelDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model described by numbers, so that its files are not needed.

    Attributes:
        block_memory: size of the weights of one block.
        cache_memory: size of one token in the attention cache of one block.
        hidden_size: number of values in one token's hidden state.
    """

    name: Name
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
    block_memory: ByteSize
    cache_memory: ByteSize
    hidden_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class GroupDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        model: local folder or hub id, or a description in numbers; None for the demo model.
        revision: branch, tag or commit of a hub model.
        dtype: data type that the servers compute in and send; auto is the checkpoint's own, or bfloat16 for a model
            described by numbers.
        quant: quantization of the servers' weights; block_memory of a model described by numbers already reflects it.
        client: the device on which the client runs; None for a separate machine.
        order: all devices in the order of the ring; None for the best order.
        read_share: share of the weights on a drive that a token reads; None for all of them, as in dense models.
    """

    devices: Annotated[tuple[DeviceDescription, ...], msgspec.Meta(min_length=1, max_length=MAX_DEVICES)]
    model: str | ModelDescription | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quant: Literal["none", "packed", "int8", "nf4"] = "none"
    cache_tokens: Tokens = DEFAULT_CACHE_TOKENS
    client: Name | None = None
    link: DefaultLink = DefaultLink()
    links: tuple[DeviceLink, ...] = ()
    order: tuple[Name, ...] | None = None
    read_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


def read_group_file(path: Path) -> GroupDescription:
    """Read and validate a file. Raises `UsageError`, which names the field."""
    return yaml_file.read_file(path, parse_group_file, "description of a group", UsageError)


def parse_group_file(data: bytes) -> GroupDescription:
    """Parse and validate the content of a file. Raises `UsageError`, which names the field."""
    description = yaml_file.parse_yaml(data, GroupDescription, UsageError, dec_hook=_decode_unit)
    _validate_names(description)
    return description


def _decode_unit(kind: type[Any], value: object) -> Any:
    return kind.parse(value)


def _validate_names(description: GroupDescription) -> None:
    names = [device.name for device in description.devices]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UsageError(f"devices: two devices are named {repeated[0]!r}; give each its own name")
    if CLIENT in names:
        raise UsageError(f"devices: the name {CLIENT!r} is reserved for the client; give the device another name")
    if description.client is not None and description.client not in names:
        raise UsageError(f"client: {description.client!r} is not one of the devices; leave it out for another machine")
    if description.order is not None and sorted(description.order) != sorted(names):
        raise UsageError("order: name every device once, or leave it out")
    pairs: set[frozenset[str]] = set()
    for index, link in enumerate(description.links):
        place, pair = f"links[{index}].between", frozenset(link.between)
        unknown = pair - {*names, CLIENT}
        if unknown:
            raise UsageError(f"{place}: {min(unknown)!r} is neither a device nor {CLIENT!r}")
        if description.client is not None and CLIENT in pair:
            raise UsageError(f"{place}: the client runs on {description.client!r}; name that device")
        if len(pair) == 1 or pair in pairs:
            raise UsageError(f"{place}: {' and '.join(link.between)} are the same device or have a link already")
        pairs.add(pair)


def to_yaml(description: GroupDescription, heading: str = "") -> str:
    """Format a description as YAML that `parse_group_file` can read. `heading` becomes comment lines."""
    content = _without_empty_fields(msgspec.to_builtins(description, enc_hook=_encode_unit))
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    body: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return comment + body


def _encode_unit(value: object) -> float:
    return int(value) if isinstance(value, int) else float(value)  # type: ignore[arg-type]


def _without_empty_fields(value: Any) -> Any:
    """Remove fields without a value."""
    if isinstance(value, dict):
        return {key: _without_empty_fields(part) for key, part in value.items() if part not in (None, [], ())}
    return [_without_empty_fields(part) for part in value] if isinstance(value, list | tuple) else value


def described_model_size(model: ModelDescription, dtype: str) -> ModelSize:
    """The size of a model described by numbers."""
    weights = (int(model.block_memory),) * model.blocks
    return ModelSize(model.name, weights, int(model.cache_memory), model.hidden_size * (4 if dtype == "float32" else 2))


def build_group(description: GroupDescription, model: ModelSize) -> DeviceGroup:
    """Build the group for a model. Raises `UsageError` if the model has more than `MAX_BLOCKS` blocks."""
    if model.blocks > MAX_BLOCKS:
        raise UsageError(f"{model.name} has {model.blocks} blocks; plans are made for {MAX_BLOCKS} at most")
    by_name = {device.name: device for device in description.devices}
    entries = [by_name[name] for name in description.order or by_name]
    devices = tuple(map(_planned_device, entries))
    ends = [*(entry.name for entry in entries), description.client or CLIENT]
    between = {frozenset(link.between): link for link in description.links}

    def link(sender: int, receiver: int) -> tuple[float, float]:
        default, names = description.link, frozenset({ends[sender], ends[receiver]})
        if len(names) == 1:  # the client's own device
            return 0.0, float("inf")
        special = between.get(names)
        latency = special.latency if special is not None and special.latency is not None else default.latency
        bandwidth = special.bandwidth if special is not None and special.bandwidth is not None else default.bandwidth
        entry = by_name.get(ends[sender])
        upload = entry.upload if entry is not None and entry.upload is not None else bandwidth
        return float(latency), float(min(upload, bandwidth))

    send, latency = link_tables(len(ends), model.hidden_bytes, link)
    fixed = description.order is not None or not can_try_all_orders(len(devices), model.blocks)
    return DeviceGroup(devices, model, description.cache_tokens, send, latency, fixed, description.read_share or 1.0)


def _planned_device(entry: DeviceDescription) -> PlannedDevice:
    drive = None if entry.drive is None else PlannedDrive(int(entry.drive.space), float(entry.drive.speed))
    return PlannedDevice(entry.name, int(entry.memory), entry.speed, drive)


FILE_COMMENT = """From the servers' announcements. memory is a lower bound, what the current blocks and free cache take;
replace it with what `swarm server` prints as free. speed, upload and links are as measured by the servers.
link applies to every pair that was not measured, and to the client."""


def describe_servers(
    servers: Sequence[ServerInfo],
    model: ModelSize,
    source: str | None,
    held: Mapping[str, ModelSize] | None = None,
) -> GroupDescription:
    """Describe online servers of a model as a group.

    Args:
        servers: in the order in which they should be listed.
        source: local folder or hub id of the model; None for the demo model.
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
        cache_tokens=min(DEFAULT_CACHE_TOKENS, least),
        link=_default_link(servers),
        links=_links(servers, names),
    )


def common_quantization(servers: Sequence[ServerInfo]) -> str:
    """The `--quant` of all servers; "none", which takes the most memory, if they differ."""
    forms = {"nf4" if server.quantization == "int4" else server.quantization for server in servers}
    return forms.pop() if forms in ({"packed"}, {"int8"}, {"nf4"}) else "none"


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
