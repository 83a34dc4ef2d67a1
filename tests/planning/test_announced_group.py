"""From announcements to a description."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import ServerInfo
from swarm.errors import UsageError
from swarm.planning.announced_group import FILE_COMMENT, common_quantization, describe_servers
from swarm.planning.device_group import ModelSize
from swarm.planning.group_description import DefaultLink, build_group, parse_group_file, to_yaml
from swarm.planning.partition import partition
from swarm.server.limits import DEFAULT_CACHE_TOKENS
from tests.infos import server_info

MODEL = ModelSize("model", (1000, 2000, 1000, 1000), 10, 64)


def test_what_servers_announce() -> None:
    servers = [
        server_info(0, 2, "peerA", name="desk", throughput=50.0, cache_tokens_free=100, network_throughput=1000.0),
        server_info(2, 4, "peerB", throughput=5.0, cache_tokens_free=200, round_trips=(("peerA", 0.01), ("gone", 9.0))),
    ]
    description = describe_servers(servers, MODEL, "some/model", None)
    first, second = description.devices
    assert (first.name, first.speed, first.upload) == ("desk", 50.0, 64_000.0)
    assert (second.name, second.speed, second.upload) == ("…peerB", 5.0, None)
    assert description.model == "some/model"
    assert description.cache_tokens == 100  # the most that all of them have
    (link,) = description.links
    assert set(link.between) == {"desk", "…peerB"}
    assert link.latency == 0.005
    assert description.link == DefaultLink(latency=link.latency)
    group = build_group(description, MODEL)
    assert [device.usable_memory for device in group.devices] == [3000 + 2 * 100 * 10, 2000 + 2 * 200 * 10]


def test_memory_is_what_the_announced_form_of_the_weights_takes() -> None:
    servers = [
        server_info(0, 2, "a", quantization="int8"),
        server_info(0, 2, "b"),
        server_info(0, 2, "c", quantization="x"),
    ]
    small = ModelSize("model", (500, 1000, 500, 500), 10, 64)
    group = build_group(describe_servers(servers, MODEL, None, None, {"int8": small, "none": MODEL}), MODEL)
    cache = 2 * servers[0].cache_tokens_free * 10
    assert [device.usable_memory - cache for device in group.devices] == [1500, 3000, 3000]


def test_the_form_of_the_weights_that_servers_have_in_common() -> None:
    for announced, quant in [
        ({"none"}, "none"),
        ({"int8"}, "int8"),
        ({"int4"}, "nf4"),
        ({"nf4", "int4"}, "nf4"),
        ({"int8", "none"}, "none"),
        ({"int8", "int4"}, "none"),
        ({"something else"}, "none"),
    ]:
        assert common_quantization([server_info(0, 1, form, quantization=form) for form in announced]) == quant


def test_both_ends_measured_the_link() -> None:
    servers = [
        server_info(0, 2, "a", round_trips=(("b", 0.04),)),
        server_info(2, 4, "b", round_trips=(("a", 0.02), ("b", 1.0))),
    ]
    (link,) = describe_servers(servers, MODEL, None, None).links
    assert link.latency == 0.01


def test_cache_tokens() -> None:
    idle = server_info(0, 4, "a", cache_tokens_free=1 << 20)
    assert describe_servers([idle], MODEL, None, None).cache_tokens == DEFAULT_CACHE_TOKENS
    assert describe_servers([idle], MODEL, None, 77).cache_tokens == 77
    # One whose cache is reserved to the last token is taken to have as much as the others.
    full = server_info(0, 2, "b", cache_tokens_free=0)
    small = server_info(2, 4, "c", cache_tokens_free=300)
    description = describe_servers([full, small], MODEL, None, None)
    assert description.cache_tokens == 300
    assert len(partition(build_group(description, MODEL)).stages) == 2


def test_no_servers_and_too_many() -> None:
    with pytest.raises(UsageError, match="no server of model is online"):
        describe_servers([], MODEL, None, None)
    with pytest.raises(UsageError, match="33 servers are online; plans are made for 32"):
        describe_servers([server_info(0, 4, f"peer{n}") for n in range(33)], MODEL, None, None)


@st.composite
def announced(draw: st.DrawFn) -> list[ServerInfo]:
    """Servers with whatever the schema of announcements lets through."""
    count = draw(st.integers(1, 5))
    ids = [f"Qm{'x' * 38}{n:06}" for n in range(count)]
    names = st.text(max_size=60) | st.sampled_from(["client", "same", ids[0], "…000000", "\x1b[2J"])
    servers = []
    for peer_id in ids:
        start = draw(st.integers(0, 3))
        servers.append(
            server_info(
                start,
                draw(st.integers(start + 1, 4)),
                peer_id,
                name=draw(names),
                throughput=draw(st.floats(0, 1e9, exclude_min=True)),
                cache_tokens_free=draw(st.integers(0, 2**48)),
                network_throughput=draw(st.floats(0, 1e9)),
                round_trips=tuple(draw(st.lists(st.tuples(st.sampled_from(ids), st.floats(0, 3600)), max_size=5))),
            )
        )
    return servers


@given(announced())
def test_whatever_is_announced_can_be_written_and_planned_for(servers: list[ServerInfo]) -> None:
    description = describe_servers(servers, MODEL, None, None)
    assert parse_group_file(to_yaml(description, FILE_COMMENT).encode()) == description
    assert all(device.name.isprintable() for device in description.devices)
    group = build_group(description, MODEL)
    # What a server holds now, it can hold.
    for server, device in zip(servers, group.devices, strict=True):
        if server.cache_tokens_free:
            held = MODEL.memory(server.span.start, server.span.end, description.cache_tokens)
            assert held <= device.usable_memory
