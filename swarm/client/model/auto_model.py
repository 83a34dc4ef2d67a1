"""`AutoDistributedModelFor...`: the transformers model itself, with the swarm in the place of its blocks.

The client's own part of a model comes from this machine, from the hub, or from servers that share it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from swarm.client.config import ClientConfig, ModelIdentity, NetworkOptions
from swarm.client.connection import SwarmConnection
from swarm.client.local_blocks import LocalBlocks, LocalBlocksOption, parse_local_blocks
from swarm.client.model.generation_mixin import ActiveSessions, DistributedGenerationMixin, DistributedModelMixin
from swarm.client.model.remote_sequential import RemoteLayer, RemoteSequential
from swarm.client.model.transformers_hooks import ForwardHooks
from swarm.client.threads.compute_lock import share_head
from swarm.client.threads.network_thread import NetworkThread
from swarm.client.tuning.options import TuningConfig, TuningOptions, resolve_tuning
from swarm.client.tuning.trained import TrainedParameters
from swarm.data_structures import Span, WireFormat
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import AdapterMismatch, HubUnreachable, InvalidOption, SwarmError
from swarm.membership.invite import Invite, read_invite
from swarm.models.adapters.adapter_files import StoredAdapter, read_adapter
from swarm.models.blockless_model import Task, load_blockless_model
from swarm.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from swarm.models.checkpoints.known_digests import known_digests
from swarm.models.checkpoints.partial_loading import resolve_dtype
from swarm.models.cutting.families import classification_class
from swarm.models.images import ImageTower
from swarm.models.loading.span_loading import load_span
from swarm.models.tokenizers.end_token import add_end_token, tokenizer_end_token
from swarm.models.wire_defaults import default_wire_format
from swarm.protocol.compression import load_quantizer
from swarm.shared_weights.manifest import CLIENT, parts_of_blocks
from swarm.shared_weights.peer_model import open_from_peers
from swarm.transport.addresses import parse_peers
from swarm.transport.p2p import P2PConfig, Peer

logger = logging.getLogger(__name__)

SOURCES = ("auto", "hub", "peers")

AUTO_WIRE = "auto"
"""The value of `wire` that leaves the format to the model's family."""


@dataclass(frozen=True)
class ModelSource:
    """Which model a client loads and where its files may come from; the fields are arguments of `from_pretrained`."""

    model: str | Path | None
    revision: str | None
    cache_dir: str | Path | None
    weights_from: str
    initial_peers: tuple[str, ...]
    membership: Invite | None
    network: NetworkOptions

    def __post_init__(self) -> None:
        if self.weights_from not in SOURCES:
            raise InvalidOption(f"weights_from={self.weights_from!r} is not one of {', '.join(SOURCES)}")

    def open(self, local_blocks: LocalBlocksOption = None) -> Checkpoint:
        """The model, of which the client's part and these blocks are on this machine if they come from peers."""
        if self.weights_from == "peers":
            return self._from_peers(local_blocks)
        try:
            return open_checkpoint(self.model, revision=self.revision, cache_dir=self.cache_dir)
        except HubUnreachable as error:
            if self.weights_from == "hub" or not self._believes:
                raise
            logger.info("The model hub cannot be reached; asking peers for the weights")
            try:
                return self._from_peers(local_blocks)
            except SwarmError as why:
                raise HubUnreachable(f"{error}. Nor can it be had from peers: {why}") from error

    @property
    def _believes(self) -> bool:
        return self.network.digests is not None or self.membership is not None

    def _from_peers(self, local_blocks: LocalBlocksOption) -> Checkpoint:
        if self.model is None:
            raise InvalidOption('weights_from="peers" needs the name that the model has in the swarm')
        thread = NetworkThread()
        try:
            return thread.run(self._receive(str(self.model), local_blocks))
        finally:
            thread.close()

    async def _receive(self, model: str, local_blocks: LocalBlocksOption) -> Checkpoint:
        joining = P2PConfig(initial_peers=self.initial_peers, membership=self.membership)
        peer = await Peer.create(joining, AnnouncementValidator())
        try:
            found = await open_from_peers(
                peer,
                model,
                revision=self.revision,
                digests=self.network.digests,
                believe_first=self.membership is not None,
                cache_dir=Path(self.cache_dir) if self.cache_dir is not None else None,
            )
            span = parse_local_blocks(local_blocks, found.checkpoint.blocks)
            await found.require([*parts_of_blocks(0, span.end if span is not None else 0), CLIENT])
            return found.received
        finally:
            await peer.shutdown()


