"""Keys and values of all sessions in pages of one pool, so that one kernel reads the rows of all of them.

A page holds `page` positions of one row, in every layer of the span. Rows that are copied share their full pages; who
holds a page is counted. Page 0 belongs to nobody: what has to be written somewhere, but is read by no row, goes there.

Only the compute thread takes pages. They are given back from any thread, also by the garbage collector in the middle
of anything, so that giving back is no more than putting them into a queue that the next taker empties.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import torch

PAGE = 256
"""Positions of a page: FlashAttention 2, which is what torch brings, takes multiples of 256 and nothing else."""

FIRST_PAGES = 4
"""Pages by which a pool grows at least."""

SCRATCH = 0


class PagePool:
    """The pages of one span.

    Attributes:
        page: positions of a page.
        pages: how many pages there are, the one that belongs to nobody included.
        layers: number of a layer that has written -> keys, values `[pages or more, page, heads, dim]`.
        moves: how often a layer's storage came to lie elsewhere.
    """

    def __init__(self, page: int = PAGE) -> None:
        self.page = page
        self.pages = 1
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.moves = 0
        self._holders = [1]
        self._free: list[int] = []
        self._returned: deque[tuple[int, ...]] = deque()

    @property
    def in_use(self) -> int:
        """Pages that somebody holds."""
        self._take_back()
        return self.pages - 1 - len(self._free)

    def holders(self, page: int) -> int:
        """How many times a page is held."""
        self._take_back()
        return self._holders[page]

    def reserve(self, positions: int) -> None:
        """Have room for so many positions in full pages from now on, so that the pool need not grow step by step.

        Raises `torch.OutOfMemoryError`, which leaves the pool as it was.
        """
        self._grow(1 + -(-positions // self.page))

    def take(self, count: int) -> list[int]:
        """Pages that nobody holds, held once from now on; the pool grows if there are too few.

        Raises `torch.OutOfMemoryError`, and takes none, if the pool cannot grow.
        """
        self._take_back()
        if count > len(self._free):
            self._grow_for(self.pages + count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages, which somebody holds already, once more."""
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: tuple[int, ...]) -> None:
        """Hold pages once less. For any thread."""
        self._returned.append(pages)

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what some pages hold to others, in every layer."""
        if not sources:
            return
        for layer in self.layers.values():
            for storage in layer:
                index = torch.tensor([sources, targets], device=storage.device)
                storage.index_copy_(0, index[1], storage.index_select(0, index[0]))

    def layer(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage of one layer, for keys and values `[tokens, heads, ..., dim]` like those given."""
        stored = self.layers.get(number)
        if stored is None:
            stored = self.layers[number] = self._empty(keys), self._empty(values)
            self.moves += 1
        return stored

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, because kernels may multiply what lies behind a row's end by a weight of zero.
        return like.new_zeros(self.pages, self.page, like.shape[1], like.shape[-1])

    def _grow_for(self, needed: int) -> None:
        """By a quarter, so that what is ever copied stays below five times what is held; by less if memory is short."""
        try:
            self._grow(max(needed, self.pages + max(FIRST_PAGES, self.pages // 4)))
        except torch.OutOfMemoryError:
            self._grow(needed)

    def _grow(self, pages: int) -> None:
        """One layer after the other, so that no more than one is there twice at any time.

        If memory ends in between, some layers have room for pages that do not exist yet. That harms nothing.
        """
        if pages <= self.pages:
            return
        for number in self.layers:
            self._grow_keys(number, pages)
            self._grow_values(number, pages)
        self._free.extend(range(pages - 1, self.pages - 1, -1))
        self._holders.extend([0] * (pages - self.pages))
        self.pages = pages

    # Two functions, whose variables end with them: what was copied is freed before the next is made.
    def _grow_keys(self, number: int, pages: int) -> None:
        keys, values = self.layers[number]
        self.layers[number] = _grown(keys, pages), values
        self.moves += 1

    def _grow_values(self, number: int, pages: int) -> None:
        keys, values = self.layers[number]
        self.layers[number] = keys, _grown(values, pages)

    def _take_back(self) -> None:
        while self._returned:
            for page in self._returned.popleft():
                self._holders[page] -= 1
                if not self._holders[page]:
                    self._free.append(page)


class Lease:
    """The pages of some rows, held until nobody has the lease any more: neither session nor step that is computed.

    However a session ends (closed, expired, disconnected, its step failed), its pages come back, and never while a step
    still writes to them.

    Attributes:
        tables: the pages of each row, in order.
    """

    def __init__(self, pool: PagePool, tables: tuple[tuple[int, ...], ...]) -> None:
        self.tables = tables
        held = tuple(page for table in tables for page in table)
        weakref.finalize(self, pool.give_back, held).atexit = False


@torch.inference_mode()
def _grown(storage: torch.Tensor, pages: int) -> torch.Tensor:
    if storage.shape[0] >= pages:
        return storage
    larger = storage.new_zeros(pages, *storage.shape[1:])
    larger[: storage.shape[0]] = storage
    return larger
