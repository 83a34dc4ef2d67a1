"""The sequences of a session in pages of the pool, and one forward for tokens of many sessions."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarm.data_structures import StepLayout
from swarm.errors import WrongPosition
from swarm.models.attention.page_pool import PageLease, PagePool
from swarm.models.attention.paged_attention import BatchSequence, PagedBatch, build_index
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.step_part import StepPart, adapter_segments

PageTables = tuple[tuple[int, ...], ...]
"""The pages of each sequence, in order."""


MAX_FORWARD_PAGES = 64
"""New pages for the tokens of a forward without a session that are computed at once: `DEFAULT_CACHE_TOKENS`."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """How a step's sequence gets its pages, in order: those kept from its source, then free ones.

    Attributes:
        kept: pages of the source that the sequence holds too.
        copied: page of the source whose beginning goes into the first new page; None if nothing has to be copied.
        fresh: how many new pages it gets.
        overwrites: whether its new tokens take the place of something that its source may still continue from.
    """

    kept: tuple[int, ...]
    copied: int | None
    fresh: int
    overwrites: bool


def plan_pages(
    tables: PageTables, lengths: Sequence[int], layout: StepLayout, page_size: int, holders: Callable[[int], int]
) -> list[PagePlan]:
    """Which pages each sequence of a step shares, takes over, copies and needs.

    Full pages before a sequence's start are shared. The others are written to. A sequence takes such a page over if
    neither another session nor another sequence of the step needs it; otherwise it gets a new one. A sequence that
    copies the beginning of a page does not need it afterwards. But the step may fail and be sent again: then the page
    must still be there.

    Args:
        tables, lengths: pages and positions of the session's sequences.
        holders: how often a page is held; once if by one of these sequences alone.
    """
    sources = layout.sources if layout.sources is not None else range(layout.sequences)
    befores = [tables[source] if source < len(tables) else () for source in sources]
    needed_by_others = {
        page for before, start in zip(befores, layout.starts, strict=True) for page in before[: start // page_size]
    }
    reach: dict[int, int] = {}
    for before, start in zip(befores, layout.starts, strict=True):
        for page in before[: -(-start // page_size)]:
            reach[page] = max(reach.get(page, 0), start)
    plans = []
    for source, before, start, count in zip(sources, befores, layout.starts, layout.counts, strict=True):
        full, rest = divmod(start, page_size)
        needed = -(-(start + count) // page_size)
        kept = before[:full]
        for page in before[full:needed]:
            if holders(page) > 1 or page in needed_by_others or reach.get(page, 0) > start:
                break
            kept += (page,)
            needed_by_others.add(page)
        copied = before[full] if rest and len(kept) == full else None
        overwrites = len(kept) > full and count > 0 and start < lengths[source]
        plans.append(PagePlan(kept, copied, needed - len(kept), overwrites))
    return plans


@dataclass
class StagedPagedSequences:
    """Sequences as a step leaves them: `lease` has pages for all of the step's tokens, `lengths` include them."""

    sequences: PagedSequences
    lease: PageLease
    lengths: tuple[int, ...]

    def make_room(self, layout: StepLayout) -> int:
        """The lease has it."""
        return layout.tokens

    def commit(self) -> None:
        """Make them the session's sequences."""
        self.sequences.lease, self.sequences.lengths = self.lease, self.lengths


