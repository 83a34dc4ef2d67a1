"""What a server's options mean for its model and on its machine. Resolved once, before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from swarm.common.dtypes import dtype_name
from swarm.common.units import format_bytes
from swarm.data_structures import Span
from swarm.errors import InvalidOption, NotEnoughMemory
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.checkpoints.footprint import memory_footprint
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.models.exits.model_head import head_bytes, head_loading_bytes
from swarm.models.exits.trained_exits import BaseModel, StoredExits
from swarm.models.flash.files.block_files import PackedModel, flash_root
from swarm.models.loading.flash_preparation import plan_for_flash
from swarm.models.weights.quantization import NONE
from swarm.server import memory_budget
from swarm.server.config import ServerConfig
from swarm.server.flash_budget import FlashBudget, flash_footprint, wants_flash
from swarm.server.limits import DEFAULT_CACHE_TOKENS, DEFAULT_REQUEST_BYTES
from swarm.server.memory_budget import MemoryBudget

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedConfig:
    """The options as given, and a definite value for each that was left to the server.

    Attributes:
        options: as given. What needs no resolving is read from here.
        checkpoint: the model.
        device, dtype: to compute on and in.
        quantization: format of the weights, see `swarm.models.weights.quantization`.
        cache_tokens: tokens that the attention cache can hold.
        adapter_memory: bytes for clients' adapters.
        budget: what memory holds of the blocks, whose weights are in memory or on flash.
        trained_exits: the file of lenses and classifiers for tokens that leave early; None if there is none.
        request_memory: bytes for requests on their way.
    """

    options: ServerConfig
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    quantization: str
    cache_tokens: int
    adapter_memory: int
    budget: MemoryBudget | FlashBudget
    trained_exits: StoredExits | None = None
    request_memory: int = DEFAULT_REQUEST_BYTES

    @property
    def flash(self) -> FlashBudget | None:
        """What memory holds of blocks on flash; None if all weights are in memory."""
        return self.budget if isinstance(self.budget, FlashBudget) else None


def resolve_config(options: ServerConfig, checkpoint: Checkpoint | None = None) -> ResolvedConfig:
    """Decide device, dtype, quantization and sizes. Blocks, for a download at worst.

    Args:
        checkpoint: the model; None to open it by the options.

    Raises:
        ModelNotFound, CheckpointError, UnsupportedModel: the model cannot be served.
        InvalidOption: this machine cannot compute as asked.
        InvalidSpan: the model has no such blocks.
        AdapterError: the lenses and classifiers cannot be used.
        NotEnoughMemory: the blocks that were asked for would fit without exits, or the exits' head cannot be loaded.
    """
    if checkpoint is None:
        checkpoint = open_checkpoint(options.model, revision=options.revision, cache_dir=options.cache_dir)
    if options.blocks.span is not None:
        checkpoint.validate_span(options.blocks.span.start, options.blocks.span.end)
    device = memory_budget.resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, checkpoint.config)
    cache_tokens = options.cache_tokens or DEFAULT_CACHE_TOKENS
    trained_exits = _open_trained_exits(options, checkpoint)
    reserved = (options.adapter_memory or 0) + (options.request_memory or 0)
    reserved += memory_budget.session_buffer_bytes(checkpoint, device, dtype, cache_tokens)
    quantization = NONE  # a size for weights on flash decides what fits, so nothing has to be quantized
    if options.flash.memory is None or options.quant != "auto":
        quantization = memory_budget.resolve_quantization(
            options.quant,
            checkpoint,
            device,
            dtype,
            options.blocks.requested,
            cache_tokens,
            reserved,
        )
    # Tokens cannot leave inside blocks on flash, so the memory that exits need must not move blocks there.
    budget = _resolve_budget(options, checkpoint, device, dtype, quantization, cache_tokens, reserved)
    if isinstance(budget, MemoryBudget):
        budget = _less_exits(budget, options, checkpoint, dtype, trained_exits)
    free = memory_budget.free_memory(device)
    adapter_memory = memory_budget.adapter_memory(options.adapter_memory, free)
    hidden_size: int = checkpoint.config.get_text_config().hidden_size
    request_memory = memory_budget.request_memory(options.request_memory, free, hidden_size, dtype.itemsize)
    logger.info("Model: %s, revision %s, %d blocks", checkpoint.name, checkpoint.revision, checkpoint.blocks)
    logger.info("Device: %s, computing in %s", device, dtype_name(dtype))
    if isinstance(budget, FlashBudget):
        quantization = NONE  # even if memory would have held a few more blocks in 8 bits
    return ResolvedConfig(
        options,
        checkpoint,
        device,
        dtype,
        quantization,
        cache_tokens,
        adapter_memory,
        budget,
        trained_exits,
        request_memory,
    )


def _open_trained_exits(options: ServerConfig, checkpoint: Checkpoint) -> StoredExits | None:
    if options.exits is None:
        if options.exits_from is not None:
            raise InvalidOption("--exits-from says how sure tokens are, --exits where they may leave; give both")
        return None
    options.exits.require_inside(checkpoint.blocks)
    if options.exits_from is None:
        return None
    hidden_size: int = checkpoint.config.get_text_config().hidden_size
    base = BaseModel(checkpoint.name, checkpoint.revision, hidden_size, checkpoint.blocks)
    return StoredExits.open(options.exits_from, base)


def _less_exits(
    budget: MemoryBudget,
    options: ServerConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    trained: StoredExits | None,
) -> MemoryBudget:
    """What is left for blocks beside what tells how sure tokens are: the head, and with each block the lens and the
    classifier behind it."""
    held = options.blocks.span or Span(0, checkpoint.blocks)  # a span that was asked for is kept
    exits = options.exits.within(held, checkpoint.blocks) if options.exits is not None else ()
    if not exits:
        return budget
    block_bytes = list(budget.footprint.block_bytes)
    for block in exits:
        block_bytes[block - 1] += trained.weight_bytes(block) if trained is not None else 0
    _require_head_loads(checkpoint, dtype)
    head = head_bytes(checkpoint, dtype)
    footprint = replace(budget.footprint, block_bytes=tuple(block_bytes))
    charged = replace(budget, footprint=footprint, free=max(0, budget.free - head))
    if budget.fits(options.blocks.requested) and not charged.fits(options.blocks.requested):
        raise NotEnoughMemory(
            f"the blocks fit into the memory that is free, but not beside what --exits needs: {format_bytes(head)} for "
            "the model's head, and the lenses of --exits-from; serve fewer blocks, use --quant int8, lower "
            "--cache-tokens, or leave --exits out"
        )
    logger.info("Exits: %s of memory are for the model's head", format_bytes(head))
    return charged


def _require_head_loads(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Raise `NotEnoughMemory` if the head cannot be loaded, which takes more than it takes afterwards."""
    needed, free = head_loading_bytes(checkpoint, dtype), memory_budget.free_memory(torch.device("cpu"))
    if needed > free:
        raise NotEnoughMemory(
            f"loading the model's head for --exits takes {format_bytes(needed)} of memory for a moment, and "
            f"{format_bytes(free)} are free; end other programs, or leave --exits out"
        )