class _AutoDistributedModel:
    """Loads distributed models for one task.

    Attributes:
        task: the task of the models.
        default_tuning_mode: the tuning mode if the caller does not choose one.
    """

    task: ClassVar[Task]
    default_tuning_mode: ClassVar[str | None] = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        initial_peers: Sequence[str] | None = None,
        membership: str | Path | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "auto",
        wire: str | WireFormat = AUTO_WIRE,
        cache_dir: str | Path | None = None,
        weights_from: str = "auto",
        local_blocks: int | str | Span | None = None,
        show_route: bool = False,
        network: NetworkOptions | None = None,
        num_labels: int | None = None,
        tuning_mode: str | None = None,
        adapter: str | Path | None = None,
        tuning: TuningOptions | None = None,
    ) -> Any:
        """The family's transformers model, with embeddings, norm and head here and all blocks in the swarm.

        All parameters are frozen except those that `tuning_mode`, or a new head, trains; these are float32.

        Args:
            model: local folder or hub id; None for the demo model.
            initial_peers: addresses of peers; None reads the environment variable SWARM_INITIAL_PEERS.
            membership: for a private swarm, the line that `swarm members invite` printed, or the path of a file that
                holds it; None reads the environment variable SWARM_MEMBERSHIP.
            revision: branch, tag or commit of a hub model.
            dtype: of the local part: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
            wire: format of hidden states on the wire: "none" (as computed), "float16", "bfloat16", "blockwise8", or
                "auto": 8 bits if measurements showed that the family tolerates them, else 16 (docs/wire.md).
            cache_dir: folder for files of the hub, and for what peers send.
            weights_from: where config, tokenizer, embeddings and head come from: "hub" (or the folder), "peers"
                (servers of the swarm that share them), or "auto": from peers if the model is not a folder, the hub
                cannot be reached, and `network` says which weights are believed.
            local_blocks: first blocks that this process computes itself, such as 4 or "0:4".
            show_route: print every route that a session takes.
            network: which servers are used, and how long to wait for them.
            num_labels: number of classes of a classification; None for that of the adapter or the config.
            tuning_mode: "ptune" (virtual tokens, `model.prompts`), "deep_ptune" (also `model.deep_prompts`, added to
                them at each block) or "lora" (`model.lora`). Classification trains its head as well.
            adapter: folder or hub repository in PEFT's format (safetensors only); frozen unless training goes on.
            tuning: details of fine-tuning.

        Returns:
            an instance of the family's class (such as `LlamaForCausalLM`) with the mixin of `generation_mixin`.

        Raises `UsageError`; its subclasses in `swarm.errors` name the reasons.
        """
        wire_format, mode = _parse_wire(wire), tuning_mode or (cls.default_tuning_mode if adapter is None else None)
        tuning_config = resolve_tuning(mode, adapter, tuning or TuningOptions())
        _validate_num_labels(cls.task, num_labels)
        peers, network = _resolve_initial_peers(initial_peers), network or NetworkOptions()
        invite = _read_invite(membership)
        source = ModelSource(model, revision, cache_dir, weights_from, peers, invite, network)
        checkpoint = source.open(local_blocks)
        request = _resolve_model(checkpoint, cls.task, dtype, num_labels, tuning_config, cache_dir)
        wire_format = wire_format or default_wire_format(checkpoint.config, tuning_config.is_training)
        local_span = parse_local_blocks(local_blocks, checkpoint.blocks)
        return _load_model(ClientConfig(peers, wire_format, local_span, show_route, network, invite), request)

    @staticmethod
    def open_checkpoint(
        model: str | Path | None = None,
        *,
        initial_peers: Sequence[str] | None = None,
        membership: str | Path | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        weights_from: str = "auto",
        local_blocks: int | str | Span | None = None,
        network: NetworkOptions | None = None,
        **others: Any,
    ) -> Checkpoint:
        """The checkpoint that `from_pretrained` would use, with the same arguments; others are ignored.

        If it comes from peers, what the client needs of it is received.
        """
        peers, invite = _resolve_initial_peers(initial_peers), _read_invite(membership)
        source = ModelSource(model, revision, cache_dir, weights_from, peers, invite, network or NetworkOptions())
        return source.open(local_blocks)


class AutoDistributedModelForCausalLM(_AutoDistributedModel):
    """Loads distributed language models; see `from_pretrained`."""

    task = "CAUSAL_LM"


class AutoDistributedModelForSequenceClassification(_AutoDistributedModel):
    """Loads distributed models that classify texts: the family's head over the last real token of each sequence."""

    task = "SEQ_CLS"


class AutoModelForPromptTuning(AutoDistributedModelForSequenceClassification):
    """Classification by prompt tuning, as in figure 3 of the Petals paper: 16 virtual tokens and a linear head."""

    default_tuning_mode = "ptune"


@dataclass(frozen=True)
class _ModelRequest:
    """The model to load, checked as far as possible without the swarm.

    Attributes:
        num_labels: number of classes; None for that of the config.
        stored: the adapter's files; None if no adapter is loaded.
    """

    checkpoint: Checkpoint
    task: Task
    dtype: torch.dtype
    num_labels: int | None
    tuning: TuningConfig
    stored: StoredAdapter | None