class PagedSequences:
    """The sequences of one session.

    Attributes:
        lease: their pages, which return to the pool when the lease is not used any more.
        lengths: positions of each sequence.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.lease = PageLease(pool, ())
        self.lengths: tuple[int, ...] = ()

    def inputs_again(self, layout: StepLayout) -> None:
        """Keys and values go back by themselves."""

    def stage(self, layout: StepLayout, inputs: torch.Tensor) -> StagedPagedSequences:
        """The sequences copied and rolled back as the layout says, with pages for the tokens that they bring.

        Raises `torch.OutOfMemoryError`, and changes nothing, if the pool cannot grow.
        """
        ends = tuple(map(operator.add, layout.starts, layout.counts))
        if self._continues_in_place(layout):
            return StagedPagedSequences(self, self.lease, ends)
        plans = plan_pages(self.lease.tables, self.lengths, layout, self.pool.page_size, self.pool.holder_count)
        lease = self._lease_pages(plans)
        self.lengths = self._lengths_if_step_fails(layout, plans)
        return StagedPagedSequences(self, lease, ends)

    def beginning(self, length: int, max_length: int) -> PagedSequences:
        """See `SequenceStorage.beginning`. It shares the pages: whoever writes to one takes another."""
        result = PagedSequences(self.pool)
        pages = self.lease.tables[0][: -(-length // self.pool.page_size)]
        self.pool.retain(pages)
        result.lease, result.lengths = PageLease(self.pool, (pages,)), (length,)
        return result

    def _continues_in_place(self, layout: StepLayout) -> bool:
        """Whether all sequences continue at their ends, in pages of their own. Quicker than a plan with no changes."""
        if layout.sources is not None or layout.starts != self.lengths:
            return False
        page_size, holders = self.pool.page_size, self.pool.holder_count
        for table, start, count in zip(self.lease.tables, layout.starts, layout.counts, strict=True):
            if start + count > len(table) * page_size or any(holders(page) > 1 for page in table[start // page_size :]):
                return False
        return True

    def _lease_pages(self, plans: Sequence[PagePlan]) -> PageLease:
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

    def _lengths_if_step_fails(self, layout: StepLayout, plans: Sequence[PagePlan]) -> tuple[int, ...]:
        """What the session may continue from if the step fails: nothing that the step may have overwritten."""
        left = list(self.lengths)
        sources = layout.sources if layout.sources is not None else range(layout.sequences)
        for source, start, one in zip(sources, layout.starts, plans, strict=True):
            if one.overwrites:
                left[source] = min(left[source], start)
        return tuple(left)


class StagedWholePages:
    """Whole sequences, of which only those have pages that are being computed.

    Attributes:
        lease: the pages of each sequence; none of those that are computed, or have not begun.
    """

    def __init__(self, pool: PagePool, sequences: int) -> None:
        self.lease = PageLease(pool, ((),) * sequences)
        self._pool = pool

    def make_room(self, layout: StepLayout) -> int:
        """Pages for the next tokens, as many as `MAX_FORWARD_PAGES` hold; the sequences before give theirs back.

        Raises `torch.OutOfMemoryError` if the pool cannot grow.
        """
        tables: list[tuple[int, ...]] = []
        kept: list[int] = []
        fresh: list[int] = []
        tokens, room = 0, MAX_FORWARD_PAGES
        for table, start, count in zip(self.lease.tables, layout.starts, layout.counts, strict=True):
            before = table if start and count else ()
            new = min(-(-(start + count) // self._pool.page_size) - len(before), room) if count else 0
            tables.append(before)
            fresh.append(new)
            room -= new
            kept.extend(before)
            tokens += max(0, min(count, (len(before) + new) * self._pool.page_size - start))
        self._pool.retain(kept)
        self.lease = PageLease(self._pool, tuple(tables))  # what is computed is given back first
        taken = iter(self._pool.allocate(sum(fresh)))
        self._pool.retain(kept)
        held = [(*before, *itertools.islice(taken, new)) for before, new in zip(tables, fresh, strict=True)]
        self.lease = PageLease(self._pool, tuple(held))
        return tokens

    def commit(self) -> None:
        """Nothing is kept."""


class WholePagedSequences:
    """Sequences that one step brings from beginning to end, and of which nothing is kept.

    With pages for all of them at once, many short ones would take a page each.
    """

    lengths: tuple[int, ...] = ()

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def inputs_again(self, layout: StepLayout) -> None:
        """Keys and values go back by themselves."""

    def beginning(self, length: int, max_length: int) -> WholePagedSequences:
        """Nothing is kept."""
        raise WrongPosition("a forward without a session keeps nothing")

    def stage(self, layout: StepLayout, inputs: torch.Tensor) -> StagedWholePages:
        """No pages yet. Raises `WrongPosition` if the step continues anything."""
        if any(layout.starts) or layout.sources is not None:
            raise WrongPosition("the sequences of a forward without a session begin at position 0")
        return StagedWholePages(self._pool, layout.sequences)


def compute_parts(model: SpanModel, parts: Sequence[StepPart]) -> list[torch.Tensor]:
    """One forward for all parts, whose sequences are `StagedPagedSequences`; the outputs of each part."""
    hidden_NH, positions, members = _packed(parts)
    with model.adapted.activate(adapter_segments(parts)), model.text_lengths(parts):
        output_NH = _forward(model, hidden_NH, positions, members)
    return list(output_NH.split([len(part.inputs) for part in parts]))


def fill_parts(model: SpanModel, parts: Sequence[StepPart]) -> None:
    """Store keys and values of the parts' tokens; see `SpanModel.fill_tokens`."""
    paging = model.strategy.paging
    assert paging is not None
    hidden_NH, positions, members = _packed(parts)
    index = build_index(members, paging.pool.page_size, model.device)
    with model.adapted.activate(adapter_segments(parts)), model.text_lengths(parts):
        model.fill_tokens(hidden_NH, positions, PagedBatch(paging, index))


def _packed(parts: Sequence[StepPart]) -> tuple[torch.Tensor, list[int], list[BatchSequence]]:
    """Hidden states and positions of the tokens of all parts, and the sequences that they belong to."""
    members: list[BatchSequence] = []
    positions: list[int] = []
    for part in parts:
        layout = part.layout
        offsets = layout.offsets if layout.offsets is not None else (0,) * layout.sequences
        sequences = zip(part.staged.lease.tables, layout.starts, layout.counts, offsets, strict=True)
        for table, start, count, offset in sequences:
            if count:
                members.append(BatchSequence(table, start, count))
                positions.extend(range(start + offset, start + offset + count))
    inputs = [part.inputs for part in parts]
    return inputs[0] if len(inputs) == 1 else torch.cat(inputs), positions, members


def _forward(
    model: SpanModel, hidden_NH: torch.Tensor, positions: Sequence[int], members: Sequence[BatchSequence]
) -> torch.Tensor:
    paging = model.strategy.paging
    assert paging is not None
    if model.graphs is not None and model.runs_traced:
        replayed = model.graphs.step(hidden_NH, positions, members)
        if replayed is not None:
            return replayed
    index = build_index(members, paging.pool.page_size, model.device)
    return model.forward_tokens(hidden_NH, positions, PagedBatch(paging, index))