def _resolve_budget(
    options: ServerConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    cache_tokens: int,
    reserved: int,
) -> MemoryBudget | FlashBudget:
    """What memory holds of the blocks, beside `reserved` bytes: on flash if that was asked for, or if those that were
    asked for do not fit in memory."""
    free = memory_budget.free_memory(device) - reserved
    in_memory = MemoryBudget(memory_footprint(checkpoint, dtype, quantization), free, cache_tokens)
    if not wants_flash(options.flash, device.type, quantization, in_memory.fits(options.blocks.requested)):
        return in_memory
    asked_for = options.flash.memory is not None
    on_flash = _flash_budget(options, checkpoint, dtype, in_memory)
    if on_flash is None and asked_for:
        raise InvalidOption(f"--flash: {checkpoint.name} has blocks without weights that could be on flash; use off")
    if on_flash is None or not (asked_for or on_flash.fits(options.blocks.requested)):
        return in_memory  # flash does not help, so the refusal is about memory
    reason = "as asked for" if asked_for else "because the blocks do not fit in memory"
    logger.info("Weights: on flash, %s", reason)
    return on_flash


def _flash_budget(
    options: ServerConfig, checkpoint: Checkpoint, dtype: torch.dtype, in_memory: MemoryBudget
) -> FlashBudget | None:
    """What the same memory holds of blocks on flash; None if some cannot be there."""
    root, exact = flash_root(options.cache_dir), options.flash_exact
    planned = plan_for_flash(checkpoint, Span(0, checkpoint.blocks), dtype, root, exact)
    footprint = flash_footprint(checkpoint, dtype, planned)
    if footprint is None:
        return None
    packed = PackedModel.of(checkpoint, dtype, root)
    return FlashBudget(footprint, in_memory.free, in_memory.cache_tokens, options.flash.memory, packed, exact)