def _resolve_model(
    checkpoint: Checkpoint,
    task: Task,
    dtype: str | torch.dtype,
    num_labels: int | None,
    tuning: TuningConfig,
    cache_dir: str | Path | None,
) -> _ModelRequest:
    if task == "SEQ_CLS":
        classification_class(checkpoint.config)  # raises if the family has none
    stored = None
    if tuning.adapter is not None:
        revision, force = tuning.options.adapter_revision, tuning.options.force_adapter
        stored = read_adapter(tuning.adapter, checkpoint, revision=revision, cache_dir=cache_dir, force=force)
    num_labels = _resolve_num_labels(num_labels, stored)
    return _ModelRequest(checkpoint, task, resolve_dtype(dtype, checkpoint.config), num_labels, tuning, stored)


def _load_model(config: ClientConfig, request: _ModelRequest) -> Any:
    """Connect to the swarm and assemble the model."""
    checkpoint = request.checkpoint
    logger.info("hidden states of %s travel as %s", checkpoint.name, config.wire)
    if config.wire is WireFormat.BLOCKWISE8:
        load_quantizer(torch.device("cpu"))
    local = None
    if config.local_blocks is not None:
        span_model = load_span(checkpoint, config.local_blocks, dtype=request.dtype, device=torch.device("cpu"))
        local = LocalBlocks(span_model)
    digests = known_digests(checkpoint, config.network.digests)
    identity = ModelIdentity(checkpoint.name, checkpoint.revision, checkpoint.blocks, digests)
    connection = SwarmConnection(config, identity, local)
    try:
        return _assemble_model(connection, request)
    except BaseException:
        connection.close()
        raise


def _assemble_model(connection: SwarmConnection, request: _ModelRequest) -> Any:
    checkpoint, task = request.checkpoint, request.task
    blocks = RemoteSequential(connection, Span(0, connection.blocks))
    layer = RemoteLayer(blocks, checkpoint.structure.layer_outputs)
    mixin = DistributedGenerationMixin if task == "CAUSAL_LM" else DistributedModelMixin
    loaded = load_blockless_model(
        checkpoint, layer, mixin, dtype=request.dtype, task=task, num_labels=request.num_labels
    )
    model = loaded.model
    # Assigned without nn.Module's bookkeeping, because they do not belong to the model's weights.
    object.__setattr__(model, "remote_blocks", blocks)
    object.__setattr__(model, "remote_layer", layer)
    object.__setattr__(model, "swarm", connection)
    object.__setattr__(model, "_active", ActiveSessions())
    object.__setattr__(model, "_guess_memory", {})
    object.__setattr__(model, "_tower", ImageTower(checkpoint, model, request.dtype))
    if task == "CAUSAL_LM":
        add_end_token(model, tokenizer_end_token(checkpoint.fetch))
        if not hasattr(model, "lm_head"):
            object.__setattr__(model, "lm_head", model.get_output_embeddings())
        share_head(model.lm_head)
    ForwardHooks(model, loaded.owner, layer)
    model.trained = TrainedParameters(loaded, checkpoint)
    if request.stored is not None:
        model.trained.load(request.stored, request.tuning)
    else:
        model.trained.initialize(request.tuning)
    return model


def _validate_num_labels(task: Task, num_labels: int | None) -> None:
    if num_labels is None:
        return
    if task != "SEQ_CLS":
        raise InvalidOption("num_labels is for classification; use AutoDistributedModelForSequenceClassification")
    if isinstance(num_labels, bool) or not isinstance(num_labels, int) or num_labels < 1:
        raise InvalidOption(f"num_labels={num_labels!r} is not a valid number of classes: use 1 or more")


def _resolve_num_labels(num_labels: int | None, stored: StoredAdapter | None) -> int | None:
    """The number of classes: that of the adapter's head if it has one, else that of the caller."""
    found = {len(tensor) for tensor in stored.heads.values()} if stored is not None else set()
    if not found:
        return num_labels
    if num_labels not in (None, *found):
        raise AdapterMismatch(f"num_labels={num_labels}, but the adapter's head has {min(found)} classes")
    return min(found)


def _read_invite(membership: str | Path | None) -> Invite | None:
    return read_invite(os.environ.get("SWARM_MEMBERSHIP") if membership is None else membership)


def _resolve_initial_peers(given: Sequence[str] | None) -> tuple[str, ...]:
    addresses: Sequence[str]
    if given is None:
        addresses = os.environ.get("SWARM_INITIAL_PEERS", "").replace(",", " ").split()
    else:
        addresses = [given] if isinstance(given, str) else given
    peers = parse_peers(addresses)
    if not peers:
        raise InvalidOption(
            "no swarm to connect to: pass initial_peers=[ADDRESS], or set the environment variable SWARM_INITIAL_PEERS"
        )
    return peers


def _parse_wire(wire: str | WireFormat) -> WireFormat | None:
    """The format that the caller chose; None if it is left to the family."""
    if wire == AUTO_WIRE:
        return None
    try:
        return WireFormat(wire)
    except ValueError:
        raise InvalidOption(f"wire={wire!r} is not one of {AUTO_WIRE}, {', '.join(WireFormat)}") from None
