"""How many requests of a server are being answered."""

from __future__ import annotations

import asyncio


class UnansweredRequests:
    """Counts the requests that have arrived and are not answered yet."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def add(self) -> None:
        """A request has arrived."""
        self._count += 1
        self._none.clear()

    def remove(self, count: int = 1) -> None:
        """Some requests are answered, or dropped."""
        self._count -= count
        if not self._count:
            self._none.set()

    async def none(self) -> None:
        """Return once every request that has arrived is answered."""
        await self._none.wait()
