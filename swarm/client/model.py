"""`AutoDistributedModelForCausalLM`: the transformers model itself, with the swarm in the place of its blocks."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.client.baton import Turn
from swarm.client.config import ClientConfig
from swarm.client.connection import SwarmConnection
from swarm.client.inference_lanes import InferenceLanes
from swarm.client.lane_generation import generate_in_lanes
from swarm.client.lanes import LanesWanted, check_lanes
from swarm.client.local_blocks import LocalBlocks, parse_local_blocks
from swarm.client.remote_sequential import Call, RemoteLayer, RemoteSequential
from swarm.client.session import InferenceSession
from swarm.client.speculation import bounded, check_speculation, unseen_length
from swarm.data_structures import Span, WireFormat
from swarm.errors import InvalidOption, UsageError
from swarm.models.checkpoint import Checkpoint, open_checkpoint
from swarm.models.heads import load_heads
from swarm.models.loading import resolve_dtype
from swarm.models.quantization import FORMS
from swarm.models.sequence_cache import SequenceCache
from swarm.models.span_loading import load_span
from swarm.models.wire_defaults import default_wire
from swarm.protocol.compression import warm_up
from swarm.transport.addresses import parse_peers

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The wire format that is left to the family."""


class AutoDistributedModelForCausalLM:
    """Makes distributed models; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        initial_peers: Sequence[str] | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "auto",
        wire: str | WireFormat = AUTO,
        cache_dir: str | Path | None = None,
        show_route: bool = False,
        request_timeout: float = 60.0,
        wait_for_blocks: float = 60.0,
        allowed_servers: Iterable[str] | None = None,
        blocked_servers: Iterable[str] = (),
        push: bool = True,
        local_blocks: int | str | Span | None = None,
        quant: str | Iterable[str] | None = None,
    ) -> Any:
        """The transformers model with embeddings, final norm and head here and all blocks in the swarm.

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

        Returns:
            an instance of the family's own class (such as `LlamaForCausalLM`), with the additions of
            `DistributedMixin`.

        Raises:
            UsageError: of the fitting kind; see `swarm.errors`.
        """
        asked = _wire_format(wire)
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
        config = replace(config, local_blocks=parse_local_blocks(local_blocks, checkpoint.blocks))
        config = replace(config, wire=asked or default_wire(checkpoint.config))
        logger.info("hidden states of %s travel as %s", checkpoint.name, config.wire)
        if config.wire is WireFormat.BLOCKWISE8:
            warm_up(torch.device("cpu"))
        resolved = resolve_dtype(dtype, checkpoint.config)
        connection = _connect(config, checkpoint, resolved)
        try:
            return _build(checkpoint, connection, resolved)
        except BaseException:
            connection.close()
            raise


class DistributedMixin:
    """What a distributed model has beyond its transformers class.

    Attributes:
        swarm: the connection; `swarm.close()` disconnects.
        remote_blocks: the blocks as a module; slices of it run some of them.
    """

    swarm: SwarmConnection
    remote_blocks: RemoteSequential

    def extra_repr(self) -> str:
        return f"wire={self.swarm.config.wire}"

    @property
    def word_embeddings(self) -> nn.Module:
        """Token ids to the hidden states that `session.step` takes."""
        return self.get_input_embeddings()  # type: ignore[attr-defined, no-any-return]

    def inference_session(self, *, max_length: int) -> InferenceSession:
        """Open a session for up to `max_length` tokens a row; servers reserve room for them at the first step.

        As a context manager it is used by every `generate` inside, which then computes only what is new: a prompt
        that begins with tokens of an earlier call continues there.
        """
        return InferenceSession(self, self.swarm, max_length)

    def inference_lanes(self, lanes: LanesWanted = "auto", *, max_length: int) -> InferenceLanes:
        """Open several sessions that are in flight at once; see `InferenceLanes`.

        Args:
            lanes: how many; "auto" for one a server of the route.
            max_length: as for `inference_session`.
        """
        check_lanes(lanes)
        count = self.swarm.stages() if lanes == "auto" else lanes
        return InferenceLanes([self.inference_session(max_length=max_length) for _ in range(count)])

    def generate(
        self,
        inputs: Any = None,
        *args: Any,
        session: InferenceSession | None = None,
        lanes: LanesWanted | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, with everything it takes.

        Args:
            session: the session to use; else the one whose `with` block this is in; else one for this call alone.
            lanes: divide the rows into so many groups, each with a session of its own, that are in flight at once, so
                that servers need not wait for each other; "auto" for one a server of the route. There is at most one
                a row. The texts are the same as without, but for sampled ones, and those depend on the seed and the
                number of lanes alone.

        Raises:
            UsageError: the arguments cannot be divided among lanes; it says why.
        """
        session = session or self._active.session
        if lanes is not None:
            if session is not None:
                raise UsageError(
                    "lanes have sessions of their own; leave session out (and generate outside of its `with`)"
                )
            named = inspect.signature(super().generate).bind(inputs, *args, **kwargs).arguments  # type: ignore[misc]
            settings = named.pop("kwargs", {})
            return generate_in_lanes(self, lanes, {**named, **settings}, self._generate)
        if session is not None and kwargs.get("past_key_values") is None:
            tokens = inputs if inputs is not None else kwargs.get("input_ids")
            _continue_session(session, tokens, kwargs.get("attention_mask"))
            kwargs["past_key_values"] = session.cache
        return self._generate({"inputs": inputs, **kwargs}, None, *args)

    def _generate(self, arguments: dict[str, Any], turn: Turn | None, *args: Any) -> Any:
        """transformers' `generate`, computing inside the turn if this is one lane of several."""
        try:
            with turn if turn is not None else nullcontext():
                return super().generate(arguments.pop("inputs", None), *args, **arguments)  # type: ignore[misc]
        finally:
            own, self._active.own = self._active.own, None
            if own is not None:
                own.close()

    def enter_session(self, session: InferenceSession) -> None:
        """Make `session` the one that `generate` uses in this thread."""
        self._active.session = session

    def leave_session(self, session: InferenceSession) -> None:
        """End the effect of `enter_session`."""
        if self._active.session is session:
            self._active.session = None

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, length: int
    ) -> None:
        """transformers' hook: the cache of a `generate` that was given none is a session of its own."""
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            self._active.own = self.inference_session(max_length=max(1, length))
            model_kwargs["past_key_values"] = self._active.own.cache

    def _get_candidate_generator(self, generation_config: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        """transformers' hook: what proposes the candidates of assisted generation."""
        check_speculation(generation_config, is_draft_remote=isinstance(assistant_model, DistributedMixin))
        generator = super()._get_candidate_generator(  # type: ignore[misc]
            generation_config=generation_config, assistant_model=assistant_model, **kwargs
        )
        return bounded(generator, generation_config.max_length - 1)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: torch.Tensor | None = None,  # by name: transformers looks whether it is taken
        **kwargs: Any,
    ) -> Any:
        """transformers' hook: which tokens a forward gets."""
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if next_sequence_length is None and isinstance(cache, SequenceCache):
            mask_length = mask.shape[1] if mask is not None else None
            next_sequence_length = unseen_length(cache.length, input_ids.shape[1], mask_length)
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, next_sequence_length=next_sequence_length, **kwargs
        )

    _active: _Active


