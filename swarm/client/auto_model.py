"""`AutoDistributedModelFor...`: the transformers model itself, with the swarm in the place of its blocks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from swarm.client.config import ClientConfig
from swarm.client.connection import SwarmConnection
from swarm.client.forward_hooks import ForwardHooks
from swarm.client.generation import ActiveSessions, DistributedGenerationMixin, DistributedModelMixin
from swarm.client.local_blocks import LocalBlocks, parse_local_blocks
from swarm.client.remote_sequential import RemoteLayer, RemoteSequential
from swarm.client.threads.shared_head import share_head
from swarm.client.tuning.options import TuningOptions, tuning_options
from swarm.client.tuning.trained import TrainedParameters
from swarm.data_structures import Span, WireFormat
from swarm.errors import AdapterMismatch, InvalidOption
from swarm.models.adapters.adapter_files import StoredAdapter, read_adapter
from swarm.models.blockless_model import Task, load_blockless_model
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.checkpoints.partial_model import resolve_dtype
from swarm.models.cutting.families import classification_class
from swarm.models.span_loading import load_span
from swarm.models.weights.quantization import QUANTIZATION_FORMS
from swarm.models.wire_defaults import default_wire_format
from swarm.protocol.compression import load_quantizer
from swarm.transport.addresses import parse_peers

logger = logging.getLogger(__name__)

AUTO_WIRE = "auto"
"""The wire format that is left to the family."""


class _AutoDistributedModel:
    """Makes distributed models for one task.

    Attributes:
        task: what the models are for.
        tuning_mode: what is trained if nothing else is said.
    """

    task: ClassVar[Task]
    tuning_mode: ClassVar[str | None] = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        initial_peers: Sequence[str] | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "auto",
        wire: str | WireFormat = AUTO_WIRE,
        cache_dir: str | Path | None = None,
        show_route: bool = False,
        request_timeout: float = 60.0,
        wait_for_blocks: float = 60.0,
        allowed_servers: Iterable[str] | None = None,
        blocked_servers: Iterable[str] = (),
        push: bool = True,
        local_blocks: int | str | Span | None = None,
        quant: str | Iterable[str] | None = None,
        num_labels: int | None = None,
        tuning_mode: str | None = None,
        pre_seq_len: int | None = None,
        lora_config: Any = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        target_modules: str | Iterable[str] | None = None,
        adapter: str | Path | None = None,
        adapter_revision: str | None = None,
        trainable: bool | None = None,
        force_adapter: bool = False,
    ) -> Any:
        """The family's transformers model with embeddings, final norm and head here and all blocks in the swarm.

        All parameters are frozen but those that `tuning_mode`, or a new head, asks for; these are float32, whatever
        the dtype of the model. `model.parameters()` may go into any optimizer.

        Args:
            model: local folder or hub id; None for the demo model.
            initial_peers: addresses of peers; the environment variable SWARM_INITIAL_PEERS stands in for it.
            revision: branch, tag or commit of a hub model.
            dtype: of the local part: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
            wire: how hidden states travel: "none" (as computed), "float16", "bfloat16", "blockwise8", or "auto": 8 bits
                where they were measured to be harmless for the family, else 16 (docs/wire.md). The log and
                `repr(model)` say which.
            cache_dir: where files from the hub are kept.
            show_route: print every route that a session takes.
            request_timeout: seconds to wait for one answer at most; usually much less, from what answers took so far.
            wait_for_blocks: seconds to wait for a server when nobody holds some blocks.
            allowed_servers: peer ids of servers that may be used; None allows all.
            blocked_servers: peer ids of servers that are never used.
            push: let servers hand their outputs on to each other, instead of through this client.
            local_blocks: first blocks that this process computes itself, such as 4 or "0:4"; only their weights are
                loaded. The swarm needs to hold the others alone.
            quant: use only servers that hold their weights so: "none", "int8", "nf4", "int4" (what CPUs have in the
                place of nf4), or several of them; None uses all.
            num_labels: classes to tell apart; None for what the adapter or the config says. For classification only.
            tuning_mode: what is trained: "ptune" (virtual tokens in front of the text, `model.prompts`),
                "deep_ptune" (also what is added to them at each block, `model.deep_prompts`), "lora" (`model.lora`).
                A model for classification trains its head as well.
            pre_seq_len: virtual tokens; None for 16.
            lora_config: a `peft.LoraConfig`, or a dict of its entries. What servers cannot do is refused by name.
            lora_rank, lora_alpha, target_modules: the same said directly, 8 and 8 and queries and values by default.
            adapter: folder or hub repository with what was trained, in PEFT's format (safetensors only). It is used
                frozen, unless `tuning_mode` or `trainable` says that training goes on.
            adapter_revision: branch, tag or commit of that repository.
            trainable: whether training of the adapter goes on.
            force_adapter: use an adapter that was trained for another revision of the model.

        Returns:
            an instance of the family's own class (such as `LlamaForCausalLM`), with the additions of
            `swarm.client.generation`.

        Raises:
            UsageError: of the fitting kind; see `swarm.errors`.
        """
        asked = _wire_format(wire)
        tuning = tuning_options(
            tuning_mode=tuning_mode or (cls.tuning_mode if adapter is None else None),
            pre_seq_len=pre_seq_len,
            lora_config=lora_config,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            target_modules=target_modules,
            adapter=adapter,
            adapter_revision=adapter_revision,
            force_adapter=force_adapter,
            trainable=trainable,
        )
        _check_labels(cls.task, num_labels)
        config = ClientConfig(
            initial_peers=_initial_peers(initial_peers),
            request_timeout=request_timeout,
            wait_for_blocks=wait_for_blocks,
            allowed_servers=frozenset(allowed_servers) if allowed_servers is not None else None,
            blocked_servers=frozenset(blocked_servers),
            push=push,
            show_route=show_route,
            quant=_quantizations(quant),
        )
        checkpoint = open_checkpoint(model, revision=revision, cache_dir=cache_dir)
        if cls.task == "SEQ_CLS":
            classification_class(checkpoint.config)  # whether there is any, before anybody is asked
        stored = _stored(tuning, checkpoint, cache_dir)
        config = replace(config, local_blocks=parse_local_blocks(local_blocks, checkpoint.blocks))
        trains = tuning.trainable and (tuning.mode is not None or tuning.adapter is not None)
        config = replace(config, wire=asked or default_wire_format(checkpoint.config, trains))
        logger.info("hidden states of %s travel as %s", checkpoint.name, config.wire)
        if config.wire is WireFormat.BLOCKWISE8:
            load_quantizer(torch.device("cpu"))
        resolved = resolve_dtype(dtype, checkpoint.config)
        connection = _connect(config, checkpoint, resolved)
        try:
            return _build(checkpoint, connection, resolved, cls.task, _labels(num_labels, stored), tuning, stored)
        except BaseException:
            connection.close()
            raise


class AutoDistributedModelForCausalLM(_AutoDistributedModel):
    """Makes distributed language models; see `from_pretrained`."""

    task = "CAUSAL_LM"


class AutoDistributedModelForSequenceClassification(_AutoDistributedModel):
    """Makes distributed models that classify texts: the family's own head over the last real token of each row."""

    task = "SEQ_CLS"


