"""Checksums of this client's copies of what goes into a hop; those of large ones are computed in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.client.hops.input_history import Step
from swarm.common.large_payloads import MAX_INLINE_BYTES
from swarm.protocol.input_checksum import input_checksum


class OwnChecksums:
    """The checksums of one hop's inputs.

    Args:
        on_change: called when one has been computed that was asked for before.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._computed: dict[int, asyncio.Task[bytes]] = {}

    def get(self, step: Step) -> bytes | None:
        """The checksum of a step's input; None if it has yet to come."""
        if len(step.hidden.payload) <= MAX_INLINE_BYTES:
            return input_checksum(step.request, step.hidden.payload)
        task = self._computed.get(step.number)
        if task is None:
            work = asyncio.to_thread(input_checksum, step.request, step.hidden.payload)
            task = self._computed[step.number] = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(lambda _: self._on_change())
        if not task.done():
            return None
        return self._computed.pop(step.number).result()

    def clear(self) -> None:
        """Forget all of them."""
        for task in self._computed.values():
            task.cancel()
        self._computed.clear()
