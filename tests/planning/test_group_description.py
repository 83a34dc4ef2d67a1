"""The YAML file: what is read, what is refused and how, and that what is written is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.common.units import ByteSize, BytesPerSecond, Duration
from swarm.data_structures import ServerInfo
from swarm.errors import UsageError
from swarm.planning import group_description
from swarm.planning.device_group import DeviceGroup, ModelSize, PlannedDrive
from swarm.planning.group_description import (
    FILE_COMMENT,
    DefaultLink,
    DeviceDescription,
    DeviceLink,
    DriveDescription,
    GroupDescription,
    ModelDescription,
    build_group,
    common_quantization,
    describe_servers,
    parse_group_file,
    to_yaml,
)
from tests.infos import server_info

FILE = """
model: {name: big, blocks: 8, block_memory: 1 GB, cache_memory: 4 KB, hidden_size: 4096}
cache_tokens: 1000
client: laptop
link: {latency: 2 ms, bandwidth: 8 MB/s}
devices:
  - {name: desktop, memory: 8GB, speed: 100}
  - {name: laptop, memory: 4 GiB, speed: 10.5, upload: 8 Mbit/s}
  - {name: pi, memory: 512 MiB, speed: 1}
links:
  - {between: [pi, desktop], bandwidth: 16 MB/s}
  - {between: [desktop, laptop], latency: 1 ms}
