"""Kinds of hostile messages. Each module here has one subclass of `Kind`, which the campaign finds by itself."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import random
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tests.fuzz.targets import Targets


class Violation(Exception):
    """Something happened that must not happen, whatever anybody sends. The message says what."""


class Kind:
    """One kind of hostile messages. Made without arguments; `open`, many times `send`, `close`, in one event loop.

    Attributes:
        name: such as "frames".
        share: percent of all messages; 0 for a kind that does not count, of which a batch is sent now and then.
        outcomes: how often what came of a message; what is refused counts under the error's code. For the table.
    """

    name: ClassVar[str]
    share: ClassVar[int]

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    async def open(self, targets: Targets) -> None:
        """Get ready: peers, connections, a model of the protocol."""

    async def send(self, random: random.Random) -> int:
        """Send one batch; how many messages it had: 10 to 200. Takes a few seconds at most.

        All that is sent follows from `random` alone, so that the batch can be replayed. Other kinds send at the same
        time. Raises `Violation` for what must not happen; any other exception is a violation too.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Give everything back. Called also if `open` or `send` has failed."""


async def gather_all(work: Iterable[Awaitable[None]]) -> None:
    """Wait for all, then raise the first error."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def load_kinds() -> dict[str, type[Kind]]:
    """All kinds, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {kind.name: kind for kind in sorted(Kind.__subclasses__(), key=lambda kind: -kind.share)}


__all__ = ["Kind", "Violation", "gather_all", "load_kinds"]
