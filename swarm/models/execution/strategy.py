"""How a span computes: where keys and values lie, and what runs the tokens of a step.

`swarm.models.execution.strategy_choice` chooses the strategy for some loaded blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.execution.cuda_graphs import GraphRecorder
from swarm.models.execution.traced_forward import FlatForward, TokenFill

CacheLayout = Literal["contiguous", "paged", "padded"]
"""Where the keys and values of sequences lie.

contiguous: each session keeps a store of its own, in which every sequence begins at slot 0.
paged: the sequences of all sessions lie in pages of one pool, which one kernel reads. Made for GPUs.
padded: sequences that grow together form a rectangle, padded on the left. Slow, but every family can compute with it.
"""


@dataclass(frozen=True)
class ExecutionStrategy:
    """How a span computes. Immutable: a model that should compute differently is another `SpanModel`.

    Attributes:
        layout: where keys and values lie. Tokens of several sessions share a forward unless it is "padded".
        paging: the page pool and its kernel, for the paged layout only. All parts of a loaded span share it.
        flat: the traced forward of packed tokens; None to run the family's modules.
        traced_fill: stores keys and values of tokens that skip the blocks; None to run the family's modules for that.
        graph_recorder: records decode steps as graphs, see `cuda_graphs`; None to record nothing. Needs pages.
        by_token: whether a sequence that has begun is continued by one token at a time, because the family's layers
            forget its state if several come (Mamba's first kind).
    """

    layout: CacheLayout = "padded"
    paging: PagedAttention | None = None
    flat: FlatForward | None = None
    traced_fill: TokenFill | None = None
    graph_recorder: GraphRecorder | None = None
    by_token: bool = False

    def __post_init__(self) -> None:
        if (self.paging is not None) != (self.layout == "paged"):
            raise ValueError(f"the layout {self.layout!r} does not go with paging={self.paging!r}")
        if self.flat is not None and not self.packed:
            raise ValueError("a flat forward needs packed tokens, and a padded layout has none")
        if self.graph_recorder is not None and self.paging is None:
            raise ValueError(f"decode steps are recorded over pages only, not over a {self.layout} layout")

    @property
    def packed(self) -> bool:
        """Whether tokens of many sessions can be computed in one forward."""
        return self.layout != "padded"

    def narrowed(self, start: int, end: int) -> ExecutionStrategy:
        """The same for the blocks [start, end) of those that it is for.

        Decode steps of a part are not recorded: clients choose the parts, and recordings take memory and time.
        """
        flat = self.flat.narrowed(start, end) if self.flat is not None else None
        return replace(self, flat=flat, traced_fill=None, graph_recorder=None)

    def __str__(self) -> str:
        forward = "flat" if self.flat is not None else "plain"
        graphs = ", recorded decode steps" if self.graph_recorder is not None else ""
        return f"{self.layout} cache, {forward} forward{graphs}"


PADDED = ExecutionStrategy()
"""What every family can compute with."""
