"""How a span computes: where keys and values lie, and what runs the tokens of a step.

`swarm.models.execution.trials` finds the best strategy for some loaded blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from swarm.common.trials import Trial
from swarm.models.attention.paged_attention import PagedAttention
from swarm.models.execution.cuda_graphs import GraphRecorder
from swarm.models.execution.tracing.flat_forward import FlatForward
from swarm.models.execution.tracing.traced_forward import TokenFill, TokenForward

CacheLayout = Literal["contiguous", "paged", "padded"]
"""Where the keys and values of sequences lie.

contiguous: each session keeps a store of its own, in which every sequence begins at slot 0.
paged: the sequences of all sessions lie in pages of one pool, which one kernel reads. Made for GPUs.
padded: sequences that grow together form a rectangle, padded on the left. Slow, but every family can compute with it.
"""

ForwardKind = Literal["plain", "flat", "compiled"]
"""What runs packed tokens: the family's modules, its traced operations one after the other, or machine code."""


@dataclass(frozen=True)
class ExecutionStrategy:
    """How a span computes. Immutable: a model that should compute differently is another `SpanModel`.

    Attributes:
        layout: where keys and values lie. Tokens of several sessions share a forward unless it is "padded".
        paging: the page pool and its kernel, for the paged layout only. All parts of a loaded span share it.
        forward: what runs packed tokens.
        traced: the traced forward, unless `forward` is "plain".
        flat: the flat forward, for parts of the blocks; None if the family's modules are faster or cannot be traced.
        traced_fill: stores keys and values of tokens that skip the blocks; None to run the family's modules for that.
        graph_recorder: records decode steps as graphs, see `cuda_graphs`; None to record nothing. Needs pages.
        trials: what was tried on this machine to find this strategy, in order.
    """

    layout: CacheLayout = "padded"
    paging: PagedAttention | None = None
    forward: ForwardKind = "plain"
    traced: TokenForward | None = None
    flat: FlatForward | None = None
    traced_fill: TokenFill | None = None
    graph_recorder: GraphRecorder | None = None
    trials: tuple[Trial, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if (self.paging is not None) != (self.layout == "paged"):
            raise ValueError(f"the layout {self.layout!r} does not go with paging={self.paging!r}")
        if (self.traced is not None) != (self.forward != "plain"):
            raise ValueError(f"a {self.forward} forward does not go with traced={self.traced!r}")
        if self.traced is not None and not self.packed:
            raise ValueError("a traced forward needs packed tokens, and a padded layout has none")
        if self.graph_recorder is not None and self.paging is None:
            raise ValueError(f"decode steps are recorded over pages only, not over a {self.layout} layout")

    @property
    def packed(self) -> bool:
        """Whether tokens of many sessions can be computed in one forward."""
        return self.layout != "padded"

    def plain(self) -> ExecutionStrategy:
        """The same layout, with the family's modules and no recordings."""
        return ExecutionStrategy(self.layout, self.paging, trials=self.trials)

    def after(self, *trials: Trial) -> ExecutionStrategy:
        """The same, found by some more trials."""
        return replace(self, trials=(*self.trials, *trials))

    def narrowed(self, start: int, end: int) -> ExecutionStrategy:
        """The same for the blocks [start, end) of those that it is for.

        What is compiled computes just all of them. Decode steps of a part are not recorded either: clients choose the
        parts, and recordings take memory and time.
        """
        if self.flat is None:
            return replace(self, forward="plain", traced=None, traced_fill=None, graph_recorder=None)
        flat = self.flat.narrowed(start, end)
        return replace(self, forward="flat", traced=flat, flat=flat, traced_fill=None, graph_recorder=None)

    def __str__(self) -> str:
        graphs = ", recorded decode steps" if self.graph_recorder is not None else ""
        return f"{self.layout} cache, {self.forward} forward{graphs}"


PADDED = ExecutionStrategy()
"""What every family can compute with."""