class _Active(threading.local):
    """Sessions in use by the current thread."""

    session: InferenceSession | None = None
    own: InferenceSession | None = None


def _build(checkpoint: Checkpoint, connection: SwarmConnection, dtype: torch.dtype) -> Any:
    blocks = RemoteSequential(connection, Span(0, connection.blocks))
    layer = RemoteLayer(blocks, checkpoint.anatomy.outputs)
    model, owner = load_heads(checkpoint, layer, DistributedMixin, dtype=dtype)
    # Past nn.Module's bookkeeping: neither is a part of the model's weights.
    object.__setattr__(model, "remote_blocks", blocks)
    object.__setattr__(model, "swarm", connection)
    object.__setattr__(model, "_active", _Active())
    if not hasattr(model, "lm_head"):
        object.__setattr__(model, "lm_head", model.get_output_embeddings())
    _watch_calls(model, owner, layer)
    return model


def _watch_calls(model: Any, owner: nn.Module, layer: RemoteLayer) -> None:
    """Before every forward of the module around the layers, tell the remote layer what it is for."""
    signature = inspect.signature(owner.forward)
    positioned = "position_ids" in signature.parameters

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            kwargs = {**signature.bind_partial(*args).arguments, **kwargs}
        cache = kwargs.get("past_key_values")
        if cache is None and kwargs.get("use_cache"):
            # A hand-written loop: out = model(ids, use_cache=True), then model(next, past_key_values=out...).
            limit = getattr(model.config, "max_position_embeddings", None) or 2048
            cache = model.inference_session(max_length=min(limit, 2048)).cache
            kwargs = {**kwargs, "past_key_values": cache}
        if cache is not None and not isinstance(cache, SequenceCache):
            raise UsageError(
                f"a {type(cache).__name__} cannot hold what remote servers compute; leave past_key_values out, or "
                "use model.inference_session()"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            raise UsageError("the swarm takes attention masks of shape [rows, tokens] only")
        session = cache.session if cache is not None else None
        layer.expect(Call(session, mask, kwargs.get("position_ids"), positioned, kwargs.get("input_ids")))
        return (), kwargs

    owner.register_forward_pre_hook(before, with_kwargs=True)


def _continue_session(session: InferenceSession, tokens: Any, mask: torch.Tensor | None) -> None:
    """Roll a session back to where it agrees with the prompt of a new `generate`."""
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
        session.position = 0
        return
    known = session.cache.common_prefix(tokens, mask)
    # At least one token has to be computed, or there would be no logits to go on from.
    session.position = min(known, tokens.shape[1] - 1)


def _connect(config: ClientConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> SwarmConnection:
    digests = checkpoint.digests(0, checkpoint.blocks)
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
    if not wanted or not wanted <= FORMS:
        raise InvalidOption(f"quant={quant!r} is not one or several of {', '.join(sorted(FORMS))}, or None for all")
    return wanted


def _wire_format(wire: str | WireFormat) -> WireFormat | None:
    """What was asked for; None leaves it to the family."""
    if wire == AUTO:
        return None
    try:
        return WireFormat(wire)
    except ValueError:
        raise InvalidOption(f"wire={wire!r} is not one of {AUTO}, {', '.join(WireFormat)}") from None
