"""What a server's options mean for its model and on its machine. Resolved once, before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.protocol.compression import dtype_name
from swarm.server import memory_budget
from swarm.server.config import ServerConfig
from swarm.server.limits import DEFAULT_CACHE_TOKENS

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
    """

    options: ServerConfig
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    quantization: str
    cache_tokens: int
    adapter_memory: int


def resolve_config(options: ServerConfig) -> ResolvedConfig:
    """Open the checkpoint and decide device, dtype, quantization and sizes. Blocks, for a download at worst.

    Raises:
        ModelNotFound, CheckpointError, UnsupportedModel: the model cannot be served.
        InvalidOption: this machine cannot compute as asked.
        InvalidSpan: the model has no such blocks.
    """
    checkpoint = open_checkpoint(options.model, revision=options.revision, cache_dir=options.cache_dir)
    device = memory_budget.resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, checkpoint.config)
    cache_tokens = options.cache_tokens or DEFAULT_CACHE_TOKENS
    quantization = memory_budget.resolve_quantization(
        options.quant, checkpoint, device, dtype, options.blocks.requested, cache_tokens, options.adapter_memory or 0
    )
    adapter_memory = memory_budget.adapter_memory(options.adapter_memory, memory_budget.free_memory(device))
    logger.info("Model: %s, revision %s, %d blocks", checkpoint.name, checkpoint.revision, checkpoint.blocks)
    logger.info("Device: %s, computing in %s", device, dtype_name(dtype))
    if options.blocks.span is not None:
        checkpoint.validate_span(options.blocks.span.start, options.blocks.span.end)
    return ResolvedConfig(options, checkpoint, device, dtype, quantization, cache_tokens, adapter_memory)
