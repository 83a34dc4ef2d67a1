"""The tool that finds cycles."""

from __future__ import annotations

import gc

from swarm.data_structures import Span
from tests.garbage import left_to_collector


class Holder(Exception):
    """Something of this project, that may hold itself."""

    __module__ = "swarm.test"


def test_what_is_freed_at_once_is_not_counted():
    with left_to_collector() as found:
        Holder().add_note("nothing holds it")
        kept = Holder()
        kept.self = kept
    assert not found
    assert gc.isenabled()


def test_cycles_are_counted_with_what_hangs_on_them():
    with left_to_collector() as found:
        for start in range(3):
            lost = Holder()
            lost.self, lost.span = lost, [Span(start, 4)]
            del lost
    assert found["swarm.test.Holder"] == 3
    assert found["swarm.data_structures.Span"] in (0, 3)  # the collector does not look at objects without references