class AutoModelForPromptTuning(AutoDistributedModelForSequenceClassification):
    """Classification by prompt tuning, as in figure 3 of the Petals paper: 16 virtual tokens and a linear head."""

    tuning_mode = "ptune"


def _build(
    checkpoint: Checkpoint,
    connection: SwarmConnection,
    dtype: torch.dtype,
    task: Task,
    num_labels: int | None,
    tuning: TuningOptions,
    stored: StoredAdapter | None,
) -> Any:
    blocks = RemoteSequential(connection, Span(0, connection.blocks))
    layer = RemoteLayer(blocks, checkpoint.structure.layer_outputs)
    mixin = DistributedGenerationMixin if task == "CAUSAL_LM" else DistributedModelMixin
    heads = load_blockless_model(checkpoint, layer, mixin, dtype=dtype, task=task, num_labels=num_labels)
    model = heads.model
    # Past nn.Module's bookkeeping: neither is a part of the model's weights.
    object.__setattr__(model, "remote_blocks", blocks)
    object.__setattr__(model, "swarm", connection)
    object.__setattr__(model, "_active", ActiveSessions())
    if task == "CAUSAL_LM":
        if not hasattr(model, "lm_head"):
            object.__setattr__(model, "lm_head", model.get_output_embeddings())
        share_head(model.lm_head)
    ForwardHooks(model, heads.owner, layer)
    model.trained = TrainedParameters(heads, checkpoint)
    if stored is not None:
        model.trained.load(stored, tuning)
    else:
        model.trained.begin(tuning)
    return model


