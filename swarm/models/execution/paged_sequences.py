"""A session's rows in pages, and one forward for tokens of many sessions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.data_structures import StepLayout
from swarm.models.adapters.adapter_batch import active_adapters
from swarm.models.attention.page_pool import PageLease, PagePool
from swarm.models.attention.paged_attention import BatchSequence, PagedBatch, build_index
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.step_part import StepPart, adapter_shares

Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """How a step's row gets its pages, in order: those of its source, then `fresh` ones nobody holds.

    Attributes:
        kept: pages of the source that the row holds too.
        copied: page of the source whose beginning goes into the first fresh page; None if nothing has to be copied.
        overwrites: whether the row's new tokens take the place of something that its source may still go on from.
    """

    kept: tuple[int, ...]
    copied: int | None
    fresh: int
    overwrites: bool


def plan_pages(
    tables: Tables, lengths: Sequence[int], layout: StepLayout, page: int, holders: Callable[[int], int]
) -> list[PagePlan]:
    """Which pages each row of a step shares, takes over, copies and needs.

    Full pages before a row's start are shared. The others are written to, so a row takes them over if nobody else
    needs them, neither another session's row nor another row of the step; else it gets fresh ones. A row that copies a
    page's beginning needs no more of it, unless the step fails and comes again: then it must still be there.

    Args:
        tables, lengths: pages and positions of the session's rows.
        holders: how often a page is held; once if by one of these rows alone.
    """
    sources = layout.sources if layout.sources is not None else range(layout.sequences)
    befores = [tables[source] if source < len(tables) else () for source in sources]
    needed_by_others = {
        page_id for before, start in zip(befores, layout.starts, strict=True) for page_id in before[: start // page]
    }
    reach: dict[int, int] = {}
    for before, start in zip(befores, layout.starts, strict=True):
        for page_id in before[: -(-start // page)]:
            reach[page_id] = max(reach.get(page_id, 0), start)
    plans = []
    for source, before, start, count in zip(sources, befores, layout.starts, layout.counts, strict=True):
        full, rest = divmod(start, page)
        needed = -(-(start + count) // page)
        kept = before[:full]
        for page_id in before[full:needed]:
            if holders(page_id) > 1 or page_id in needed_by_others or reach.get(page_id, 0) > start:
                break
            kept += (page_id,)
            needed_by_others.add(page_id)
        copied = before[full] if rest and len(kept) == full else None
        overwrites = len(kept) > full and count > 0 and start < lengths[source]
        plans.append(PagePlan(kept, copied, needed - len(kept), overwrites))
    return plans


@dataclass
class StagedPagedSequences:
    """Rows as a step leaves them: `lease` has room for all of the step's tokens, `lengths` are with them."""

    rows: PagedSequences
    lease: PageLease
    lengths: tuple[int, ...]

    def commit(self) -> None:
        self.rows.lease, self.rows.lengths = self.lease, self.lengths


class PagedSequences:
    """The rows of one session.

    Attributes:
        lease: their pages, which go back to the pool when nobody has the rows any more.
        lengths: positions of each row.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.lease = PageLease(pool, ())
        self.lengths: tuple[int, ...] = ()

    def stage(self, layout: StepLayout) -> StagedPagedSequences:
        """The rows copied and set back as the layout says, with pages for what they bring.

        Raises `torch.OutOfMemoryError`, and changes nothing, if the pool cannot grow.
        """
        ends = tuple(map(operator.add, layout.starts, layout.counts))
        if self._goes_on(layout):
            return StagedPagedSequences(self, self.lease, ends)
        plans = plan_pages(self.lease.tables, self.lengths, layout, self.pool.page_size, self.pool.holder_count)
        lease = self._leased(plans)
        self.lengths = self._left(layout, plans)
        return StagedPagedSequences(self, lease, ends)

    def _goes_on(self, layout: StepLayout) -> bool:
        """Whether a plan would change nothing, without making one: rows go on where they end, in pages of their own."""
        if layout.sources is not None or layout.starts != self.lengths:
            return False
        page, holders = self.pool.page_size, self.pool.holder_count
        for table, start, count in zip(self.lease.tables, layout.starts, layout.counts, strict=True):
            if start + count > len(table) * page or any(holders(one) > 1 for one in table[start // page :]):
                return False
        return True

    def _leased(self, plans: Sequence[PagePlan]) -> PageLease:
        if tuple(one.kept for one in plans) == self.lease.tables and not any(one.fresh for one in plans):
            return self.lease
        fresh = iter(self.pool.allocate(sum(one.fresh for one in plans)))
        tables, pairs = [], []
        for one in plans:
            self.pool.retain(one.kept)
            new = [next(fresh) for _ in range(one.fresh)]
            if one.copied is not None:
                pairs.append((one.copied, new[0]))
            tables.append((*one.kept, *new))
        lease = PageLease(self.pool, tuple(tables))  # before anything can fail
        self.pool.copy_pages([source for source, _ in pairs], [target for _, target in pairs])
        return lease

    def _left(self, layout: StepLayout, plans: Sequence[PagePlan]) -> tuple[int, ...]:
        """What is left of the rows, should the step fail: nobody may go on from what it is going to overwrite."""
        left = list(self.lengths)
        sources = layout.sources if layout.sources is not None else range(layout.sequences)
        for source, start, one in zip(sources, layout.starts, plans, strict=True):
            if one.overwrites:
                left[source] = min(left[source], start)
        return tuple(left)


def compute(model: SpanModel, parts: Sequence[StepPart]) -> list[torch.Tensor]:
    """One forward for all parts, whose drafts are `StagedPagedSequences`s."""
    members: list[BatchSequence] = []
    positions: list[int] = []
    for part in parts:
        layout = part.layout
        offsets = layout.offsets if layout.offsets is not None else (0,) * layout.sequences
        rows = zip(part.staged.lease.tables, layout.starts, layout.counts, offsets, strict=True)
        for table, start, count, offset in rows:
            if count:
                members.append(BatchSequence(table, start, count))
                positions.extend(range(start + offset, start + offset + count))
    inputs = [part.inputs for part in parts]
    hidden_NH = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
    with model.adapted.activate(adapter_shares(parts)):
        output_NH = _forward(model, hidden_NH, positions, members)
    return list(output_NH.split([len(hidden) for hidden in inputs]))


def _forward(
    model: SpanModel, hidden_NH: torch.Tensor, positions: Sequence[int], members: Sequence[BatchSequence]
) -> torch.Tensor:
    assert model.paging is not None
    if model.graphs is not None and active_adapters() is None:  # what is recorded knows no adapters
        replayed = model.graphs.step(hidden_NH, positions, members)
        if replayed is not None:
            return replayed
    index = build_index(members, model.paging.pool.page_size, model.device)
    return model.forward_tokens(hidden_NH, positions, PagedBatch(model.paging, index))
