from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import ModelInfo
from swarm.monitor.source import MAX_BLOCKS, MAX_MODELS, chosen

infos = st.builds(ModelInfo, st.text("abcdef", min_size=1, max_size=1), st.integers(1, 2048), st.just("main"))
lists = st.lists(infos, max_size=6, unique_by=lambda info: info.name)


@given(lists, lists, st.lists(st.text("abcdef", min_size=1, max_size=1), max_size=4))
def test_what_is_looked_at_is_bounded_and_nothing_is_lost(listed, remembered, wanted):
    taken, absent, left_out = chosen(listed, remembered, wanted)
    known = {info.name for info in (*listed, *remembered)}
    assert sum(info.blocks for info in taken) <= MAX_BLOCKS
    assert len({info.name for info in taken}) == len(taken)
    assert all(info in listed for info in taken if info.name in {one.name for one in listed})
    if wanted:
        assert {info.name for info in taken} <= set(wanted)
        assert set(absent) == set(wanted) - known
    assert len(taken) + left_out == len(known & set(wanted) if wanted else known)


def test_models_that_nobody_names_any_more_are_looked_at_too():
    listed, gone = ModelInfo("now", 3, "main"), ModelInfo("gone", 4, "main")
    assert chosen([listed], [gone, ModelInfo("now", 3, "old")], ()) == ([listed, gone], (), 0)


def test_a_flood_of_names_does_not_take_the_place_of_models_that_many_serve():
    listed = [ModelInfo("real", 100, "main"), *(ModelInfo(f"fake{n}", 2000, "main") for n in range(500))]
    taken, _, left_out = chosen(listed, (), ())
    assert taken[0].name == "real"
    assert sum(info.blocks for info in taken) <= MAX_BLOCKS
    assert left_out == 501 - len(taken)
    small = [ModelInfo(f"fake{n}", 1, "main") for n in range(500)]
    assert len(chosen(small, (), ())[0]) == MAX_MODELS
    # Who names his models is not bothered at all.
    assert chosen(listed, (), ["real"]) == ([listed[0]], (), 0)
