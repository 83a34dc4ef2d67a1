"""What is left to Python's garbage collector, because it lies in a cycle of references."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_to_collector() -> Iterator[Counter[str]]:
    """Counts objects of this project that nobody has at the end of the body, and that were not freed all the same.

    By the full names of their types. Everything else that a process holds longest hangs on such objects.
    """
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        found.update(name for name in names if name.startswith("swarm."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
