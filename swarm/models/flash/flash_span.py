"""A span whose blocks compute from records, each kind in its way, within one budget of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from swarm.data_structures import FlashUse
from swarm.models.flash.block_plan import FlashBlock, RecordKind
from swarm.models.flash.experts import attach as experts
from swarm.models.flash.experts.expert_pool import ExpertPool
from swarm.models.flash.memory_shares import NeuronNeed, divide_neurons, memory_needs, share_memory, slab_bytes
from swarm.models.flash.neurons import sparse_feed_forward
from swarm.models.flash.neurons.active_window import ForwardTokens
from swarm.models.flash.neurons.sparse_feed_forward import SlabMemory, SpanShared, SparseFeedForward, SparseOptions
from swarm.models.flash.streaming import BlockStream


@dataclass(frozen=True)
class FlashSpan:
    """The parts of a loaded span that compute from records. Used by one thread at a time.

    Attributes:
        weight_bytes: memory that all weights of the span take, buffers for records included.
        blocks: in the order of the span.
        stream: the blocks that are read whole; None if there are none.
        pools: experts in memory, one for each layout.
        neurons: feed-forward layers that select neurons.
        shared: what these have in common.
        perplexity_loss: how much selecting neurons raises the perplexity, as a share; None if it was not measured.
        files: what lets go of the packed files.
    """

    weight_bytes: int
    blocks: Sequence[FlashBlock]
    stream: BlockStream | None = None
    pools: Sequence[ExpertPool] = ()
    neurons: Sequence[SparseFeedForward] = ()
    shared: SpanShared = field(default_factory=lambda: SpanShared(SlabMemory(0)))
    perplexity_loss: float | None = None
    files: ExitStack = field(default_factory=ExitStack)

    @property
    def sparse(self) -> bool:
        """Whether results are approximate, because a token is computed with some neurons only."""
        return bool(self.neurons)

    @property
    def trainable(self) -> bool:
        """Whether there are gradients: a streamed block has all of its weights while it is computed."""
        return not self.pools and not self.neurons

    @property
    def record_bytes(self) -> int:
        """Bytes of all records on the drive."""
        return sum(one.store.layout.file_bytes for one in self.blocks)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Meanwhile, all tokens are computed with all neurons."""
        before, self.shared.exactly = self.shared.exactly, True
        try:
            yield
        finally:
            self.shared.exactly = before

    def begin_forward(self, counts: Sequence[int]) -> None:
        """Say how many tokens each sequence of the next forward brings: several are a prompt's, or candidates of
        speculation, of which the window over neurons keeps those that are expected to be accepted."""
        self.shared.tokens.counts = counts

    def use(self) -> FlashUse:
        """What was read so far."""
        read = [one.store.counters for one in self.blocks]
        experts = [pool.counters for pool in self.pools]
        neurons = [layer.counters for layer in self.neurons]
        return FlashUse(
            read_bytes=sum(one.bytes for one in read),
            reads=sum(one.reads for one in read),
            wait_seconds=sum(one.wait_seconds for one in read),
            needed=sum(one.hits + one.misses for one in experts) + sum(one.needed for one in neurons),
            hits=sum(one.hits for one in experts) + sum(one.needed - one.read for one in neurons),
            selected=sum(one.selected for one in neurons),
            selectable=sum(one.tokens * one.neurons for one in neurons),
        )

    def close(self) -> None:
        """Let go of the files. The blocks cannot be computed any more."""
        self.files.close()


def attach_blocks(blocks: Sequence[FlashBlock], memory: int, resident_bytes: int) -> FlashSpan:
    """Put modules that compute from records into the blocks of a span.

    Args:
        blocks: in the order of the span.
        memory: bytes for all weights of the span.
        resident_bytes: of the weights that always stay in memory.

    Raises:
        NotEnoughMemory: the blocks cannot be computed within `memory`.
        DriveFailed: what has to be in memory cannot be read.
    """
    by_kind: dict[RecordKind, list[FlashBlock]] = {}
    for one in blocks:
        by_kind.setdefault(one.plan.kind, []).append(one)
    needs = memory_needs([(one.plan.kind, one.store.layout) for one in blocks])
    shares = share_memory(memory - resident_bytes, needs)
    streamed = by_kind.get(RecordKind.BLOCK)
    stream = BlockStream(streamed, shares[RecordKind.BLOCK]) if streamed else None
    pools = []
    if RecordKind.EXPERTS in by_kind:
        pools = experts.attach(by_kind[RecordKind.EXPERTS], shares[RecordKind.EXPERTS])
    layers: list[SparseFeedForward] = []
    shared = SpanShared(SlabMemory(0), ForwardTokens())
    if RecordKind.NEURONS in by_kind:
        sparse = by_kind[RecordKind.NEURONS]
        shared = SpanShared(SlabMemory(slab_bytes([one.store.layout for one in sparse])), ForwardTokens())
        layers = _attach_neurons(sparse, shares[RecordKind.NEURONS], shared)
    taken = (stream.memory_bytes if stream is not None else 0) + sum(pool.buffer.nbytes for pool in pools)
    taken += shared.slabs.nbytes + sum(layer.memory_bytes for layer in layers)
    return FlashSpan(resident_bytes + taken, blocks, stream, pools, layers, shared)


def _attach_neurons(blocks: Sequence[FlashBlock], memory: int, shared: SpanShared) -> list[SparseFeedForward]:
    """Sparse layers, with memory for neurons in proportion to what tokens need of each."""
    calibrated = [one.predictor for one in blocks if one.predictor is not None]
    assert len(calibrated) == len(blocks)
    predictors = [found.predictor.to(one.store.layout.dtype) for found, one in zip(calibrated, blocks, strict=True)]
    left = memory - shared.slabs.nbytes - sum(predictor.memory_bytes for predictor in predictors)
    layouts = [one.store.layout for one in blocks]
    needs = [
        NeuronNeed(layout.count, layout.stride, found.two_tokens)
        for layout, found in zip(layouts, calibrated, strict=True)
    ]
    return [
        sparse_feed_forward.attach(
            one.block, one.plan, one.taken, one.resident, predictor, one.store, SparseOptions(slots), shared
        )
        for one, predictor, slots in zip(blocks, predictors, divide_neurons(left, needs), strict=True)
    ]
