"""Loading a span whose large weights stay on flash, from the packed files of its blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import InvalidOption
from swarm.models.block_loading import return_freed_memory
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.execution.hooked_module import HookedModule
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import LayoutRequest, choose_layout
from swarm.models.flash.block_plan import FlashBlock
from swarm.models.flash.files.prepared_block import PreparedBlock
from swarm.models.flash.flash_span import attach_blocks
from swarm.models.flash.planned_blocks import PlannedBlock, build_block
from swarm.models.flash.reading import FlashStore
from swarm.models.loading.flash_preparation import open_prepared, read_predictor
from swarm.models.loading.span_loading import SpanAssembly
from swarm.models.weights import frozen_linear
from swarm.models.weights.quantization import weight_bytes

logger = logging.getLogger(__name__)

MAX_LOSS = 1000.0
"""The largest loss of perplexity that is told apart: such outputs are noise."""


@dataclass(frozen=True)
class FlashOptions:
    """How a span is kept on flash.

    Attributes:
        memory: bytes for weights, those that always stay in memory included.
        root: the folder of all packed files, see `files.block_files.flash_root`.
        planned: what lies on flash of each block; see `plan_for_flash`.
    """

    memory: int
    root: Path
    planned: Mapping[int, PlannedBlock]


def load_flash_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    options: FlashOptions,
    progress: bool = False,
    layout: LayoutRequest = "auto",
) -> SpanModel:
    """Load `span` from packed files, which are prepared first where they are missing or broken. On the CPU.

    Raises:
        InvalidSpan: the span is outside the model.
        InvalidOption: some of the blocks cannot be on flash.
        CheckpointError: weights are missing, unreadable or of the wrong shape.
        NotEnoughSpace: the drive is too small for the packed files.
        NotEnoughMemory: the blocks cannot be computed with so little memory.
        PackedFileError, DriveFailed: packed files cannot be read although they were checked.
    """
    checkpoint.validate_span(span.start, span.end)
    planned = {block: options.planned[block] for block in range(span.start, span.end) if block in options.planned}
    if len(planned) < span.length:
        raise InvalidOption(f"--flash: some blocks of {span} have no weights that could be on flash; use off")
    with ExitStack() as opened:
        prepared = open_prepared(checkpoint, planned, dtype, options.root, progress)
        cut, blocks = _build_blocks(checkpoint, span, dtype, prepared, opened)
        resident = sum(weight_bytes(one.block) + sum(value.nbytes for value in one.resident.values()) for one in blocks)
        flash = attach_blocks(blocks, options.memory, resident)
        flash = replace(flash, perplexity_loss=_perplexity_loss(blocks))
        if flash.sparse:
            logger.warning("%s", _approximation(flash.perplexity_loss))
        on_drive, in_memory = format_bytes(flash.record_bytes), format_bytes(flash.weight_bytes)
        logger.info("Flash: %s of weights on the drive; %s of memory for weights", on_drive, in_memory)
        digests = [one.digest for one in prepared]
        model = SpanModel(cut, span, digests, checkpoint.config.hidden_size, flash=flash)
        model = choose_layout(model, layout)
        flash.files.enter_context(opened.pop_all())
    return model


def _perplexity_loss(blocks: Sequence[FlashBlock]) -> float | None:
    """How much selecting neurons in all of the blocks raises the perplexity; None if it was not measured."""
    predictors = [one.predictor for one in blocks if one.predictor is not None]
    losses = [one.perplexity_loss for one in predictors if one.perplexity_loss is not None]
    return min(sum(losses), MAX_LOSS) if predictors and len(losses) == len(predictors) else None


def _approximation(loss: float | None) -> str:
    known = "its cost was not measured" if loss is None else f"the perplexity of a test text changed by {loss:+.2%}"
    return (
        f"Flash: results are APPROXIMATE, because tokens are computed with some neurons only; {known}. Other peers are "
        "told, and clients use this server only if they accept it. --flash-exact computes all neurons"
    )


def _build_blocks(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    prepared: Sequence[PreparedBlock],
    opened: ExitStack,
) -> tuple[HookedModule, list[FlashBlock]]:
    """The span without the weights that are on flash, and where these are."""
    path = checkpoint.structure.layers_path
    assembly = SpanAssembly(checkpoint, span)
    blocks = []
    for one in prepared:
        store = FlashStore.open(one.records, one.layout)
        opened.callback(store.close)
        tensors = one.resident_tensors()
        built = build_block(checkpoint, one.block, dtype, one.plan, tensors)
        layers = built.model.get_submodule(path)
        frozen_linear.prepack(layers)
        resident = {name: tensors[name] for name in one.plan.resident}
        blocks.append(FlashBlock(layers[0], one.plan, built.taken, resident, store, read_predictor(one)))
        assembly.append(built.model)
        return_freed_memory()
    return assembly.finish(), blocks
