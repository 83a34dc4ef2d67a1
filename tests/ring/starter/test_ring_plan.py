"""Plans of rings: the best one, the one that is told, the one that is taken up again, and what others take over."""

from __future__ import annotations

import itertools
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span
from swarm.errors import PartitionError, RingFileError
from swarm.planning.device_group import ModelSize
from swarm.protocol.messages import Holding
from swarm.ring.pairing import WorkerLine
from swarm.ring.starter.ring_options import (
    RingOptions,
    options_of,
    parse_ring_file,
    partition_numbers,
    read_ring_file,
    write_ring_file,
)
from swarm.ring.starter.ring_plan import (
    RingDevice,
    RingGroup,
    RingPart,
    RingPlan,
    best_plan,
    make_group,
    parse_partition,
    replan,
    resumed_plan,
    told_plan,
)

BLOCK = 1_000_000
BLOCKS = 12


def device(key: str, blocks: float = 100, speed: float = 1.0, latency: float = 0.001) -> RingDevice:
    """A device with memory for so many blocks, which computes a block in 1 ms divided by `speed`."""
    memory = int(blocks * BLOCK / 0.9) + 1
    return RingDevice(key, key or "here", memory, {"bfloat16": BLOCK / (0.001 / speed)}, 0.0, latency, 1e9)


def ring_of(*workers: RingDevice, starter: RingDevice | None = None, blocks: int = BLOCKS) -> RingGroup:
    model = ModelSize("model", (BLOCK,) * blocks, 0, 1)
    return make_group(starter or device("", latency=0.0), workers, model, "bfloat16", 1)


def spans(plan: RingPlan) -> dict[str, str]:
    return {part.worker: str(part.span) for part in plan.parts}


def test_equal_devices_get_equal_parts():
    ring = ring_of(device("a"), device("b"))
    assert str(ring.ring_plan(best_plan(ring))) == "4+4+4"


def test_the_starter_computes_the_first_blocks_or_none():
    ring = ring_of(device("a", speed=100), device("b", speed=100), starter=device("", speed=0.01, latency=0.0))
    plan = ring.ring_plan(best_plan(ring))
    assert plan.local_blocks == 0
    assert plan.numbers == (0, 6, 6)


def test_a_worker_has_a_block_even_where_the_starter_alone_were_faster():
    ring = ring_of(device("a", speed=0.01), starter=device("", speed=100, latency=0.0))
    plan = best_plan(ring)
    assert ring.ring_plan(plan).numbers == (11, 1)
    assert plan.stages[0].device.memory == ring.group.devices[0].memory  # what it says of the starter is true


def test_a_slow_worker_is_left_out():
    ring = ring_of(device("a"), device("snail", speed=0.001))
    assert spans(ring.ring_plan(best_plan(ring))) == {"a": "6:12"}


def test_devices_of_the_same_name_are_told_apart():
    ring = make_group(
        device("", latency=0.0),
        [
            RingDevice("QmFirst1", "pi", 10**9, {"bfloat16": 1e9}, 0.0),
            RingDevice("QmOther2", "pi", 10**9, {"bfloat16": 1e9}, 0.0),
        ],
        ModelSize("model", (BLOCK,) * BLOCKS, 0, 1),
        "bfloat16",
        1,
    )
    assert [one.name for one in ring.group.devices] == ["here", "pi …First1", "pi …Other2"]
    assert set(ring.ring_plan(best_plan(ring)).workers) == {"QmFirst1", "QmOther2"}


@pytest.mark.parametrize(
    ("text", "expected"), [("2+5+5", {"a": "2:7", "b": "7:12"}), ("0+6+6", {"a": "0:6", "b": "6:12"})]
)
def test_a_told_plan_is_followed(text, expected):
    ring = ring_of(device("a"), device("b"))
    plan = told_plan(ring, parse_partition(text))
    assert spans(plan) == expected
    assert str(plan) == text
    assert ring.ring_plan(ring.pipeline_plan(plan)) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [("5+7", "is for 1 workers, and there are 2"), ("2+5+6", "makes 13 blocks"), ("6+0+6", "gives a worker no block")],
)
def test_a_told_plan_that_does_not_fit_is_refused(text, said):
    with pytest.raises(PartitionError, match=said.replace("+", r"\+")):
        told_plan(ring_of(device("a"), device("b")), parse_partition(text))


def test_what_is_no_partition_is_refused():
    for text in ["", "12", "a+b", "2+", "+2", "2++5", "2+-1", "2 + 5", "2+5.0", "99999+1"]:
        with pytest.raises(PartitionError, match="numbers of blocks such as"):
            parse_partition(text)


def test_a_ring_is_taken_up_again_as_it_is():
    held = {"b": Holding("m", "r", 7, 12), "a": Holding("m", "r", 2, 7), "spare": None}
    plan = resumed_plan(held, "m", "r", 12)
    assert plan is not None
    assert str(plan) == "2+5+5"
    assert spans(plan) == {"a": "2:7", "b": "7:12"}


