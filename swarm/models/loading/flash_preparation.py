"""Preparing a span for flash: packed files of its blocks, and predictors where neurons are selected."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from swarm.data_structures import Span
from swarm.errors import CheckpointError, InvalidOption, PackedFileError, format_blocks
from swarm.models.checkpoints.checkpoint import Checkpoint
from swarm.models.checkpoints.tokenizer import load_tokenizer
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.planned_blocks import plan_span
from swarm.models.flash.files.preparation import add_predictor, open_span
from swarm.models.flash.files.prepared_block import PreparedBlock
from swarm.models.flash.neurons.predictor import encode_predictor
from swarm.models.flash.plans.block_choice import BlockPlanner
from swarm.models.flash.plans.block_plan import RecordKind
from swarm.models.loading.neuron_calibration import calibrate, calibration_text, calibration_tokens

logger = logging.getLogger(__name__)


def span_planner(checkpoint: Checkpoint, span: Span, dtype: torch.dtype, root: Path, exact: bool) -> BlockPlanner:
    """What plans the blocks of a span. Neurons are selected only if there are predictors, or a text to make them with.

    Args:
        root: the folder of all packed files.
        exact: never select neurons.
    """
    if exact:
        return BlockPlanner(exact=True)
    planner = BlockPlanner()
    files = (PackedModel.of(checkpoint, dtype, root).files(block) for block in range(span.start, span.end))
    if all(one.predictor_entry.exists() for one in files):
        return planner
    planned = plan_span(checkpoint, span, dtype, planner.plan)
    sparse = any(one.plan.kind is RecordKind.NEURONS for one in planned.values())
    if sparse and _text(checkpoint) is None:
        logger.warning("Flash: no neurons are selected, because %s has no tokenizer", checkpoint.name)
        return BlockPlanner(exact=True)
    return planner


def open_prepared(
    checkpoint: Checkpoint, span: Span, dtype: torch.dtype, root: Path, exact: bool, progress: bool
) -> list[PreparedBlock]:
    """The packed files of the span's blocks, checked and open; what is missing or broken is prepared before.

    Raises:
        InvalidSpan: the span is outside the model.
        InvalidOption: some of its blocks cannot be on flash.
        CheckpointError, NotEnoughSpace, PackedFileError: as for `files.preparation`.
    """
    planner = span_planner(checkpoint, span, dtype, root, exact)
    with ExitStack() as opened:
        prepared = open_span(checkpoint, span, dtype=dtype, root=root, plan_of=planner.plan, progress=progress)
        for one in prepared.values():
            opened.callback(one.close)
        if len(prepared) < span.length:
            raise InvalidOption(f"--flash: some blocks of {span} have no weights that could be on flash; use off")
        make_predictors(checkpoint, PackedModel.of(checkpoint, dtype, root), prepared, progress)
        opened.pop_all()
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


def _needs_predictor(prepared: PreparedBlock) -> bool:
    """Whether a block of neurons has no predictor that can be used."""
    if prepared.plan.kind is not RecordKind.NEURONS:
        return False
    try:
        return prepared.predictor() is None
    except PackedFileError as error:
        logger.warning("%s; it is made again", error)
        return True