"""


def group_from(text: str) -> DeviceGroup:
    description = parse_group_file(text.encode())
    assert isinstance(description.model, ModelDescription)
    return group_description.build_group(
        description, group_description.described_model_size(description.model, description.dtype)
    )


def test_a_file_becomes_a_group() -> None:
    group = group_from(FILE)
    assert [(device.name, device.memory, device.speed) for device in group.devices] == [
        ("desktop", 8 * 10**9, 100), ("laptop", 4 << 30, 10.5), ("pi", 512 << 20, 1)
    ]  # fmt: skip
    assert group.model.weights == (10**9,) * 8
    assert group.model.memory(2, 4, group.cache_tokens) == 2 * (10**9 + 1000 * 4000)
    assert group.model.hidden_bytes == 8192
    assert not group.fixed_order
    desktop, laptop, pi, client = 0, 1, 2, group.client_index
    assert group.latency[desktop][laptop] == group.latency[laptop][desktop] == 0.001
    assert group.latency[pi][desktop] == 0.002
    assert group.send[pi][desktop] == group.send[desktop][pi] == 8192 / 16e6
    assert group.send[desktop][laptop] == 8192 / 8e6
    assert group.send[laptop][desktop] == 8192 / 1e6  # its upload is slower than the link
    # The client is the laptop.
    assert group.send[laptop][client] == group.send[client][laptop] == group.latency[client][laptop] == 0
    assert group.send[client][desktop] == 8192 / 1e6
    assert group.latency[client][desktop] == 0.001


def test_a_device_has_a_drive() -> None:
    group = group_from(
        FILE.replace("speed: 1}", "speed: 1, drive: {space: 200 GB, speed: 2 GB/s}}") + "read_share: 0.1"
    )
    assert [device.drive for device in group.devices] == [None, None, PlannedDrive(200 * 10**9, 2e9)]
    assert group.read_share == 0.1
    assert group_from(FILE).read_share == 1.0


def test_an_order_is_followed() -> None:
    group = group_from(FILE + "order: [pi, laptop, desktop]")
    assert [device.name for device in group.devices] == ["pi", "laptop", "desktop"]
    assert group.fixed_order
    assert group.send[1][2] == 8192 / 1e6


def test_the_example_of_the_documentation_is_right() -> None:
    page = Path(__file__).parents[2] / "docs" / "private-swarm.md"
    description = parse_group_file(page.read_text().split("```yaml\n")[1].split("```")[0].encode())
    assert [device.name for device in description.devices] == ["desktop", "laptop", "pi"]
    assert description.client == "laptop"


def test_what_is_wrong_is_said_in_one_line() -> None:
    for old, new, message in [
        ("speed: 1}", "speed: fast}", "devices[2].speed: Expected `float`, got `str`"),
        ("speed: 1}", "speed: 0}", "devices[2].speed: Expected `float` >= 1e-06"),
        ("speed: 1}", "speed: .nan}", "devices[2].speed: "),
        ("speed: 1}", "sped: 1}", "devices[2]: Object contains unknown field `sped`"),
        (", speed: 1}", "}", "devices[2]: Object missing required field `speed`"),
        ("8GB", "8 QB", "devices[0].memory: '8 QB' is not a size such as 8GB or 512 MiB"),
        ("8GB", "{}", "devices[0].memory: {} is not a size"),
        ("speed: 1}", "speed: 1, drive: {space: 1 GB}}", "devices[2].drive: Object missing required field `speed`"),
        ("speed: 1}", "speed: 1, drive: {space: 1 GB, speed: 0}}", "devices[2].drive.speed: 0 is not a bandwidth"),
        ("cache_tokens: 1000", "read_share: 1.5", "read_share: Expected `float` <= 1"),
        ("2 ms", "2 MB", "link.latency: '2 MB' is not a time such as 5 ms"),
        ("8 Mbit/s", "8 GB", "devices[1].upload: '8 GB' is not a bandwidth such as 100 Mbit/s"),
        ("name: desktop,", "name: pi,", "devices: two devices are named 'pi'"),
        ("name: pi", "name: client", "devices: the name 'client' is reserved for the client"),
        ("name: pi", "name: yes", "devices[2].name: Expected `str`, got `bool`"),
        ("name: pi", 'name: "a\\nb"', "devices[2].name: "),
        ("client: laptop", "client: phone", "client: 'phone' is not one of the devices"),
        ("[pi, desktop]", "[pi, tv]", "links[0].between: 'tv' is neither a device nor 'client'"),
        ("[pi, desktop]", "[pi, client]", "links[0].between: the client runs on 'laptop'"),
        ("[pi, desktop]", "[pi]", "links[0].between: Expected `array` of length 2"),
        ("[pi, desktop]", "[pi, pi]", "links[0].between: "),
        ("[pi, desktop]", "[laptop, desktop]", "links[1].between: "),
        ("blocks: 8", "blocks: 0", "model.blocks: Expected `int` >= 1"),
        ("blocks: 8", "blocks: 100000", "model.blocks: Expected `int` <= 256"),
        ("cache_tokens: 1000", "cache_tokens: -1", "cache_tokens: Expected `int` >= 1"),
        ("cache_tokens: 1000", "dtype: int3", "dtype: Invalid enum value 'int3'"),
        ("cache_tokens: 1000", "order: [pi]", "order: name every device once"),
        ("cache_tokens: 1000", "order: [pi, pi, desktop]", "order: name every device once"),
        ("cache_tokens: 1000", "order: [pi", "invalid YAML: line 4: "),
        (
            "cache_tokens: 1000",
            "a: !!python/object/apply:os.abort []",
            "invalid YAML: line 3: could not determine a constr",
        ),
    ]:
        assert old in FILE
        with pytest.raises(UsageError) as caught:
            parse_group_file(FILE.replace(old, new, 1).encode())
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


@given(st.binary(max_size=200) | st.text(alphabet="{}[]:-,&*!|>'\"#% \nadevicsnm1", max_size=200).map(str.encode))
def test_any_bytes_are_a_description_or_an_error(data: bytes) -> None:
    with pytest.raises(UsageError):
        parse_group_file(data)


NAMES = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=20).filter(lambda name: name != "client")


@st.composite
def descriptions(draw: st.DrawFn) -> GroupDescription:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    devices = tuple(
        DeviceDescription(
            name=name,
            memory=ByteSize(draw(st.integers(0, 10**18))),
            speed=draw(st.floats(1e-6, 1e9)),
            upload=draw(st.none() | st.floats(1, 1e18).map(BytesPerSecond)),
            drive=draw(st.none() | st.builds(DriveDescription, SIZES, st.floats(1, 1e18).map(BytesPerSecond))),
        )
        for name in names
    )
    return GroupDescription(
        devices=devices,
        model=draw(
            st.none() | NAMES | st.builds(ModelDescription, NAMES, st.integers(1, 9), SIZES, SIZES, st.just(64))
        ),
        dtype=draw(st.sampled_from(["auto", "float16"])),
        cache_tokens=draw(st.integers(1, 2**40)),
        link=DefaultLink(Duration(draw(st.floats(0, 3600))), BytesPerSecond(draw(st.floats(1, 1e18)))),
        links=(DeviceLink(("client", names[0]), Duration(draw(st.floats(0, 3600)))),),
        order=draw(st.none() | st.permutations(names).map(tuple)),
        read_share=draw(st.none() | st.floats(0.01, 1)),
    )


SIZES = st.integers(0, 10**15).map(ByteSize)


@given(descriptions(), st.sampled_from(["", "two\nlines"]))
def test_what_is_written_is_read_again(description: GroupDescription, heading: str) -> None:
    assert parse_group_file(to_yaml(description, heading).encode()) == description


MODEL = ModelSize("model", (1000, 2000, 1000, 1000), 10, 64)


def test_what_servers_announce() -> None:
    servers = [
        server_info(0, 2, "peerA", name="desk", throughput=50.0, cache_tokens_free=100, network_throughput=1000.0),
        server_info(2, 4, "peerB", throughput=5.0, cache_tokens_free=200, round_trips=(("peerA", 0.01), ("gone", 9.0))),
    ]
    description = describe_servers(servers, MODEL, "some/model")
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
    group = build_group(describe_servers(servers, MODEL, None, {"int8": small, "none": MODEL}), MODEL)
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


def test_no_servers_and_too_many() -> None:
    with pytest.raises(UsageError, match="no server of model is online"):
        describe_servers([], MODEL, None)
    with pytest.raises(UsageError, match="33 servers are online; plans are made for 32"):
        describe_servers([server_info(0, 4, f"peer{n}") for n in range(33)], MODEL, None)


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
    description = describe_servers(servers, MODEL, None)
    assert parse_group_file(to_yaml(description, FILE_COMMENT).encode()) == description
    assert all(device.name.isprintable() for device in description.devices)
    group = build_group(description, MODEL)
    # What a server holds now, it can hold.
    for server, device in zip(servers, group.devices, strict=True):
        if server.cache_tokens_free:
            held = MODEL.memory(server.span.start, server.span.end, description.cache_tokens)
            assert held <= device.usable_memory