def test_pieces_of_rings_are_not_taken_up():
    for held in [
        {},
        {"a": None},
        {"a": Holding("m", "r", 2, 7)},
        {"a": Holding("m", "r", 2, 7), "b": Holding("m", "r", 8, 12)},
        {"a": Holding("m", "r", 2, 8), "b": Holding("m", "r", 7, 12)},
        {"a": Holding("m", "r", 2, 7), "b": Holding("m", "old", 7, 12)},
        {"a": Holding("m", "r", 2, 13)},
        {"a": Holding("m", "r", 12, 2)},
    ]:
        assert resumed_plan(held, "m", "r", 12) is None


PLAN = RingPlan(2, (RingPart("a", Span(2, 6)), RingPart("b", Span(6, 9)), RingPart("c", Span(9, 12))))


def test_neighbors_take_the_blocks_of_one_that_vanished():
    for present, expected in [
        ({"a", "c"}, {"a": "2:7", "c": "7:12"}),  # cut where both are as quick
        ({"a", "b"}, {"a": "2:6", "b": "6:12"}),
        ({"b", "c"}, {"b": "2:9", "c": "9:12"}),
        ({"b"}, {"b": "2:12"}),
    ]:
        plan = replan(ring_of(device("a"), device("b"), device("c")), PLAN, present)
        assert plan is not None
        assert spans(plan) == expected


def test_a_worker_without_blocks_steps_in():
    ring = ring_of(device("a"), device("b"), device("c"), device("spare"))
    plan = replan(ring, PLAN, {"a", "c", "spare"})
    assert plan is not None
    assert spans(plan) == {"a": "2:6", "spare": "6:9", "c": "9:12"}


def test_where_neighbors_have_no_room_all_is_planned_anew():
    ring = ring_of(device("a", blocks=4), device("b", blocks=3), device("c", blocks=6))
    plan = replan(ring, PLAN, {"a", "c"})
    assert plan is not None
    assert spans(plan) == {"a": "2:6", "c": "6:12"}
    ring = ring_of(device("a", blocks=7), device("b", blocks=3), device("c", blocks=3))
    plan = replan(ring, PLAN, {"b", "a"})
    assert plan is not None
    assert plan.local_blocks == 2


def test_a_ring_waits_for_one_that_the_others_cannot_replace():
    small = ring_of(device("a", blocks=4), device("b", blocks=3), device("c", blocks=3))
    assert replan(small, PLAN, {"a", "c"}) is None
    assert replan(small, PLAN, set()) is None


@given(st.data())
@settings(max_examples=150)
def test_what_is_planned_anew_covers_all_blocks_and_fits(data):
    count = data.draw(st.integers(1, 4))
    devices = [
        device(name, data.draw(st.integers(1, BLOCKS)), data.draw(st.sampled_from([0.5, 1.0, 4.0])))
        for name in "abcd"[:count]
    ]
    ring = ring_of(*devices)
    edges = sorted(data.draw(st.sets(st.integers(1, BLOCKS - 1), min_size=1, max_size=count)))
    parts = [
        RingPart(name, Span(*span)) for name, span in zip("abcd", itertools.pairwise([*edges, BLOCKS]), strict=False)
    ]
    plan = RingPlan(edges[0], tuple(parts))
    present = data.draw(st.sets(st.sampled_from("abcd"[:count])))
    found = replan(ring, plan, present)
    if found is None:
        room = {one.key: int(one.memory * 0.9) // BLOCK for one in devices}
        kept = [part for part in plan.parts if part.worker in present]
        assert sum(room[name] for name in present) < BLOCKS - edges[0] or not kept or len(present) < count
        return
    assert found.local_blocks == plan.local_blocks
    assert set(found.workers) <= present
    assert [found.local_blocks, *(part.span.end for part in found.parts)] == [
        *(part.span.start for part in found.parts),
        BLOCKS,
    ]
    if all(part.worker in present for part in plan.parts) and all(
        ring.group.place(ring.keys.index(part.worker), part.span.start, part.span.end) for part in plan.parts
    ):
        assert spans(found) == spans(plan)


LINES = tuple(WorkerLine(f"QmWorker{n}", f"pi {n}", ("/ip4/10.0.0.1/tcp/1",), bytes(16)) for n in (1, 2))


@pytest.mark.parametrize(
    "options",
    [
        RingOptions(None, LINES),
        RingOptions("org/model", LINES, (2, 5, 5), "main", "bfloat16", "int8", 2048, 4),
    ],
)
def test_what_was_saved_starts_the_same_ring(options, tmp_path):
    path = tmp_path / "ring.yaml"
    write_ring_file(path, options)
    assert options_of(read_ring_file(path)) == options
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_used_names_the_field():
    for text, said in [
        ("model: m", "workers"),
        ("workers: []", "workers"),
        ("workers: [x]\nmodell: m", "modell"),
        ("workers: [x]\npartition: [2, -1]", "partition"),
        ("workers: [x]\ndtype: float64", "dtype"),
        ("- a", "object"),
        ("a: b: c", "YAML"),
    ]:
        with pytest.raises(RingFileError, match=said):
            parse_ring_file(text.encode())


@given(st.lists(st.integers(0, 99), min_size=2, max_size=6))
def test_a_partition_is_a_text_or_numbers(numbers):
    assert partition_numbers(numbers) == partition_numbers("+".join(map(str, numbers))) == tuple(numbers)
    assert partition_numbers(None) is None
