"""A feed-forward layer that computes the neurons that its tokens need, and reads those that are not in memory.

For few tokens: predict, begin to read what is missing, compute what is there meanwhile, wait, compute what was read.
For many tokens, as of prompts, nearly every neuron is needed by some token: all are read in order, in slabs of which
one is computed while the next is read, and computed exactly.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from swarm.errors import DriveFailed, TrainingRefused
from swarm.models.flash.block_plan import BlockPlan
from swarm.models.flash.neurons.active_window import ActiveWindow, ForwardTokens, Portion
from swarm.models.flash.neurons.feed_forward_site import ACTIVATION, DOWN, GATE, UP, put_in_place
from swarm.models.flash.neurons.neuron_matrix import NeuronMatrix
from swarm.models.flash.neurons.neuron_products import NeuronProducts
from swarm.models.flash.neurons.predictor import NeuronPredictor
from swarm.models.flash.records import (
    FinishedRead,
    Indices,
    PendingRead,
    RecordBuffer,
    RecordLayout,
    StoreCounters,
    WeightStore,
    allocate_aligned,
)


@dataclass
class NeuronCounters:
    """Sums since the layer was made.

    Attributes:
        neurons: of the layer.
        forwards, tokens: computed with selected neurons.
        selected: neurons selected for tokens, summed over tokens.
        needed: neurons selected for at least one token of a forward, summed over forwards.
        read: those of them that were not in memory.
        portions: more than `forwards` if memory was too small for what a forward needed.
    """

    neurons: int
    forwards: int = 0
    tokens: int = 0
    selected: int = 0
    needed: int = 0
    read: int = 0
    portions: int = 0

    def count_forward(self, selected_TN: torch.Tensor, needed: int) -> None:
        self.forwards += 1
        self.tokens += len(selected_TN)
        self.selected += int(selected_TN.sum())
        self.needed += needed


SLAB_BYTES = 8 << 20
"""Bytes that are read at once: drives gain nothing from more."""


class SlabMemory:
    """Two slabs, shared by all blocks of a span, which are computed one after the other.

    Args:
        size: bytes of a slab; at least a record.
    """

    def __init__(self, size: int = SLAB_BYTES) -> None:
        self.size = size
        self._halves = (allocate_aligned(size), allocate_aligned(size))

    @property
    def nbytes(self) -> int:
        return 2 * self.size

    def buffers(self, layout: RecordLayout) -> tuple[RecordBuffer, RecordBuffer]:
        """Both as buffers of this layout. What was in them is lost."""
        slots = self.size // layout.stride
        first, second = (RecordBuffer(layout, slots, memory) for memory in self._halves)
        return first, second


class ExactPass:
    """Computes one block's feed-forward layer with all of its neurons.

    Args:
        biases: by role, of all neurons.
        store: holds the block's records.
    """

    def __init__(
        self, products: NeuronProducts, biases: Mapping[str, torch.Tensor], store: WeightStore, memory: SlabMemory
    ) -> None:
        self._products, self._biases, self._store, self._memory = products, biases, store, memory

    def compute(self, hidden_TH: torch.Tensor, joining: Indices, matrix: NeuronMatrix) -> torch.Tensor:
        """The layer's result, `[tokens, hidden]`.

        Args:
            joining: neurons, sorted, that come into `matrix` on the way, which has room for them.

        Raises `DriveFailed`; what has come into the matrix by then is right.
        """
        # Sums of many slabs, so in fp32.
        result_TH = hidden_TH.new_zeros(hidden_TH.shape, dtype=torch.float32)
        with closing(self._slabs()) as slabs:
            for start, end, buffer in slabs:
                biases = {role: bias[start:end] for role, bias in self._biases.items()}
                rows = self._products.rows(buffer, biases).first(end - start)
                result_TH += self._products.all_neurons(hidden_TH, rows) @ rows.down
                here = joining[np.searchsorted(joining, start) : np.searchsorted(joining, end)]
                matrix.append(here, _Slab(buffer, start)).wait()
        return self._products.with_bias(result_TH.to(hidden_TH.dtype))

    def _slabs(self) -> Generator[tuple[int, int, RecordBuffer]]:
        """The first neuron of each slab, the one behind its last, and where they are, until the next is asked for."""
        count = self._store.layout.count
        buffers = self._memory.buffers(self._store.layout)
        size = buffers[0].slots
        pending: PendingRead | None = None
        try:
            pending = self._begin(0, buffers[0])
            for number, start in enumerate(range(0, count, size)):
                arrived, pending, end = pending, None, min(start + size, count)
                assert arrived is not None
                arrived.wait()
                if end < count:
                    pending = self._begin(end, buffers[(number + 1) % 2])
                yield start, end, buffers[number % 2]
        finally:
            if pending is not None:
                pending.wait()  # nothing is read into memory that others use

    def _begin(self, start: int, buffer: RecordBuffer) -> PendingRead:
        records = np.arange(start, min(start + buffer.slots, self._store.layout.count))
        return self._store.read(records, buffer, records - start)


class _Slab:
    """A slab as a store: its neurons are copied from memory."""

    def __init__(self, buffer: RecordBuffer, start: int) -> None:
        self.layout = buffer.layout
        self.counters = StoreCounters()
        self._buffer, self._start = buffer, start

    def read(self, records: Indices, buffer: RecordBuffer, slots: Indices) -> PendingRead:
        buffer.copy_from(self._buffer, records - self._start, slots)
        return FinishedRead()

    def close(self) -> None:
        """There is nothing to let go of."""


EXACT_FROM = 32
"""Tokens of a forward from which all neurons are computed: reading them in order then costs less than finding out which
are needed, and prompts are exact."""

NOTED_TOKENS, NOTED_SHARE = 64, 1 / 4
"""The last tokens of an exact forward whose neurons are noted as needed: so many, and no more than this share of the
forward, since predicting costs up to a sixth of what computing does."""


@dataclass(frozen=True)
class SparseOptions:
    """How sparse layers compute.

    Attributes:
        capacity: neurons of one block that memory has room for.
        exact_from: tokens of a forward from which it is computed exactly.
    """

    capacity: int
    exact_from: int = EXACT_FROM


@dataclass
class SpanShared:
    """What the sparse layers of a span have in common, since they compute one after the other.

    Attributes:
        slabs: memory for exact passes.
        tokens: which tokens of the forward in progress belong together.
        exactly: whether everything is computed with all neurons, whatever the number of tokens.
    """

    slabs: SlabMemory = field(default_factory=SlabMemory)
    tokens: ForwardTokens = field(default_factory=ForwardTokens)
    exactly: bool = False


class SparseFeedForward(nn.Module):
    """Computes a block's feed-forward layer, `[..., hidden]` to the same shape. Used by one thread.

    Args:
        plan: of the block.
        activation: the block's own.
        resident: the tensors of `plan.resident`, by their names.
        predictor: of the block.
        store: holds the block's records.

    Attributes:
        counters: what was selected and read.
        matrix: the neurons in memory.
    """

    def __init__(
        self,
        plan: BlockPlan,
        activation: nn.Module,
        resident: Mapping[str, torch.Tensor],
        predictor: NeuronPredictor,
        store: WeightStore,
        options: SparseOptions,
        shared: SpanShared,
    ) -> None:
        super().__init__()
        biases = {role: resident.get(f"{plan.modules[role]}.bias") for role in (UP, GATE, DOWN) if role in plan.modules}
        self._biases = {role: bias for role, bias in biases.items() if bias is not None and role != DOWN}
        self._products = NeuronProducts(plan, activation, biases[DOWN])
        self._predictor = predictor
        self._store = store
        self._options = options
        self._shared = shared
        self.counters = NeuronCounters(store.layout.count)
        self.matrix = NeuronMatrix(store.layout, min(options.capacity, store.layout.count), self._biases)
        self._rows = self._products.rows(self.matrix.buffer, {role: self.matrix.values(role) for role in self._biases})
        self._window = ActiveWindow(self.matrix)
        self._exact = ExactPass(self._products, self._biases, store, shared.slabs)

    @property
    def memory_bytes(self) -> int:
        """Memory for neurons and the predictor; that of slabs is the span's."""
        return self.matrix.buffer.nbytes + self._predictor.memory_bytes

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises `DriveFailed`, and `TrainingRefused` where gradients are asked for."""
        if hidden.requires_grad:
            raise TrainingRefused(
                "this server reads weights from flash and computes only some of them, so it has no gradients; train "
                "over servers that hold their weights in memory"
            )
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        exactly = self._shared.exactly or len(hidden_TH) >= self._options.exact_from
        result_TH = self._compute_exactly(hidden_TH) if exactly else self._compute_selected(hidden_TH)
        return result_TH.view(hidden.shape)

    def _compute_exactly(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        noted = max(1, min(NOTED_TOKENS, int(len(hidden_TH) * NOTED_SHARE)))
        selected_TN = self._predictor.select(hidden_TH[-noted:])
        shares_N = selected_TN.float().mean(0).numpy()
        needed = np.flatnonzero(shares_N)
        portion = self._window.while_all_pass(needed, shares_N[needed], len(selected_TN))
        self.matrix.delete(portion.leaving)
        return self._exact.compute(hidden_TH, portion.joining, self.matrix)

    def _compute_selected(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        selected_TN = self._predictor.select(hidden_TH)
        needed = _neurons_of(selected_TN)
        expected = self._shared.tokens.expected(len(hidden_TH))
        kept = None if expected is None else _neurons_of(selected_TN[torch.from_numpy(expected)])
        self.counters.count_forward(selected_TN, len(needed))
        result_TH = torch.zeros_like(hidden_TH)
        for portion in self._window.portions(needed, kept):
            result_TH += self._compute_portion(hidden_TH, selected_TN, portion)
        return self._products.with_bias(result_TH)

    def _compute_portion(self, hidden_TH: torch.Tensor, selected_TN: torch.Tensor, portion: Portion) -> torch.Tensor:
        """The sum over a portion's neurons."""
        matrix, products = self.matrix, self._products
        matrix.delete(portion.leaving)
        there = matrix.num_used
        pending = matrix.append(portion.joining, self._store)
        places = torch.from_numpy(matrix.row_of[portion.needed])
        is_new = places >= there
        values_TN = hidden_TH.new_empty(len(hidden_TH), len(places))
        try:
            values_TN[:, ~is_new] = products.neurons(hidden_TH, self._rows, places[~is_new])
        finally:
            self._finish(pending, portion.joining)
        values_TN[:, is_new] = products.neurons(hidden_TH, self._rows, places[is_new])
        # A token's result depends on the neurons predicted for it and no others, so that it is always the same.
        values_TN.masked_fill_(~selected_TN[:, torch.from_numpy(portion.needed)], 0)
        self.counters.read += len(portion.joining)
        self.counters.portions += 1
        return products.down(values_TN, self._rows, places)

    def _finish(self, pending: PendingRead, joining: Indices) -> None:
        """Wait for a read. What did not arrive does not stay in the matrix."""
        try:
            pending.wait()
        except DriveFailed:
            self.matrix.delete(joining)
            raise


def attach(
    block: nn.Module,
    plan: BlockPlan,
    taken: Mapping[str, nn.Module],
    resident: Mapping[str, torch.Tensor],
    predictor: NeuronPredictor,
    store: WeightStore,
    options: SparseOptions,
    shared: SpanShared,
) -> SparseFeedForward:
    """Put a sparse layer in place of the modules that were taken out of `block`.

    Args:
        taken: what `take_out` returned, by role. The activation is used; weights are not needed.
        resident: the tensors of `plan.resident`, by their names in the block.
        predictor: of this block.
        store: holds its records; `close` of the returned layer closes it.
        shared: the same for all blocks of a span.
    """
    activation, path = taken[ACTIVATION], plan.modules[ACTIVATION]
    settings = {name.removeprefix(f"{path}."): value for name, value in resident.items() if name.startswith(f"{path}.")}
    activation.load_state_dict(settings, assign=True)
    layer = SparseFeedForward(plan, activation, resident, predictor, store, options, shared)
    put_in_place(block, plan, layer)
    return layer


def _neurons_of(selected_TN: torch.Tensor) -> Indices:
    """The neurons that any token selects, sorted."""
    return np.flatnonzero(selected_TN.any(0).numpy())
