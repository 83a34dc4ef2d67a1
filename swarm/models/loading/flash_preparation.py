"""Preparing a span for flash: packed files of its blocks, and predictors where neurons are selected."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from swarm.data_structures import Span
from swarm.errors import CheckpointError, PackedFileError, format_blocks
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.flash.block_plan import RecordKind
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.preparation import add_predictor, open_span
from swarm.models.flash.files.prepared_block import PreparedBlock
from swarm.models.flash.neurons.predictor import CalibratedPredictor, encode_predictor, load_predictor
from swarm.models.flash.planned_blocks import BlockPlanner, PlannedBlock, plan_span
from swarm.models.loading.neuron_calibration import calibrate, calibration_text, calibration_tokens
from swarm.models.tokenizers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def plan_for_flash(
    checkpoint: Checkpoint, span: Span, dtype: torch.dtype, root: Path, exact: bool
) -> dict[int, PlannedBlock]:
    """What preparation writes for each block of a span; blocks of which nothing can be on flash are left out.

    Neurons are selected only if there are predictors for all of them, or a text to make them with.

    Args:
        root: the folder of all packed files.
        exact: never select neurons.

    Raises `InvalidSpan` if the span is outside the model.
    """
    planned = plan_span(checkpoint, span, dtype, BlockPlanner(exact).plan)
    packed = PackedModel.of(checkpoint, dtype, root)
    sparse = [block for block, one in planned.items() if one.plan.kind is RecordKind.NEURONS]
    predictors = [packed.files(block, RecordKind.NEURONS).predictor for block in sparse]
    if all(os.path.exists(one) for one in predictors) or _text(checkpoint) is not None:
        return planned
    logger.warning("Flash: no neurons are selected, because %s has no tokenizer", checkpoint.name)
    return plan_span(checkpoint, span, dtype, BlockPlanner(exact=True).plan)


def open_prepared(
    checkpoint: Checkpoint, planned: Mapping[int, PlannedBlock], dtype: torch.dtype, root: Path, progress: bool
) -> list[PreparedBlock]:
    """The packed files of planned blocks, checked and open; what is missing or broken is prepared before.

    Args:
        planned: see `plan_for_flash`.

    Raises `CheckpointError`, `NotEnoughSpace` and `PackedFileError` as `files.preparation` does.
    """
    prepared = open_span(checkpoint, planned, dtype=dtype, root=root, progress=progress)
    make_predictors(checkpoint, PackedModel.of(checkpoint, dtype, root), prepared, progress)
    return list(prepared.values())


def make_predictors(
    checkpoint: Checkpoint, packed: PackedModel, prepared: Mapping[int, PreparedBlock], progress: bool = False
) -> list[int]:
    """Make predictors for those prepared blocks of neurons that have none, or broken ones. Returns these blocks.

    Raises:
        PackedFileError: the checkpoint has no tokenizer, so predictors cannot be made.
        CheckpointError, NotEnoughSpace: as for `files.preparation`.
    """
    without = {block: one for block, one in prepared.items() if _needs_predictor(one)}
    if not without:
        return []
    tokens = _text(checkpoint)
    if tokens is None:
        raise PackedFileError(
            f"blocks {format_blocks(without)} of {checkpoint.name} have no usable predictors, and it has no tokenizer "
            "to make them with; use --flash-exact"
        )
    for block, (made, digest) in calibrate(checkpoint, without, tokens, packed.dtype, progress=progress).items():
        add_predictor(packed, without[block], encode_predictor(made, digest))
    return list(without)


def _text(checkpoint: Checkpoint) -> torch.Tensor | None:
    """Tokens to make predictors with; None if the checkpoint has no tokenizer."""
    try:
        return calibration_tokens(load_tokenizer(checkpoint.source, checkpoint.revision), calibration_text())
    except CheckpointError as error:
        logger.debug("%s", error)
        return None


def read_predictor(prepared: PreparedBlock) -> CalibratedPredictor | None:
    """The predictor of a block; None if it has none, or if no neurons are selected in it.

    Raises `PackedFileError` if it is broken, or not one of this block and this version.
    """
    if prepared.plan.kind is not RecordKind.NEURONS:
        return None
    path = prepared.files.predictor
    if not path.exists():
        return None
    return load_predictor(path, prepared.digest, prepared.layout.fields[0].values, prepared.layout.count)


def _needs_predictor(prepared: PreparedBlock) -> bool:
    """Whether a block of neurons has no predictor that can be used."""
    try:
        return prepared.plan.kind is RecordKind.NEURONS and read_predictor(prepared) is None
    except PackedFileError as error:
        logger.warning("%s; it is made again", error)
        return True
