"""Decode steps as recorded graphs: the GPU repeats a whole forward without Python launching kernel after kernel.

A recording always works on the same memory and with the same shapes. So a batch is copied into the buffers of the next
larger size, and filled up with sequences in the scratch page. A batch is computed without a recording if a sequence
brings more than one token, or if it is larger than the largest recording. Once a recording has failed, every batch is:
a family or a quantized product that waits for the GPU in between cannot be recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from swarm.models.attention.multi_session_attention import PackedBatch
from swarm.models.attention.page_pool import SCRATCH_PAGE
from swarm.models.attention.paged_attention import BatchSequence, PagedAttention, PagedBatch, PagedBatchIndex

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sequences of a recording. Up to about a hundred sequences a step costs what reading the weights costs, so doubling
keeps the recordings few and wastes little."""

TABLE_WIDTHS = (4, 16, 64, 256)
"""Pages of a recording's longest sequence. The kernel is launched for the longest sequence that a recording allows, and
stops at the end of each one. So a recording that is much too wide costs little, and few widths are enough."""

WARM_UP_RUNS = 2
"""Runs before a recording, in which libraries choose their kernels and take their memory."""

Replay = Callable[[], None]
GraphRecorder = Callable[[Callable[[], None]], Replay]
"""Takes a function that reads and writes the same memory whenever it is called. What it returns does that again."""

PackedForward = Callable[[torch.Tensor, torch.Tensor, PackedBatch], torch.Tensor]
"""Hidden states `[tokens, hidden]`, positions `[tokens, 1]` and their batch to outputs; see `SpanModel.run_packed`."""


class CudaGraphRecorder:
    """Records CUDA graphs. They never run at the same time, so they share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Replay:
        with torch.cuda.device(self._device):
            graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP_RUNS):
                    function()
            torch.cuda.current_stream().wait_stream(aside)
            # Other threads may use the GPU meanwhile, for something that has nothing to do with this.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                function()
        return graph.replay


@dataclass(frozen=True)
class _RecordedGraph:
    """A forward over buffers, for a fixed number of sequences with a fixed number of pages each.

    Attributes:
        width: pages of each sequence.
        hidden_NH: the inputs.
        numbers: int32, one after the other: the sequences' positions, slots, lengths and pages, copied at once.
        bounds: where each sequence's token begins. It never changes, but a graph reads it at the same address.
        output_NH: the outputs.
        replay: computes them.
    """

    sequences: int
    width: int
    hidden_NH: torch.Tensor
    numbers: torch.Tensor
    bounds: torch.Tensor
    output_NH: torch.Tensor
    replay: Replay

    def fill(
        self, hidden_NH: torch.Tensor, positions: Sequence[int], members: Sequence[BatchSequence], page_size: int
    ) -> None:
        """Copy a batch into the buffers; the places behind it are sequences in the scratch page."""
        empty = self.sequences - len(members)
        numbers = [*positions, *[0] * empty]
        numbers += [
            member.table[member.start // page_size] * page_size + member.start % page_size for member in members
        ]
        numbers += [SCRATCH_PAGE * page_size] * empty
        numbers += [member.end for member in members]
        numbers += [1] * empty
        for member in members:
            numbers += member.table
            numbers += [SCRATCH_PAGE] * (self.width - len(member.table))
        numbers += [SCRATCH_PAGE] * (self.width * empty)
        self.numbers.copy_(torch.tensor(numbers, dtype=torch.int32))
        self.hidden_NH[: len(members)] = hidden_NH


class DecodeGraphs:
    """The recordings of one span's forward, made when they are first needed.

    Args:
        forward: what is recorded.
        paging: where the sequences lie.
        recorder: a `CudaGraphRecorder`, or for tests a function that returns its argument.
        like: an empty tensor of hidden states, `[0, hidden]`, of the span's dtype and on its device.

    Attributes:
        works: False once a recording has failed.
        failure: why it has failed; "" as long as it works.
    """

    def __init__(
        self, forward: PackedForward, paging: PagedAttention, recorder: GraphRecorder, like: torch.Tensor
    ) -> None:
        self._forward = forward
        self._paging = paging
        self._recorder = recorder
        self._like = like
        self.works, self.failure = True, ""
        self._recordings: dict[tuple[int, int], _RecordedGraph] = {}
        self._relocations = -1

    @torch.inference_mode()
    def step(
        self, hidden_NH: torch.Tensor, positions: Sequence[int], members: Sequence[BatchSequence]
    ) -> torch.Tensor | None:
        """The outputs of a batch; None if it has to be computed without a recording."""
        if len(members) != len(positions):
            return None  # some sequence brings more than one token
        sequences = _next_size(len(members), BATCH_SIZES)
        width = _next_size(max(len(member.table) for member in members), TABLE_WIDTHS)
        recording = self._recording(sequences, width) if sequences is not None and width is not None else None
        if recording is None:
            return None
        recording.fill(hidden_NH, positions, members, self._paging.pool.page_size)
        recording.replay()
        return recording.output_NH[: len(members)].clone()

    def _recording(self, sequences: int, width: int) -> _RecordedGraph | None:
        pool = self._paging.pool
        if pool.relocations != self._relocations:
            self._recordings.clear()  # they would write to where the pool was
            self._relocations = pool.relocations
        if (sequences, width) not in self._recordings and self.works:
            try:
                recording = self._record(sequences, width)
            except RuntimeError as error:  # CUDA's own errors are of this class
                self.works, self.failure = False, str(error).partition("\n")[0]
                self._recordings.clear()
                logger.warning("Decode steps are not recorded as CUDA graphs: %s", self.failure)
                return None
            if pool.relocations != self._relocations:  # the first run made layers of the pool
                return self._recording(sequences, width)
            self._recordings[sequences, width] = recording
        return self._recordings.get((sequences, width))

    def _record(self, sequences: int, width: int) -> _RecordedGraph:
        page_size, device = self._paging.pool.page_size, self._like.device
        hidden_NH = self._like.new_zeros(sequences, self._like.shape[1])
        output_NH = torch.zeros_like(hidden_NH)
        numbers = torch.zeros(sequences * (3 + width), dtype=torch.int32, device=device)
        bounds = torch.arange(sequences + 1, dtype=torch.int32, device=device)

        def forward() -> None:
            positions_N, slots_N, lengths, table = numbers.split([sequences, sequences, sequences, sequences * width])
            table = table.view(sequences, width)
            index = PagedBatchIndex(slots_N.long(), bounds, lengths, table, 1, width * page_size)
            batch = PagedBatch(self._paging, index)
            output_NH.copy_(self._forward(hidden_NH, positions_N.long().unsqueeze(1), batch))

        recording = _RecordedGraph(sequences, width, hidden_NH, numbers, bounds, output_NH, lambda: None)
        recording.fill(hidden_NH[:0], (), (), page_size)
        return replace(recording, replay=self._recorder(forward))


def _next_size(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that is large enough, if there is one."""
    return next((size for size in sizes if size >= count), None)
