"""Decode steps as recorded graphs: the GPU repeats a whole forward without Python naming one kernel after the other.

A recording always works on the same memory and with the same shapes, so a batch is copied into buffers of the next
size, and what is missing to that size are rows that lie in the page that belongs to nobody. Batches that bring more
than a token a row, or are larger than the largest recording, are computed the plain way; so is everything from the
moment on at which a recording fails (a family or a quantized product that waits for the GPU in between cannot be
recorded).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from swarm.models.attention.page_pool import SCRATCH_PAGE
from swarm.models.attention.paged_attention import BatchSequence, PagedBatch, PagedBatchIndex

if TYPE_CHECKING:
    from swarm.models.execution.span_model import SpanModel

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows of a recording. Up to a hundred rows or so a step costs what reading the weights costs, so that doubling keeps
the recordings few and wastes little."""

TABLE_WIDTHS = (4, 16, 64, 256)
"""Pages of a recording's longest row. The kernel is launched for the longest row that a recording allows, and stops at
the end of each row, so that a recording much too wide costs little; one for every length would be recorded all day."""

WARM_UP_RUNS = 2
"""Plain runs before a recording: libraries choose their kernels and take their memory in them."""

Replay = Callable[[], None]
GraphRecorder = Callable[[Callable[[], None]], Replay]
"""Takes a function that reads and writes the same memory whenever it is called; what it returns does that again."""


class CudaGraphRecorder:
    """Records with CUDA graphs, which share their memory: they never run at the same time."""

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
            # Other threads may use the GPU meanwhile, for what has nothing to do with this.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                function()
        return graph.replay


@dataclass(frozen=True)
class _RecordedGraph:
    """A forward over buffers, for so many rows of so many pages (`width`).

    Attributes:
        hidden_NH: the inputs.
        numbers: int32, one after the other: the rows' positions, slots, lengths and pages. One copy brings all of them.
        output_NH: the outputs.
        replay: computes them.
    """

    rows: int
    width: int
    hidden_NH: torch.Tensor
    numbers: torch.Tensor
    output_NH: torch.Tensor
    replay: Replay

    def fill(
        self, hidden_NH: torch.Tensor, positions: Sequence[int], members: Sequence[BatchSequence], page: int
    ) -> None:
        """Put a batch in front; the rows behind it go to the page that belongs to nobody."""
        empty = self.rows - len(members)
        numbers = [*positions, *[0] * empty]
        numbers += [member.table[member.start // page] * page + member.start % page for member in members]
        numbers += [SCRATCH_PAGE * page] * empty
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
        record: a `CudaGraphRecorder`, or for tests a function that returns its argument.

    Attributes:
        works: False once a recording has failed.
    """

    def __init__(self, model: SpanModel, record: GraphRecorder) -> None:
        self._model = model
        self.record = record
        self.works = True
        self._recordings: dict[tuple[int, int], _RecordedGraph] = {}
        self._moves = -1

    @torch.inference_mode()
    def step(
        self, hidden_NH: torch.Tensor, positions: Sequence[int], members: Sequence[BatchSequence]
    ) -> torch.Tensor | None:
        """`SpanModel.forward_tokens` of a batch of rows; None if it has to be computed the plain way."""
        if len(members) != len(positions):
            return None  # some row brings more than one token
        rows, width = (
            _bucket(len(members), BATCH_SIZES),
            _bucket(max(len(member.table) for member in members), TABLE_WIDTHS),
        )
        recording = self._recording(rows, width) if rows is not None and width is not None else None
        if recording is None:
            return None
        recording.fill(hidden_NH, positions, members, self._page)
        recording.replay()
        return recording.output_NH[: len(members)].clone()

    def _recording(self, rows: int, width: int) -> _RecordedGraph | None:
        paging = self._model.paging
        assert paging is not None
        if paging.pool.relocations != self._moves:
            self._recordings.clear()  # they would write to where the pool was
            self._moves = paging.pool.relocations
        if (rows, width) not in self._recordings and self.works:
            try:
                made = self._made(rows, width)
            except Exception as error:  # whatever CUDA makes of a family's code
                self.works = False
                self._recordings.clear()
                logger.warning("Decode steps are not recorded as CUDA graphs: %s", str(error).partition("\n")[0])
                return None
            if (
                paging.pool.relocations != self._moves
            ):  # its first run made layers of the pool; all are where they stay now
                return self._recording(rows, width)
            self._recordings[rows, width] = made
        return self._recordings.get((rows, width))

    def _made(self, rows: int, width: int) -> _RecordedGraph:
        model, page = self._model, self._page
        hidden_NH = torch.zeros(rows, model.hidden_size, dtype=model.dtype, device=model.device)
        output_NH = torch.zeros_like(hidden_NH)
        numbers = torch.zeros(rows * (3 + width), dtype=torch.int32, device=model.device)
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=model.device)

        def forward() -> None:
            assert model.paging is not None
            positions_N, slots_N, lengths, table = numbers.split([rows, rows, rows, rows * width])
            index = PagedBatchIndex(slots_N.long(), bounds, lengths, table.view(rows, width), 1, width * page)
            batch = PagedBatch(model.paging, index)
            output_NH.copy_(model.run_packed(hidden_NH, positions_N.long().unsqueeze(1), batch))

        recording = _RecordedGraph(rows, width, hidden_NH, numbers, output_NH, lambda: None)
        recording.fill(hidden_NH[:0], (), (), page)
        return replace(recording, replay=self.record(forward))

    @property
    def _page(self) -> int:
        assert self._model.paging is not None
        return self._model.paging.pool.page_size


def _bucket(count: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= count), None)
