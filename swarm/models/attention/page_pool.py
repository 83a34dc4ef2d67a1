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

PAGE_POSITIONS = 256
"""Positions of a page: FlashAttention 2, which is what torch brings, takes multiples of 256 and nothing else."""

MIN_GROWTH_PAGES = 4
"""Pages by which a pool grows at least."""

SCRATCH_PAGE = 0


class PagePool:
    """The pages of one span.

    Attributes:
        page_size: positions of a page.
        page_count: how many pages there are, the one that belongs to nobody included.
        layers: number of a layer that has written -> keys, values `[pages or more, page, heads, dim]`.
        relocations: how often a layer's storage came to lie elsewhere.
    """

    def __init__(self, page_size: int = PAGE_POSITIONS) -> None:
        self.page_size = page_size
        self.page_count = 1
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.relocations = 0
        self._holders = [1]
        self._free: list[int] = []
        self._released: deque[tuple[int, ...]] = deque()

    @property
    def in_use(self) -> int:
        """Pages that somebody holds."""
        self._collect_released()
        return self.page_count - 1 - len(self._free)

    def holder_count(self, page: int) -> int:
        """How many times a page is held."""
        self._collect_released()
        return self._holders[page]

    def reserve(self, positions: int) -> None:
        """Have room for so many positions in full pages from now on, so that the pool need not grow step by step.

        Raises `torch.OutOfMemoryError`, which leaves the pool as it was.
        """
        self._grow(1 + -(-positions // self.page_size))

    def allocate(self, count: int) -> list[int]:
        """Pages that nobody holds, held once from now on; the pool grows if there are too few.

        Raises `torch.OutOfMemoryError`, and takes none, if the pool cannot grow.
        """
        self._collect_released()
        if count > len(self._free):
            self._grow_for(self.page_count + count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Hold pages, which somebody holds already, once more."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: tuple[int, ...]) -> None:
        """Hold pages once less. For any thread."""
        self._released.append(pages)

    @torch.inference_mode()
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what some pages hold to others, in every layer."""
        if not sources:
            return
        for layer in self.layers.values():
            for storage in layer:
                index = torch.tensor([sources, targets], device=storage.device)
                storage.index_copy_(0, index[1], storage.index_select(0, index[0]))

    def layer_storage(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage of one layer, for keys and values `[tokens, heads, ..., dim]` like those given."""
        stored = self.layers.get(number)
        if stored is None:
            stored = self.layers[number] = self._empty(keys), self._empty(values)
            self.relocations += 1
        return stored

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, because kernels may multiply what lies behind a row's end by a weight of zero.
        return like.new_zeros(self.page_count, self.page_size, like.shape[1], like.shape[-1])

    def _grow_for(self, needed: int) -> None:
        """By a quarter, so that what is ever copied stays below five times what is held; by less if memory is short."""
        try:
            self._grow(max(needed, self.page_count + max(MIN_GROWTH_PAGES, self.page_count // 4)))
        except torch.OutOfMemoryError:
            self._grow(needed)

    def _grow(self, pages: int) -> None:
        """One layer after the other, so that no more than one is there twice at any time.

        If memory ends in between, some layers have room for pages that do not exist yet. That harms nothing.
        """
        if pages <= self.page_count:
            return
        for number in self.layers:
            self._grow_keys(number, pages)
            self._grow_values(number, pages)
        self._free.extend(range(pages - 1, self.page_count - 1, -1))
        self._holders.extend([0] * (pages - self.page_count))
        self.page_count = pages

    # Two functions, whose variables end with them: what was copied is freed before the next is made.
    def _grow_keys(self, number: int, pages: int) -> None:
        keys, values = self.layers[number]
        self.layers[number] = _grown(keys, pages), values
        self.relocations += 1

    def _grow_values(self, number: int, pages: int) -> None:
        keys, values = self.layers[number]
        self.layers[number] = keys, _grown(values, pages)

    def _collect_released(self) -> None:
        while self._released:
            for page in self._released.popleft():
                self._holders[page] -= 1
                if not self._holders[page]:
                    self._free.append(page)


class PageLease:
    """The pages of some rows, held until nobody has the lease any more: neither session nor step that is computed.

    However a session ends (closed, expired, disconnected, its step failed), its pages come back, and never while a step
    still writes to them.

    Attributes:
        tables: the pages of each row, in order.
    """

    def __init__(self, pool: PagePool, tables: tuple[tuple[int, ...], ...]) -> None:
        self.tables = tables
        held = tuple(page for table in tables for page in table)
        weakref.finalize(self, pool.release, held).atexit = False


@torch.inference_mode()
def _grown(storage: torch.Tensor, pages: int) -> torch.Tensor:
    if storage.shape[0] >= pages:
        return storage
    larger = storage.new_zeros(pages, *storage.shape[1:])
    larger[: storage.shape[0]] = storage
    return larger
