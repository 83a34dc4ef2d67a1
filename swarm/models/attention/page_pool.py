"""Keys and values of all sessions in pages of one pool, so that one kernel reads the sequences of all of them.

A page holds `page_size` positions of one sequence, in every layer of the span. Copies of a sequence share their full
pages, and holders of a page are counted. Page 0 is the scratch page: it takes what has to be written somewhere, but
is never read.

A pool that is mostly empty can shrink again. Free pages at its beginning are taken first, so that those at its end get
free.

Only the compute thread allocates pages. Any thread releases them, even the garbage collector in the middle of anything
else. So a release only puts pages into a queue, which the next allocation empties.
"""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import torch

PAGE_POSITIONS = 256
"""Positions of a page: FlashAttention 2, which is what torch brings, takes multiples of 256 only."""

MIN_GROWTH_PAGES = 4
"""Pages by which a pool grows at least."""

SHRINK_BELOW = 0.5
"""A pool shrinks to at most this part of its size, so that it is not worth it for little, and not undone at once."""

SPARE_SHARE = 0.5
"""Free pages that a pool keeps when it shrinks, for each page that is held."""

SCRATCH_PAGE = 0
"""The page that does not belong to any sequence."""


class PagePool:
    """The pages of one span.

    Attributes:
        page_size: positions of a page.
        page_count: how many pages there are, including the scratch page.
        layers: number of a layer that has written -> keys, values `[pages or more, page size, heads, dim]`.
        relocations: how often the storage of a layer was moved.
    """

    def __init__(self, page_size: int = PAGE_POSITIONS) -> None:
        self.page_size = page_size
        self.page_count = 1
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.relocations = 0
        self._holders = [1]
        self._free: list[int] = []  # a heap
        self._reserved = 1
        self._released: deque[tuple[int, ...]] = deque()

    @property
    def in_use(self) -> int:
        """Pages that are held."""
        self._collect_released()
        return self.page_count - 1 - len(self._free)

    def holder_count(self, page: int) -> int:
        """How many times a page is held."""
        self._collect_released()
        return self._holders[page]

    def reserve(self, positions: int) -> None:
        """Grow to so many positions in full pages, so that the pool need not grow step by step.

        Raises `torch.OutOfMemoryError`, which leaves the pool as it was.
        """
        pages = 1 + -(-positions // self.page_size)
        self._grow(pages)
        self._reserved = max(self._reserved, pages)

    def shrink(self) -> None:
        """Give memory back if much less would do. Only for the compute thread, between forwards.

        What was reserved stays, and so do pages that are held, and some to spare. If memory for the smaller storage of
        a layer is short, that layer keeps its larger one.
        """
        self._collect_released()
        last = max((page for page, holders in enumerate(self._holders) if holders), default=SCRATCH_PAGE)
        spare = MIN_GROWTH_PAGES + int(self.in_use * SPARE_SHARE)
        pages = max(self._reserved, last + 1, 1 + self.in_use + spare)
        if pages > self.page_count * SHRINK_BELOW:
            return
        self._free = [page for page in self._free if page < pages]
        heapq.heapify(self._free)
        del self._holders[pages:]
        self.page_count = pages
        for number, (keys, values) in self.layers.items():
            try:
                self.layers[number] = _shrunk(keys, pages), _shrunk(values, pages)
            except torch.OutOfMemoryError:
                break
            self.relocations += 1

    def allocate(self, count: int) -> list[int]:
        """Take free pages, which are held once from now on; the pool grows if there are too few.

        Raises `torch.OutOfMemoryError`, and takes none, if the pool cannot grow.
        """
        self._collect_released()
        if count > len(self._free):
            self._grow_for(self.page_count + count - len(self._free))
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Hold pages, which are held already, once more."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: tuple[int, ...]) -> None:
        """Hold pages once less. For any thread."""
        self._released.append(pages)

    @torch.inference_mode()
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the contents of some pages to others, in every layer."""
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
        # Zeros, because kernels may multiply what lies behind a sequence's end by a weight of zero.
        return like.new_zeros(self.page_count, self.page_size, like.shape[1], like.shape[-1])

    def _grow_for(self, needed: int) -> None:
        """Grow by a quarter, so that all copying stays below five times the size; by less if memory is short."""
        try:
            self._grow(max(needed, self.page_count + max(MIN_GROWTH_PAGES, self.page_count // 4)))
        except torch.OutOfMemoryError:
            self._grow(needed)

    def _grow(self, pages: int) -> None:
        """Grow one layer after the other, so that only one layer exists twice at any time.

        If memory runs out in between, some layers have space for pages that do not exist yet, which is harmless.
        """
        if pages <= self.page_count:
            return
        for number in self.layers:
            self._grow_keys(number, pages)
            self._grow_values(number, pages)
        self._free.extend(range(self.page_count, pages))  # larger than all others, so that it stays a heap
        self._holders.extend([0] * (pages - self.page_count))
        self.page_count = pages

    # Two functions, because their variables end with them: the old storage is freed before the next one is made.
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
                    heapq.heappush(self._free, page)


class PageLease:
    """The pages of some sequences, held as long as a session or a step in progress refers to the lease.

    However a session ends (closed, expired, disconnected, its step failed), its pages return to the pool, and never
    while a step still writes to them.

    Attributes:
        tables: the pages of each sequence, in order.
    """

    def __init__(self, pool: PagePool, tables: tuple[tuple[int, ...], ...]) -> None:
        self.tables = tables
        held = tuple(page for table in tables for page in table)
        weakref.finalize(self, pool.release, held).atexit = False


@torch.inference_mode()
def _shrunk(storage: torch.Tensor, pages: int) -> torch.Tensor:
    return storage[:pages].clone()


@torch.inference_mode()
def _grown(storage: torch.Tensor, pages: int) -> torch.Tensor:
    if storage.shape[0] >= pages:
        return storage
    larger = storage.new_zeros(pages, *storage.shape[1:])
    larger[: storage.shape[0]] = storage
    return larger