def _stored(tuning: TuningOptions, checkpoint: Checkpoint, cache_dir: str | Path | None) -> StoredAdapter | None:
    if tuning.adapter is None:
        return None
    return read_adapter(
        tuning.adapter, checkpoint, revision=tuning.adapter_revision, cache_dir=cache_dir, force=tuning.force
    )


def _check_labels(task: Task, num_labels: int | None) -> None:
    if num_labels is None:
        return
    if task != "SEQ_CLS":
        raise InvalidOption("num_labels is for classification; use AutoDistributedModelForSequenceClassification")
    if isinstance(num_labels, bool) or not isinstance(num_labels, int) or num_labels < 1:
        raise InvalidOption(f"num_labels={num_labels!r} is no number of classes")


def _labels(asked: int | None, stored: StoredAdapter | None) -> int | None:
    """How many classes: what the adapter's head tells apart, or what was asked for."""
    found = {len(tensor) for tensor in stored.heads.values()} if stored is not None else set()
    if not found:
        return asked
    if asked not in (None, *found):
        raise AdapterMismatch(f"num_labels={asked}, but the adapter's head tells {min(found)} classes apart")
    return min(found)


def _connect(config: ClientConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> SwarmConnection:
    digests = checkpoint.block_digests(0, checkpoint.blocks)
    local = None
    if config.local_blocks is not None:
        local = LocalBlocks(load_span(checkpoint, config.local_blocks, dtype=dtype, device=torch.device("cpu")))
    return SwarmConnection(config, checkpoint.name, checkpoint.revision, checkpoint.blocks, digests, local)


def _initial_peers(given: Sequence[str] | None) -> tuple[str, ...]:
    addresses: Sequence[str]
    if given is None:
        addresses = os.environ.get("SWARM_INITIAL_PEERS", "").replace(",", " ").split()
    else:
        addresses = [given] if isinstance(given, str) else given
    peers = parse_peers(addresses)
    if not peers:
        raise InvalidOption(
            "say which swarm to use: initial_peers=[ADDRESS], or the environment variable SWARM_INITIAL_PEERS"
        )
    return peers


def _quantizations(quant: str | Iterable[str] | None) -> frozenset[str] | None:
    if quant is None:
        return None
    wanted = frozenset([quant] if isinstance(quant, str) else quant)
    if not wanted or not wanted <= QUANTIZATION_FORMS:
        known = ", ".join(sorted(QUANTIZATION_FORMS))
        raise InvalidOption(f"quant={quant!r} is not one or several of {known}, or None for all")
    return wanted


def _wire_format(wire: str | WireFormat) -> WireFormat | None:
    """What was asked for; None leaves it to the family."""
    if wire == AUTO_WIRE:
        return None
    try:
        return WireFormat(wire)
    except ValueError:
        raise InvalidOption(f"wire={wire!r} is not one of {AUTO_WIRE}, {', '.join(WireFormat)}") from None
