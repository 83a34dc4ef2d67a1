"""Work on a payload that takes as long as the payload is large: beside the network loop if that would be felt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_INLINE_BYTES = 1 << 17
"""Up to this size the checksum and the check for NaN take less time (0.1 ms) than handing them to another thread."""


def do_later(size: int, work: Callable[[], object]) -> None:
    """Have `work` on `size` bytes done for which nobody waits: when the network loop is free, or in a thread."""
    loop = asyncio.get_running_loop()
    if size <= MAX_INLINE_BYTES:
        loop.call_soon(work)
    else:
        loop.run_in_executor(None, work)


async def run_large(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` on `size` bytes: computed here if they are few, else in a thread. Raises what it raises.

    Both checks let other threads run meanwhile, so neither the network loop nor the compute thread waits for them.
    """
    if size <= MAX_INLINE_BYTES:
        return work(*args, **kwargs)
    return await in_thread(work, *args, **kwargs)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in another thread, as `asyncio.to_thread` does. While the interpreter ends, threads take no work
    any more: an event loop that goes on for a moment does it itself."""
    try:
        future = asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **kwargs))
    except RuntimeError:
        return work(*args, **kwargs)
    return await future
